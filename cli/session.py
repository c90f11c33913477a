"""The connection to a daemon, and the options that several commands share, with their completion in shells."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from refitd import config
from refitd.errors import RefitdError
from refitd.protocol.reports import ModelStatus, StatusReport
from refitd_cli.output import print_json

if TYPE_CHECKING:
    from refitd.client import Client

_UID = "refitd.uid"

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")


def connect(address: str | None, timeout: float = 10.0) -> Client:
    """Connect to the daemon at `address` within `timeout` seconds; raise TransportError if none runs there."""
    import refitd

    context = click.get_current_context(silent=True)
    uid = None if context is None else context.meta.get(_UID)
    client: Client = refitd.connect(address, name="refitctl", timeout=timeout, uid=uid, reconnect=False)
    return client


@dataclass(frozen=True)
class Session:
    """How a command connects to its daemon and prints its result. Click's context object, completed by the options."""

    factory: Callable[[str | None], Client] = connect
    address: str | None = None
    as_json: bool = False

    def connect(self) -> Client:
        """Return a new connection; its user closes it."""
        return self.factory(self.address)

    @contextmanager
    def client(self) -> Iterator[Client]:
        """Yield a connected client and close it afterwards."""
        client = self.connect()
        try:
            yield client
        finally:
            client.close()

    def show(self, report: R, people: Callable[[R], object]) -> None:
        """Print a report: with --json as one object, else by `people`."""
        if self.as_json:
            print_json(report)
        else:
            people(report)


class Connection:
    """A session's connection, which is made again after the daemon was away."""

    def __init__(self, session: Session) -> None:
        """Connect at the first use."""
        self._session = session
        self._client: Client | None = None

    @contextmanager
    def client(self) -> Iterator[Client]:
        """Yield the client, connected now if it is not; an error in the block closes it."""
        try:
            self._client = self._client or self._session.connect()
            yield self._client
        except RefitdError:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


def prints(function: Callable[..., int | None]) -> Callable[..., Any]:
    """Add --json; the command gets a Session first. It returns its exit status, None for 0."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
    @click.pass_obj
    @wraps(function)
    def run(session: Session, /, *, as_json: bool, address: str | None = None, **given: Any) -> int | None:
        return function(replace(session, address=address, as_json=as_json), **given)

    return run


def asks(function: Callable[..., int | None]) -> Callable[..., Any]:
    """Add the options that find a daemon, and --json; see `prints`."""
    return address_option(prints(function))


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
        with ctx.scope(cleanup=False), replace(session, address=ctx.params.get("address")).client() as client:
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
