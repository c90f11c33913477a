"""What all sources have in common: their slots, a registration that can be repeated with them, and their versions.

A source registers before its engines, so it cannot know their dtypes. It asks the coordinator before each version that
it rounds. The registration with wider tensors continues the source's incarnation (`run`) and its version numbers; older
versions are withdrawn.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs

from refitd.buffers.layout import ALIGNMENT, Written
from refitd.client.calls import Turn, check_process, whole
from refitd.client.connection import Connection
from refitd.client.reconnect import Give, Line, renumbered
from refitd.client.source_tensors import rounded_in
from refitd.describe.metadata import ParameterMetadata
from refitd.errors import PeerLost, RefitdError, RefusedError, TransportError, from_code
from refitd.protocol import local
from refitd.protocol.base import Message
from refitd.protocol.shards import Shard, shard_of
from refitd.text import called

if TYPE_CHECKING:
    import torch

    from refitd.client.arenas import Arena
    from refitd.client.client import Client

_log = logging.getLogger("refitd.client")

# How long a publication waits for a swap that reads an older, rounded version. After that it rounds once more.
SWAP_ENDS_S = 5.0
LOOK_S = 0.02

ANSWER_S = 10.0

SINCE_PROTOCOL = 4_001  # the daemon knows Wrote


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
                    called(registered.member),
                    sorted(held.values()),
                )
            self.arenas = tuple(connection.map_arena(arena, write=True) for arena in registered.slots)
            self._held, held = {}, {}
        self._told = frozenset(held.values())
        self._run = registered.run
        return registered


class Filling(NamedTuple):
    """A slot that a version is being copied into: its number, its memory, and the member it was granted to."""

    member: str
    slot: int
    arena: Arena


# A client tells of at least so many written bytes at a time, and of this part of a version.
TOLD_BYTES = 32 << 20
TOLD_PART = 64


class Progress:
    """Tells the daemon which bytes of a slot are written: a swap may copy them before the rest."""

    def __init__(self, connection: Connection, version: int, filling: Filling, settle: Callable[[], object]) -> None:
        """`settle` waits until the GPUs' queued copies into the slot have ended."""
        self._connection, self._version, self._filling, self._settle = connection, version, filling, settle
        self._written, self._size = Written(), 0
        self._step = max(TOLD_BYTES, filling.arena.nbytes // TOLD_PART)

    def __call__(self, offset: int, nbytes: int) -> None:
        """Note that a tensor at this offset is written, or queued to be."""
        # tensors begin at multiples of ALIGNMENT: the ranges of neighbours touch
        self._written.add(offset, offset + -(-nbytes // ALIGNMENT) * ALIGNMENT)
        self._size += nbytes
        if self._size < self._step or self._connection.welcome.protocol < SINCE_PROTOCOL:
            return
        self._settle()
        spans, self._written, self._size = self._written.spans(), Written(), 0
        with contextlib.suppress(RefitdError):  # `publish` reports a lost daemon
            self._connection.tell(local.Wrote(self._filling.member, self._version, spans))


class SlotSource(ABC):
    """A registered source.

    Attributes:
        model: as registered.
        member: the registration's id.
        run: identifies this incarnation of the trainer and its versions.
    """

    def __init__(
        self,
        line: Line,
        connection: Connection,
        model: str,
        registered: local.Registered,
        slots: SourceSlots,
        wire: Sequence[ParameterMetadata],
        closed: Callable[[Any], object],
    ) -> None:
        """`wire` describes the offered tensors. `closed` is called when the source is closed."""
        self._line = line
        self._connection = connection
        self._failure: local.Failure | None = None  # why it could not be registered again
        self._pid = os.getpid()
        self._told = closed
        self._slots = slots
        self._offers(wire)
        self._turn = Turn(f"a version of {model!r} is being published")
        self._closed = False
        self._next_version = registered.next_version
        self.model = model
        self.member = registered.member
        self.run = registered.run
        connection.listen(self.member, self._notified)

    @property
    def next_version(self) -> int:
        """The lowest version that may be published: above the live version and all versions published by this rank."""
        check_process(self._pid)
        return self._next_version

    def close(self) -> None:
        """End the registration and withdraw all its versions."""
        if self._closed:
            return
        connection, member = self._connection, self.member
        # it is not registered if registering again with unrounded tensors has failed
        is_registered = bool(self._slots.arenas or self._slots.message.live)
        self.release()
        self._told(self)
        if is_registered:
            self._line.deregister(connection, member)

    def register_again(self, connection: Connection, give: Give, timeout: float) -> None:
        """Register over a new connection; raises RefitdError if the daemon refuses or is lost again."""
        registered = self._slots.register_again(connection, give, timeout)
        self._next_version = max(self._next_version, registered.next_version)
        self.member, self.run = registered.member, registered.run
        self._connection = connection  # last: a thread that still uses the old one gets PeerLost and retries
        connection.listen(self.member, self._notified)

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Store the new numbers of arenas from `allocate` that were handed over to another daemon."""
        message = self._slots.message
        self._slots.message = structs.replace(message, live=renumbered(message.live, numbers))

    def give_up(self, failure: local.Failure) -> None:
        """Note that registering again failed; later calls raise `failure`."""
        self._failure = failure

    def arenas(self) -> set[int]:
        """Return the arenas from `allocate` that hold its tensors."""
        return set()

    def release(self) -> None:
        """Drop the slots; later calls to publish fail."""
        self._connection.unlisten(self.member)
        self._slots.arenas = ()
        self._closed = True

    def _check_open(self) -> None:
        check_process(self._pid)
        if self._failure is not None:
            raise from_code(self._failure.code, self._failure.message)
        if self._closed:
            raise RefusedError(f"this source of model {self.model!r} is closed; register it again")

    @contextlib.contextmanager
    def _filling(self, connection: Connection, version: int, timeout: float) -> Iterator[Filling]:
        """Wait for a free slot, which the block fills; return the slot to the daemon if the block raises."""
        member = self.member
        begin = local.BeginPublish(member=member, version=version, timeout_s=timeout)
        # the daemon answers at its deadline; wait a little longer to receive its reason
        granted = connection.request(begin, local.SlotGranted, timeout + 2.0).slot
        try:
            yield Filling(member, granted, self._slots.granted(granted, connection))
        except BaseException:
            self._slots.withdrawn(version)
            with contextlib.suppress(RefitdError):
                connection.request(local.Withdraw(member=member, version=version), local.Done, ANSWER_S)
            raise

    def _filled(
        self, connection: Connection, version: int, filling: Filling, timeout: float, *, is_anew: bool = False
    ) -> None:
        """Publish the version in a filled slot; `is_anew` says that tensors were replaced since the last version."""
        self._next_version = max(self._next_version, version + 1)  # first: it may be published even without an answer
        before = self._slots.offered(version, filling.slot, filling.arena)
        done = local.Publish(member=filling.member, version=version, slot=filling.slot, is_anew=is_anew)
        try:
            connection.request(done, local.Done, timeout)
        except RefitdError as exc:
            if exc.code in (RefusedError.code, TransportError.code):  # not PeerLost: the next daemon learns of the slot
                self._slots.refused(before, filling.slot)
            raise

    @abstractmethod
    def _notified(self, message: Message) -> None:
        """Handle a notification of the daemon."""

    # --- unrounded tensors --------------------------------------------------------------------------------

    @abstractmethod
    def _widen(self, exact: Collection[str]) -> Sequence[ParameterMetadata]:
        """Offer these canonical tensors unrounded from now on; return the descriptions of all offered tensors."""

    def _offers(self, wire: Sequence[ParameterMetadata]) -> None:
        self._wire = wire
        self._is_rounded = any(m.cast_from for m in wire)  # some target may need a tensor unrounded

    def _offer_unrounded(self, connection: Connection, timeout: float) -> None:
        """Before a publication: offer unrounded the tensors that a target needs so, and make slots if there are none.

        Raises:
            RefusedError, ArenaError: it cannot be registered with the wider tensors; the next publication tries again.
            TransportError: the daemon or the coordinator is disconnected.
        """
        slots = self._slots
        if slots.arenas and not self._is_rounded:
            return
        if slots.arenas:
            names = self._needed(connection, timeout)
            if not names:
                return
            named = ", ".join(sorted(names)[:5])
            _log.info(
                "member=%s %d tensors are offered unrounded from now on: %s", called(self.member), len(names), named
            )
            self._offers(self._widen(names))
            slots.change(shard_of(list(self._wire), is_partial=slots.message.shard.is_partial))
            connection.unlisten(self.member)
            connection.request(local.Deregister(member=self.member), local.Done, ANSWER_S)
        self.register_again(connection, lambda address, nbytes: None, timeout)

    def _needed(self, connection: Connection, timeout: float) -> set[str]:
        """Return the canonical names to offer unrounded; none if a swap still reads an older version after the wait."""
        deadline = time.monotonic() + min(SWAP_ENDS_S, timeout / 2)
        while True:
            answer = connection.request(local.GetUnrounded(member=self.member), local.Unrounded, ANSWER_S)
            names = rounded_in(self._wire, answer.names)
            if not names or not answer.is_read:
                return names
            if time.monotonic() > deadline:
                _log.warning(
                    "member=%s a swap still reads an older version, so %s and %d other tensors are rounded once more",
                    called(self.member),
                    min(names),
                    len(names) - 1,
                )
                return set()
            time.sleep(LOOK_S)


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
