"""What a shell completes: the models and replicas that a running daemon knows, asked with a short deadline."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import click

from refitd.errors import RefitdError
from refitd.protocol.reports import ModelStatus
from refitd_cli.session import Session, connect

DEADLINE_S = 1.0

# Shells insert a completed name as it is, and clients choose their names: `$(...)` or a quote would be obeyed.
_PLAIN = re.compile(r"[\w.:/@%+,][\w.:/@%+,=-]*")


def model_names(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the registered models whose names begin like this."""
    return _named(ctx, incomplete, lambda model: {model.model})


def replica_names(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the replicas of all models whose names begin like this; click does not tell the model before an option."""
    return _named(ctx, incomplete, lambda model: {target.replica for target in model.targets})


def _named(ctx: click.Context, incomplete: str, names_of: Callable[[ModelStatus], set[str]]) -> list[str]:
    session = ctx.find_object(Session) or Session(partial(connect, timeout=DEADLINE_S))
    try:
        with ctx.scope(cleanup=False), session.client(ctx.params.get("address")) as client:
            models = client.status(timeout=DEADLINE_S).models
    except (RefitdError, OSError):
        return []  # a shell that waits for a word has no place for errors
    found = {name for model in models for name in names_of(model)}
    return sorted(name for name in found if name.startswith(incomplete) and _PLAIN.fullmatch(name))
