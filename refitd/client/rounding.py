"""Register a rounding source again when a target needs some of its tensors unrounded.

A source registers before the engines that take from it, so it cannot know what they hold. It asks before each version
that it rounds. The registration with wider tensors keeps the run and its version numbers; older versions are withdrawn.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from refitd.client.connection import Connection
from refitd.client.reconnect import Give
from refitd.client.slots import SourceSlots
from refitd.client.source_casts import rounded_in
from refitd.describe.metadata import ParameterMetadata
from refitd.errors import ProtocolError
from refitd.protocol import local
from refitd.protocol.shards import shard_of

_log = logging.getLogger("refitd.client")

# How long a publication waits for a swap that reads an older, rounded version. After that it is rounded once more.
SWAP_ENDS_S = 5.0
LOOK_S = 0.02

ANSWER_S = 10.0


class Registered(Protocol):
    """A source that is registered with slots."""

    model: str
    member: str
    _slots: SourceSlots

    def register_again(self, connection: Connection, give: Give, timeout: float) -> None:
        """Register over a connection."""


def offer_unrounded(
    source: Registered,
    connection: Connection,
    wire: Sequence[ParameterMetadata],
    widen: Callable[[Collection[str]], Sequence[ParameterMetadata]],
    timeout: float,
) -> None:
    """Have a source offer unrounded what some target needs so; call it before each publication.

    Args:
        source: its slots change.
        connection: over which it is registered.
        wire: the present descriptions of its tensors.
        widen: called with canonical names; offers them unrounded from then on, and returns the new descriptions.
        timeout: seconds.

    Raises:
        RefusedError, ArenaError: it cannot be registered with the wider tensors; the next publication tries again.
        TransportError: the daemon or the coordinator is away.
    """
    slots = source._slots
    if slots.arenas:
        if not any(m.cast_from for m in wire):
            return
        names = _needed(source, connection, wire, timeout)
        if not names:
            return
        named = ", ".join(sorted(names)[:5])
        _log.info("member=%s %d tensors are offered unrounded from now on: %s", source.member, len(names), named)
        old = source.member
        slots.change(shard_of(list(widen(names)), is_partial=slots.message.shard.is_partial))
        connection.unlisten(old)
        connection.request(local.Deregister(member=old), local.Done, ANSWER_S)
    source.register_again(connection, lambda address, nbytes: None, timeout)


def _needed(source: Registered, connection: Connection, wire: Sequence[ParameterMetadata], timeout: float) -> set[str]:
    """Return the canonical names to be offered unrounded; none if a swap does not end reading an older version."""
    deadline = time.monotonic() + min(SWAP_ENDS_S, timeout / 2)
    while True:
        try:
            answer = connection.request(local.GetUnrounded(member=source.member), local.Unrounded, ANSWER_S)
        except ProtocolError as exc:
            _log.warning(
                "member=%s all tensors are rounded: the coordinator or daemon is older: %s", source.member, exc
            )
            return set()
        names = rounded_in(wire, answer.names)
        if not names or not answer.is_read:
            return names
        if time.monotonic() > deadline:
            _log.warning(
                "member=%s a swap still reads an older version, so %s and %d other tensors are rounded once more",
                source.member,
                min(names),
                len(names) - 1,
            )
            return set()
        time.sleep(LOOK_S)
