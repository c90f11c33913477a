"""The streams of an exchange: the messages from one rank to another, and the description that both ends compare."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from refitd.copy_services import DIRECT, Route
from refitd.copy_services.digests import Digest, HostDigest
from refitd.copy_services.pieces import PackedMessage, Piece, PieceSpan, aligned, lay_out
from refitd.copy_services.steps import AWAIT, CONVERT, DIGEST, READ, RECEIVE, SEND, Steps

# A stream over a path has about PATH_MESSAGES messages of at least PATH_MESSAGE_BYTES: each relay adds the time of one.
PATH_MESSAGES = 64  # as refitd.plan.relays predicts
PATH_MESSAGE_BYTES = 512 << 10

OFFER = struct.Struct("<16sqq")  # digest of ids and sizes, pieces, bytes

Key = tuple[int, int]  # task id, part
Line = tuple[int, Route]  # position of a peer, and the route of the data to or from it


@dataclass(slots=True)
class Stream:
    """All pieces of one direction and route to or from one peer, and their messages of at most `limit` bytes."""

    position: int
    route: Route
    is_send: bool
    keys: list[Key]
    pieces: list[Piece]
    messages: list[PackedMessage]
    limit: int
    next: int = 0
    has_bases: bool = False  # both ends have equal bases for all pieces, so deltas may be sent
    digest: Digest = field(default_factory=HostDigest)
    steps: Steps = field(default_factory=Steps)  # of the run

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)

    def await_written(self, message: PackedMessage) -> None:
        """Return once the pieces of a message to send are written; see Piece."""
        for span in message.spans:
            if (wait := self.pieces[span.piece].await_written) is not None:
                self.steps.time(AWAIT, wait)

    def read(self, span: PieceSpan, out: torch.Tensor) -> None:
        """Write a part of a piece to `out`."""
        piece = self.pieces[span.piece]
        self.steps.time(CONVERT if piece.converts else READ, piece.pack, span.start, span.end, out)

    def add(self, buffer: torch.Tensor) -> None:
        """Add bytes to the digest."""
        self.steps.time(DIGEST, self.digest.update, buffer)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A message that has been posted."""

    stream: Stream
    number: int
    posted: Any
    buffer: torch.Tensor
    is_staged: bool
    is_note: bool = False  # it announces later messages (windows.py)
    since: float = field(default_factory=time.perf_counter)

    def passed(self) -> None:
        """Note that it has been sent or has arrived."""
        self.stream.steps.add(SEND if self.stream.is_send else RECEIVE, self.since)

    @property
    def payload(self) -> int:
        """Bytes of pieces in it; 0 for the digest."""
        messages = self.stream.messages
        return messages[self.number].payload if self.number < len(messages) else 0


def streams_of(halves: Mapping[Line, Mapping[Key, Piece]], limit: int, *, is_send: bool) -> dict[Line, Stream]:
    """Return the streams of noted pieces, in messages of at most `limit` bytes."""
    streams = {}
    for position, route in sorted(halves):
        noted, most = halves[position, route], limit
        # large ones first: then every rank's last messages are small. Workers number a plan's rows as parts: these stay
        # in the plan's order, because a source that is being published is mostly written in it
        if route == DIRECT:
            keys = sorted(noted, key=lambda key: (key[1], -noted[key].nbytes, key))
        else:  # ids differ between hops, the order does not
            keys = sorted(noted, key=lambda key: -noted[key].nbytes)
            share = sum(piece.nbytes for piece in noted.values()) // PATH_MESSAGES
            most = min(limit, max(PATH_MESSAGE_BYTES, aligned(share)))
        pieces = [noted[key] for key in keys]
        messages = lay_out([piece.nbytes for piece in pieces], most)
        streams[position, route] = Stream(position, route, is_send, keys, pieces, messages, most)
    return streams


def steps_of(message: PackedMessage, longest: int) -> Iterator[tuple[PieceSpan, slice]]:
    """Cut a message's spans into steps of at most `longest` bytes: (part of the piece, its place in the message)."""
    for span in message.spans:
        for start in range(span.start, span.end, longest):
            end = min(span.end, start + longest)
            at = span.at + start - span.start
            yield PieceSpan(span.piece, start, end, at), slice(at, at + end - start)


def of_peer(streams: Mapping[Line, Stream], position: int) -> list[Stream]:
    """Return the streams to or from a peer, in an order that it knows too."""
    return [streams[line] for line in sorted(streams) if line[0] == position]


def offer_of(streams: Sequence[Stream]) -> bytes:
    """Return the description of a peer's streams that both ends compare: ids and sizes of all pieces, and routes."""
    digest, count, nbytes = xxhash.xxh3_128(), 0, 0
    for stream in streams:
        digest.update(struct.pack("<qqq", stream.route.path, stream.route.hop, stream.limit))
        for key, piece in zip(stream.keys, stream.pieces, strict=True):
            digest.update(struct.pack("<qqqq", *key, piece.nbytes, piece.itemsize))
        count, nbytes = count + len(stream.pieces), nbytes + stream.nbytes
    return OFFER.pack(digest.digest(), count, nbytes)


def broken_path(streams: Sequence[Stream], rank: int) -> str:
    """Return an error text unless this rank receives everything that it must pass on; "" if it does."""
    arriving = {stream.route: stream for stream in streams if not stream.is_send}
    for stream in streams:
        path, hop = stream.route.path, stream.route.hop
        if stream.is_send and hop:
            before = arriving.get(Route(path, hop - 1))
            if before is None or [p.nbytes for p in before.pieces] != [p.nbytes for p in stream.pieces]:
                return f"rank {rank} does not receive the data that it should pass on over path {path}, as relay {hop}"
    return ""


def mismatch(sends: Mapping[Key, Piece], receives: Mapping[Key, Piece], rank: int) -> str:
    """Return an error text about this rank's transfers to itself, "" if they match."""
    if odd := sorted(sends.keys() ^ receives.keys()):
        return f"task {odd[0]} of rank {rank} with itself has {'no receive' if odd[0] in sends else 'no send'}"
    for key, piece in sends.items():
        other = receives[key]
        if (piece.nbytes, piece.itemsize) != (other.nbytes, other.itemsize):
            return f"task {key} of rank {rank} with itself sends {piece.describe()} and receives {other.describe()}"
    return ""
