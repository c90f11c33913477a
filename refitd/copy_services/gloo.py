"""Gloo: tensors exchanged within a torch process group, packed into messages per pair of ranks.

    note     send / receive halves, local ones paired by id
    agree    each pair compares digests of (id, bytes) before anything is posted: a gloo receive that is smaller
             than its send would end the process
    move     at most WINDOW messages per direction and peer are in flight; all first messages are posted, then each
             message, in the order of posting, is waited for and replaced by its stream's next one
    prove    each stream ends with the digest of what was packed, compared with that of what then lies in the
             destinations; all ranks learn whether every rank has everything

No rank can block another for ever: a stream's k-th message is posted on both ends as soon as both have finished
its (k - WINDOW)-th, and both wait for messages in the order of k.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from refitd.copy_services.base import DigestMismatch
from refitd.copy_services.exchange import ExchangeResult, ExchangeService
from refitd.errors import RefitdError, RefitFailed, RefusedError, TransportError
from refitd.spmd.messages import Message, Span, boxes_between, lay_out
from refitd.spmd.peers import Deadline, Group, Peers

WINDOW = 2
MAX_MESSAGE_BYTES = 8 << 20
MIN_MESSAGE_BYTES = 64 << 10
# staging for all streams of a rank together, where the group is so large that messages must shrink
STAGING_BYTES = 256 << 20

_TAG = 0x52470000
_OFFER = struct.Struct("<16sqq")  # digest of ids and sizes, pieces, bytes
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Key = tuple[int, int]  # task id, part


@dataclass(frozen=True, slots=True)
class _Piece:
    """One half of a transfer."""

    key: Key
    tensor: torch.Tensor
    dtype: torch.dtype  # of the elements while they travel

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize


@dataclass(slots=True)
class _Stream:
    """All pieces of one direction to or from one peer, in the order of ids, and the messages they are laid into."""

    position: int
    is_send: bool
    pieces: list[_Piece]
    messages: list[Message]
    next: int = 0
    digest: Any = field(default_factory=xxhash.xxh3_128)


@dataclass(frozen=True, slots=True)
class _InFlight:
    stream: _Stream
    number: int
    posted: Any
    buffer: torch.Tensor
    is_staged: bool


class GlooService(ExchangeService):
    """Exchanges tensors over a process group with a gloo backend. See ExchangeService for the promises."""

    name = "gloo"
    moves_device_memory = True  # through staging in main memory

    def __init__(self, group: Group = None, *, message_bytes: int | None = None) -> None:
        """Use a group; None is the default group.

        Args:
            group: a torch process group with gloo for the CPU.
            message_bytes: most bytes of a message, the same on every rank; by default what the size of the group
                allows.
        """
        self.peers = Peers(group)
        self.group = self.peers.group
        self.ranks = self.peers.ranks
        share = STAGING_BYTES // (2 * WINDOW * max(1, len(self.peers) - 1))
        self._limit = message_bytes or max(MIN_MESSAGE_BYTES, min(MAX_MESSAGE_BYTES, share))
        self._limit -= self._limit % 16
        self._sends: dict[int, dict[Key, _Piece]] = {}
        self._receives: dict[int, dict[Key, _Piece]] = {}
        self._spare: list[torch.Tensor] = []
        self._position = {rank: position for position, rank in enumerate(self.peers.ranks)}
        self._unusable = ""

    @property
    def is_usable(self) -> bool:
        """See ExchangeService.is_usable."""
        return not self._unusable

    def send(
        self, task_id: int, tensor: torch.Tensor, peer: int, *, part: int = 0, dtype: torch.dtype | None = None
    ) -> None:
        """See ExchangeService.send."""
        self._note(self._sends, _Piece((task_id, part), tensor.detach(), dtype or tensor.dtype), peer)

    def receive(self, task_id: int, tensor: torch.Tensor, peer: int, *, part: int = 0) -> None:
        """See ExchangeService.receive."""
        self._note(self._receives, _Piece((task_id, part), tensor.detach(), tensor.dtype), peer)

    def _note(self, halves: dict[int, dict[Key, _Piece]], piece: _Piece, peer: int) -> None:
        if peer not in self._position:
            raise TransportError(f"task {piece.key}: rank {peer} is not in the group {list(self.peers.ranks)}")
        noted = halves.setdefault(self._position[peer], {})
        if noted.setdefault(piece.key, piece) is not piece:
            raise TransportError(f"task {piece.key} with rank {peer}: its id is used twice; give each tensor a part")

    def run(
        self, timeout: float, *, verify: bool = True, refuse: str = "", finish: Callable[[], object] | None = None
    ) -> ExchangeResult:
        """See ExchangeService.run."""
        sends, self._sends = self._sends, {}
        receives, self._receives = self._receives, {}
        if self._unusable:
            raise TransportError(f"this service cannot be used any more: {self._unusable}; make one on a new group")
        started, deadline = time.perf_counter(), Deadline.after(timeout)
        me = self.peers.index
        local_sends, local_receives = sends.pop(me, {}), receives.pop(me, {})
        outgoing = self._streams(sends, is_send=True)
        incoming = self._streams(receives, is_send=False)
        streams = [*incoming.values(), *outgoing.values()]
        try:
            self._agree(
                outgoing, incoming, refuse or _mismatch(local_sends, local_receives, self.peers.rank), verify, deadline
            )
            with torch.no_grad():
                trouble = self._move(
                    streams, lambda: _copy_local(local_sends, local_receives, verify), verify, deadline
                )
            self._conclude(trouble, finish, deadline)
        except _Agreed as exc:
            raise exc.error from exc.__cause__
        except BaseException as exc:
            # connections may hold half a message
            self._unusable = f"a run ended with {type(exc).__name__}: {exc}"
            raise
        return ExchangeResult(
            sent_bytes=sum(p.nbytes for s in outgoing.values() for p in s.pieces),
            received_bytes=sum(p.nbytes for s in incoming.values() for p in s.pieces),
            local_bytes=sum(p.nbytes for p in local_receives.values()),
            messages=sum(len(s.messages) for s in streams),
            seconds=time.perf_counter() - started,
        )

    def close(self) -> None:
        """See ExchangeService.close."""
        self._unusable = self._unusable or "it has been closed"
        self._sends, self._receives, self._spare = {}, {}, []

    def _streams(self, halves: Mapping[int, Mapping[Key, _Piece]], *, is_send: bool) -> dict[int, _Stream]:
        streams = {}
        for position in sorted(halves):
            pieces = [halves[position][key] for key in sorted(halves[position])]
            messages = lay_out([piece.nbytes for piece in pieces], self._limit)
            streams[position] = _Stream(position, is_send, pieces, messages)
        return streams

    def _agree(
        self,
        outgoing: Mapping[int, _Stream],
        incoming: Mapping[int, _Stream],
        trouble: str,
        verify: bool,
        deadline: Deadline,
    ) -> None:
        """Compare what each pair is about to do; everyone raises unless all agree."""
        peers = self.peers
        terms = struct.pack("<q?", self._limit, verify)
        offers = [_offer(outgoing.get(i), terms) for i in range(len(peers))]
        offered = peers.all_to_all(offers, deadline, "comparing transfers")
        for position, offer in enumerate(offered):
            expected = _offer(incoming.get(position), terms)
            if not trouble and position != peers.index and offer != expected:
                _, pieces, nbytes = _OFFER.unpack(offer)
                _, want, want_bytes = _OFFER.unpack(expected)
                trouble = (
                    f"rank {peers.ranks[position]} is about to send {pieces} pieces, {nbytes} bytes, and rank "
                    f"{peers.rank} expects {want} pieces, {want_bytes} bytes, or others of that size; all ranks must "
                    "use one plan, and equal message sizes and verification"
                )
        if found := peers.first_trouble(trouble, deadline, "agreeing on transfers"):
            raise _Agreed(RefusedError(f"nothing has been moved: {found}"))

    def _conclude(self, trouble: str, finish: Callable[[], object] | None, deadline: Deadline) -> None:
        """Do what is left to do here, and learn whether every rank has done its part."""
        failure: Exception | None = None
        if finish is not None and not trouble:
            try:
                finish()
            except Exception as exc:  # whatever it is, the others must not believe it was done
                failure = exc
        said = f"d{trouble}" if trouble else ""
        if failure is not None:
            said = f"f rank {self.peers.rank}: {type(failure).__name__}: {failure}"
        found = self.peers.first_trouble(said, deadline, "concluding transfers")
        if found.startswith("d"):
            raise _Agreed(DigestMismatch(found[1:], copy=-1))
        if found:
            raise _Agreed(RefitFailed(f"everything arrived, and could not be finished:{found[1:]}")) from failure

    def _move(self, streams: Sequence[_Stream], meanwhile: Callable[[], str], verify: bool, deadline: Deadline) -> str:
        """Post, wait and replace until every stream is at its end; `meanwhile` runs while the first are moving.

        Returns what `meanwhile` or a comparison of digests has found wrong, or "".
        """
        flying: deque[_InFlight] = deque()
        me, size = self.peers.index, len(self.peers)
        # each rank begins with the next one, so that not all of them talk to the first
        order = sorted(streams, key=lambda s: (s.is_send, (s.position - me) % size))
        for _ in range(WINDOW):
            flying.extend(flight for stream in order if (flight := self._post(stream, verify)))
        trouble = meanwhile()
        while flying:
            done = flying.popleft()
            self.peers.wait(done.posted, done.stream.position, deadline, _doing(done))
            if not done.stream.is_send:
                trouble = self._land(done, verify) or trouble
            if done.is_staged:
                self._give_back(done.buffer)
            if flight := self._post(done.stream, verify):
                flying.append(flight)
        return trouble

    def _post(self, stream: _Stream, verify: bool) -> _InFlight | None:
        """Start a stream's next message, None behind the last one. With `verify` the last one is the digest."""
        number = stream.next
        if not stream.messages or number >= len(stream.messages) + verify:
            return None
        stream.next += 1
        post = self.peers.send if stream.is_send else self.peers.receive
        # a message can only meet its own other half
        tag = _TAG + number % 0x10000
        if number == len(stream.messages):
            said = stream.digest.digest() if stream.is_send else bytes(stream.digest.digest_size)
            buffer = torch.frombuffer(bytearray(said), dtype=torch.uint8)
            return _InFlight(stream, number, post(buffer, stream.position, tag), buffer, is_staged=False)
        message = stream.messages[number]
        direct = _direct(stream.pieces, message)
        buffer = self._staging()[: message.nbytes] if direct is None else direct
        if stream.is_send:
            if direct is None:
                for span in message.spans:
                    _pack(stream.pieces[span.piece], span, buffer)
            if verify:
                _digest(stream, message, buffer)
        return _InFlight(stream, number, post(buffer, stream.position, tag), buffer, is_staged=direct is None)

    def _land(self, done: _InFlight, verify: bool) -> str:
        """Write a message that has arrived to its places, and take the digest of what lies there then.

        Returns what is wrong, once the last message has brought the digest of what was read.
        """
        stream = done.stream
        if done.number == len(stream.messages):
            if done.buffer.numpy().tobytes() == stream.digest.digest():
                return ""
            return (
                f"what rank {self.peers.rank} wrote is not what rank {self.ranks[stream.position]} read; something "
                "else writes to these tensors during the transfer"
            )
        message = stream.messages[done.number]
        if not done.is_staged:
            if verify:
                _digest(stream, message, done.buffer)
            return ""
        for span in message.spans:
            _unpack(stream.pieces[span.piece], span, done.buffer)
        if verify:
            again = self._staging()[: message.nbytes]
            for span in message.spans:
                _pack(stream.pieces[span.piece], span, again)
            _digest(stream, message, again)
            self._give_back(again)
        return ""

    def _staging(self) -> torch.Tensor:
        # first touch of fresh pages costs several copies: buffers are kept between runs
        return self._spare.pop() if self._spare else torch.empty(self._limit, dtype=torch.uint8)

    def _give_back(self, buffer: torch.Tensor) -> None:
        if len(self._spare) * self._limit < STAGING_BYTES:
            self._spare.append(buffer.new_empty(0).set_(buffer.untyped_storage()))


