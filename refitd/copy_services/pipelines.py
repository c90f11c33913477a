"""The running streams of a WindowExchange: whole, announced message by message, or relayed (see windows.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from refitd.copy_services.deltas import LONGEST_REST, NOTE_BYTES, Bytes, Comparison, Delta, Encoding, Note, apply
from refitd.copy_services.packed import TAG, WINDOW, Move, PackedExchange
from refitd.copy_services.pieces import ALIGNMENT, PackedMessage, Piece
from refitd.copy_services.streams import InFlight, Stream, steps_of
from refitd.errors import TransportError

_OPENING = -1  # as number of a message
AHEAD = 8
_NOTE_TAG = 0x52490001  # notes and messages are in flight together and have different tags
# Two ranks may exchange over several paths, with far fewer messages than this in flight. If the tags of two paths still
# collide, they exchange messages, which the digests find.
_TAGS_APART = 4099


class Pipeline(ABC):
    """A running stream: posts its messages, and handles those that have been sent or have arrived.

    `arrived` counts the received bytes of pieces; `trouble` is an error text about them. `seconds` is the duration of
    the stream. `relay` passes it on.
    """

    def __init__(self, service: PackedExchange, stream: Stream, move: Move) -> None:
        self._service, self._move = service, move
        self.stream = stream
        self.relay: Relay | None = None
        self.arrived, self.trouble, self.seconds = 0, "", 0.0

    @abstractmethod
    def begin(self, number: int) -> list[InFlight]:
        """Post the first messages, in WINDOW calls."""

    @abstractmethod
    def done(self, flight: InFlight) -> list[InFlight]:
        """Handle a message that has been sent or has arrived; return the messages posted next."""

    def _land(self, flight: InFlight) -> None:
        """Write a whole message that has arrived, and count it."""
        self.trouble = self._service._land(flight, self._move.verify) or self.trouble
        self.arrived += flight.payload

    def _post(self, number: int, buffer: torch.Tensor, *, is_staged: bool = False, is_note: bool = False) -> InFlight:
        """Start sending or receiving a message."""
        stream, peers = self.stream, self._service.peers
        post = peers.send if stream.is_send else peers.receive
        # a tag for each message: it can only meet its own other half
        tag = (_NOTE_TAG if is_note else TAG) + (number + _TAGS_APART * stream.route.path) % 0x10000
        return InFlight(stream, number, post(buffer, stream.position, tag), buffer, is_staged, is_note)

    def _post_next(self) -> list[InFlight]:
        """Post the next message, whole; with `verify` the last is the digest. Returns [] behind the last."""
        made = self._service._next_buffer(self.stream, self._move.verify)
        if made is None:
            return []
        number, buffer, is_staged = made
        return [self._post(number, buffer, is_staged=is_staged)]


class PlainPipeline(Pipeline):
    """A stream of whole messages."""

    def begin(self, number: int) -> list[InFlight]:
        """See Pipeline.begin."""
        return self._post_next()

    def done(self, flight: InFlight) -> list[InFlight]:
        """See Pipeline.done."""
        if not self.stream.is_send:
            self._move.tally.crossed_bytes += flight.buffer.numel()
            self._land(flight)
        if flight.is_staged:
            self._service._give_back(flight.buffer)
        return self._post_next()


class AnnouncedPipeline(Pipeline):
    """A stream of messages whose forms are announced."""

    def __init__(self, service: PackedExchange, stream: Stream, move: Move) -> None:
        super().__init__(service, stream, move)
        self._flying: dict[int, int] = {}  # posted messages that are not done, and their bytes

    def begin(self, number: int) -> list[InFlight]:
        """See Pipeline.begin."""
        return [self._post_note(_OPENING)] if number == 0 else []

    def done(self, flight: InFlight) -> list[InFlight]:
        """See Pipeline.done."""
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
        """Post the next message with its note, or after the last message the digest, if the window has room."""
        stream = self.stream
        number = stream.next
        if number >= len(stream.messages):
            return self._post_next()
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
        return self._post(number, data, is_note=True)

    def _announces(self, number: int) -> range:
        """Return the messages whose forms the note of a message announces; there may be no such messages."""
        return range(AHEAD) if number == _OPENING else range(number + AHEAD, number + AHEAD + 1)

    def _width(self, message: PackedMessage) -> int:
        """Return the bytes of a word of a message: those of its smallest elements; blocks consist of bytes."""
        sizes = (self.stream.pieces[span.piece].itemsize for span in message.spans)
        return min(8, *(1 if size > ALIGNMENT else size for size in sizes))

    def _bases(self, message: PackedMessage) -> dict[int, Piece]:
        """Return the base of each piece in a message; {} if one has none, or the peer has other bases."""
        if not self.stream.has_bases:
            return {}
        bases = {span.piece: self.stream.pieces[span.piece].base for span in message.spans}
        found = {piece: base.piece for piece, base in bases.items() if base is not None}
        return found if len(found) == len(bases) else {}

    def _post_whole(self, number: int, *, with_digest: bool) -> InFlight:
        """Send a message whole."""
        stream, service = self.stream, self._service
        message = stream.messages[number]
        stream.await_written(message)
        direct = service._direct(stream, message)
        buffer = service._staging()[: message.nbytes] if direct is None else direct
        for span, here in steps_of(message, service.step_bytes) if with_digest or direct is None else ():
            if direct is None:
                stream.read(span, buffer[here])
            if with_digest:
                stream.add(buffer[here])
        return self._post(number, buffer, is_staged=direct is None)

    @abstractmethod
    def _note(self, number: int) -> bytes:
        """Return the note to send with a message, or a buffer of that size to receive it."""

    @abstractmethod
    def _noted(self, flight: InFlight) -> None:
        """Handle a note that has been sent or has arrived."""

    @abstractmethod
    def _length(self, number: int) -> int:
        """Return the bytes of an announced message without its note; 0 if it is unchanged."""

    @abstractmethod
    def _post_body(self, number: int) -> InFlight:
        """Post a message in its announced form."""

    @abstractmethod
    def _passed(self, flight: InFlight) -> None:
        """Handle the end of a message; `flight` is its last part that was sent or has arrived."""

    @abstractmethod
    def _ended(self, flight: InFlight) -> None:
        """Handle the digest, sent or arrived."""


class AnnouncedSender(AnnouncedPipeline):
    """Decides on the form of each message, announces it, and sends it."""

    def __init__(self, service: PackedExchange, stream: Stream, move: Move) -> None:
        super().__init__(service, stream, move)
        self._announced: dict[int, Delta | None] = {}  # None: whole
        # after a message without a useful delta, the next one, two, four, ... are sent whole without a comparison
        self._resting, self._next_rest = 0, 1

    def _note(self, number: int) -> bytes:
        if number >= len(self.stream.messages):
            return bytes(NOTE_BYTES)
        message = self.stream.messages[number]
        delta = self._announced[number] = self._compared(message)
        return (Note(Encoding.WHOLE, 0, message.nbytes) if delta is None else delta.note).to_bytes()

    def _compared(self, message: PackedMessage) -> Delta | None:
        """Add a message to the digest; return its delta, None if it is better sent whole.

        Without bases the message is not read yet.
        """
        if not self.stream.has_bases:
            return None
        self.stream.await_written(message)
        service, bases = self._service, self._bases(message)
        comparison = Comparison(message.nbytes, self._width(message)) if bases and not self._resting else None
        self._resting = max(0, self._resting - 1)
        direct = service._direct(self.stream, message)
        packed, before = service._staging(), service._staging()
        for span, here in steps_of(message, service.step_bytes):
            size = span.end - span.start
            new = packed[:size] if direct is None else direct[here]
            if direct is None:
                self.stream.read(span, new)
            self.stream.add(new)
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
        stream, delta = self.stream, self._announced[number]
        if delta is not None:
            return self._post(number, torch.from_numpy(delta.body))
        # with bases, packed again: its packed form was dropped after the announcement
        return self._post_whole(number, with_digest=self._move.verify and not stream.has_bases)

    def _passed(self, flight: InFlight) -> None:
        del self._announced[flight.number]

    def _ended(self, flight: InFlight) -> None:
        pass


class AnnouncedReceiver(AnnouncedPipeline):
    """Rebuilds whole messages from bases and deltas."""

    def __init__(self, service: PackedExchange, stream: Stream, move: Move) -> None:
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
                if note.form is not Encoding.WHOLE and not self._bases(message):
                    raise TransportError(
                        f"{self._service.peers.label(self.stream.position)} sends message {number} as a delta, but "
                        f"{self._service.peers.label(self._service.peers.index)} has no base for it"
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
        direct = service._direct(stream, stream.messages[number]) if note.form is Encoding.WHOLE else None
        if direct is not None:
            return self._post(number, direct)
        return self._post(number, service._staging()[: note.nbytes], is_staged=True)

    def _passed(self, flight: InFlight) -> None:
        note = self._announced.pop(flight.number)
        if not flight.is_note:
            self._move.tally.crossed_bytes += flight.buffer.numel()
        if self.relay is not None:
            self.relay.take(flight.number, flight.buffer.numpy()[: note.nbytes])
        if note.form is Encoding.WHOLE:
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


class Relay(AnnouncedPipeline):
    """Passes a stream on to the next rank of its path: each message once it has arrived, then the received digest."""

    def __init__(self, service: PackedExchange, stream: Stream, move: Move) -> None:
        super().__init__(service, stream, move)
        self._may_open = self._is_open = False
        self._deltas: dict[int, Delta] = {}  # announced messages that are passed on unchanged
        self._arrived = 0  # messages, and the digest

    def begin(self, number: int) -> list[InFlight]:
        """Return []: no message has arrived yet."""
        return []

    def announced(self, number: int, note: Note) -> None:
        """Record the announced form of a message."""
        if self.stream.has_bases and note.form is not Encoding.WHOLE:
            self._deltas[number] = Delta(note, np.zeros(0, np.uint8))

    def opened(self) -> None:
        """Record that the forms of the first messages have been announced."""
        self._may_open = True

    def take(self, number: int, body: Bytes) -> None:
        """Record a message that has arrived; it is written before the next call of `advance`."""
        self._arrived = number + 1
        if number in self._deltas:
            self._deltas[number] = Delta(self._deltas[number].note, body.copy())

    def ended(self, digest: bytes) -> None:
        """Record the digest, which arrives last."""
        self._arrived += 1
        self.stream.digest = _PassedDigest(digest)

    def advance(self) -> list[InFlight]:
        """Post the messages that can be passed on now."""
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
        return (Note(Encoding.WHOLE, 0, self._length(number)) if delta is None else delta.note).to_bytes()

    def _noted(self, flight: InFlight) -> None:
        pass

    def _length(self, number: int) -> int:
        delta = self._deltas.get(number)
        return self.stream.messages[number].nbytes if delta is None else delta.note.nbytes

    def _post_body(self, number: int) -> InFlight:
        delta = self._deltas.get(number)
        if delta is not None:
            return self._post(number, torch.from_numpy(delta.body))
        return self._post_whole(number, with_digest=False)

    def _passed(self, flight: InFlight) -> None:
        self._deltas.pop(flight.number, None)

    def _ended(self, flight: InFlight) -> None:
        pass


class _PassedDigest:
    """The digest received from another rank, to be passed on."""

    def __init__(self, said: bytes) -> None:
        self._said = said

    def update(self, buffer: torch.Tensor, /) -> None:
        """Ignore the bytes."""

    def digest(self) -> bytes:
        """Return the received digest."""
        return self._said
