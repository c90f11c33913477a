"""Check which messages a client's roles (trainer, engine, operator) allow, and the names in messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from refitd.errors import RefusedError
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.base import Message
from refitd.protocol.shards import Shard
from refitd.text import flaw

TRAINER, ENGINE, OPERATOR = "trainer", "engine", "operator"
ALL_ROLES = frozenset({TRAINER, ENGINE, OPERATOR})

# A trainer may swap: `client.swap` is part of its loop.
_SWAPS = frozenset({TRAINER, OPERATOR})
_NEEDED: dict[type[Message], frozenset[str]] = {
    local.CreateArena: frozenset({TRAINER, ENGINE}),
    sidecar.GiveArena: frozenset({TRAINER, ENGINE}),
    local.RegisterSource: frozenset({TRAINER}),
    local.GetUnrounded: frozenset({TRAINER}),
    local.RegisterTarget: frozenset({ENGINE}),
    local.Restored: frozenset({ENGINE}),
    local.Suspend: frozenset({ENGINE}),
    local.RegisterController: frozenset({ENGINE}),
    local.StartSwap: _SWAPS,
    local.StartSwaps: _SWAPS,
    local.AbortSwap: _SWAPS,
    local.Evict: _SWAPS,
    local.Forget: _SWAPS,
    local.Reload: frozenset({OPERATOR}),
    local.DrainNode: frozenset({OPERATOR}),
    local.Verify: _SWAPS,  # it reads every byte of every replica
    local.Publish: frozenset({TRAINER}),
    local.BeginPublish: frozenset({TRAINER}),
    local.Wrote: frozenset({TRAINER}),
}


@dataclass(frozen=True, slots=True)
class Allowed:
    """The rights of a public key: its owner's name, the node name it may use, the roles of that node's clients."""

    name: str
    node: str = ""  # "": any
    roles: frozenset[str] = ALL_ROLES


ANYONE = Allowed("")  # a peer without a key: file modes protect local sockets


def check_role(message: Message, roles: frozenset[str], who: str, where: str) -> None:
    """Refuse a message that none of `roles` may send.

    Args:
        message: the request.
        roles: the sender's roles.
        who: the sender's name, for the error.
        where: the setting that gives the sender its roles, for the error.

    Raises:
        RefusedError: the sender lacks the role; the error names the message, both sets of roles and the setting.
    """
    if isinstance(message, cluster.AddShard):
        needed = frozenset({TRAINER if message.role == "source" else ENGINE})
    else:
        needed = _NEEDED.get(type(message), ALL_ROLES)
    if not needed & roles:
        raise RefusedError(
            f"{type(message).__name__} needs the role {listed(needed, ' or ')}, and {who} has "
            f"{listed(roles) or 'none'}; {where} gives roles"
        )


def read_roles(words: Iterable[str]) -> frozenset[str]:
    """Return roles by name.

    Raises:
        ValueError: a name is unknown.
    """
    found = frozenset(words)
    if unknown := sorted(found - ALL_ROLES):
        raise ValueError(f"{unknown[0]!r} is no role; roles are {listed(ALL_ROLES)}")
    return found


def listed(roles: Iterable[str], between: str = ", ") -> str:
    """Return roles as text for display."""
    return between.join(sorted(roles))


_NAMES = ("model", "replica", "name", "label", "device", "digest", "member")


def check_names(message: Message) -> None:
    """Refuse a message with an invalid name, in its fields or its tensors.

    A name is invalid if it contains NUL or cannot be encoded. Rules for one kind of request are where the daemon or the
    coordinator handles it, for instance in `refitd.daemon.new_members`.

    Raises:
        RefusedError: a name is invalid; the error names the field and the reason.
    """
    for field in _NAMES:
        name = getattr(message, field, "")
        if isinstance(name, str) and ("\0" in name or not name.isascii()):  # almost all names need no further check
            _check(f"{type(message).__name__}: {field}", (name,))
    shard = getattr(message, "shard", None)
    if isinstance(shard, Shard):
        check_tensor_names(shard)


def check_tensor_names(shard: Shard) -> None:
    """Refuse a description with an invalid tensor name.

    Raises:
        RefusedError: a name is invalid; the error names the tensor and the reason.
    """
    for tensor in shard.tensors:
        _check("tensor", (tensor.name, *tensor.aliases))
    for kept in shard.kept:
        _check("kept tensor", (kept.name, *kept.tensors))


def _check(what: str, names: Iterable[str]) -> None:
    for name in names:
        if found := flaw(name):
            raise RefusedError(f"{what} {name!r} {found}; choose another")