class _Agreed(Exception):
    """All ranks have come to the same conclusion; the connections are in order."""

    def __init__(self, error: RefitdError) -> None:
        super().__init__(str(error))
        self.error = error


def _doing(flight: _InFlight) -> str:
    return f"message {flight.number} {'to' if flight.stream.is_send else 'from'}"


def _offer(stream: _Stream | None, terms: bytes) -> bytes:
    digest = xxhash.xxh3_128()
    pieces = stream.pieces if stream else []
    for piece in pieces:
        digest.update(struct.pack("<qqqq", *piece.key, piece.nbytes, piece.dtype.itemsize))
    digest.update(terms if pieces else b"")
    return _OFFER.pack(digest.digest(), len(pieces), sum(piece.nbytes for piece in pieces))


def _mismatch(sends: Mapping[Key, _Piece], receives: Mapping[Key, _Piece], rank: int) -> str:
    """Return what is wrong with this rank's transfers to itself, or ""."""
    if odd := sorted(sends.keys() ^ receives.keys()):
        return f"task {odd[0]} of rank {rank} with itself has {'no receive' if odd[0] in sends else 'no send'}"
    for key, piece in sends.items():
        other = receives[key]
        if piece.tensor.numel() != other.tensor.numel() or piece.dtype != other.dtype:
            return (
                f"task {key} of rank {rank} with itself sends {piece.tensor.numel()} elements of {piece.dtype} and "
                f"receives {other.tensor.numel()} of {other.dtype}"
            )
    return ""


