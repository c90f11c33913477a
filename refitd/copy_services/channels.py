"""A channel: one worker's part in an epoch, over the connections of wires.py. Messages are matched by tag and order."""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from refitd.copy_services import Mailbox
from refitd.errors import DeadlineExceeded, PeerLost, TransportError

if TYPE_CHECKING:
    from refitd.copy_services.wires import Wires

# Longer messages wait for their receive.
INLINE_BYTES = 16 << 10

HEAD = struct.Struct("<c7x8sqQQ")  # kind, channel, tag, number of the message with this tag, bytes that follow
HELLO, NONCE, PROOF, VALUE, INLINE, WANTED, BODY = (kind.encode() for kind in "hnpviwb")
# Seconds between two looks for an epoch that was given up, in a wait.
LOOK_S = 0.05
# Messages of a peer for which no receive is posted.
_MAX_KEPT = 4096

Key = tuple[int, int, int]  # position of the peer, tag, number of the message with both


@dataclass(slots=True, eq=False)
class Pending:
    """A send or receive that was started. `data` has the message's bytes, or gets them."""

    data: memoryview
    tensor: object = None  # owns the memory of `data`
    is_done: bool = False
    is_abandoned: bool = False

    def abandon(self) -> None:
        """From now on `data` is not written."""
        self.is_abandoned = True


@dataclass(slots=True, eq=False)
class Outgoing:
    """A frame on its way into the kernel; `posted` is done once it is there. `parts` are what is left of it."""

    parts: list[memoryview]
    channel: bytes
    posted: Pending | None = None
    is_begun: bool = False


class Wire:
    """One connection. `label` names the worker at its other end, once that worker has said or proven it."""

    def __init__(self, sock: socket.socket, label: str = "", *, is_guest: bool) -> None:
        self.sock, self.label, self.is_guest = sock, label, is_guest
        self.since = time.monotonic()
        self.is_connecting = False
        self.is_torn = False  # it holds a part of a message that will not be completed
        self.out: deque[Outgoing] = deque()
        self.awaits_room = False
        self.head, self.got = memoryview(bytearray(HEAD.size)), 0
        self.left = 0  # bytes of the present frame that have not come
        self.into: memoryview | None = None  # where they go; None: they are skipped
        self.frame: tuple[bytes, bytes, int, int] | None = None  # kind, channel, tag, number
        self.body: bytearray | None = None  # of a frame that is handled once it is whole
        self.target: Pending | None = None
        self.nonces: dict[bytes, bytes] = {}  # the peer's, by channel
        self.mine: dict[bytes, bytes] = {}
        self.proven: set[bytes] = set()


def frame_of(kind: bytes, channel: bytes, tag: int, number: int, body: bytes) -> Outgoing:
    """Return a frame that is small enough to be copied."""
    return Outgoing([memoryview(HEAD.pack(kind, channel, tag, number, len(body)) + body)], channel)


