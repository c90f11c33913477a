"""What a trainer, an engine and an operator may ask for, on a node and between nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from refitd.errors import RefusedError
from refitd.protocol import cluster, local
from refitd.protocol.base import Message

TRAINER, ENGINE, OPERATOR = "trainer", "engine", "operator"
ALL_ROLES = frozenset({TRAINER, ENGINE, OPERATOR})

# A trainer that has published may have it swapped in: `client.swap` is part of its loop.
_SWAPS = frozenset({TRAINER, OPERATOR})
_NEEDED: dict[type[Message], frozenset[str]] = {
    local.CreateArena: frozenset({TRAINER, ENGINE}),
    local.RegisterSource: frozenset({TRAINER}),
    local.RegisterTarget: frozenset({ENGINE}),
    local.StartSwap: _SWAPS,
    local.AbortSwap: _SWAPS,
    local.Verify: _SWAPS,  # it reads every byte of every replica
    cluster.ShardPublished: frozenset({TRAINER}),
}


@dataclass(frozen=True, slots=True)
class Allowed:
    """A public key that is let in: the name its owner goes by, the node it may be, the roles of that node's clients."""

    name: str
    node: str = ""  # "": any
    roles: frozenset[str] = ALL_ROLES


ANYONE = Allowed("")  # a peer that needs no key: local sockets have file modes instead


def roles_for(message: Message) -> frozenset[str]:
    """Return the roles any of which may send this message; all of them where it takes none in particular."""
    if isinstance(message, cluster.AddShard):
        return frozenset({TRAINER if message.role == "source" else ENGINE})
    return _NEEDED.get(type(message), ALL_ROLES)


def check_role(message: Message, roles: frozenset[str], who: str, where: str) -> None:
    """Refuse a message that none of `roles` may send.

    Args:
        message: what was asked for.
        roles: those of the sender.
        who: the sender, for the error.
        where: what gives the sender its roles and would have to be changed.

    Raises:
        RefusedError: names the message, the sender's roles, those that are needed and where they are given.
    """
    needed = roles_for(message)
    if not needed & roles:
        raise RefusedError(
            f"{type(message).__name__} needs the role {listed(needed, ' or ')}, and {who} has "
            f"{listed(roles) or 'none'}; {where} gives roles"
        )


def read_roles(words: Iterable[str]) -> frozenset[str]:
    """Return roles by their names; raises ValueError where one is none."""
    found = frozenset(words)
    if unknown := sorted(found - ALL_ROLES):
        raise ValueError(f"{unknown[0]!r} is no role; roles are {listed(ALL_ROLES)}")
    return found


def listed(roles: Iterable[str], between: str = ", ") -> str:
    """Return roles as people read them."""
    return between.join(sorted(roles))
