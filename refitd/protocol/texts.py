"""Checks of names in messages, before they become file names, paths or log lines."""

from __future__ import annotations

from collections.abc import Iterable

from refitd.errors import RefusedError
from refitd.protocol.base import Message
from refitd.protocol.shards import Shard
from refitd.text import flaw

_NAMES = ("model", "replica", "name", "label", "device", "digest", "member")


def check_names(message: Message) -> None:
    """Refuse a message with an invalid name, in its own fields or those of its tensors.

    Raises:
        RefusedError: names the field and the reason.
    """
    for field in _NAMES:
        _check(f"{type(message).__name__}: {field}", (getattr(message, field, ""),))
    shard = getattr(message, "shard", None)
    if isinstance(shard, Shard):
        check_tensor_names(shard)


def check_tensor_names(shard: Shard) -> None:
    """Refuse a description with an invalid tensor name.

    Raises:
        RefusedError: names the tensor and the reason.
    """
    for tensor in shard.tensors:
        _check("tensor", (tensor.name, *tensor.aliases))
    for kept in shard.kept:
        _check("kept tensor", (kept.name, *kept.tensors))


def _check(what: str, names: Iterable[object]) -> None:
    for name in names:
        if isinstance(name, str) and (found := flaw(name)):
            raise RefusedError(f"{what} {name!r} {found}; choose another")
