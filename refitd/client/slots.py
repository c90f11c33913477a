"""The slots of a source rank and what each holds, so that they survive a restart of the daemon."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from msgspec import structs

from refitd.client.connection import Connection
from refitd.errors import PeerLost
from refitd.protocol import local
from refitd.protocol.shards import Shard

if TYPE_CHECKING:
    from refitd.client.devices import Arena
    from refitd.client.reconnect import Give

_log = logging.getLogger("refitd.client")


class SourceSlots:
    """The slots of one registration, which it can make again over another connection.

    Attributes:
        arenas: the slots, mapped; none for a source that lends tensors of an arena.
        message: the registration.
        newest: the highest version that was published or lent, also one of which it is not known; None: none was.
    """

    def __init__(
        self, message: local.RegisterSource, registered: local.SourceRegistered, arenas: tuple[Arena, ...]
    ) -> None:
        self.message = message
        self.arenas = arenas
        self.newest: int | None = None
        self._run = registered.run
        # slot -> version, and the address it was written to: a registration meanwhile may have replaced the memory
        self._held: dict[int, tuple[int, int]] = {}
        self._told: frozenset[int] = frozenset()  # the versions that the last registration has named
        self._offer: tuple[int, int | None] | None = None  # the version offered last, and `newest` before it

    def passed_on(self, version: int) -> bool:
        """Whether the present daemon was told, by the registration, that a slot holds this version whole.

        If not, it is as though the version had not been offered: an earlier daemon has ended over it, and the slot was
        finished too late for the registration with the present one.
        """
        if version in self._told:
            return True
        if self._offer is not None and self._offer[0] == version:
            self.newest = self._offer[1]
            self.withdrawn(version)
        return False

    def granted(self, slot: int, connection: Connection) -> Arena:
        """Return the slot that the daemon has granted: what it held is about to be overwritten.

        Raises:
            PeerLost: the daemon has ended, so that the next one may have been told of what the slot holds.
        """
        self._held.pop(slot, None)
        if connection.is_lost:
            raise PeerLost("the refitd daemon has ended before the version was copied; publish it again")
        return self.arenas[slot]

    def offered(self, version: int, slot: int | None = None, memory: Arena | None = None) -> int | None:
        """Record that a version is being published (from this slot, written to its memory) or lent.

        Returns:
            The newest version before it.
        """
        before, self.newest = self.newest, version
        if slot is not None and memory is not None:
            self._offer = version, before
            self._held[slot] = version, memory.address
        return before

    def refused(self, before: int | None, slot: int | None = None) -> None:
        """The daemon has not taken what was offered; `before` is the answer of `offered`."""
        self.newest = before
        if slot is not None:
            self._held.pop(slot, None)

    def withdrawn(self, version: int) -> None:
        """A version is no longer published."""
        self._held = {slot: held for slot, held in dict(self._held).items() if held[0] != version}
        self._told -= {version}

    def change(self, shard: Shard) -> None:
        """Take note of another description, and let go of the slots: `register_again` makes new ones."""
        self.message = structs.replace(self.message, shard=shard)
        self.arenas, self._held, self._offer = (), {}, None
        self._told = frozenset()

    def register_again(self, connection: Connection, give: Give, timeout: float) -> local.SourceRegistered:
        """Register over a new connection, with the same slots and what they hold.

        Raises:
            RefitdError: the daemon or the coordinator refuses, or is gone again.
        """
        arenas = self.arenas
        numbers = [give(arena.address, arena.nbytes) for arena in arenas]
        newest = self.newest  # before what the slots hold: a version that is being offered is in both, or in neither
        held = {
            slot: version
            for slot, (version, address) in dict(self._held).items()
            if slot < len(arenas) and address == arenas[slot].address and newest is not None and version <= newest
        }
        given = [local.GivenSlot(number, held.get(slot)) for slot, number in enumerate(numbers) if number is not None]
        is_whole = len(given) == len(numbers)
        message = structs.replace(
            self.message, given=tuple(given) if is_whole else (), run=self._run, newest=newest, timeout_s=timeout
        )
        for slot in () if is_whole else given:
            connection.request(local.FreeArena(arena=slot.arena), local.Done, timeout)
        registered = connection.request(message, local.SourceRegistered, timeout)
        if not is_whole or not arenas:
            if held:
                _log.warning(
                    "member=%s its published versions %s are gone: their memory could not be given back to the daemon; "
                    "publish the next one",
                    registered.member,
                    sorted(held.values()),
                )
            self.arenas = tuple(connection.map_arena(arena, write=True) for arena in registered.slots)
            self._held, held = {}, {}
        self._told = frozenset(held.values())
        self._run = registered.run
        return registered
