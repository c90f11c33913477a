"""NIXL: receivers read messages out of their senders' memory, over UCX: RDMA where there is any, else TCP or cma.

There is no process group. Agents learn of each other through the epoch's mailbox, and say everything else by
notifications:

    inline   a small message itself: agreements, digests
    offer    a message lies at this address of the sender's slab; the receiver reads it from there
    taken    it has been read; the sender may use that memory again

Each notification begins with a MAC of it and of the names of both agents. One without is as if it had not come.

Each worker registers one slab of memory, in which all messages are packed and into which they are read. The tensors
themselves are never registered: nothing can be written to them by a transfer that was given up, arenas may change
places under their addresses, and a network card's table of regions stays small.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import secrets
import struct
import time
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from refitd.copy_services.authentication import MAC_BYTES, Authenticator, prove
from refitd.copy_services.base import MAX_MESSAGE_BYTES, NIXL
from refitd.copy_services.epoch import Epoch
from refitd.copy_services.packed import NO_MARK, STAGING_BYTES, WINDOW
from refitd.copy_services.peers import Deadline, Peers
from refitd.copy_services.streams import Stream
from refitd.copy_services.waits import Backoff
from refitd.copy_services.windows import WindowExchange
from refitd.errors import ConfigError, DeadlineExceeded, PeerLost, TransportError

# messages up to this size travel inside the notification
INLINE_BYTES = 1024
# messages shrink to this in epochs so large that the slab would exceed its limit; then there are too many workers
LEAST_MESSAGE_BYTES = 4096
# the most notifications of one peer that are kept before they are asked for
MAX_KEPT = 4096
# buffers beside those of the messages in flight: one to read back, two to copy within a rank
_OTHER_BUFFERS = 3
# looks at the wires after a run, so that the last notification leaves
_LAST_LOOKS = 4

_HEAD = struct.Struct("<cqq")  # kind, tag, number of the message with this tag
_OFFER = struct.Struct("<QQ")  # address, bytes
_INLINE, _OFFERED, _TAKEN = b"i", b"o", b"t"

Key = tuple[int, int, int]  # peer, tag, number of the message with this peer and tag


@dataclass(slots=True, eq=False)
class _Posted:
    """A started send or receive, until it is done."""

    key: Key
    tensor: torch.Tensor
    is_done: bool = False
    handle: Any = None  # of a read that has begun

    def abandon(self) -> None:
        """Do nothing: a read that goes on writes to the slab, which is not used again."""


@dataclass(slots=True)
class _Inbox:
    """What peers have said and nobody has asked for."""

    inline: dict[Key, bytes] = field(default_factory=dict)
    offers: dict[Key, tuple[int, int]] = field(default_factory=dict)

    def check(self, peer: int, label: str) -> None:
        """Raise TransportError if a peer says more than it may."""
        if sum(key[0] == peer for key in (*self.inline, *self.offers)) > MAX_KEPT:
            raise TransportError(f"{label} has sent more than {MAX_KEPT} messages that nobody expects")


class NixlPeers(Peers):
    """The workers of an epoch, each with an agent of NIXL. Sends and receives are matched by tag and order."""

    def __init__(self, epoch: Epoch, slab: torch.Tensor, deadline: Deadline) -> None:
        """Make an agent, register the slab, and meet the other workers.

        Raises:
            ConfigError: NIXL cannot be loaded.
            DeadlineExceeded, PeerLost: a worker did not come, or the epoch was given up.
            TransportError: NIXL cannot start, another worker's agent cannot be understood, or lacks the epoch's key.
        """
        self.group, self.device, self._labels = None, torch.device("cpu"), tuple(epoch.labels)
        self.index, self.ranks = epoch.index, tuple(range(epoch.size))
        self._library, self._slab = _load(), slab
        self._notes = Authenticator(epoch.key)
        self._names: dict[int, str] = {}
        self._forged: set[int] = set()  # under whose names notifications without a MAC came
        self._sent: dict[tuple[int, int], int] = {}
        self._received: dict[tuple[int, int], int] = {}
        self._sending: dict[Key, _Posted] = {}
        self._receiving: dict[Key, _Posted] = {}
        self._reading: list[_Posted] = []
        self._inbox = _Inbox()
        self._agent: Any = None
        name = self._names[epoch.index] = f"{epoch.id}/{epoch.index}/{secrets.token_hex(8)}"
        try:
            # without its thread, which would spin on a processor: whoever waits drives it
            config = self._library.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent = self._library.nixl_agent(name, config)
            self._region = self._agent.register_memory([(slab.data_ptr(), slab.nbytes, 0, "")], "DRAM")
            metadata = self._agent.get_agent_metadata()
        except Exception as exc:  # its errors have no common class
            raise TransportError(f"{self.label(self.index)}: NIXL cannot start: {_said(exc)}") from exc
        self._join(epoch, {"name": name, "metadata": b64encode(metadata).decode()}, deadline)
        self.authenticator = prove(self, epoch, deadline)

    def _join(self, epoch: Epoch, said: dict[str, str], deadline: Deadline) -> None:
        epoch.mailbox.put(f"agent/{epoch.index}", json.dumps(said).encode())
        for position in range(epoch.size):
            if position == epoch.index:
                continue
            left = max(0.001, deadline.at - time.monotonic())
            try:
                found = json.loads(epoch.mailbox.get(f"agent/{position}", left))
                self._names[position] = str(found["name"])
                metadata = b64decode(found["metadata"], validate=True)
            except DeadlineExceeded as exc:
                raise DeadlineExceeded(
                    f"{self.label(position)} did not come to epoch {epoch.id} within {deadline.seconds:.1f} s"
                ) from exc
            except (ValueError, TypeError, KeyError) as exc:
                raise TransportError(
                    f"epoch {epoch.id}: what {self.label(position)} says of its agent cannot be read: {exc}"
                ) from exc
            try:
                self._agent.add_remote_agent(metadata)
            except Exception as exc:
                raise TransportError(
                    f"{self.label(self.index)} cannot reach {self.label(position)}: {_said(exc)}; use one version of "
                    "NIXL on all nodes, and check UCX_NET_DEVICES"
                ) from exc

    @property
    def _is_named(self) -> bool:
        return len(self) > 1

    def send(self, tensor: torch.Tensor, position: int, tag: int) -> Any:
        """Start sending a tensor: at most INLINE_BYTES, or in the slab. It must not change until `wait` returns."""
        number = self._sent[position, tag] = self._sent.get((position, tag), -1) + 1
        posted = _Posted((position, tag, number), tensor)
        if tensor.nbytes <= INLINE_BYTES:
            self._say(position, _INLINE, tag, number, tensor.numpy().tobytes())
            posted.is_done = True
        else:
            self._sending[posted.key] = posted
            self._say(position, _OFFERED, tag, number, _OFFER.pack(tensor.data_ptr(), tensor.nbytes))
        return posted

    def receive(self, tensor: torch.Tensor, position: int, tag: int) -> Any:
        """Start receiving into a tensor: at most INLINE_BYTES, or in the slab. It is filled when `wait` returns."""
        number = self._received[position, tag] = self._received.get((position, tag), -1) + 1
        posted = _Posted((position, tag, number), tensor)
        self._receiving[posted.key] = posted
        self._match(posted)
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
                odd = "; what came under its name lacks the epoch's key, or was altered on the way"
                raise DeadlineExceeded(
                    f"{purpose} {self.label(position)}; {self.label(self.index)} waited {deadline.seconds:g} s"
                    + odd * (position in self._forged)
                ) from None

    def look(self) -> None:
        """Take notifications, and finish reads that have ended.

        Raises:
            PeerLost: a read failed, names its peer.
            TransportError: a peer says what cannot be.
        """
        peers = {name: position for position, name in self._names.items()}
        for name, notes in self._agent.get_new_notifs().items():
            position = peers.get(name)
            if position is None or position == self.index:
                continue
            for note in notes:
                if self._notes.is_mac(note[:MAC_BYTES], b"note", *self._ends(position, self.index), note[MAC_BYTES:]):
                    self._hear(position, note[MAC_BYTES:])
                else:
                    self._forged.add(position)
        for posted in list(self._reading):
            try:
                state = self._agent.check_xfer_state(posted.handle)
            except Exception as exc:
                raise self._lost(posted.key[0], exc) from exc
            if state == "ERR":
                raise self._lost(posted.key[0], RuntimeError("the read failed"))
            if state == "DONE":
                self._reading.remove(posted)
                self._agent.release_xfer_handle(posted.handle)
                self._done(posted)
                position, tag, number = posted.key
                self._say(position, _TAKEN, tag, number)

    def _hear(self, position: int, note: bytes) -> None:
        label = self.label(position)
        if len(note) < _HEAD.size:
            raise TransportError(f"{label} sends a notification of {len(note)} bytes")
        kind, tag, number = _HEAD.unpack_from(note)
        key, body = (position, tag, number), note[_HEAD.size :]
        if kind == _TAKEN:
            posted = self._sending.pop(key, None)
            if posted is None:
                raise TransportError(f"{label} has taken a message that was not offered")
            posted.is_done = True
            return
        if kind == _INLINE:
            self._inbox.inline[key] = body
        elif kind == _OFFERED and len(body) == _OFFER.size:
            self._inbox.offers[key] = _OFFER.unpack(body)
        else:
            raise TransportError(f"{label} sends a notification of kind {kind!r} with {len(body)} bytes")
        if (posted := self._receiving.get(key)) is not None:
            self._match(posted)
        else:
            self._inbox.check(position, label)

    def _match(self, posted: _Posted) -> None:
        """Give a receive what has come for it, if it has."""
        position, key, tensor = posted.key[0], posted.key, posted.tensor
        if (body := self._inbox.inline.pop(key, None)) is not None:
            self._check_size(position, len(body), tensor.nbytes)
            if body:
                tensor.copy_(torch.frombuffer(bytearray(body), dtype=torch.uint8))
            self._done(posted)
        elif (offer := self._inbox.offers.pop(key, None)) is not None:
            self._check_size(position, offer[1], tensor.nbytes)
            if posted.handle is not None:
                raise TransportError(f"{self.label(position)} offers a message twice")
            self._read(posted, offer[0])

    def _check_size(self, position: int, nbytes: int, expected: int) -> None:
        if nbytes != expected:
            raise TransportError(f"{self.label(position)} sends a message of {nbytes} bytes, expected {expected}")

    def _read(self, posted: _Posted, address: int) -> None:
        position, tensor = posted.key[0], posted.tensor
        try:
            here = self._agent.get_xfer_descs([(tensor.data_ptr(), tensor.nbytes, 0)], "DRAM")
            there = self._agent.get_xfer_descs([(address, tensor.nbytes, 0)], "DRAM")
            posted.handle = self._agent.initialize_xfer("READ", here, there, self._names[position])
            state = self._agent.transfer(posted.handle)
        except Exception as exc:
            raise self._lost(position, exc) from exc
        if state == "ERR":
            raise self._lost(position, RuntimeError("the read could not begin"))
        self._reading.append(posted)

    def _done(self, posted: _Posted) -> None:
        posted.is_done = True
        self._receiving.pop(posted.key, None)

    def _say(self, position: int, kind: bytes, tag: int, number: int, body: bytes = b"") -> None:
        note = _HEAD.pack(kind, tag, number) + body
        mac = self._notes.mac(b"note", *self._ends(self.index, position), note)
        try:
            self._agent.send_notif(self._names[position], mac + note)
        except Exception as exc:
            raise self._lost(position, exc) from exc

    def _ends(self, sender: int, receiver: int) -> tuple[bytes, bytes]:
        return self._names[sender].encode(), self._names[receiver].encode()

    def _lost(self, position: int, exc: Exception) -> PeerLost:
        return PeerLost(
            f"{self.label(position)} cannot be reached; {self.label(self.index)} lost its connection ({_said(exc)})"
        )

    def close(self) -> None:
        """End the agent. What other agents still read of the slab stays mapped until then."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        with contextlib.suppress(Exception):  # a peer may be gone, which is why this is closed
            for posted in self._reading:
                agent.release_xfer_handle(posted.handle)
            for position, name in self._names.items():
                if position != self.index:
                    agent.remove_remote_agent(name)
            agent.deregister_memory(self._region)
        self._reading = []


