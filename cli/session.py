"""The daemon client of `refitctl` commands, from a factory that tests replace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import click

from refitd.protocol.cable_reports import CablesMeasured
from refitd.protocol.reports import (
    DrainReport,
    EvictReport,
    ForgetReport,
    HistoryReport,
    ModelDescription,
    PlanReport,
    ReloadReport,
    ResumeReport,
    StatusReport,
    SwapProgress,
    SwapReport,
    VerifyReport,
)
from refitd.protocol.traces import TraceReport

_UID = "refitd.uid"

F = TypeVar("F", bound=Callable[..., Any])


class ControlClient(Protocol):
    """The part of refitd's client that commands use."""

    def swap(
        self,
        model: str,
        version: int | None = None,
        *,
        timeout: float | None = None,
        queue: bool = False,
        on_progress: Callable[[SwapProgress], None] | None = None,
    ) -> SwapReport:
        """Make a version live everywhere; raise SwapFailed if it is not."""
        ...

    def swap_together(
        self,
        versions: Mapping[str, int | None],
        *,
        timeout: float | None = None,
        on_progress: Callable[[SwapProgress], None] | None = None,
    ) -> dict[str, SwapReport]:
        """Make versions of several models live by one decision; as `swap`."""
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

    def status(self, *, timeout: float = 30.0) -> StatusReport:
        """Return the cluster as the coordinator sees it."""
        ...

    def trace(self, model: str, swap: str = "") -> TraceReport:
        """Return what every process did in a swap, and when."""
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

    def evict(self, model: str, replica: str, rank: int | None = None, reason: str = "") -> EvictReport:
        """Remove a replica, or one rank of it, from `model`."""
        ...

    def forget(self, model: str) -> ForgetReport:
        """Free what dead processes left of `model`."""
        ...

    def reload(self) -> ReloadReport:
        """Have the coordinator read its list of admitted keys again."""
        ...

    def measure_cables(self, pairs: Iterable[tuple[str, str]], *, duration: float = 2.0) -> CablesMeasured:
        """Measure how fast nodes send to each other."""
        ...

    def drain(
        self,
        node: str,
        *,
        timeout: float | None = None,
        wait: bool = True,
        on_progress: Callable[[SwapProgress], None] | None = None,
    ) -> DrainReport:
        """Leave a node out of new swaps; wait for the running ones."""
        ...

    def resume(self, node: str) -> ResumeReport:
        """Let a drained node take part in swaps again."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


def connect(address: str | None, timeout: float = 10.0) -> ControlClient:
    """Connect to the daemon at `address` within `timeout` seconds; raise TransportError if none runs there."""
    import refitd

    context = click.get_current_context(silent=True)
    uid = None if context is None else context.meta.get(_UID)
    client: ControlClient = refitd.connect(address, name="refitctl", timeout=timeout, uid=uid, reconnect=False)
    return client


@dataclass(frozen=True)
class Session:
    """Click's context object: how commands connect."""

    factory: Callable[[str | None], ControlClient] = connect

    @contextmanager
    def client(self, address: str | None) -> Iterator[ControlClient]:
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
    """Add --address, and --uid, which `connect` finds by itself."""
    function = click.option(
        "--uid",
        type=click.IntRange(min=0, max=(1 << 32) - 1),
        expose_value=False,
        callback=_note_uid,
        help="Whose daemon it must be.  [default: $REFITD_DAEMON_UID, else your own, or root's]",
    )(function)
    return click.option(
        "--address",
        metavar="DIR",
        help="The daemon's runtime directory.  [default: $REFITD_RUNTIME_DIR, else as without --config]",
    )(function)


def _note_uid(ctx: click.Context, _: click.Parameter, uid: int | None) -> None:
    ctx.meta[_UID] = uid