class Channel(Mailbox):
    """This worker's part in one epoch: its peers by position, and the messages in flight."""

    def __init__(self, wires: Wires, epoch: str, index: int, labels: Sequence[str], key: bytes) -> None:
        """Note an epoch's workers and key; `Wires.join` forms the channel."""
        self.wires, self.epoch, self.index, self.labels = wires, epoch, index, tuple(labels)
        self.id = hashlib.blake2b(epoch.encode(), digest_size=8).digest()
        self._key = key
        self.peers: dict[int, Wire] = {}
        self.values: dict[str, bytes] = {}
        self.lost: dict[int, str] = {}  # position -> how, once all had come
        self.is_formed = False
        self._numbers: dict[tuple[bool, int, int], int] = {}
        self.sending: dict[Key, Pending] = {}  # not wanted yet
        self.receiving: dict[Key, Pending] = {}
        self.inline: dict[Key, bytes] = {}
        self.wanted: set[Key] = set()

    def proof(self, *parts: bytes) -> bytes:
        """Return a MAC of some parts and the epoch, 16 bytes."""
        made = hmac.new(self._key, digestmod="sha256")
        for part in (b"wire", self.epoch.encode(), *parts):
            made.update(struct.pack("<q", len(part)) + part)
        return made.digest()[:16]

    def _number(self, is_send: bool, position: int, tag: int) -> int:
        self._numbers[is_send, position, tag] = found = self._numbers.get((is_send, position, tag), -1) + 1
        return found

    def send(self, posted: Pending, position: int, tag: int) -> Pending:
        """Start a send. Its memory must not change until it is done."""
        key = position, tag, self._number(True, position, tag)
        if (wire := self.peers.get(position)) is None:
            raise self._gone(position, "sending to")
        if len(posted.data) <= INLINE_BYTES:
            self.wires.say(wire, INLINE, self.id, *key[1:], bytes(posted.data))
            posted.is_done = True
        elif key in self.wanted:
            self.wanted.discard(key)
            self._send_body(wire, key, posted)
        else:
            self.sending[key] = posted
        return posted

    def _send_body(self, wire: Wire, key: Key, posted: Pending) -> None:
        head = HEAD.pack(BODY, self.id, *key[1:], len(posted.data))
        wire.out.append(Outgoing([memoryview(head), posted.data], self.id, posted))
        self.wires.flush(wire)

    def receive(self, posted: Pending, position: int, tag: int) -> Pending:
        """Start a receive."""
        key = position, tag, self._number(False, position, tag)
        if (body := self.inline.pop(key, None)) is not None:
            self._take(key, posted, body)
            return posted
        if (wire := self.peers.get(position)) is None:
            raise self._gone(position, "receiving from")
        self.receiving[key] = posted
        if len(posted.data) > INLINE_BYTES:
            self.wires.say(wire, WANTED, self.id, *key[1:])
        return posted

    def _gone(self, position: int, doing: str) -> PeerLost:
        return PeerLost(f"{doing} {self.labels[position]}: {self.lost.get(position, 'it has left')}")

    def _take(self, key: Key, posted: Pending, body: bytes) -> None:
        if len(body) != len(posted.data):
            raise TransportError(
                f"{self.labels[key[0]]} sends a message of {len(body)} bytes, expected {len(posted.data)}"
            )
        if not posted.is_abandoned:
            posted.data[:] = body
        posted.is_done = True

    def came(self, position: int, kind: bytes, tag: int, number: int, body: bytes) -> None:
        """Handle a frame of a peer; raises TransportError if it is impossible."""
        key = position, tag, number
        if kind == VALUE:
            name, _, value = body.partition(b"\0")
            stem, slash, last = name.decode(errors="replace").rpartition("/")
            # the peer may have another position here than in its own epoch
            self.values[stem + slash + (str(position) if last == str(tag) else last)] = value
        elif kind == INLINE:
            if (posted := self.receiving.pop(key, None)) is not None:
                self._take(key, posted, body)
            else:
                self.inline[key] = body
        elif (posted := self.sending.pop(key, None)) is not None:
            self._send_body(self.peers[position], key, posted)
        else:
            self.wanted.add(key)
        if len(self.inline) + len(self.wanted) + len(self.values) > _MAX_KEPT * len(self.labels):
            raise TransportError(f"{self.labels[position]} sends messages that no receive expects")

    def put(self, key: str, value: bytes) -> None:
        """Give all peers a value; each key is put once, by one worker. A key may end with this worker's position."""
        for wire in list(self.peers.values()):
            self.wires.say(wire, VALUE, self.id, self.index, 0, key.encode() + b"\0" + value)

    def get(self, key: str, timeout: float) -> bytes:
        """Wait for a peer's value.

        Raises:
            DeadlineExceeded, PeerLost: no peer put it in time, a peer was lost, or the epoch was given up.
        """
        until = time.monotonic() + timeout
        while key not in self.values:
            self.check()
            if (left := until - time.monotonic()) <= 0:
                raise DeadlineExceeded(f"nobody left {key!r} within {timeout:.1f} s")
            self.wires.step(min(left, LOOK_S))
        return self.values[key]

    def check(self) -> None:
        """Raise PeerLost if a peer is lost or the epoch was given up."""
        for position, how in self.lost.items():
            raise PeerLost(f"{self.labels[position]}: {how}")
        self.wires.look(self)

    def stop(self) -> None:
        """Read and write no message's memory from now on: a run has failed."""
        for posted in self.receiving.values():
            posted.abandon()
        for wire in list(self.peers.values()):
            self.wires.purge(wire, self.id)
        self.sending, self.receiving, self.inline, self.wanted = {}, {}, {}, set()
