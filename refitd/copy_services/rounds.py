"""Messages in symmetric rounds: round k is one group call with the k-th message of every stream.

Some transports match operations by their order and run a group call as a whole (NCCL). Their ranks can wait for each
other in a circle unless all issue matching calls in the same order. Therefore every message has a place that both its
ends derive from its number and their distance, and all ranks go through the places in the same order:

    (number, class)     class = (distance - 1) // 128,  distance = (destination - source) mod size

A class has at most 128 sends and 128 receives on any rank, so a group call has at most 256 operations.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from refitd.copy_services.packed import WINDOW, Move, PackedExchange
from refitd.copy_services.peers import Deadline
from refitd.copy_services.streams import InFlight
from refitd.copy_services.waits import poll

MAX_OPERATIONS = 256
_CLASS = MAX_OPERATIONS // 2

Turn = tuple[int, bool]  # position of the peer; whether it is a send


def rounds(index: int, size: int, sends: Mapping[int, int], receives: Mapping[int, int]) -> Iterator[list[Turn]]:
    """Yield the turns of each group call; each turn is the next message of its stream.

    Args:
        index: this rank's position in its group.
        size: size of the group.
        sends: number of messages to each position; none to this rank itself.
        receives: number of messages from each position.
    """
    classes: dict[int, list[tuple[Turn, int]]] = {}
    for is_send, counts in ((False, receives), (True, sends)):
        for position, count in counts.items():
            distance = (position - index if is_send else index - position) % size
            classes.setdefault((distance - 1) // _CLASS, []).append(((position, is_send), count))
    for number in range(max([*sends.values(), *receives.values()], default=0)):
        for _, members in sorted(classes.items()):
            if turns := [turn for turn, count in members if count > number]:
                yield turns


class RoundsExchange(PackedExchange):
    """The pipeline of packed.py with group calls instead of single messages; WINDOW calls are in flight."""

    @abstractmethod
    def _issue(self, flights: Sequence[InFlight], deadline: Deadline, subject: str) -> Any:
        """Start sending and receiving these buffers in one group call; return a handle for it.

        Raises:
            PeerLost: the transport refuses.
        """

    @abstractmethod
    def _is_over(self, issued: Any) -> bool:
        """Whether a group call has ended, well or not. Never waits."""

    @abstractmethod
    def _finish(self, issued: Any, deadline: Deadline, subject: str) -> None:
        """Complete a group call that has ended; work queued afterwards sees the buffers that it filled.

        Raises:
            PeerLost: it has failed.
        """

    def _working(self, deadline: Deadline) -> AbstractContextManager[object]:
        """Return a context for packing and unpacking; both are done when it ends."""
        return nullcontext()

    def _move(self, move: Move) -> str:
        """See PackedExchange._move."""
        by_turn = {(stream.position, stream.is_send): stream for stream in move.streams}
        counts = {turn: len(s.messages) + move.verify for turn, s in by_turn.items() if s.messages}
        calls = rounds(
            self.peers.index,
            len(self.peers),
            {position: count for (position, is_send), count in counts.items() if is_send},
            {position: count for (position, is_send), count in counts.items() if not is_send},
        )
        flying: deque[tuple[list[InFlight], str, Any]] = deque()

        def launch() -> None:
            turns = next(calls, ())
            flights = []
            for turn in turns:
                made = self._next_buffer(by_turn[turn], move.verify)
                assert made is not None  # there are as many turns as messages
                number, buffer, is_staged = made
                flights.append(InFlight(by_turn[turn], number, None, buffer, is_staged))
            if flights:
                subject = self._subject(flights)
                flying.append((flights, subject, self._issue(flights, move.deadline, subject)))

        arrived = 0
        with self._working(move.deadline):
            for _ in range(WINDOW):
                launch()
            trouble = move.meanwhile()
            while flying:
                flights, subject, issued = flying.popleft()
                poll(partial(self._is_over, issued), move.deadline, subject)
                self._finish(issued, move.deadline, subject)
                for flight in flights:
                    if not flight.stream.is_send:
                        trouble = self._land(flight, move.verify) or trouble
                        arrived += flight.payload
                    if flight.is_staged:
                        self._give_back(flight.buffer)
                if move.on_progress is not None:
                    move.on_progress(arrived)
                launch()
        return trouble

    def _subject(self, flights: Sequence[InFlight]) -> str:
        """Name the participants of a group call, for errors."""
        positions = sorted({flight.stream.position for flight in flights})
        names = ", ".join(self.peers.label(position) for position in positions[:8])
        more = f" and {len(positions) - 8} more" if len(positions) > 8 else ""
        return f"{self.peers.label(self.peers.index)} exchanged no message {flights[0].number} with {names}{more}"