def _copy_local(sends: Mapping[Key, _Piece], receives: Mapping[Key, _Piece], verify: bool) -> str:
    """Copy what stays on this rank; return what turned out wrong, or ""."""
    for key in sorted(receives):
        source, target = sends[key], receives[key].tensor
        value = source.tensor
        if value.shape != target.shape:
            value = value.reshape(target.shape)
        if value.dtype == target.dtype:
            value, target = _raw(value), _raw(target)
        if value.data_ptr() == target.data_ptr() and value.stride() == target.stride() and value.dtype == target.dtype:
            continue  # it is there already
        target.copy_(value)
        if verify and value.dtype == target.dtype and not torch.equal(value.to(target.device), target):
            return f"task {key}: the local copy differs from its source; something else writes to one of them"
    return ""


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as integers, which every copy supports and leaves bit for bit."""
    size = tensor.element_size()
    if size == 16:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(_SAME_SIZE[size])


def _direct(pieces: Sequence[_Piece], message: Message) -> torch.Tensor | None:
    """Return the message's bytes in the tensor itself, where one piece has them contiguously in main memory."""
    if len(message.spans) != 1:
        return None
    span = message.spans[0]
    piece = pieces[span.piece]
    tensor = piece.tensor
    if tensor.device.type != "cpu" or piece.dtype != tensor.dtype or not tensor.is_contiguous():
        return None
    # strides of dimensions of size 1 may be anything
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)[span.start : span.end]


def _pack(piece: _Piece, span: Span, buffer: torch.Tensor) -> None:
    for there, here in _parts(piece, span, buffer):
        here.copy_(there)


def _unpack(piece: _Piece, span: Span, buffer: torch.Tensor) -> None:
    for there, here in _parts(piece, span, buffer):
        there.copy_(here)


def _parts(piece: _Piece, span: Span, buffer: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of equal shape: part of the tensor, and its place in the message."""
    tensor, dtype = piece.tensor, piece.dtype
    item = dtype.itemsize
    parts, at = [], span.at
    is_raw = dtype == tensor.dtype
    for index, count in boxes_between(tensor.shape, span.start // item, span.end // item):
        box = tensor[index]
        place = buffer[at : at + count * item].view(dtype).view(box.shape)
        parts.append((_raw(box), _raw(place)) if is_raw else (box, place))
        at += count * item
    return parts


def _digest(stream: _Stream, message: Message, buffer: torch.Tensor) -> None:
    data = buffer.numpy()
    for span in message.spans:  # what lies between them is not defined
        stream.digest.update(data[span.at : span.at + span.end - span.start])
