"""The pipeline of two-sided services: pieces packed into messages per pair of ranks, sent, unpacked and proven.

    note   send and receive halves; halves within this rank are paired by id
    agree  each pair compares digests of (id, bytes) before the first message is posted: with some transports a receive
           smaller than its send would end the process
    move   at most WINDOW messages per direction and peer are in flight
    prove  each stream ends with the digest of the packed bytes, which the receiver compares with the digest of its
           destinations; all ranks learn whether every rank is complete

Transports differ in how messages move: windows.py, nccl.py (rounds) and nvshmem.py (slots).
"""

from __future__ import annotations

import struct
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from refitd.copy_services import (
    DIRECT,
    MAX_MESSAGE_BYTES,
    PACKED,
    DigestMismatch,
    ExchangeResult,
    ExchangeService,
    Route,
    Transfers,
)
from refitd.copy_services.digests import DIGEST_BYTES, Digest, HostDigest
from refitd.copy_services.peers import Peers
from refitd.copy_services.pieces import PackedMessage, Piece, TensorPiece, aligned, lay_out
from refitd.copy_services.steps import PLACE, Steps
from refitd.copy_services.streams import (
    OFFER,
    InFlight,
    Key,
    Line,
    Stream,
    broken_path,
    mismatch,
    of_peer,
    offer_of,
    steps_of,
    streams_of,
)
from refitd.copy_services.waits import Deadline
from refitd.errors import PeerLost, RefitdError, RefitFailed, RefusedError, TransportError

WINDOW = 2
MIN_MESSAGE_BYTES = 64 << 10
# limit on all staging of a rank; messages shrink in groups so large that they would exceed it
STAGING_BYTES = 256 << 20
# bytes packed and hashed, or unpacked and hashed, together; they stay in the second-level cache
STEP_BYTES = 256 << 10

# seconds between the ends of waits that depend on each other, and the maximum share of a run's time for all of them
_TURN_S, _TURNS_SHARE = 0.1, 0.05

_SECOND_WORD_S = 0.3

TAG = 0x52470000
_TERMS = struct.Struct("<q?7x")  # size of messages, whether digests are compared
_LEFT = struct.Struct("<d")  # seconds until a rank's deadline
_ABOUT = struct.Struct("<qq")  # run, path
MARK_BYTES = 8
NO_MARK = bytes(MARK_BYTES)


@dataclass(slots=True)
class Tally:
    """The bytes that other ranks sent to this rank in one run."""

    crossed_bytes: int = 0
    delta_bytes: int = 0  # size of the pieces that were received as deltas
    changed_bytes: int = 0  # changed bytes within these pieces
    is_base_wrong: bool = False  # a delta on a base gave other bytes than were sent: the delta or the base is wrong


@dataclass(frozen=True, slots=True)
class Move:
    """The streams of one run. `meanwhile` is called while first messages are in flight; it returns an error text."""

    streams: Sequence[Stream]
    tally: Tally
    meanwhile: Callable[[], str]
    verify: bool
    deadline: Deadline
    on_progress: Callable[[int], None] | None


@dataclass(frozen=True)
class _Held(Transfers):
    outgoing: Mapping[Line, Stream]
    incoming: Mapping[Line, Stream]
    local: tuple[dict[Key, Piece], dict[Key, Piece]]
    offers: list[bytes]
    expected: list[bytes]


