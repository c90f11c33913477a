"""The ranks of an exchange in one process, each with a thread; over gloo, or over NIXL where it is installed."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from refitd.copy_services import Epoch, Mailbox
from refitd.copy_services.gloo import GlooService
from refitd.copy_services.windows import WindowExchange
from refitd.errors import DeadlineExceeded, RefitdError

TIMEOUT_S = 20.0
# a NIXL that is missing is reported by the conformance suite
SERVICES = ["gloo", *(["nixl"] if importlib.util.find_spec("nixl") else [])]


class ServiceThreads:
    """Services of a group over loopback; `services[i]` is rank i's."""

    def __init__(
        self, service: str, labels: Sequence[str], message_bytes: int, kinds: Mapping[int, type[WindowExchange]] = {}
    ) -> None:
        """For ranks in `kinds`, the service's class inherits from the given class first."""
        self._threads = ThreadPoolExecutor(len(labels))
        join = {"gloo": _gloo, "nixl": _nixl}[service](tuple(labels), message_bytes, kinds)
        self.services: list[WindowExchange] = list(self._threads.map(join, range(len(labels))))

    def run(self, *, timeout: float = TIMEOUT_S, first_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Return each rank's result, or its error; `first_s` is the timeout of rank 0, if it has its own."""

        def one(service: WindowExchange, timeout: float) -> Any:
            try:
                return service.run(timeout, **kwargs)
            except RefitdError as exc:
                return exc

        timeouts = [timeout if first_s is None else first_s] + [timeout] * (len(self.services) - 1)
        return list(self._threads.map(one, self.services, timeouts))

    def close(self) -> None:
        for service in self.services:
            service.close()
        self._threads.shutdown()


def _of(service: Any, kind: type[WindowExchange] | None) -> Any:
    return service if kind is None else type(kind.__name__, (kind, service), {})


def _gloo(labels: tuple[str, ...], message_bytes: int, kinds: Mapping[int, type[WindowExchange]]) -> Any:
    store = dist.HashStore()

    def join(rank: int) -> WindowExchange:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=TIMEOUT_S)
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # type: ignore[attr-defined]
        group = ProcessGroupGloo(store, rank, len(labels), options)
        found: WindowExchange = _of(GlooService, kinds.get(rank))(group, labels=labels, message_bytes=message_bytes)
        return found

    return join


def _nixl(labels: tuple[str, ...], message_bytes: int, kinds: Mapping[int, type[WindowExchange]]) -> Any:
    from refitd.copy_services.nixl import NixlService

    mailbox, parts = _Box(), 3 * message_bytes * len(labels)  # the size cuts messages into parts

    def join(rank: int) -> WindowExchange:
        epoch = Epoch("e", rank, labels, "127.0.0.1", parts, mailbox, TIMEOUT_S, bytes(32))
        found: WindowExchange = _of(NixlService, kinds.get(rank))(epoch, message_bytes=message_bytes)
        return found

    return join


class _Box(Mailbox):
    """A mailbox within this process."""

    def __init__(self) -> None:
        self._changed, self._values = threading.Condition(), dict[str, bytes]()

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout):
                raise DeadlineExceeded(f"nobody has put {key}")
            return self._values[key]
