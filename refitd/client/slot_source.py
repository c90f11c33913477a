"""What all sources have in common: a registration that can be repeated, and versions that are copied into slots.

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
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs

from refitd.client.connection import Connection
from refitd.client.reconnect import Give, Line, renumbered
from refitd.client.slots import SourceSlots
from refitd.client.source_tensors import rounded_in
from refitd.client.threads import Turn, check_process
from refitd.describe.metadata import ParameterMetadata
from refitd.errors import RefitdError, RefusedError, TransportError, from_code
from refitd.protocol import local
from refitd.protocol.base import Message
from refitd.protocol.shards import shard_of

if TYPE_CHECKING:
    from refitd.client.arenas import Arena

_log = logging.getLogger("refitd.client")

# How long a publication waits for a swap that reads an older, rounded version. After that it rounds once more.
SWAP_ENDS_S = 5.0
LOOK_S = 0.02

ANSWER_S = 10.0


class Filling(NamedTuple):
    """A slot that a version is being copied into: its number, its memory, and the member it was granted to."""

    member: str
    slot: int
    arena: Arena


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
            _log.info("member=%s %d tensors are offered unrounded from now on: %s", self.member, len(names), named)
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
                    self.member,
                    min(names),
                    len(names) - 1,
                )
                return set()
            time.sleep(LOOK_S)
