"""NIXL: receivers read messages from their senders' memory over UCX, by RDMA if available, else TCP or cma.

The workers of an epoch are agents that find each other through the epoch's mailbox, without a process group. Each
worker registers one slab of memory. All other data travels in notifications:

    inline   a small message itself: agreements, notes, digests
    wanted   a receive has been posted
    part     a part of a wanted message is at this address of the sender's slab; the receiver reads it into its own
    taken    the part has been read and copied to its destination; the sender may reuse that memory
    direct   a wanted message is at this address of the sender's arena; the receiver reads it into its own arena

Each begins with a MAC of its content and of the names of both agents. A notification without a valid MAC is ignored.

    sender's tensor  --copy-->  slab  ==read==>  slab  --copy-->  receiver's tensor

    sender's arena  ==read==>  receiver's arena      (if both are registered: contiguous pieces without conversion)

In an epoch of GPUs the slab is in GPU memory, so a card with GPUDirect RDMA reads from GPU to GPU; both copies are then
within a GPU.

For each peer and direction the slab has PARTS places. Only wanted messages are cut into parts, so a sender's places
wait only for reads that the receiver has room for. Therefore no message waits behind another one, as with gloo. A read
that was given up may still write to an arena until the agent ends, with its epoch.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import struct
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from refitd.buffers.arena import MappedArena
from refitd.buffers.cuda import MappedDeviceArena
from refitd.copy_services import PACKED, Epoch, ExchangeResult
from refitd.copy_services.digests import MAC_BYTES, Authenticator, DeviceDigests, Digest
from refitd.copy_services.epoch_peers import EpochPeers
from refitd.copy_services.nixl_memory import PARTS, Regions, load, new_slab, part_bytes
from refitd.copy_services.packed import STAGING_BYTES
from refitd.copy_services.peers import first_line, prove
from refitd.copy_services.waits import Backoff, Deadline, make_current
from refitd.copy_services.windows import WindowExchange
from refitd.errors import DeadlineExceeded, PeerLost, TransportError

# messages up to this size travel inside the notification
INLINE_BYTES = 1024
# limit on a peer's notifications for which this worker has posted no receive
MAX_KEPT = 4096
# limit on one copy to or from a slab on a GPU
_COPY_S = 60.0

_HEAD = struct.Struct("<cqq")  # kind, tag, number of the message with this tag
_PART = struct.Struct("<QQQQ")  # address, bytes of the part, its offset in the message, bytes of the message
_ADDRESS = struct.Struct("<Q")
_INLINE, _WANTED, _PARTED, _TAKEN, _DIRECT = b"i", b"w", b"p", b"t", b"d"
_REGISTERED = b"r"  # in `wanted`: the destination is registered

Key = tuple[int, int, int]  # peer, tag, number of the message with this peer and tag


@dataclass(slots=True, eq=False)
class _PostedMessage:
    """A started send or receive, until it is done. `tensor` has the message's bytes, or gets them."""

    key: Key
    tensor: torch.Tensor
    begun: int = 0  # bytes that have been put into the slab
    left: int = 0  # bytes that have not been taken
    is_done: bool = False

    @classmethod
    def of(cls, key: Key, tensor: torch.Tensor) -> _PostedMessage:
        """Begin with all of a contiguous tensor."""
        return cls(key, tensor.view(-1).view(torch.uint8), 0, tensor.nbytes)

    def abandon(self) -> None:
        """Ignored: only `look` writes to the tensor, and no run calls it afterwards."""


@dataclass(slots=True, eq=False)
class _PartRead:
    """A read of one part, from a peer's slab into this process's, or of a message into its tensor (no `place`)."""

    posted: _PostedMessage
    place: torch.Tensor | None
    part: slice  # of the message
    address: int  # of the peer's place
    handle: Any


@dataclass(slots=True)
class _Peer:
    """The open transfers with one peer."""

    name: str = ""
    gpu: int = 0  # the number that its process has for its slab's GPU
    is_forged: bool = False  # notifications without a MAC have come under its name
    inline: dict[Key, bytes] = field(default_factory=dict)  # messages without a matching receive yet
    wanted: dict[Key, bool] = field(default_factory=dict)  # wanted and not sent yet; whether to registered memory
    free: list[torch.Tensor] = field(default_factory=list)  # free places for sending to it
    lent: dict[int, tuple[torch.Tensor, _PostedMessage, int]] = field(default_factory=dict)  # places in use, by address
    queue: deque[_PostedMessage] = field(default_factory=deque)  # wanted messages that wait for a place
    room: list[torch.Tensor] = field(default_factory=list)  # free places for receiving from it


