"""What a `refitctl` command talks to: a client of the node's daemon, from a factory the caller may choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import click

from refitd.protocol.reports import (
    HistoryReport,
    ModelDescription,
    PlanReport,
    StatusReport,
    SwapProgress,
    SwapReport,
    VerifyReport,
)

F = TypeVar("F", bound=Callable[..., Any])


class Control(Protocol):
    """The part of refitd's client that operators use."""

    def swap(
        self,
        model: str,
        version: int | None = None,
        *,
        timeout: float | None = None,
        queue: bool = False,
        on_progress: Callable[[SwapProgress], None] | None = None,
    ) -> SwapReport:
        """Make a version live everywhere; raise RefitFailed with the report if it is not."""
        ...

    def rollback(
        self,
        model: str,
        version: int | None = None,
        *,
        timeout: float | None = None,
        on_progress: Callable[[SwapProgress], None] | None = None,
    ) -> SwapReport:
        """Make an older version live again; as `swap`."""
        ...

    def history(self, model: str = "", limit: int = 20) -> HistoryReport:
        """Return the last swaps, the newest first."""
        ...

    def status(self) -> StatusReport:
        """Return the cluster as the coordinator sees it."""
        ...

    def plan(self, model: str) -> PlanReport:
        """Return what a swap of `model` would move."""
        ...

    def describe(self, model: str) -> ModelDescription:
        """Return what every registered rank of `model` holds."""
        ...

    def verify(self, model: str, *, timeout: float | None = None) -> VerifyReport:
        """Check live weights against the digests of the versions that are served."""
        ...

    def abort(self, model: str, reason: str = "") -> None:
        """Stop the running swap of `model`."""
        ...

    def close(self) -> None:
        """Leave the daemon."""
        ...


def connect(address: str | None) -> Control:
    """Connect to the daemon at `address`; raise TransportError if none runs there."""
    import refitd

    client: Control = refitd.connect(address, name="refitctl")
    return client


@dataclass(frozen=True)
class Session:
    """Carried by click's context object; tests put their own factory in."""

    factory: Callable[[str | None], Control] = connect

    @contextmanager
    def client(self, address: str | None) -> Iterator[Control]:
        """Yield a connected client and close it afterwards."""
        client = self.factory(address)
        try:
            yield client
        finally:
            client.close()


def json_option(function: F) -> F:
    """Add --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")(function)


def address_option(function: F) -> F:
    """Add --address."""
    return click.option(
        "--address",
        metavar="DIR",
        help="The daemon's runtime directory.  [default: $REFITD_RUNTIME_DIR, else as without --config]",
    )(function)