class PackedExchange(ExchangeService):
    """Common part of the two-sided services over a torch process group. See ExchangeService for their contract.

    Attributes:
        peers: the processes of the group, and the device for their agreements.
        device: the device of messages.
    """

    capabilities = PACKED
    #: whether this service supports paths over several ranks
    relays: ClassVar[bool] = False
    #: maximum bytes packed and digested in one step
    step_bytes: ClassVar[int] = STEP_BYTES

    def __init__(self, peers: Peers, *, message_bytes: int | None = None, staging_bytes: int = STAGING_BYTES) -> None:
        """Use the processes of a group.

        Args:
            peers: the group.
            message_bytes: maximum size of a message, equal on all ranks; by default it depends on the group's size.
            staging_bytes: limit on this service's buffers, equal on all ranks.
        """
        self.peers = peers
        self.device = peers.device
        self.group = peers.group
        self.ranks = peers.ranks
        self._hops = peers.hops or len(peers)
        self._staging_limit = staging_bytes
        share = staging_bytes // (2 * WINDOW * (peers.degree or max(1, len(peers) - 1)))
        self._limit = message_bytes or max(MIN_MESSAGE_BYTES, min(MAX_MESSAGE_BYTES, share))
        self._limit = aligned(self._limit)
        self._sends: dict[Line, dict[Key, Piece]] = {}
        self._receives: dict[Line, dict[Key, Piece]] = {}
        self._spare: list[torch.Tensor] = []
        self._buffers = 0
        self._position = {rank: position for position, rank in enumerate(peers.ranks)}
        self._unusable = ""
        self._runs = 0

    @property
    def is_usable(self) -> bool:
        """See ExchangeService.is_usable."""
        return not self._unusable

    def send(
        self,
        task_id: int,
        data: torch.Tensor | Piece,
        peer: int,
        *,
        part: int = 0,
        dtype: torch.dtype | None = None,
        route: Route = DIRECT,
    ) -> None:
        """See ExchangeService.send."""
        if isinstance(data, torch.Tensor):
            data = TensorPiece(data.detach(), dtype or data.dtype)
        self._note(self._sends, (task_id, part), data, peer, route)

    def receive(
        self, task_id: int, data: torch.Tensor | Piece, peer: int, *, part: int = 0, route: Route = DIRECT
    ) -> None:
        """See ExchangeService.receive."""
        if isinstance(data, torch.Tensor):
            data = TensorPiece(data.detach(), data.dtype)
        self._note(self._receives, (task_id, part), data, peer, route)

    def _note(self, halves: dict[Line, dict[Key, Piece]], key: Key, piece: Piece, peer: int, route: Route) -> None:
        if peer not in self._position:
            raise TransportError(f"task {key}: rank {peer} is not in the group {list(self.peers.ranks)}")
        if route != DIRECT and (not self.relays or peer == self.peers.rank):
            raise TransportError(f"task {key} with rank {peer}: {self.name} does not follow {route}")
        noted = halves.setdefault((self._position[peer], route), {})
        if noted.setdefault(key, piece) is not piece:
            raise TransportError(f"task {key} with rank {peer}: its id is used twice; give each tensor a part")

    def hold(self) -> Transfers:
        """See ExchangeService.hold."""
        sends, self._sends = self._sends, {}
        receives, self._receives = self._receives, {}
        me = self.peers.index, DIRECT
        local = sends.pop(me, {}), receives.pop(me, {})
        outgoing = streams_of(sends, self._limit, is_send=True)
        incoming = streams_of(receives, self._limit, is_send=False)
        everyone = range(len(self.peers))
        offers, expected = ([offer_of(of_peer(streams, i)) for i in everyone] for streams in (outgoing, incoming))
        return _Held(outgoing, incoming, local, offers, expected)

    def run(
        self,
        timeout: float,
        transfers: Transfers | None = None,
        *,
        verify: bool = True,
        refuse: str = "",
        finish: Callable[[], object] | None = None,
        on_progress: Callable[[int], None] | None = None,
        on_wrong_base: Callable[[], object] | None = None,
    ) -> ExchangeResult:
        """See ExchangeService.run."""
        held = self.hold() if transfers is None else transfers
        assert isinstance(held, _Held)
        if self._unusable:
            raise TransportError(f"this service cannot be used again: {self._unusable}; make one on a new group")
        started, deadline = time.perf_counter(), Deadline.after(timeout)
        self._runs += 1
        streams = [*held.incoming.values(), *held.outgoing.values()]
        steps = Steps()
        for stream in streams:
            stream.next, stream.digest, stream.steps = 0, self._new_digest(self._about(stream)), steps
        trouble = refuse or mismatch(*held.local, self.peers.rank) or broken_path(streams, self.peers.rank)
        tally = Tally()
        try:
            deadline = self._agree(held, trouble, verify, deadline)
            with torch.no_grad():
                meanwhile = partial(self._copy_local, *held.local, verify)
                move = Move(streams, tally, meanwhile, verify, self._turn(deadline, 1), on_progress)
                trouble = self._move(move)
            if tally.is_base_wrong and on_wrong_base is not None:
                on_wrong_base()
            self._conclude(trouble, finish, deadline)
        except _Agreed as exc:
            raise exc.error from exc.__cause__
        except BaseException as exc:
            # connections may hold half a message
            self._unusable = f"a run ended with {type(exc).__name__}: {exc}"
            if isinstance(exc, PeerLost):
                # gloo closes all connections of a rank that loses one: let that rank report its error first
                time.sleep(_SECOND_WORD_S)
            raise
        received = sum(stream.nbytes for stream in held.incoming.values())
        return ExchangeResult(
            sent_bytes=sum(stream.nbytes for stream in held.outgoing.values()),
            received_bytes=received,
            local_bytes=sum(piece.nbytes for piece in held.local[1].values()),
            messages=sum(len(s.messages) for s in streams),
            seconds=time.perf_counter() - started,
            staging_bytes=self._buffers * self._limit,
            crossed_bytes=tally.crossed_bytes or received,
            delta_bytes=tally.delta_bytes,
            changed_bytes=tally.changed_bytes,
            steps=steps.times(),
        )

    def close(self) -> None:
        """See ExchangeService.close."""
        self._unusable = self._unusable or "it has been closed"
        self._sends, self._receives, self._spare = {}, {}, []

    @property
    def _turns(self) -> int:
        """The number of turns in which waits of one run end: comparing, agreeing, moving over relays, moving."""
        return 2 * self._hops + 3

    def _turn(self, deadline: Deadline, turn: int) -> Deadline:
        """Return the deadline of a wait that must end before `turn` later ones.

        If a rank stops, the ranks that wait for it keep further ranks waiting. The ranks that wait for it directly must
        end first, and name it. Therefore an earlier step of the run has an earlier deadline.
        """
        step = min(_TURN_S, _TURNS_SHARE * deadline.seconds / self._turns)
        return Deadline(deadline.at - turn * step, deadline.seconds)

    def _agree(self, held: _Held, trouble: str, verify: bool, deadline: Deadline) -> Deadline:
        """Compare the planned transfers with each peer; every rank raises unless all agree.

        Returns the earliest deadline of all ranks: `_turn` compares deadlines of different ranks.
        """
        peers = self.peers
        left = _LEFT.pack(deadline.left().total_seconds())
        terms = _TERMS.pack(self._limit, verify)
        outgoing, incoming = (
            # only digests prove that two bases were equal
            [self._mark(both) if verify and (both := of_peer(streams, i)) else NO_MARK for i in range(len(peers))]
            for streams in (held.outgoing, held.incoming)
        )
        said = [
            left + offer + terms + mine + theirs
            for offer, mine, theirs in zip(held.offers, outgoing, incoming, strict=True)
        ]
        offered = peers.all_to_all(said, self._turn(deadline, self._turns), "comparing transfers")
        for position, record in enumerate(offered):
            offer, sent, received = (
                record[_LEFT.size : -2 * MARK_BYTES],
                record[-2 * MARK_BYTES : -MARK_BYTES],
                record[-MARK_BYTES:],
            )
            for streams, mine, theirs in ((held.outgoing, outgoing, received), (held.incoming, incoming, sent)):
                for stream in of_peer(streams, position):
                    stream.has_bases = mine[position] == theirs != NO_MARK
            expected = held.expected[position]
            _, pieces, nbytes = OFFER.unpack(offer[: OFFER.size])
            _, want, want_bytes = OFFER.unpack(expected)
            same = offer == expected + terms or (not pieces and not want)
            if not trouble and position != peers.index and not same:
                trouble = (
                    f"{peers.label(position)} is about to send {pieces} pieces, {nbytes} bytes, but "
                    f"{peers.label(peers.index)} expects {want} pieces, {want_bytes} bytes, or others of that size; "
                    "all ranks must use one plan, and equal message sizes and verification"
                )
        if found := peers.first_trouble(trouble, self._turn(deadline, self._turns - 1), "agreeing on transfers"):
            raise _Agreed(RefusedError(f"no data has been moved: {found}"))
        earliest = min(_LEFT.unpack(record[: _LEFT.size])[0] for record in offered)
        return Deadline(min(deadline.at, time.monotonic() + earliest), deadline.seconds)

    def _conclude(self, trouble: str, finish: Callable[[], object] | None, deadline: Deadline) -> None:
        """Call `finish`, and learn whether every rank has done its part."""
        failure: Exception | None = None
        if finish is not None and not trouble:
            try:
                finish()
            except Exception as exc:  # after any error the other ranks must learn that this rank failed
                failure = exc
        said = f"d{trouble}" if trouble else ""
        if failure is not None:
            said = f"f {self.peers.label(self.peers.index)}: {type(failure).__name__}: {failure}"
        found = self.peers.first_trouble(said, deadline, "concluding transfers")
        if found.startswith("d"):
            raise _Agreed(DigestMismatch(found[1:]))
        if found:
            raise _Agreed(
                RefitFailed(f"all data arrived, but the transfer could not be finished:{found[1:]}")
            ) from failure

    def _mark(self, streams: Sequence[Stream]) -> bytes:
        """Return a mark of all streams to or from one peer.

        It is equal on both ends only if they have equal bases, and both want deltas.
        """
        return NO_MARK

    @abstractmethod
    def _move(self, move: Move) -> str:
        """Move everything; return an error text, "" if all is well."""

    def _order(self, streams: Sequence[Stream]) -> list[Stream]:
        """Return the order in which streams are served: each rank starts with its successor, not all with rank 0."""
        me, size = self.peers.index, len(self.peers)
        # by hop: data from a relay waits for the data that the relay receives, never the other way round (windows.py)
        return sorted(streams, key=lambda s: (s.is_send, s.route.hop, (s.position - me) % size, s.route))

    def _next_buffer(
        self, stream: Stream, verify: bool, room: torch.Tensor | None = None
    ) -> tuple[int, torch.Tensor, bool] | None:
        """Return (number, buffer, whether it is staging) for a stream's next message, packed if it is a send.

        The message is placed in `room` if given, else in the tensor itself if possible, else in staging.
        """
        number = stream.next
        if not stream.messages or number >= len(stream.messages) + verify:
            return None
        stream.next += 1
        if number == len(stream.messages):
            said = stream.digest.digest() if stream.is_send else bytes(DIGEST_BYTES)
            return number, torch.frombuffer(bytearray(said), dtype=torch.uint8).to(self.device), False
        message = stream.messages[number]
        direct = self._direct(stream, message) if room is None else None
        buffer = (self._staging() if room is None else room)[: message.nbytes] if direct is None else direct
        if stream.is_send:
            stream.await_written(message)
            for span, here in steps_of(message, self.step_bytes):
                if direct is None:
                    stream.read(span, buffer[here])
                if verify:
                    stream.add(buffer[here])
        return number, buffer, direct is None

    def _land(self, done: InFlight, verify: bool) -> str:
        """Write an arrived message to its destinations, read them back, and add the result to the digest.

        Returns an error text after the last message, the sender's digest, if the digests differ.
        """
        stream = done.stream
        if done.number == len(stream.messages):
            if done.buffer.cpu().numpy().tobytes() == stream.digest.digest():
                return ""
            why = "another process writes to these tensors during the transfer, or the data was altered on the way"
            if stream.has_bases:
                why = (
                    "it came as a delta: the delta was altered on the way, or the version that an engine there serves "
                    "was overwritten; that node's log says which (delta-wrong or base-wrong); swap again"
                )
            return (
                f"the bytes that {self.peers.label(self.peers.index)} wrote differ from the bytes that "
                f"{self.peers.label(stream.position)} read; {why}"
            )
        again = self._staging() if done.is_staged and verify else None
        for span, here in steps_of(stream.messages[done.number], self.step_bytes):
            piece = stream.pieces[span.piece]
            found = done.buffer[here]
            if done.is_staged:
                stream.steps.time(PLACE, piece.unpack, span.start, span.end, found)
            if again is not None:
                found = again[: span.end - span.start]
                stream.read(span, found)
            if verify:
                stream.add(found)
        if again is not None:
            self._give_back(again)
        return ""

    def _direct(self, stream: Stream, message: PackedMessage) -> torch.Tensor | None:
        """Return the message's bytes in the tensor itself, if one piece holds them on this transport's device."""
        if len(message.spans) != 1:
            return None
        span = message.spans[0]
        found = stream.pieces[span.piece].direct(span.start, span.end)
        return found if found is not None and found.device == self.device else None

    def _copy_local(self, sends: Mapping[Key, Piece], receives: Mapping[Key, Piece], verify: bool) -> str:
        """Copy the transfers within this rank; return an error text, "" if all is well."""
        for key in sorted(receives):
            source, target = sends[key], receives[key]
            if source.await_written is not None:
                source.await_written()
            if isinstance(source, TensorPiece) and isinstance(target, TensorPiece):
                is_same = target.copy_from(source, verify=verify)
            else:
                is_same = self._copy_staged(source, target, verify)
            if not is_same:
                return f"task {key}: the local copy differs from its source; another thread writes to one of them"
        return ""

    def _copy_staged(self, source: Piece, target: Piece, verify: bool) -> bool:
        buffer, again = self._staging(), self._staging()
        is_same = True
        for message in lay_out([source.nbytes], self._limit):
            for span, here in steps_of(message, self.step_bytes):
                source.pack(span.start, span.end, buffer[here])
                target.unpack(span.start, span.end, buffer[here])
                if verify:
                    target.pack(span.start, span.end, again[here])
                    is_same = is_same and torch.equal(buffer[here], again[here])
        self._give_back(buffer)
        self._give_back(again)
        return is_same

    def _new_digest(self, about: bytes) -> Digest:
        """Return the digest of a stream; in an epoch it is a MAC of its bytes and its subject."""
        authenticator = self.peers.authenticator
        return HostDigest() if authenticator is None else authenticator.stream(about)

    def _about(self, stream: Stream) -> bytes:
        """Return the subject of a stream: the run and both ranks, or the run and the path, whose ranks pass the MAC on.

        The MAC of one run is therefore invalid in every other run.
        """
        path, labels = stream.route.path, (self.peers.label(self.peers.index), self.peers.label(stream.position))
        ends = "" if path else "\0".join(labels if stream.is_send else labels[::-1])
        return _ABOUT.pack(self._runs, path) + ends.encode()

    def _staging(self) -> torch.Tensor:
        # first touch of new pages costs as much as several copies, so buffers are reused between runs
        if self._spare:
            return self._spare.pop()
        self._buffers += 1
        return torch.empty(self._limit, dtype=torch.uint8, device=self.device)

    def _give_back(self, buffer: torch.Tensor) -> None:
        if len(self._spare) * self._limit < self._staging_limit:
            self._spare.append(buffer.new_empty(0).set_(buffer.untyped_storage()))
        else:
            self._buffers -= 1


class _Agreed(Exception):
    """All ranks have agreed on this error; the connections are in order."""

    def __init__(self, error: RefitdError) -> None:
        super().__init__(str(error))
        self.error = error