class NixlPeers(EpochPeers):
    """The workers of an epoch, each with an agent of NIXL. Sends and receives are matched by tag and order."""

    def __init__(self, epoch: Epoch, slab_bytes: int, deadline: Deadline) -> None:
        """Make an agent, register a slab of at most `slab_bytes`, and meet the other workers.

        Raises:
            ConfigError: NIXL cannot be loaded, or there are too many workers for so many bytes.
            DeadlineExceeded, PeerLost: a worker did not come, or the epoch was abandoned.
            TransportError: NIXL cannot start, another worker's agent cannot be understood, or lacks the epoch's key.
        """
        super().__init__(epoch)
        size = part_bytes((epoch.peers or epoch.size - 1) + 1, slab_bytes)
        self._library = load()
        nbytes = 2 * PARTS * (epoch.size - 1) * size
        self._slab, self._stream, self._segment, gpu = new_slab(nbytes, epoch.device)
        self._notes = Authenticator(epoch.key)
        self._peers = [_Peer() for _ in range(epoch.size)]
        places = iter(self._slab.split(size) if len(self._slab) else ())
        for position, peer in enumerate(self._peers):
            if position != epoch.index:
                peer.free, peer.room = ([next(places) for _ in range(PARTS)] for _ in range(2))
        self._sent: dict[tuple[int, int], int] = {}
        self._received: dict[tuple[int, int], int] = {}
        self._sending: dict[Key, _PostedMessage] = {}  # not wanted yet
        self._receiving: dict[Key, _PostedMessage] = {}
        self._offered: dict[Key, _PostedMessage] = {}  # read by the peer from an arena
        self._reads: list[_PartRead] = []
        self._agent: Any = None
        self._peers[epoch.index].gpu = gpu
        name = self._peers[epoch.index].name = f"{epoch.id}/{epoch.index}/{secrets.token_hex(8)}"
        try:
            # without a progress thread, which would spin on a processor: waiting drives progress
            config = self._library.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent = self._library.nixl_agent(name, config)
            there = [(self._slab.data_ptr(), self._slab.nbytes, gpu, "")] if len(self._slab) else []
            self._region = self._agent.register_memory(there, self._segment) if there else None
            metadata = self._agent.get_agent_metadata()
            self.regions = Regions(self._agent, self._segment, gpu)
        except Exception as exc:  # its errors have no common class
            raise TransportError(f"{self.label(self.index)}: NIXL cannot start: {first_line(exc)}") from exc
        self._join(epoch, {"name": name, "gpu": gpu, "metadata": b64encode(metadata).decode()}, deadline)
        self.authenticator = prove(self, epoch, deadline)

    @property
    def slab_bytes(self) -> int:
        """Bytes of the slab."""
        return self._slab.nbytes

    def _join(self, epoch: Epoch, said: dict[str, object], deadline: Deadline) -> None:
        for position, word in enumerate(self.introduce(epoch, json.dumps(said).encode(), deadline)):
            if position == epoch.index:
                continue
            try:
                found = json.loads(word)
                self._peers[position].name, self._peers[position].gpu = str(found["name"]), int(found.get("gpu", 0))
                metadata = b64decode(found["metadata"], validate=True)
            except (ValueError, TypeError, KeyError, AttributeError) as exc:
                raise TransportError(
                    f"epoch {epoch.id}: the description of {self.label(position)}'s agent cannot be read: {exc}"
                ) from exc
            try:
                self._agent.add_remote_agent(metadata)
            except Exception as exc:
                raise TransportError(
                    f"{self.label(self.index)} cannot reach {self.label(position)}: {first_line(exc)}; use one "
                    "version of NIXL on all nodes, and check UCX_NET_DEVICES"
                ) from exc

    def send(self, tensor: torch.Tensor, position: int, tag: int) -> Any:
        """Start sending a contiguous tensor, which must not change until `wait` returns."""
        number = self._sent[position, tag] = self._sent.get((position, tag), -1) + 1
        posted, peer = _PostedMessage.of((position, tag, number), tensor), self._peers[position]
        if tensor.nbytes <= INLINE_BYTES:
            self._say(posted.key, _INLINE, posted.tensor.cpu().numpy().tobytes())
            posted.is_done = True
        elif posted.key in peer.wanted:
            self._give(posted, is_direct=peer.wanted.pop(posted.key))
        else:
            self._sending[posted.key] = posted
        return posted

    def receive(self, tensor: torch.Tensor, position: int, tag: int) -> Any:
        """Start receiving into a contiguous tensor, which is filled when `wait` returns."""
        number = self._received[position, tag] = self._received.get((position, tag), -1) + 1
        posted, peer = _PostedMessage.of((position, tag, number), tensor), self._peers[position]
        self._receiving[posted.key] = posted
        if (body := peer.inline.pop(posted.key, None)) is not None:
            self._take_inline(posted, body)
        elif tensor.nbytes > INLINE_BYTES:
            self._say(posted.key, _WANTED, _REGISTERED if self.regions.at(posted.tensor) is not None else b"")
        return posted

    def wait(self, posted: Any, position: int, deadline: Deadline, purpose: str) -> None:
        """See Peers.wait."""
        pause = Backoff()
        while not posted.is_done:
            self.look()
            if posted.is_done:
                return
            try:
                pause.take(deadline, "")
            except DeadlineExceeded:
                odd = "; notifications under its name lack the epoch's key, or were altered on the way"
                raise DeadlineExceeded(
                    f"{purpose} {self.label(position)}; {self.label(self.index)} waited {deadline.seconds:g} s"
                    + odd * self._peers[position].is_forged
                ) from None

    def look(self) -> None:
        """Handle notifications, and finish reads that have ended.

        Raises:
            PeerLost: a read failed, names its peer.
            TransportError: a peer sent an impossible notification.
        """
        positions = {peer.name: position for position, peer in enumerate(self._peers)}
        for name, notes in self._agent.get_new_notifs().items():
            position = positions.get(name, self.index)
            if position == self.index:
                continue
            for note in notes:
                if self._notes.is_mac(note[:MAC_BYTES], b"note", *self._ends(position, self.index), note[MAC_BYTES:]):
                    self._hear(position, note[MAC_BYTES:])
                else:
                    self._peers[position].is_forged = True
        for read in list(self._reads):
            position = read.posted.key[0]
            try:
                state = self._agent.check_xfer_state(read.handle)
            except Exception as exc:
                raise self._lost(position, exc) from exc
            if state == "ERR":
                raise self._lost(position, RuntimeError("the read failed"))
            if state == "DONE":
                self._reads.remove(read)
                self._agent.release_xfer_handle(read.handle)
                self._has_read(read)

    def _hear(self, position: int, note: bytes) -> None:
        label, peer = self.label(position), self._peers[position]
        if len(note) < _HEAD.size:
            raise TransportError(f"{label} sends a notification of {len(note)} bytes")
        kind, tag, number = _HEAD.unpack_from(note)
        key, body = (position, tag, number), note[_HEAD.size :]
        if kind == _INLINE:
            if (posted := self._receiving.get(key)) is not None:
                self._take_inline(posted, body)
            else:
                peer.inline[key] = body
        elif kind == _WANTED and body in (b"", _REGISTERED):
            if (posted := self._sending.pop(key, None)) is not None:
                self._give(posted, is_direct=bool(body))
            else:
                peer.wanted[key] = bool(body)
        elif kind == _PARTED and len(body) == _PART.size:
            self._read(key, *_PART.unpack(body))
        elif kind == _TAKEN and len(body) == _ADDRESS.size:
            self._was_taken(position, *_ADDRESS.unpack(body))
        elif kind == _TAKEN and not body and key in self._offered:
            self._offered.pop(key).is_done = True
        elif kind == _DIRECT and len(body) >= _PART.size:
            self._read_directly(key, body)
        else:
            raise TransportError(f"{label} sends a notification of kind {kind!r} with {len(body)} bytes")
        if len(peer.inline) + len(peer.wanted) > MAX_KEPT:
            raise TransportError(f"{label} has sent more than {MAX_KEPT} messages that no receive expects")

    def _take_inline(self, posted: _PostedMessage, body: bytes) -> None:
        self._check_size(posted, len(body))
        if body:
            posted.tensor.copy_(torch.frombuffer(bytearray(body), dtype=torch.uint8))
        self._done(posted)

    def _check_size(self, posted: _PostedMessage, nbytes: int) -> None:
        if nbytes != len(posted.tensor):
            raise TransportError(
                f"{self.label(posted.key[0])} sends a message of {nbytes} bytes, expected {len(posted.tensor)}"
            )

    def _give(self, posted: _PostedMessage, *, is_direct: bool) -> None:
        """Offer a wanted message: where it is, if both ends are registered, else in parts of the slab."""
        position, tensor = posted.key[0], posted.tensor
        region = self.regions.at(tensor, to_read=True) if is_direct else None
        if region is None:
            self._peers[position].queue.append(posted)
            self._feed(self._peers[position])
            return
        if self._stream is not None:  # a card does not wait for work that the GPU still has to do on this memory
            with self._stream.work(Deadline.after(_COPY_S), self.label(self.index)):
                pass
        self._offered[posted.key] = posted
        place = _PART.pack(tensor.data_ptr(), len(tensor), region.number, len(tensor))
        self._say(posted.key, _DIRECT, place + self.regions.tell(region, position))

    def _feed(self, peer: _Peer) -> None:
        """Fill a peer's free places with parts of its wanted messages."""
        while peer.free and peer.queue:
            posted, place = peer.queue[0], peer.free.pop()
            start, of = posted.begun, len(posted.tensor)
            part = posted.tensor[start : start + len(place)]
            self._copy(place[: len(part)], part)
            posted.begun += len(part)
            if posted.begun == of:
                peer.queue.popleft()
            peer.lent[place.data_ptr()] = place, posted, len(part)
            self._say(posted.key, _PARTED, _PART.pack(place.data_ptr(), len(part), start, of))

    def _was_taken(self, position: int, address: int) -> None:
        peer = self._peers[position]
        if address not in peer.lent:
            raise TransportError(f"{self.label(position)} has taken a part that was not offered")
        place, posted, nbytes = peer.lent.pop(address)
        peer.free.append(place)
        posted.left -= nbytes
        posted.is_done = not posted.left
        self._feed(peer)

    def _read(self, key: Key, address: int, nbytes: int, start: int, of: int) -> None:
        """Begin to read a part of a message."""
        position, posted = key[0], self._receiving.get(key)
        peer = self._peers[position]
        if posted is None or not peer.room:
            raise TransportError(f"{self.label(position)} offers a part of a message that was not wanted")
        self._check_size(posted, of)
        most = min(len(peer.room[-1]), of - start, of - posted.begun)
        if not 0 < nbytes <= most:
            raise TransportError(
                f"{self.label(position)} offers {nbytes} bytes from {start} on of a message of {of}, at most {most} "
                "may come"
            )
        posted.begun += nbytes
        place = peer.room.pop()
        there, here = (address, nbytes, peer.gpu), (place.data_ptr(), nbytes, self._peers[self.index].gpu)
        handle = self._begin_read(position, here, there)
        self._reads.append(_PartRead(posted, place, slice(start, start + nbytes), address, handle))

    def _read_directly(self, key: Key, body: bytes) -> None:
        """Begin to read a message into its tensor. `body` also describes the sender's arena if it is new here."""
        address, nbytes, number, of = _PART.unpack_from(body)
        posted = self._receiving.get(key)
        region = self.regions.at(posted.tensor) if posted is not None else None
        if posted is None or region is None or posted.begun:
            raise TransportError(f"{self.label(key[0])} offers a message that was not wanted directly")
        self._check_size(posted, of)
        self._check_size(posted, nbytes)
        posted.begun = nbytes
        here = posted.tensor.data_ptr(), nbytes, region.number
        handle = self._begin_read(key[0], here, (address, nbytes, number), body[_PART.size :])
        self._reads.append(_PartRead(posted, None, slice(0, nbytes), address, handle))

    def _begin_read(
        self, position: int, here: tuple[int, int, int], there: tuple[int, int, int], told: bytes = b""
    ) -> Any:
        """Begin a read, (address, bytes, number of the device) at both ends; return NIXL's handle."""
        try:
            if told:
                self._agent.add_remote_agent(told)
            ends = (self._agent.get_xfer_descs([end], self._segment) for end in (here, there))
            handle = self._agent.initialize_xfer("READ", *ends, self._peers[position].name)
            state = self._agent.transfer(handle)
        except Exception as exc:
            raise self._lost(position, exc) from exc
        if state == "ERR":
            raise self._lost(position, RuntimeError("the read could not begin"))
        return handle

    def _has_read(self, read: _PartRead) -> None:
        posted, nbytes = read.posted, read.part.stop - read.part.start
        if read.place is not None:
            self._copy(posted.tensor[read.part], read.place[:nbytes])
            self._peers[posted.key[0]].room.append(read.place)
        self._say(posted.key, _TAKEN, b"" if read.place is None else _ADDRESS.pack(read.address))
        posted.left -= nbytes
        if not posted.left:
            self._done(posted)

    def _copy(self, to: torch.Tensor, found: torch.Tensor) -> None:
        """Copy to or from the slab; the copy is done when this returns, because a card does not wait for a GPU's."""
        if self._stream is None:
            to.copy_(found)
            return
        with self._stream.work(Deadline.after(_COPY_S), self.label(self.index)):
            to.copy_(found)

    def _done(self, posted: _PostedMessage) -> None:
        posted.is_done = True
        del self._receiving[posted.key]

    def _say(self, key: Key, kind: bytes, body: bytes = b"") -> None:
        position, tag, number = key
        note = _HEAD.pack(kind, tag, number) + body
        mac = self._notes.mac(b"note", *self._ends(self.index, position), note)
        try:
            self._agent.send_notif(self._peers[position].name, mac + note)
        except Exception as exc:
            raise self._lost(position, exc) from exc

    def _ends(self, sender: int, receiver: int) -> tuple[bytes, bytes]:
        return self._peers[sender].name.encode(), self._peers[receiver].name.encode()

    def _lost(self, position: int, exc: Exception) -> PeerLost:
        return PeerLost(
            f"{self.label(position)} cannot be reached; {self.label(self.index)} lost its connection "
            f"({first_line(exc)})"
        )

    def close(self) -> None:
        """End the agent. The slab stays mapped until then, because other agents may still read it."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        with contextlib.suppress(Exception):  # a lost peer may be the reason for closing
            for read in self._reads:
                agent.release_xfer_handle(read.handle)
            for position, peer in enumerate(self._peers):
                if position != self.index:
                    agent.remove_remote_agent(peer.name)
        with contextlib.suppress(Exception):  # the agent must end, and with it the reads that were given up
            self.regions.close()
        with contextlib.suppress(Exception):
            if self._region is not None:
                agent.deregister_memory(self._region)
        self._reads = []


# progress calls after a run: they send the last notification
_LAST_LOOKS = 4


class NixlService(WindowExchange):
    """Exchanges tensors by reads between NIXL agents. See ExchangeService for its contract."""

    name = "nixl"
    capabilities = PACKED

    def __init__(self, epoch: Epoch, *, message_bytes: int | None = None) -> None:
        """Join an epoch. Half of its `staging_bytes` is for messages, half for the slab.

        `message_bytes` is as in PackedExchange. Raises as NixlPeers does.
        """
        half = (epoch.staging_bytes or STAGING_BYTES) // 2
        device = torch.device(epoch.device)
        device = make_current(device) if (on_gpu := device.type == "cuda") else device
        self.peers: NixlPeers = NixlPeers(epoch, half, Deadline.after(epoch.timeout))
        super().__init__(self.peers, message_bytes=message_bytes, staging_bytes=half)
        self.device = device
        self._digests = DeviceDigests(device, self.peers.authenticator) if on_gpu else None

    def _new_digest(self, about: bytes) -> Digest:
        return super()._new_digest(about) if self._digests is None else self._digests.new(about)

    def use(self, arenas: Mapping[int, MappedArena | MappedDeviceArena]) -> None:
        """See ExchangeService.use."""
        self.peers.regions.use(arenas)

    def let_go(self, arena: int) -> None:
        """See ExchangeService.let_go."""
        self.peers.regions.drop(arena)

    def run(self, *args: Any, **kwargs: Any) -> ExchangeResult:
        """See ExchangeService.run."""
        found = super().run(*args, **kwargs)
        for _ in range(_LAST_LOOKS):
            self.peers.look()
        return replace(found, staging_bytes=found.staging_bytes + self.peers.slab_bytes)

    def close(self) -> None:
        """See ExchangeService.close."""
        super().close()
        self.peers.close()


def join(epoch: Epoch) -> NixlService:
    """Join an epoch; return once all workers have proven that they hold the key.

    Raises:
        ConfigError: NIXL cannot be loaded, or there are too many workers for `staging_bytes`.
        DeadlineExceeded, PeerLost: a worker did not come; has its label.
        TransportError: the workers cannot reach each other.
    """
    return NixlService(epoch)
