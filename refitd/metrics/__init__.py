"""Serves a process's metrics over HTTP, for Prometheus."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol, TypeVar


class Endpoint(Protocol):
    """Serves a process's metrics."""

    @property
    def endpoint(self) -> str:
        """The address on which it listens."""


Monitor = TypeVar("Monitor", bound=Endpoint)


def opened(
    address: tuple[str, int] | None, make: Callable[[tuple[str, int]], Monitor], log: Callable[..., None]
) -> Monitor | None:
    """Open a metrics endpoint by `make(address)`, which alone imports prometheus_client; None without an address."""
    if address is None:
        return None
    keep_apart()
    monitor = make(address)
    log("metrics", endpoint=monitor.endpoint)
    return monitor


def keep_apart() -> None:
    """Keep prometheus_client, which reads this when it is imported, from sharing values through files.

    vLLM sets the variable for its processes, and a process that starts a daemon may have it too.
    """
    for variable in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
        os.environ.pop(variable, None)
