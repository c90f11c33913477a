"""The TCP connections of one worker: one to each worker that it exchanges with, opened on first use and then kept.

A *channel* is this worker's part in one epoch. Channels share connections: an epoch that names only known workers
opens none. Of two workers the one with the greater label connects; the other one listens. Both then prove for each
channel that they hold its epoch's key:

    hello     the labels of both ends, once for each connection
    nonce     of a channel, from each end, once it has joined the channel
    proof     a MAC of both nonces and both labels, from each end

A new connection replaces an older one between the same workers only after its proof. A stranger can therefore connect,
but neither end a connection nor join a channel. If a connection is lost, only this pair connects again: after a random,
growing pause. Everything else travels in frames of a proven channel:

    value     of the channel's mailbox
    inline    a short message itself
    wanted    the receiver has posted the receive of a longer message
    body      such a message; the sender waits for `wanted`, so it goes straight to its destination

A message therefore never waits behind one without a receive. Frames of other channels are skipped: they are the rest
of an epoch that has ended. One thread calls all methods; no bytes move between the calls.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import random
import resource
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

from refitd.copy_services.channels import (
    BODY,
    HEAD,
    HELLO,
    INLINE,
    INLINE_BYTES,
    LOOK_S,
    NONCE,
    PROOF,
    VALUE,
    WANTED,
    Channel,
    Wire,
    frame_of,
)
from refitd.errors import DeadlineExceeded, PeerLost, TransportError

VALUE_BYTES = 1 << 20
_CONTROL_BYTES = 4 << 10
_SKIPPED_BYTES = 256 << 10  # read at a time
_LIMITS = {HELLO: _CONTROL_BYTES, NONCE: 32, PROOF: 16, VALUE: VALUE_BYTES, INLINE: INLINE_BYTES, WANTED: 0}
_NO_CHANNEL = bytes(8)

# Pause before a failed connection is tried again: random, up to this, doubled by each failure.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
# One attempt; and how long no attempt may succeed before this worker gives up, although its deadline is later.
_CONNECT_S, UNREACHABLE_S = 5.0, 12.0
# Connections without a proof: their number, and the seconds until their nonce.
_MAX_GUESTS, _GUEST_S = 64, 5.0
# Nonces of a peer's channels that this worker has not joined.
_MAX_NONCES = 64
# Connections that wait while the worker does other work.
_BACKLOG = 1024
# Descriptors that are not for connections.
_RESERVED = 64
_READS = 16  # of one connection, before the others are served
# An idle connection to a host that answers no probe is closed after about 35 s. While data is on its way only the run's
# deadline counts: a peer may read nothing for long, while it waits for its trainer.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))

_ADVICE = "check node.address and node.worker_ports there, and the firewalls between both nodes"


def listen_at(address: str, ports: Sequence[int] = (0,)) -> socket.socket:
    """Return a socket that listens at this address, at the first free one of these ports; 0 is any free port.

    Raises:
        TransportError: this host does not have the address, or no port is free.
    """
    why: Exception | None = None
    for port in ports:
        try:
            family, kind, _, _, there = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind)
        except (OSError, UnicodeError) as exc:
            why = exc
            break
        try:
            sock.bind(there)
            sock.listen(_BACKLOG)
            return sock
        except OSError as exc:
            sock.close()
            why = exc
    tried = f"ports {ports[0]} to {ports[-1]}" if len(ports) > 1 else "any port"
    raise TransportError(
        f"cannot listen at address {address}, {tried}: {why}; check node.address and node.worker_ports"
    )


class Wires:
    """All connections of this process to other workers. `opened` counts them."""

    def __init__(
        self, listener: socket.socket | None, is_given_up: Callable[[str], bool] = lambda epoch: False
    ) -> None:
        """Listen at a bound, listening socket, which the caller closes.

        `is_given_up` tells during waits whether an epoch has been abandoned.
        """
        self._listener, self._is_given_up = listener, is_given_up
        self._epoll = select.epoll()
        self._fds: dict[int, Wire] = {}
        self._by_label: dict[str, Wire] = {}
        self._channels: dict[bytes, Channel] = {}
        self._pauses: dict[str, tuple[float, float, float, str]] = {}  # label: next, pause, first failure, why
        self._looked = 0.0
        self._skipped = memoryview(bytearray(_SKIPPED_BYTES))
        self.opened = 0
        if listener is not None:
            listener.setblocking(False)
            self._epoll.register(listener.fileno(), select.EPOLLIN)

    def close(self) -> None:
        """Close all connections."""
        for wire in list(self._fds.values()):
            self._drop(wire, "it was closed here")
        self._epoll.close()

    def join(self, channel: Channel, addresses: Sequence[str], timeout: float) -> None:
        """Connect to the peers of a channel where necessary; return once all have proven that they hold the key.

        Args:
            channel: the channel.
            addresses: HOST:PORT of each position.
            timeout: seconds.

        Raises:
            DeadlineExceeded, PeerLost: a peer did not come, or the epoch was given up.
            TransportError: a peer cannot be reached; names both workers and the address.
        """
        until = time.monotonic() + timeout
        self._check_room(channel)
        self._channels[channel.id] = channel
        others = [position for position in range(len(channel.labels)) if position != channel.index]
        self._pauses = {}
        for position in others:
            wire = self._by_label.get(channel.labels[position])
            if wire is not None and wire.is_torn:
                self._drop(wire, "a message was left unfinished")
        for wire in list(self._fds.values()):
            self._meet(wire, channel)
        try:
            while missing := [position for position in others if position not in channel.peers]:
                for position in missing:
                    self._reach(channel, position, addresses[position])
                if (left := until - time.monotonic()) <= 0:
                    raise self._absent(channel, missing[0], addresses, timeout)
                self.look(channel)
                self.step(min(left, LOOK_S))
        except BaseException:
            self.leave(channel)
            raise
        channel.is_formed = True

    def _check_room(self, channel: Channel) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if len(channel.labels) + _RESERVED > limit:
            raise TransportError(
                f"{channel.labels[channel.index]} exchanges with {len(channel.labels) - 1} workers, but may open only "
                f"{limit} files (RLIMIT_NOFILE); raise LimitNOFILE of its daemon to "
                f"{len(channel.labels) + 4 * _RESERVED}"
            )

    def leave(self, channel: Channel) -> None:
        """End a channel. Its connections remain, except those with an unfinished message."""
        channel.stop()
        self._channels.pop(channel.id, None)
        for wire in list(channel.peers.values()):
            wire.proven.discard(channel.id)
        for wire in list(self._fds.values()):
            wire.mine.pop(channel.id, None)
            wire.nonces.pop(channel.id, None)
            if wire.is_torn:
                self._drop(wire, "a message was left unfinished")
        channel.peers.clear()

    def look(self, channel: Channel) -> None:
        """Raise PeerLost if the channel's epoch has been given up."""
        if (now := time.monotonic()) >= self._looked + LOOK_S:
            self._looked = now
            if self._is_given_up(channel.epoch):
                raise PeerLost("the epoch has been given up")

    # --- reaching peers

    def _reach(self, channel: Channel, position: int, address: str) -> None:
        label, me = channel.labels[position], channel.labels[channel.index]
        wire, now = self._by_label.get(label), time.monotonic()
        if wire is not None:
            if wire.is_connecting and now > wire.since + _CONNECT_S:
                self._failed(wire, f"no answer within {_CONNECT_S:g} s")
            return
        due, _, first, why = self._pauses.get(label, (0.0, 0.0, now, ""))
        if me < label or now < due:
            return
        if now > first + UNREACHABLE_S:
            raise TransportError(f"{me} cannot reach {label} at {address}: {why}; {_ADVICE}")
        self._dial(channel, label, address)

    def _dial(self, channel: Channel, label: str, address: str) -> None:
        host, _, port = address.rpartition(":")
        try:
            family, kind, _, _, there = socket.getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICSERV
            )[0]
            sock = socket.socket(family, kind)
        except (OSError, ValueError, UnicodeError) as exc:
            self._pause(label, str(exc))
            return
        sock.setblocking(False)
        wire = self._by_label[label] = self._add(sock, label, is_guest=False)
        wire.is_connecting = True
        said = sock.connect_ex(there)
        if said not in (0, errno.EINPROGRESS):
            self._failed(wire, os.strerror(said))
            return
        hello = f"{channel.labels[channel.index]}\0{label}".encode()
        wire.out.append(frame_of(HELLO, _NO_CHANNEL, 0, 0, hello))
        self._want_room(wire)

    def _failed(self, wire: Wire, why: str) -> None:
        if not wire.is_guest:
            self._pause(wire.label, why)
        self._drop(wire, why)

    def _pause(self, label: str, why: str) -> None:
        now = time.monotonic()
        _, pause, first, _ = self._pauses.get(label, (0.0, _FIRST_PAUSE_S, now, ""))
        self._pauses[label] = now + random.uniform(0.3, 1.0) * pause, min(2 * pause, _LONGEST_PAUSE_S), first, why

    def _absent(self, channel: Channel, position: int, addresses: Sequence[str], timeout: float) -> TransportError:
        label, me = channel.labels[position], channel.labels[channel.index]
        *_, why = self._pauses.get(label, ("",))
        if not why and (wire := self._by_label.get(label)) is not None and wire.is_connecting:
            why = f"no answer within {timeout:.1f} s"
        if why and me > label:
            return TransportError(f"{me} cannot reach {label} at {addresses[position]}: {why}; {_ADVICE}")
        forged = f"; {why}" if why else ""
        return DeadlineExceeded(f"{label} did not come to epoch {channel.epoch} within {timeout:.1f} s{forged}")

    # --- proofs

    def _meet(self, wire: Wire, channel: Channel) -> None:
        """Say this end's nonce of a channel and, once the peer's is known, the proof."""
        if wire.label not in channel.labels or wire.is_connecting or (wire.is_guest and channel.id not in wire.nonces):
            return
        if channel.id not in wire.mine:
            wire.mine[channel.id] = secrets.token_bytes(32)
            self.say(wire, NONCE, channel.id, 0, 0, wire.mine[channel.id])
            if channel.id in wire.nonces:
                self.say(wire, PROOF, channel.id, 0, 0, self._proof(wire, channel, is_mine=True))

    def _proof(self, wire: Wire, channel: Channel, *, is_mine: bool) -> bytes:
        ends = (channel.labels[channel.index], wire.mine[channel.id]), (wire.label, wire.nonces[channel.id])
        (prover, nonce), (to, other) = ends if is_mine else ends[::-1]
        return channel.proof(prover.encode(), to.encode(), nonce, other)

    def _proved(self, wire: Wire, channel: Channel, proof: bytes) -> None:
        known = channel.id in wire.mine and channel.id in wire.nonces
        if not known or not hmac.compare_digest(proof, self._proof(wire, channel, is_mine=False)):
            why = (
                f"the process that came as {wire.label} does not hold the key of epoch {channel.epoch}, or its proof "
                f"was altered on the way to {channel.labels[channel.index]}"
            )
            label = wire.label
            self._drop(wire, why)
            self._pause(label, why)
            return
        if wire.is_guest:
            wire.is_guest = False
            if (old := self._by_label.get(wire.label)) is not None:
                self._drop(old, "it has connected again")
            self._by_label[wire.label] = wire
        wire.proven.add(channel.id)
        channel.peers[channel.labels.index(wire.label)] = wire

    # --- bytes

    def say(self, wire: Wire, kind: bytes, channel: bytes, tag: int, number: int, body: bytes = b"") -> None:
        """Send a frame."""
        wire.out.append(frame_of(kind, channel, tag, number, body))
        self.flush(wire)

    def flush(self, wire: Wire) -> None:
        """Give the kernel what it takes."""
        try:
            while wire.out and not wire.is_connecting:
                sent = wire.sock.sendmsg(
                    [part for each, _ in zip(wire.out, range(8), strict=False) for part in each.parts]
                )
                while sent:
                    first = wire.out[0]
                    first.is_begun = True
                    taken = min(sent, len(first.parts[0]))
                    sent -= taken
                    first.parts[0] = first.parts[0][taken:]
                    if not first.parts[0]:
                        del first.parts[0]
                    if not first.parts:
                        wire.out.popleft()
                        if first.posted is not None:
                            first.posted.is_done = True
        except BlockingIOError:
            pass
        except OSError as exc:
            self._drop(wire, exc.strerror or str(exc))
            return
        self._want_room(wire)

    def purge(self, wire: Wire, channel: bytes) -> None:
        """Drop what was not sent of a channel, and skip what arrives of its present message."""
        first = wire.out[0] if wire.out and wire.out[0].is_begun else None
        if first is not None and first.channel == channel and first.posted is not None:
            wire.is_torn, first = True, None
        wire.out = deque(each for each in wire.out if each is first or each.channel != channel)
        if wire.target is not None and wire.frame is not None and wire.frame[1] == channel:
            wire.into = wire.target = None
        if not wire.is_torn:
            self._want_room(wire)
        elif wire.sock.fileno() in self._fds:
            # `leave` closes it: closed now, the peer might name this worker instead of the one that failed
            self._epoll.modify(wire.sock.fileno(), 0)
            self._lose(wire, "a message was left unfinished")

    def _want_room(self, wire: Wire) -> None:
        wants = bool(wire.out) or wire.is_connecting
        if wants != wire.awaits_room and wire.sock.fileno() in self._fds:
            wire.awaits_room = wants
            self._epoll.modify(wire.sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if wants else 0))

    def step(self, timeout: float) -> None:
        """Move what can be moved; wait up to `timeout` seconds until something can."""
        for fd, events in self._epoll.poll(timeout):
            if self._listener is not None and fd == self._listener.fileno():
                self._accept()
                continue
            wire = self._fds.get(fd)
            if wire is None or wire.is_torn:
                continue
            if wire.is_connecting:
                self._connected(wire)
            elif events & ~select.EPOLLOUT:
                self._read(wire)
            if events & select.EPOLLOUT and fd in self._fds:
                self.flush(wire)
        now = time.monotonic()
        for guest in [w for w in self._fds.values() if w.is_guest and not w.nonces and now > w.since + _GUEST_S]:
            self._drop(guest, "it said no nonce")

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(BlockingIOError, ConnectionError):
            for _ in range(_MAX_GUESTS):
                sock, _ = self._listener.accept()
                sock.setblocking(False)
                self._add(sock, is_guest=True)
        guests = [wire for wire in self._fds.values() if wire.is_guest]  # the oldest first
        for guest in guests[: max(0, len(guests) - _MAX_GUESTS)]:
            self._drop(guest, "too many strangers have connected")

    def _add(self, sock: socket.socket, label: str = "", *, is_guest: bool) -> Wire:
        wire = self._fds[sock.fileno()] = Wire(sock, label, is_guest=is_guest)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_NODELAY, 1), *_KEEPALIVE):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._epoll.register(sock.fileno(), select.EPOLLIN)
        return wire

    def _connected(self, wire: Wire) -> None:
        if code := wire.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._failed(wire, os.strerror(code))
            return
        wire.is_connecting = False
        self.opened += 1
        for channel in self._channels.values():
            if not channel.is_formed:
                self._meet(wire, channel)
        self.flush(wire)

    def _read(self, wire: Wire) -> None:
        try:
            for _ in range(_READS):
                self._read_once(wire)
                if wire.sock.fileno() not in self._fds:
                    return
        except BlockingIOError:
            pass
        except (OSError, TransportError) as exc:
            self._failed(wire, (exc.strerror if isinstance(exc, OSError) else None) or str(exc))

    def _read_once(self, wire: Wire) -> None:
        if wire.frame is None:
            found = wire.sock.recv_into(wire.head[wire.got :])
            wire.got += found
            if wire.got == HEAD.size:
                wire.got = 0
                self._begin(wire, *HEAD.unpack(wire.head))
        else:
            if wire.target is not None and wire.target.is_abandoned:
                wire.into = wire.target = None
            into = self._skipped[: wire.left] if wire.into is None else wire.into
            found = wire.sock.recv_into(into)
            wire.left -= found
            wire.into = None if wire.into is None else wire.into[found:]
        if not found:
            raise ConnectionResetError("it closed the connection")
        if wire.frame is not None and not wire.left:
            self._end(wire)

    def _begin(self, wire: Wire, kind: bytes, channel: bytes, tag: int, number: int, nbytes: int) -> None:
        """Handle the head of a frame; raises TransportError if its body may not come."""
        wire.frame, wire.left, wire.into, wire.target, wire.body = (
            (kind, channel, tag, number),
            nbytes,
            None,
            None,
            None,
        )
        there = self._channels.get(channel) if channel in wire.proven else None
        if kind == BODY and there is not None:
            key = there.labels.index(wire.label), tag, number
            posted = there.receiving.pop(key, None)
            if posted is None or len(posted.data) != nbytes:
                raise TransportError(f"it sends a message of {nbytes} bytes that was not asked for")
            if not posted.is_abandoned:
                wire.into, wire.target = posted.data, posted
        elif kind in (HELLO, NONCE, PROOF) or there is not None:
            if nbytes > _LIMITS.get(kind, -1):
                raise TransportError(f"it sends a frame {kind!r} of {nbytes} bytes")
            wire.body = bytearray(nbytes)
            wire.into = memoryview(wire.body)
        elif wire.is_guest:
            raise TransportError("it sends data before its proof")

    def _end(self, wire: Wire) -> None:
        """Handle a whole frame."""
        assert wire.frame is not None
        (kind, channel, tag, number), body, posted = wire.frame, wire.body, wire.target
        wire.frame = wire.into = wire.target = wire.body = None
        if posted is not None:
            posted.is_done = True
        if body is None:
            return
        there = self._channels.get(channel)
        if kind == HELLO:
            if not wire.is_guest or wire.label:
                raise TransportError("it says hello twice")
            wire.label = body.partition(b"\0")[0].decode(errors="replace")
        elif kind == NONCE:
            wire.nonces[channel] = bytes(body)
            while len(wire.nonces) > _MAX_NONCES:
                del wire.nonces[next(iter(wire.nonces))]
            if there is not None and channel in wire.mine:
                self.say(wire, PROOF, channel, 0, 0, self._proof(wire, there, is_mine=True))
            elif there is not None:
                self._meet(wire, there)
        elif kind == PROOF:
            if there is not None:
                self._proved(wire, there, bytes(body))
        elif there is not None:
            there.came(there.labels.index(wire.label), kind, tag, number, bytes(body))

    def _drop(self, wire: Wire, why: str) -> None:
        """Close a connection; its channels lose the peer."""
        if self._fds.pop(wire.sock.fileno(), None) is None:
            return
        self._epoll.unregister(wire.sock.fileno())
        wire.sock.close()
        if self._by_label.get(wire.label) is wire:
            del self._by_label[wire.label]
        self._lose(wire, why)

    def _lose(self, wire: Wire, why: str) -> None:
        for channel in self._channels.values():
            for position in [position for position, each in channel.peers.items() if each is wire]:
                del channel.peers[position]
                if channel.is_formed:
                    channel.lost[position] = why
