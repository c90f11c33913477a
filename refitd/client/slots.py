"""The slots of a source, which can be registered again with their versions over another connection."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import structs

from refitd.client.arguments import whole
from refitd.client.connection import Connection
from refitd.errors import PeerLost, RefusedError
from refitd.protocol import local
from refitd.protocol.shards import Shard

if TYPE_CHECKING:
    import torch

    from refitd.client.arenas import Arena
    from refitd.client.client import Client
    from refitd.client.reconnect import Give

_log = logging.getLogger("refitd.client")


@dataclass(frozen=True, slots=True)
class Slotted:
    """How a source publishes; see `Client.register_source`."""

    model: str
    slots: int
    cast: str | torch.dtype | Mapping[str, str | torch.dtype] | None
    device: str | torch.device | None
    timeout: float

    def checked_slots(self) -> int:
        """Return the number of slots as an int; raises RefusedError unless it is in 1..16."""
        slots = whole("slots", self.slots)
        if not 1 <= slots <= 16:
            raise RefusedError(f"slots must be 1..16, found {slots}; each takes the size of the shard")
        return slots


class SourceSlots:
    """The slots of one registration, which can be repeated over another connection.

    Attributes:
        arenas: the slots, mapped; empty for a source that lends tensors of an arena.
        message: the registration.
        newest: the highest version that was published or lent, even if the daemon did not confirm it; None: no version.
    """

    def __init__(self, message: local.RegisterSource, registered: local.Registered, arenas: tuple[Arena, ...]) -> None:
        self.message = message
        self.arenas = arenas
        self.newest: int | None = None
        self._run = registered.run
        # slot -> (version, address of the memory it was written to); a later registration may have replaced that memory
        self._held: dict[int, tuple[int, int]] = {}
        self._told: frozenset[int] = frozenset()  # the versions that the last registration listed
        self._offer: tuple[int, int | None] | None = None  # the last offered version, and `newest` before it

    def passed_on(self, version: int) -> bool:
        """Return whether the last registration listed a slot with this complete version for the current daemon.

        If not, undo `offered`: the previous daemon ended during the publication, and the slot was finished after the
        registration with the current daemon. The version must be published again.
        """
        if version in self._told:
            return True
        if self._offer is not None and self._offer[0] == version:
            self.newest = self._offer[1]
            self.withdrawn(version)
        return False

    def granted(self, slot: int, connection: Connection) -> Arena:
        """Return the slot that the daemon has granted, and forget its version, which the caller overwrites.

        Raises:
            PeerLost: the daemon has ended, and the registration with the next one may list the slot's old version.
        """
        self._held.pop(slot, None)
        if connection.is_lost:
            raise PeerLost("the refitd daemon has ended before the version was copied; publish it again")
        return self.arenas[slot]

    def offered(self, version: int, slot: int | None = None, memory: Arena | None = None) -> int | None:
        """Record that a version is being published from `slot` with memory `memory`, or is being lent.

        Returns:
            The previous `newest`.
        """
        before, self.newest = self.newest, version
        if slot is not None and memory is not None:
            self._offer = version, before
            self._held[slot] = version, memory.address
        return before

    def refused(self, before: int | None, slot: int | None = None) -> None:
        """Undo `offered` after the daemon has refused the version; `before` is the value that `offered` returned."""
        self.newest = before
        if slot is not None:
            self._held.pop(slot, None)

    def withdrawn(self, version: int) -> None:
        """Forget a version that is no longer published."""
        self._held = {slot: held for slot, held in dict(self._held).items() if held[0] != version}
        self._told -= {version}

    def change(self, shard: Shard) -> None:
        """Replace the shard, and drop the slots; `register_again` makes new ones."""
        self.message = structs.replace(self.message, shard=shard)
        self.arenas, self._held, self._offer = (), {}, None
        self._told = frozenset()

    def register_again(self, connection: Connection, give: Give, timeout: float) -> local.Registered:
        """Register over a new connection, with the same slots and their versions.

        Raises:
            RefitdError: the daemon or the coordinator refuses the registration, or is lost again.
        """
        arenas = self.arenas
        numbers = [give(arena.address, arena.nbytes) for arena in arenas]
        newest = self.newest  # read before `_held`: if a version is offered in between, the filter drops it
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
        registered = connection.request(message, local.Registered, timeout)
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


def register_slots(client: Client, message: local.RegisterSource) -> tuple[Connection, local.Registered, SourceSlots]:
    """Register a source and map its slots; return its connection, the answer and the slots.

    Raises:
        RefusedError: the rank is taken, or the descriptions are invalid.
        ArenaError: there is not enough memory for the slots.
    """
    connection = client._connection.steady(message.timeout_s)
    registered = connection.request(message, local.Registered, message.timeout_s)
    with client._given_back(connection, registered.member):
        mapped = tuple(connection.map_arena(arena, write=True) for arena in registered.slots)
    return connection, registered, SourceSlots(message, registered, mapped)
