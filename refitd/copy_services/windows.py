"""Messages posted one by one, at most WINDOW per stream at a time; sent as deltas or relayed where possible.

All first messages are posted; then each message, in the order of posting, is awaited and replaced by the next one of
its stream. No rank can block another for ever: a stream's k-th message is posted on both ends as soon as both have
finished its (k - WINDOW)-th, and both wait for messages in the order of k.

A stream with bases sends some messages as deltas (delta_codec.py). A receiver must know the length of what it posts, so
each message's form is announced AHEAD messages ahead:

    opening             the notes of the first AHEAD messages
    message k           the note of message k + AHEAD, then the message: whole, or its delta, or nothing if unchanged
    after the last      the digest of all messages, whole

More than WINDOW of these are in flight where they are short: as many bytes as WINDOW whole ones have. That, too, is the
same on both ends, which know all lengths: a message is posted when certain earlier ones of its stream are done.

The receiver makes the whole message of its base and the delta, and goes on as if it had come whole. So the digest
proves it, and a base that is not the sender's fails the run.

A stream that follows a path (Route) announces its messages, too. A rank passes on each message once it has written it,
in the form in which it came, or whole if the next rank holds no base, and at last the digest that came: so it is the
first sender's, and proves to the last receiver that no relay has altered anything. No rank can block another for ever
here either: messages of one number are posted to be received at the same turn at every hop, and sent on one turn later;
within a turn a rank waits for what has come over fewer relays first. (That needs lengths that do not shrink on the way,
which holds, since a message becomes whole at most once.)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch
import xxhash

from refitd.copy_services.exchange import DIRECT, Route
from refitd.copy_services.pace import Pace
from refitd.copy_services.packed import NO_MARK, STAGING_BYTES, TAG, WINDOW, Move, PackedExchange
from refitd.copy_services.peers import Deadline, Peers
from refitd.copy_services.pipelines import (
    AnnouncedReceiver,
    AnnouncedSender,
    Pipeline,
    PlainPipeline,
    Relay,
)
from refitd.copy_services.streams import InFlight, Line, Stream

_NOTE_TAG = 0x52490001  # notes have tags of their own: they are in flight together with messages
# Between two ranks there may be several paths, with far fewer messages than this in flight. Two paths whose tags meet
# after all exchange messages, which the digests find.
_TAGS_APART = 4099


class WindowExchange(PackedExchange):
    """The pipeline of packed.py with single messages. See ExchangeService for its contract."""

    relays = True

    def __init__(self, peers: Peers, *, message_bytes: int | None = None, staging_bytes: int = STAGING_BYTES) -> None:
        """See PackedExchange."""
        super().__init__(peers, message_bytes=message_bytes, staging_bytes=staging_bytes)
        self._paces: dict[Line, Pace] = {}  # of what is sent

    def _mark(self, streams: Sequence[Stream]) -> bytes:
        """See PackedExchange._mark."""
        held = [piece.base.version if piece.base is not None else "" for s in streams for piece in s.pieces]
        first_sent = [stream for stream in streams if stream.is_send and not stream.route.hop]
        # all are asked: each counts
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
            # messages that still arrive must not be written any more
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
            following = line.done(done)
            line.seconds = time.perf_counter() - started
            if move.on_progress is not None:
                move.on_progress(sum(line.arrived for line in lines))
            flying.extend((line, flight) for flight in following)
            if line.relay is not None:
                flying.extend((line.relay, flight) for flight in line.relay.advance())
        for line in lines:
            if line.stream.is_send and line.seconds and not line.stream.route.hop:
                self._pace(line.stream).took(line.seconds, line.stream.nbytes, as_deltas=line.stream.has_bases)
        return next((line.trouble for line in lines if line.trouble), trouble)

    def _patience(self, stream: Stream, deadline: Deadline) -> Deadline:
        """Return the deadline of a wait for a stream.

        If a relay stops, ranks wait for each other all along its path. The one that waits for the relay itself gives
        up first (`_turn`): who receives, the earlier the fewer hops are before it; then who sends, the later.
        """
        if stream.route == DIRECT:
            return deadline
        hop = stream.route.hop
        return self._turn(deadline, hop if stream.is_send else 2 * len(self.peers) - hop)

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

    def _post(
        self, stream: Stream, number: int, buffer: torch.Tensor, *, is_staged: bool = False, is_note: bool = False
    ) -> InFlight:
        """Start sending or receiving a message."""
        post = self.peers.send if stream.is_send else self.peers.receive
        # a tag for each message, so that it meets only its own other half
        tag = (_NOTE_TAG if is_note else TAG) + (number + _TAGS_APART * stream.route.path) % 0x10000
        return InFlight(stream, number, post(buffer, stream.position, tag), buffer, is_staged, is_note)

    def _post_next(self, stream: Stream, verify: bool) -> list[InFlight]:
        """Post a stream's next message, whole; with `verify` the last is the digest. Returns [] behind the last."""
        made = self._next_buffer(stream, verify)
        if made is None:
            return []
        number, buffer, is_staged = made
        return [self._post(stream, number, buffer, is_staged=is_staged)]


def _doing(flight: InFlight) -> str:
    what = "the opening message" if flight.number < 0 else f"message {flight.number}"
    return f"{what} {'to' if flight.stream.is_send else 'from'}"
