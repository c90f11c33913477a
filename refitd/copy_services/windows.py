"""Messages posted one by one, at most WINDOW per stream at a time; sent as deltas or relayed where possible.

All first messages are posted. Then each message, in the order of posting, is awaited and replaced by the next one of
its stream. No rank can block another for ever: both ends post a stream's k-th message as soon as both have finished its
(k - WINDOW)-th, and both wait for messages in the order of k.

A stream with bases sends some messages as deltas (deltas.py). A receiver must know the length of a message before it
posts the receive, so each message's form is announced AHEAD messages ahead:

    opening             the notes of the first AHEAD messages
    message k           the note of message k + AHEAD, then the message: whole, or its delta, or empty if unchanged
    after the last      the digest of all messages, whole

If messages are short, more than WINDOW of them are in flight: as many bytes as WINDOW whole ones have. Both ends know
all lengths and therefore use equal limits: a message is posted when certain earlier ones of its stream are done.

The receiver rebuilds the whole message from its base and the delta, then treats it like a message that arrived whole.
The digest proves the result, and a base that differs from the sender's fails the run.

A stream over a path (Route) announces its messages, too. A rank passes on each message once it has written it: in the
received form, or whole if the next rank has no base. Last it passes on the received digest, which is the first
sender's: it proves to the last receiver that no relay has altered the data. No rank can block another for ever here
either. Receives of one message number are posted at the same turn at every hop, and its sends one turn later. Within a
turn a rank waits first for the data that passed fewer relays. (This requires that lengths do not shrink on the way,
which is true because a message becomes whole at most once.)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import xxhash

from refitd.copy_services import DIRECT, Route
from refitd.copy_services.deltas import Pace
from refitd.copy_services.packed import NO_MARK, STAGING_BYTES, WINDOW, Move, PackedExchange
from refitd.copy_services.peers import Peers
from refitd.copy_services.pipelines import AnnouncedReceiver, AnnouncedSender, Pipeline, PlainPipeline, Relay
from refitd.copy_services.streams import InFlight, Line, Stream
from refitd.copy_services.waits import Deadline


class WindowExchange(PackedExchange):
    """The pipeline of packed.py with single messages. See ExchangeService for its contract."""

    relays = True

    def __init__(self, peers: Peers, *, message_bytes: int | None = None, staging_bytes: int = STAGING_BYTES) -> None:
        """See PackedExchange."""
        super().__init__(peers, message_bytes=message_bytes, staging_bytes=staging_bytes)
        self._paces: dict[Line, Pace] = {}  # of sent streams

    def _mark(self, streams: Sequence[Stream]) -> bytes:
        """See PackedExchange._mark."""
        held = [piece.base.version if piece.base is not None else "" for s in streams for piece in s.pieces]
        first_sent = [stream for stream in streams if stream.is_send and not stream.route.hop]
        # no short-circuit: wants_deltas must be called once per stream and run
        if not any(held) or not all([self._pace(stream).wants_deltas() for stream in first_sent]):
            return NO_MARK
        return xxhash.xxh3_64_digest("\0".join(held).encode())

    def _pace(self, stream: Stream) -> Pace:
        return self._paces.setdefault((stream.position, stream.route), Pace())

    def _move(self, move: Move) -> str:
        """See PackedExchange._move."""
        flying: deque[tuple[Pipeline, InFlight]] = deque()
        try:
            return self._pass(flying, move)
        except BaseException:
            # messages that still arrive must not be written
            for _, flight in flying:
                flight.posted.abandon()
            raise

    def _pass(self, flying: deque[tuple[Pipeline, InFlight]], move: Move) -> str:
        """The body of `_move`; `flying` holds the posted messages that are not known to be done."""
        started = time.perf_counter()
        lines = self._lines(move)
        for number in range(WINDOW):
            flying.extend((line, flight) for line in lines for flight in line.begin(number))
        trouble = move.meanwhile()
        while flying:
            line, done = flying[0]
            self.peers.wait(done.posted, done.stream.position, self._patience(done.stream, move.deadline), _doing(done))
            flying.popleft()
            done.passed()
            following = line.done(done)
            line.seconds = time.perf_counter() - started
            if move.on_progress is not None:
                move.on_progress(sum(line.arrived for line in lines))
            flying.extend((line, flight) for flight in following)
            if line.relay is not None:
                flying.extend((line.relay, flight) for flight in line.relay.advance())
        for line in lines:
            # a stream that waits for a publication says nothing about deltas
            waits = any(piece.await_written is not None for piece in line.stream.pieces)
            if line.stream.is_send and line.seconds and not line.stream.route.hop and not waits:
                self._pace(line.stream).took(line.seconds, line.stream.nbytes, as_deltas=line.stream.has_bases)
        return next((line.trouble for line in lines if line.trouble), trouble)

    def _patience(self, stream: Stream, deadline: Deadline) -> Deadline:
        """Return the deadline of a wait for a stream.

        If a relay stops, ranks wait for each other all along its path. The rank that waits for the relay itself must
        end its wait first (`_turn`): receivers with fewer hops before them first, then senders, last hop first.
        """
        if stream.route == DIRECT:
            return deadline
        hop = stream.route.hop
        return self._turn(deadline, hop if stream.is_send else 2 * self._hops - hop)

    def _lines(self, move: Move) -> list[Pipeline]:
        lines = [self._line(stream, move) for stream in self._order(move.streams)]
        arriving = {line.stream.route: line for line in lines if not line.stream.is_send}
        for line in lines:
            if isinstance(line, Relay):
                path, hop = line.stream.route.path, line.stream.route.hop
                arriving[Route(path, hop - 1)].relay = line
        return lines

    def _line(self, stream: Stream, move: Move) -> Pipeline:
        if not stream.has_bases and stream.route == DIRECT:
            return PlainPipeline(self, stream, move)
        if not stream.is_send:
            return AnnouncedReceiver(self, stream, move)
        return Relay(self, stream, move) if stream.route.hop else AnnouncedSender(self, stream, move)


def _doing(flight: InFlight) -> str:
    what = "the opening message" if flight.number < 0 else f"message {flight.number}"
    return f"{what} {'to' if flight.stream.is_send else 'from'}"
