"""Messages put into slots of the peer and announced by signals: a rank waits only for ranks that it exchanges with.

Every ordered pair of ranks has WINDOW leaving slots in the sender's memory and WINDOW landing slots in the receiver's.
Message `number` of a pair, counted from the service's start, uses slot number % WINDOW of both. Two words track it,
both counting from 1, so that 0 means "never":

    arrived   at the receiver, set by the sender's put: 1 + the number of the message in the slot
    freed     at the sender, set by the receiver: 1 + the number of the last message taken out of the slot

Only one rank writes a slot's word and a slot holds one message at a time, so puts may arrive in any order. Slots are
numbered by the distance from sender to receiver, which both ends know.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from refitd.copy_services.packed import DIGEST_BYTES, WINDOW, Move, PackedExchange
from refitd.copy_services.peers import Deadline, Peers
from refitd.copy_services.streams import InFlight, Stream
from refitd.copy_services.waits import Backoff


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The layout of slots and their words, the same on every rank.

    Attributes:
        size: number of ranks in the group.
        limit: bytes of a slot.
    """

    size: int
    limit: int

    @property
    def nbytes(self) -> int:
        """Bytes of all slots of a rank: first the landing slots, then the leaving slots."""
        return 2 * self._count * self.limit

    @property
    def words(self) -> int:
        """Number of words of a rank: `arrived` of each landing slot, then `freed` of each leaving slot."""
        return 2 * self._count

    @property
    def _count(self) -> int:
        return (self.size - 1) * WINDOW

    def _slot(self, source: int, target: int, number: int) -> int:
        return ((target - source) % self.size - 1) * WINDOW + number % WINDOW

    def landing(self, source: int, target: int, number: int) -> int:
        """Return the offset of a message's landing slot, at the target."""
        return self._slot(source, target, number) * self.limit

    def leaving(self, source: int, target: int, number: int) -> int:
        """Return the offset of a message's leaving slot, at the source."""
        return (self._count + self._slot(source, target, number)) * self.limit

    def arrived(self, source: int, target: int, number: int) -> int:
        """Return the index of a message's `arrived` word, at the target."""
        return self._slot(source, target, number)

    def freed(self, source: int, target: int, number: int) -> int:
        """Return the index of a message's `freed` word, at the source."""
        return self._count + self._slot(source, target, number)


def has_arrived(number: int, word: int) -> bool:
    """Whether message `number` is in its slot; `word` is the slot's `arrived` word."""
    return word == number + 1


def may_put(number: int, word: int) -> bool:
    """Whether the slot of message `number` is free: its predecessor was taken out. `word` is the `freed` word."""
    return word >= number + 1 - WINDOW


class SlottedExchange(PackedExchange):
    """The pipeline of packed.py over one-sided puts. A new service starts with all words 0 on all ranks."""

    def __init__(self, peers: Peers, *, message_bytes: int | None, staging_bytes: int) -> None:
        """See PackedExchange."""
        super().__init__(peers, message_bytes=message_bytes, staging_bytes=staging_bytes)
        self.slots = SlotLayout(len(peers), self._limit)
        self._put_count = [0] * len(peers)
        self._taken_count = [0] * len(peers)

    @abstractmethod
    def _room(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return part of this rank's slots as a uint8 tensor."""

    @abstractmethod
    def _put(self, position: int, leaving: int, landing: int, nbytes: int, word: int, value: int) -> None:
        """Copy from this rank's slots to another rank's; then set a word there."""

    @abstractmethod
    def _signal(self, position: int, word: int, value: int) -> None:
        """Set a word of another rank, after all work queued before."""

    @abstractmethod
    def _look(self) -> Sequence[int]:
        """Return this rank's words now. Work queued afterwards sees the messages that they announce."""

    def _working(self, deadline: Deadline) -> AbstractContextManager[object]:
        """Return a context for packing and unpacking; both are done when it ends."""
        return nullcontext()

    def _move(self, move: Move) -> str:
        """See PackedExchange._move."""
        left = {id(s): len(s.messages) + move.verify for s in move.streams if s.messages}
        waiting = [s for s in self._order(move.streams) if s.messages]
        found, arrived, pause = "", 0, Backoff()
        is_first = True
        with self._working(move.deadline):
            while waiting or is_first:
                words, moved = self._look(), False
                for stream in waiting:
                    step = self._leave if stream.is_send else self._take
                    for _ in range(WINDOW):
                        if not left[id(stream)] or (done := step(stream, words, move.verify)) is None:
                            break
                        nbytes, trouble = done
                        left[id(stream)] -= 1
                        arrived += nbytes
                        found = trouble or found
                        moved = True
                if is_first:
                    found, is_first = move.meanwhile() or found, False
                waiting = [s for s in waiting if left[id(s)]]
                if moved:
                    pause = Backoff()
                    if move.on_progress is not None:
                        move.on_progress(arrived)
                elif waiting:
                    pause.take(move.deadline, self._subject(waiting))
        return found

    def _leave(self, stream: Stream, words: Sequence[int], verify: bool) -> tuple[int, str] | None:
        """Put a stream's next message if its slot is free; return (0 bytes arrived, ""), or None if it is not."""
        me, target = self.peers.index, stream.position
        number = self._put_count[target]
        if not may_put(number, words[self.slots.freed(me, target, number)]):
            return None
        leaving = self.slots.leaving(me, target, number)
        made = self._next_buffer(stream, verify, self._room(leaving, self._limit))
        assert made is not None  # the caller has checked that messages are left
        _, buffer, is_staged = made
        if not is_staged:  # the digest
            self._room(leaving, buffer.numel()).copy_(buffer)
        landing, word = self.slots.landing(me, target, number), self.slots.arrived(me, target, number)
        self._put(target, leaving, landing, buffer.numel(), word, number + 1)
        self._put_count[target] += 1
        return 0, ""

    def _take(self, stream: Stream, words: Sequence[int], verify: bool) -> tuple[int, str] | None:
        """Take a stream's next message from its slot; return (bytes, error text), or None if it has not arrived."""
        me, source = self.peers.index, stream.position
        number = self._taken_count[source]
        if not has_arrived(number, words[self.slots.arrived(source, me, number)]):
            return None
        nth, stream.next = stream.next, stream.next + 1
        nbytes = stream.messages[nth].nbytes if nth < len(stream.messages) else DIGEST_BYTES
        buffer = self._room(self.slots.landing(source, me, number), nbytes)
        flight = InFlight(stream, nth, None, buffer, True)
        trouble = self._land(flight, verify)
        self._signal(source, self.slots.freed(source, me, number), number + 1)
        self._taken_count[source] += 1
        return flight.payload, trouble

    def _subject(self, waiting: Sequence[Stream]) -> str:
        """Name the ranks that are awaited, for errors."""
        told = [f"{'room at' if s.is_send else 'message from'} {self.peers.label(s.position)}" for s in waiting]
        more = f" and {len(told) - 8} more" if len(told) > 8 else ""
        return f"{self.peers.label(self.peers.index)} got no {', no '.join(told[:8])}{more}"