class NixlService(WindowExchange):
    """Exchanges tensors by reads between NIXL agents. See ExchangeService for its contract."""

    name = "nixl"
    capabilities = NIXL
    relays = False  # what is passed on would have to lie in the slab

    def __init__(self, epoch: Epoch) -> None:
        """Join an epoch. Raises as NixlPeers does, and ConfigError if it has too many workers for `staging_bytes`."""
        deadline = Deadline.after(epoch.timeout)
        limit, count = _buffers(epoch.size, epoch.staging_bytes or STAGING_BYTES)
        self._slab = torch.empty(limit * count, dtype=torch.uint8)
        self.peers: NixlPeers = NixlPeers(epoch, self._slab, deadline)
        super().__init__(self.peers, message_bytes=limit, staging_bytes=limit * count)
        self._spare = [self._slab[at : at + limit] for at in range(0, limit * count, limit)]
        self._buffers = count

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """See ExchangeService.run."""
        found = super().run(*args, **kwargs)
        for _ in range(_LAST_LOOKS):
            self.peers.look()
        return found

    def _mark(self, streams: Sequence[Stream]) -> bytes:
        """Return NO_MARK: the body of a delta would have to lie in the slab."""
        return NO_MARK

    def _direct(self, stream: Stream, message: Any) -> None:
        """Return None: messages lie in the slab."""

    def _give_back(self, buffer: torch.Tensor) -> None:
        at = buffer.storage_offset() // self._limit * self._limit
        self._spare.append(self._slab[at : at + self._limit])

    def close(self) -> None:
        """See ExchangeService.close."""
        super().close()
        self.peers.close()


