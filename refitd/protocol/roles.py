"""The roles trainer, engine and operator: which messages each may send, on a node and between nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from refitd.errors import RefusedError
from refitd.protocol import cluster, control, local, sidecar
from refitd.protocol.base import Message

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
    local.Wake: frozenset({ENGINE}),
    control.RegisterController: frozenset({ENGINE}),
    control.AddController: frozenset({ENGINE}),
    local.StartSwap: _SWAPS,
    local.StartSwaps: _SWAPS,
    local.AbortSwap: _SWAPS,
    local.Evict: _SWAPS,
    local.Forget: _SWAPS,
    local.Reload: frozenset({OPERATOR}),
    local.MeasureCables: frozenset({OPERATOR}),
    local.DrainNode: frozenset({OPERATOR}),
    local.ResumeNode: frozenset({OPERATOR}),
    local.Verify: _SWAPS,  # it reads every byte of every replica
    cluster.ShardPublished: frozenset({TRAINER}),
    cluster.WantsRoom: frozenset({TRAINER}),
}


@dataclass(frozen=True, slots=True)
class Allowed:
    """The rights of a public key: its owner's name, the node name it may use, the roles of that node's clients."""

    name: str
    node: str = ""  # "": any
    roles: frozenset[str] = ALL_ROLES


ANYONE = Allowed("")  # a peer that needs no key: local sockets have file modes instead


def roles_for(message: Message) -> frozenset[str]:
    """Return the roles that may send this message; all roles if it needs none in particular."""
    if isinstance(message, cluster.AddShard):
        return frozenset({TRAINER if message.role == "source" else ENGINE})
    return _NEEDED.get(type(message), ALL_ROLES)


def check_role(message: Message, roles: frozenset[str], who: str, where: str) -> None:
    """Refuse a message that none of `roles` may send.

    Args:
        message: the request.
        roles: the sender's roles.
        who: the sender, for the error.
        where: the setting that gives the sender its roles, for the error.

    Raises:
        RefusedError: names the message, the sender's roles, the needed roles and that setting.
    """
    needed = roles_for(message)
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
    """Return roles as text for people."""
    return between.join(sorted(roles))
