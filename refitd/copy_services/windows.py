"""Messages posted one by one, at most WINDOW of each stream at a time; as deltas, or passed on from rank to rank.

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
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
import xxhash

from refitd.addressing.messages import PackedMessage
from refitd.copy_services.delta_codec import NOTE_BYTES, Bytes, Comparison, Delta, Form, Note, apply
from refitd.copy_services.exchange import DIRECT, Route
from refitd.copy_services.pace import LONGEST_REST, Pace
from refitd.copy_services.packed import (
    NO_MARK,
    STAGING_BYTES,
    TAG,
    WINDOW,
    InFlight,
    Line,
    Move,
    PackedExchange,
    Stream,
    steps_of,
)
from refitd.copy_services.peers import Deadline, Peers
from refitd.copy_services.pieces import Piece
from refitd.errors import TransportError

_NOTE_TAG = 0x52490001  # notes have tags of their own: they are in flight together with messages
_OPENING = -1  # as number of a message
# Between two ranks there may be several paths, with far fewer messages than this in flight. Two paths whose tags meet
# after all exchange messages, which the digests find.
_TAGS_APART = 4099
AHEAD = 8
# seconds between the ends of waits that depend on each other, and the most of a run's time that all of them take
_TURN_S, _TURNS_SHARE = 0.1, 0.05


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
        flying: deque[tuple[_Line, InFlight]] = deque()
        try:
            return self._pass(flying, move)
        except BaseException:
            # what other ranks still send must not be written any more
            for _, flight in flying:
                flight.posted.abandon()
            raise

    def _pass(self, flying: deque[tuple[_Line, InFlight]], move: Move) -> str:
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
        """Return when a wait for a stream ends.

        If a relay stops, ranks wait for each other all along its path. The one that waits for the relay itself gives
        up first, and names it: who receives, the earlier the fewer hops are before it; then who sends, the later.
        """
        turns = 2 * len(self.peers)
        turn = turns - stream.route.hop if stream.is_send else stream.route.hop
        step = min(_TURN_S, _TURNS_SHARE * deadline.seconds / turns)
        return Deadline(deadline.at - (turns - turn) * step, deadline.seconds)

    def _lines(self, move: Move) -> list[_Line]:
        lines = [self._line(stream, move) for stream in self._order(move.streams)]
        arriving = {line.stream.route: line for line in lines if not line.stream.is_send}
        for line in lines:
            if isinstance(line, _Relay):
                path, hop = line.stream.route.path, line.stream.route.hop
                arriving[Route(path, hop - 1)].relay = line
        return lines

    def _line(self, stream: Stream, move: Move) -> _Line:
        if not stream.has_bases and stream.route == DIRECT:
            return _PlainLine(self, stream, move)
        if not stream.is_send:
            return _Receiver(self, stream, move)
        return _Relay(self, stream, move) if stream.route.hop else _Sender(self, stream, move)

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


class _Line(ABC):
    """A stream on its way: what to post next, and what to do with what has arrived.

    `arrived` counts bytes of pieces that lie here; `trouble` is an error text about them. `seconds` is how long the
    stream took to its end. `relay` passes it on.
    """

    def __init__(self, service: WindowExchange, stream: Stream, move: Move) -> None:
        self._service, self._move = service, move
        self.stream = stream
        self.relay: _Relay | None = None
        self.arrived, self.trouble, self.seconds = 0, "", 0.0

    @abstractmethod
    def begin(self, number: int) -> list[InFlight]:
        """Post the first messages, in WINDOW calls."""

    @abstractmethod
    def done(self, flight: InFlight) -> list[InFlight]:
        """Deal with a message that has been sent or has arrived; return what was posted in its place."""

    def _land(self, flight: InFlight) -> None:
        """Write a whole message that has arrived, and count it."""
        self.trouble = self._service._land(flight, self._move.verify) or self.trouble
        self.arrived += flight.payload


class _PlainLine(_Line):
    """A stream of whole messages."""

    def begin(self, number: int) -> list[InFlight]:
        return self._service._post_next(self.stream, self._move.verify)

    def done(self, flight: InFlight) -> list[InFlight]:
        if not self.stream.is_send:
            self._move.tally.crossed_bytes += flight.buffer.numel()
            self._land(flight)
        if flight.is_staged:
            self._service._give_back(flight.buffer)
        return self._service._post_next(self.stream, self._move.verify)


class _AnnouncedLine(_Line):
    """A stream of messages whose forms are announced."""

    def __init__(self, service: WindowExchange, stream: Stream, move: Move) -> None:
        super().__init__(service, stream, move)
        self._flying: dict[int, int] = {}  # posted messages that are not done, and their bytes

    def begin(self, number: int) -> list[InFlight]:
        return [self._post_note(_OPENING)] if number == 0 else []

    def done(self, flight: InFlight) -> list[InFlight]:
        number = flight.number
        if number == len(self.stream.messages):
            self._ended(flight)
            return []
        if flight.is_note:
            self._noted(flight)
        if number != _OPENING:
            if flight.is_note and self._flying[number]:
                return []
            self._passed(flight)
            del self._flying[number]
            if flight.is_staged:
                self._service._give_back(flight.buffer)
        return [posted for _ in range(AHEAD) for posted in self._post_message()]

    def _post_message(self) -> list[InFlight]:
        """Post the next message with its note, behind the last one the digest, if there is room for it."""
        stream = self.stream
        number = stream.next
        if number >= len(stream.messages):
            return self._service._post_next(stream, self._move.verify)
        if self._flying:
            room = WINDOW * stream.limit - sum(self._flying.values())
            if number - min(self._flying) >= AHEAD or self._length(number) > room:
                return []
        stream.next += 1
        self._flying[number] = self._length(number)
        note = self._post_note(number)
        return [note, self._post_body(number)] if self._flying[number] else [note]

    def _post_note(self, number: int) -> InFlight:
        data = torch.frombuffer(bytearray(b"".join(map(self._note, self._announces(number)))), dtype=torch.uint8)
        return self._service._post(self.stream, number, data, is_note=True)

    def _announces(self, number: int) -> range:
        """Return the messages whose forms the note of a message announces; there may be no such messages."""
        return range(AHEAD) if number == _OPENING else range(number + AHEAD, number + AHEAD + 1)

    def _width(self, message: PackedMessage) -> int:
        """Return the bytes of a word of a message: those of its smallest elements."""
        return min(8, *(self.stream.pieces[span.piece].itemsize for span in message.spans))

    def _bases(self, message: PackedMessage) -> dict[int, Piece]:
        """Return the base of each piece in a message; {} if one has none, or the peer does not hold the same."""
        if not self.stream.has_bases:
            return {}
        bases = {span.piece: self.stream.pieces[span.piece].base for span in message.spans}
        found = {piece: base.piece for piece, base in bases.items() if base is not None}
        return found if len(found) == len(bases) else {}

    def _post_whole(self, number: int, *, with_digest: bool) -> InFlight:
        """Send a message as it lies here."""
        stream, service = self.stream, self._service
        message = stream.messages[number]
        direct = service._direct(stream, message)
        buffer = service._staging()[: message.nbytes] if direct is None else direct
        for span, here in steps_of(message, service.step_bytes) if with_digest or direct is None else ():
            if direct is None:
                stream.pieces[span.piece].pack(span.start, span.end, buffer[here])
            if with_digest:
                stream.digest.update(buffer[here])
        return service._post(stream, number, buffer, is_staged=direct is None)

    @abstractmethod
    def _note(self, number: int) -> bytes:
        """Return what to send as the note of a message, or as many bytes to be filled."""

    @abstractmethod
    def _noted(self, flight: InFlight) -> None:
        """A note has been sent, or has arrived."""

    @abstractmethod
    def _length(self, number: int) -> int:
        """Return the bytes of an announced message without its note; 0 if it is unchanged."""

    @abstractmethod
    def _post_body(self, number: int) -> InFlight:
        """Post a message in its announced form."""

    @abstractmethod
    def _passed(self, flight: InFlight) -> None:
        """All of a message has been sent, or has arrived; `flight` is the last of it."""

    @abstractmethod
    def _ended(self, flight: InFlight) -> None:
        """The digest has been sent, or has arrived."""


class _Sender(_AnnouncedLine):
    """Decides on the form of each message, announces it, and sends it."""

    def __init__(self, service: WindowExchange, stream: Stream, move: Move) -> None:
        super().__init__(service, stream, move)
        self._announced: dict[int, Delta | None] = {}  # None: whole
        # after a message that was not worth a delta, some more are sent whole without a look: one, two, four, and so on
        self._resting, self._next_rest = 0, 1

    def _note(self, number: int) -> bytes:
        if number >= len(self.stream.messages):
            return bytes(NOTE_BYTES)
        message = self.stream.messages[number]
        delta = self._announced[number] = self._compared(message)
        return (Note(Form.WHOLE, 0, message.nbytes) if delta is None else delta.note).to_bytes()

    def _compared(self, message: PackedMessage) -> Delta | None:
        """Add a message to the digest; return its delta, None if it is better sent whole.

        Without bases nothing is read yet.
        """
        if not self.stream.has_bases:
            return None
        service, bases = self._service, self._bases(message)
        comparison = Comparison(message.nbytes, self._width(message)) if bases and not self._resting else None
        self._resting = max(0, self._resting - 1)
        direct = service._direct(self.stream, message)
        packed, before = service._staging(), service._staging()
        for span, here in steps_of(message, service.step_bytes):
            size = span.end - span.start
            new = packed[:size] if direct is None else direct[here]
            if direct is None:
                self.stream.pieces[span.piece].pack(span.start, span.end, new)
            self.stream.digest.update(new)
            if comparison is None:
                continue
            base = bases[span.piece]
            held = base.direct(span.start, span.end)
            if held is None:
                held = before[:size]
                base.pack(span.start, span.end, held)
            if not comparison.add(new.numpy(), held.numpy(), here.start):
                comparison, self._resting = None, self._next_rest
                self._next_rest = min(2 * self._next_rest, LONGEST_REST)
        service._give_back(packed)
        service._give_back(before)
        if comparison is None:
            return None
        self._next_rest = 1
        return comparison.delta()

    def _noted(self, flight: InFlight) -> None:
        pass

    def _length(self, number: int) -> int:
        delta = self._announced[number]
        return self.stream.messages[number].nbytes if delta is None else delta.note.nbytes

    def _post_body(self, number: int) -> InFlight:
        stream, service, delta = self.stream, self._service, self._announced[number]
        if delta is not None:
            return service._post(stream, number, torch.from_numpy(delta.body))
        # with bases, read again: nothing has kept it since it was announced
        return self._post_whole(number, with_digest=self._move.verify and not stream.has_bases)

    def _passed(self, flight: InFlight) -> None:
        del self._announced[flight.number]

    def _ended(self, flight: InFlight) -> None:
        pass


class _Receiver(_AnnouncedLine):
    """Makes whole messages of bases and deltas."""

    def __init__(self, service: WindowExchange, stream: Stream, move: Move) -> None:
        super().__init__(service, stream, move)
        self._announced: dict[int, Note] = {}

    def _note(self, number: int) -> bytes:
        return bytes(NOTE_BYTES)

    def _noted(self, flight: InFlight) -> None:
        self._move.tally.crossed_bytes += flight.buffer.numel()
        notes = flight.buffer.numpy().tobytes()
        for nth, number in enumerate(self._announces(flight.number)):
            if number < len(self.stream.messages):
                message = self.stream.messages[number]
                note = Note.from_bytes(notes[nth * NOTE_BYTES :][:NOTE_BYTES], message.nbytes, self._width(message))
                if note.form is not Form.WHOLE and not self._bases(message):
                    raise TransportError(
                        f"{self._service.peers.label(self.stream.position)} sends message {number} as a delta, and "
                        f"{self._service.peers.label(self._service.peers.index)} holds no base for it"
                    )
                self._announced[number] = note
                if self.relay is not None:
                    self.relay.announced(number, note)
        if self.relay is not None and flight.number == _OPENING:
            self.relay.opened()

    def _length(self, number: int) -> int:
        return self._announced[number].nbytes

    def _post_body(self, number: int) -> InFlight:
        stream, service, note = self.stream, self._service, self._announced[number]
        direct = service._direct(stream, stream.messages[number]) if note.form is Form.WHOLE else None
        if direct is not None:
            return service._post(stream, number, direct)
        return service._post(stream, number, service._staging()[: note.nbytes], is_staged=True)

    def _passed(self, flight: InFlight) -> None:
        note = self._announced.pop(flight.number)
        if not flight.is_note:
            self._move.tally.crossed_bytes += flight.buffer.numel()
        if self.relay is not None:
            self.relay.take(flight.number, flight.buffer.numpy()[: note.nbytes])
        if note.form is Form.WHOLE:
            self._land(flight)
            return
        stream, service, tally = self.stream, self._service, self._move.tally
        message = stream.messages[flight.number]
        width, bases = self._width(message), self._bases(message)
        direct = service._direct(stream, message)
        whole = service._staging()[: message.nbytes] if direct is None else direct
        for span, here in steps_of(message, service.step_bytes):
            if direct is None or bases[span.piece] is not stream.pieces[span.piece]:
                bases[span.piece].pack(span.start, span.end, whole[here])
        apply(note, flight.buffer.numpy()[: note.nbytes], whole.numpy(), width)
        made = InFlight(stream, flight.number, None, whole, direct is None)
        self._land(made)
        if made.is_staged:
            service._give_back(whole)
        tally.delta_bytes += made.payload
        tally.changed_bytes += note.changed * width

    def _ended(self, flight: InFlight) -> None:
        self._move.tally.crossed_bytes += flight.buffer.numel()
        self._land(flight)
        self._move.tally.is_base_wrong |= bool(self.trouble) and self.stream.has_bases
        if self.relay is not None:
            self.relay.ended(flight.buffer.numpy().tobytes())


class _Relay(_AnnouncedLine):
    """Passes a stream on to the next rank of its path: each message once it lies here, and the digest that came."""

    def __init__(self, service: WindowExchange, stream: Stream, move: Move) -> None:
        super().__init__(service, stream, move)
        self._may_open = self._is_open = False
        self._deltas: dict[int, Delta] = {}  # announced messages that are passed on as they come
        self._arrived = 0  # messages, and the digest

    def begin(self, number: int) -> list[InFlight]:
        return []

    def announced(self, number: int, note: Note) -> None:
        """Learn the form of a message that is to come."""
        if self.stream.has_bases and note.form is not Form.WHOLE:
            self._deltas[number] = Delta(note, np.zeros(0, np.uint8))

    def opened(self) -> None:
        """Learn that the forms of the first messages have been announced."""
        self._may_open = True

    def take(self, number: int, body: Bytes) -> None:
        """Take a message that has come, and lies here when `advance` is called next."""
        self._arrived = number + 1
        if number in self._deltas:
            self._deltas[number] = Delta(self._deltas[number].note, body.copy())

    def ended(self, digest: bytes) -> None:
        """Take the digest, which comes last."""
        self._arrived += 1
        self.stream.digest = _PassedDigest(digest)

    def advance(self) -> list[InFlight]:
        """Post what may be passed on now."""
        posted = []
        if self._may_open and not self._is_open:
            self._is_open = True
            posted.append(self._post_note(_OPENING))
        while following := self._post_message():
            posted += following
        return posted

    def _post_message(self) -> list[InFlight]:
        return super()._post_message() if self._is_open and self.stream.next < self._arrived else []

    def _note(self, number: int) -> bytes:
        if number >= len(self.stream.messages):
            return bytes(NOTE_BYTES)
        delta = self._deltas.get(number)
        return (Note(Form.WHOLE, 0, self._length(number)) if delta is None else delta.note).to_bytes()

    def _noted(self, flight: InFlight) -> None:
        pass

    def _length(self, number: int) -> int:
        delta = self._deltas.get(number)
        return self.stream.messages[number].nbytes if delta is None else delta.note.nbytes

    def _post_body(self, number: int) -> InFlight:
        delta = self._deltas.get(number)
        if delta is not None:
            return self._service._post(self.stream, number, torch.from_numpy(delta.body))
        return self._post_whole(number, with_digest=False)

    def _passed(self, flight: InFlight) -> None:
        self._deltas.pop(flight.number, None)

    def _ended(self, flight: InFlight) -> None:
        pass


class _PassedDigest:
    """The digest of what another rank has sent."""

    def __init__(self, said: bytes) -> None:
        self._said = said

    def update(self, buffer: torch.Tensor, /) -> None:
        """Ignore what passes here."""

    def digest(self) -> bytes:
        """Return the digest that came."""
        return self._said


def _doing(flight: InFlight) -> str:
    return f"message {flight.number} {'to' if flight.stream.is_send else 'from'}"