def join(epoch: Epoch) -> NixlService:
    """Join an epoch; return once all workers have proven who they are.

    Raises:
        ConfigError: NIXL cannot be loaded, or there are too many workers for `staging_bytes`.
        DeadlineExceeded, PeerLost: a worker did not come; has its label.
        TransportError: the workers cannot reach each other.
    """
    return NixlService(epoch)


def _buffers(size: int, staging_bytes: int) -> tuple[int, int]:
    """Return (bytes of a buffer, number of buffers) of an epoch: WINDOW for each peer and direction, and some.

    Raises:
        ConfigError: there are too many workers for so many bytes.
    """
    count = 2 * WINDOW * max(1, size - 1) + _OTHER_BUFFERS
    limit = min(MAX_MESSAGE_BYTES, staging_bytes // count)
    if limit < LEAST_MESSAGE_BYTES:
        raise ConfigError(
            f"NIXL: {size} workers in one lane need {count} buffers of at least {LEAST_MESSAGE_BYTES} bytes, and "
            f"[transport] staging_bytes is {staging_bytes}; set it to at least {count * LEAST_MESSAGE_BYTES}, or "
            'service = "gloo"'
        )
    return limit - limit % 4096, count


def _load() -> Any:
    """Import NIXL's Python interface.

    Raises:
        ConfigError: it is not installed, or its libraries cannot be loaded.
    """
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # else it prints every agent's start
    try:
        return importlib.import_module("nixl._api")
    except (ImportError, OSError, RuntimeError) as exc:
        raise ConfigError(f"NIXL cannot be loaded: {exc}; pip install 'refitd[nixl]'") from exc


def _said(exc: BaseException) -> str:
    return (str(exc).splitlines() or [""])[0].strip() or type(exc).__name__
