"""The ranks of a gloo group in one process, each with a thread."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from refitd.copy_services.gloo import GlooService
from refitd.errors import RefitdError

TIMEOUT_S = 20.0


class GlooThreads:
    """Services of a group over loopback; `services[i]` is rank i's."""

    def __init__(
        self, labels: Sequence[str], message_bytes: int, kinds: Sequence[type[GlooService]] | None = None
    ) -> None:
        """`kinds` are the services' classes, by default all GlooService."""
        store, size = dist.HashStore(), len(labels)
        self._threads = ThreadPoolExecutor(size)

        def join(rank: int) -> GlooService:
            options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timedelta(seconds=TIMEOUT_S)
            options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # type: ignore[attr-defined]
            group = ProcessGroupGloo(store, rank, size, options)
            kind = GlooService if kinds is None else kinds[rank]
            return kind(group, labels=tuple(labels), message_bytes=message_bytes)

        self.services = list(self._threads.map(join, range(size)))

    def run(self, *, timeout: float = TIMEOUT_S, **kwargs: Any) -> list[Any]:
        """Return each rank's result, or its error."""

        def one(service: GlooService) -> Any:
            try:
                return service.run(timeout, **kwargs)
            except RefitdError as exc:
                return exc

        return list(self._threads.map(one, self.services))

    def close(self) -> None:
        for service in self.services:
            service.close()
        self._threads.shutdown()
