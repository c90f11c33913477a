"""Shell completion: the models and replicas that a running daemon knows, requested with a short deadline."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import click

from refitd.errors import RefitdError
from refitd.protocol.reports import ModelStatus, StatusReport
from refitd_cli.session import Session, connect

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
