"""The connection to a daemon, and the options that several commands share, with their completion in shells."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import click

from refitd import config
from refitd.errors import RefitdError
from refitd.protocol.plan_reports import ModelDescription, PlanReport
from refitd.protocol.reports import (
    DrainReport,
    EvictReport,
    ForgetReport,
    HistoryReport,
    ModelStatus,
    ReloadReport,
    StatusReport,
    SwapProgress,
    SwapReport,
    TraceReport,
    VerifyReport,
)

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
        wait: float = 0.0,
        on_progress: Callable[[SwapProgress], None] | None = None,
    ) -> SwapReport:
        """Make a version live everywhere; raise SwapFailed if it is not."""
        ...

    def swap_together(
        self,
        versions: Mapping[str, int | None],
        *,
        timeout: float | None = None,
        wait: float = 0.0,
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

    def forget_node(self, node: str) -> ForgetReport:
        """Remove a lost node from the status."""
        ...

    def reload(self) -> ReloadReport:
        """Have the coordinator read its list of admitted keys again."""
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

    def resume(self, node: str) -> DrainReport:
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
    """Add --runtime-dir, as `refitd serve` calls it, or --address, and --uid, which `connect` finds by itself."""
    function = click.option(
        "--uid",
        type=click.IntRange(min=0, max=(1 << 32) - 1),
        expose_value=False,
        callback=_note_uid,
        help="The user whose daemon it must be.  [default: $REFITD_DAEMON_UID, else your own, or root's]",
    )(function)
    return click.option(
        "--runtime-dir",
        "--address",
        "address",
        metavar="DIR",
        help="The daemon's runtime directory.  [default: $REFITD_RUNTIME_DIR, else as without --config]",
    )(function)


def _note_uid(ctx: click.Context, _: click.Parameter, uid: int | None) -> None:
    ctx.meta[_UID] = uid


_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


class Number(click.FloatRange):
    """A number within limits. click's own range takes nan, because nan is neither below nor above any limit."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number; fail if it is none, or out of range."""
        found: float = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return found


class Duration(Number):
    """Seconds within limits: 5, 5s, 2m, 500ms or 1h."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds; fail if the text is no duration, or out of range."""
        found = re.fullmatch(r"([0-9.]+)\s*(ms|s|m|min|h)", value) if isinstance(value, str) else None
        try:
            seconds = float(value) if found is None else float(found[1]) * _UNITS[found[2]]
        except ValueError:
            self.fail(f"{value!r} is no duration: give seconds, or 500ms, 5s, 2m, 1h.", param, ctx)
        return super().convert(seconds, param, ctx)


DEADLINE_S = 1.0

# Shells insert a completed name unquoted, and clients choose their names: `$(...)` or a quote would take effect.
_PLAIN = re.compile(r"[\w.:/@%+,][\w.:/@%+,=-]*")


def model_names(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the registered models whose names begin like this."""
    return _named(ctx, incomplete, lambda model: {model.model})


def replica_names(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the replicas of all models whose names begin like this; click does not tell the model before an option."""
    return _named(ctx, incomplete, lambda model: {target.replica for target in model.targets})


def node_names(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the nodes whose names begin like this, connected or drained."""
    return _fitting(ctx, incomplete, lambda status: {node.node for node in status.nodes} | {*status.drained})


def _named(ctx: click.Context, incomplete: str, names_of: Callable[[ModelStatus], set[str]]) -> list[str]:
    return _fitting(ctx, incomplete, lambda status: {name for model in status.models for name in names_of(model)})


def _fitting(ctx: click.Context, incomplete: str, names_of: Callable[[StatusReport], set[str]]) -> list[str]:
    session = ctx.find_object(Session) or Session(partial(connect, timeout=DEADLINE_S))
    try:
        with ctx.scope(cleanup=False), session.client(ctx.params.get("address")) as client:
            status = client.status(timeout=DEADLINE_S)
    except (RefitdError, OSError):
        return []  # a shell that waits for completions cannot show errors
    return sorted(name for name in names_of(status) if name.startswith(incomplete) and _PLAIN.fullmatch(name))


_FLAGS = {"node.runtime_dir": "--runtime-dir", "node.workers": "--workers", "log.level": "--log-level"}


def config_options(function: F) -> F:
    """Add --config and flags. Precedence: flag > environment > file > default."""
    for option in (
        click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Over log.level."),
        click.option("--runtime-dir", metavar="DIR", help="Over node.runtime_dir: where the sockets are."),
        click.option("--config", "path", metavar="FILE", help="TOML; without one, defaults that suit a laptop."),
    ):
        function = option(function)
    return function


def read_config(path: str | None, **flags: Any) -> tuple[config.Config, dict[str, str]]:
    """Read the configuration as `load_config`; also return what sets each key: file, variable or flag."""
    found, origins = config.read(path, **{name.replace("__", "."): value for name, value in flags.items()})
    return found, {key: _FLAGS.get(origin, origin) for key, origin in origins.items()}


def load_config(path: str | None, **flags: Any) -> config.Config:
    """Read the configuration; a flag is named "section__key" and counts if it is not None."""
    return config.load(path, **{name.replace("__", "."): value for name, value in flags.items()})
