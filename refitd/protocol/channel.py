"""Bounded ZeroMQ sockets: one frame per message, limits on sizes and queues, heartbeats, no lingering."""

from __future__ import annotations

import contextlib
import enum
import os
import struct
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from refitd.buffers.handoff import refuse_if_listening
from refitd.errors import ConfigError, ProtocolError, RefusedError
from refitd.protocol.base import MAX_MESSAGE_BYTES, Message, encode
from refitd.protocol.keys import DOMAIN, KEYGEN, ClientKeys, KeyPair, ServerKeys, ZapHandler
from refitd.protocol.local import Failure

# Messages a peer may leave unread before more are dropped (router) or refused (dealer).
HIGH_WATER_MARK = 10_000

# Messages of one peer that queue here; more queue at the peer. Each may be as large as a message can be.
UNREAD_MARK = 32


@dataclass(frozen=True, slots=True)
class Received:
    """A received frame, not yet decoded."""

    identity: bytes  # of the connection
    frame: bytes | memoryview  # not copied; empty (no valid message) if the peer sent no frame, or several
    key: str  # the public key of the connection, "" without keys
    address: str  # the peer's; for a local peer "localhost:UID:GID:PID", from the kernel

    @property
    def local_peer(self) -> tuple[int, int] | None:
        """(uid, pid) of a local peer; None for a remote one."""
        return local_peer(self.address)


def local_peer(address: str) -> tuple[int, int] | None:
    """Return (uid, pid) of the local peer at `address` as ZeroMQ reports it; None for a remote one."""
    words = address.split(":")
    if len(words) != 4 or not all(word.isdigit() for word in words[1:]):
        return None
    return int(words[1]), int(words[3])


def _bound(sock: zmq.Socket[bytes], endpoint: str) -> None:
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    sock.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    sock.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    sock.setsockopt(zmq.HANDSHAKE_IVL, 5_000)
    if not endpoint.startswith("ipc://"):
        # No heartbeats on one host: the kernel reports a peer's end. With heartbeats, a peer that was suspended and
        # continues would use a connection that the other end has dropped, and would never receive a message again.
        sock.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
    sock.setsockopt(zmq.IPV6, 1)


def _use_key(sock: zmq.Socket[bytes], own: KeyPair) -> None:
    sock.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
    sock.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())


@contextlib.contextmanager
def _private() -> Iterator[None]:
    """Create files with mode 0600 inside this context: by default ZeroMQ makes socket files 0755."""
    old = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(old)


def framed(request: int, message: Message) -> bytes:
    """Encode a message; a too large one becomes a Failure."""
    try:
        return encode(request, message)
    except (ProtocolError, OverflowError) as exc:
        return encode(request, _too_large(message, exc))


def _too_large(message: Message, error: Exception) -> Failure:
    return Failure(code=ProtocolError.code, message=f"{type(message).__name__}: {error}")


class Router:
    """The listening end: many peers, each identified by its ZeroMQ identity.

    With keys, it receives only from peers that have an allowed key and know this end's key. The loop polls
    `control_sockets`, then calls `turned_away`. Create at most one per context.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        keys: ServerKeys | None = None,
        *,
        uids: Iterable[int] = (),
        unsent: int = HIGH_WATER_MARK,
    ) -> None:
        """Bind.

        Args:
            context: makes the socket.
            endpoint: listens on this address.
            keys: this end's key and the admitted ones.
            uids: over ipc, the admitted users, checked by the kernel; empty: all who can open the socket file.
            unsent: messages that a peer may leave unread before more are dropped.

        Raises:
            RefusedError: the endpoint is in use.
        """
        self.socket = context.socket(zmq.ROUTER)
        _bound(self.socket, endpoint)
        self.socket.setsockopt(zmq.RCVHWM, UNREAD_MARK)
        self.socket.setsockopt(zmq.SNDHWM, unsent)
        for uid in uids:
            self.socket.setsockopt(zmq.IPC_FILTER_UID, uid)  # each call adds one
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.SNDTIMEO, 0)
        self._keys = keys
        self._zap = ZapHandler(context, keys.allowed) if keys is not None else None
        self._monitor = SocketMonitor(self.socket) if endpoint.startswith("tcp://") else None
        if keys is not None:
            _use_key(self.socket, keys.own)
            self.socket.setsockopt(zmq.CURVE_SERVER, 1)
            self.socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
            self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._file = Path(endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc://") else None
        if self._file is not None:
            refuse_if_listening(self._file)
        try:
            with _private():
                self.socket.bind(endpoint)
        except zmq.ZMQError as exc:
            self._close_sockets()
            raise RefusedError(f"{endpoint}: cannot listen here: {exc.strerror}; is another one running?") from exc

    def admit(self, allowed: Collection[str]) -> None:
        """Admit these keys from now on. Earlier connections stay open: the caller must check their keys."""
        if self._zap is not None:
            self._zap.admit(allowed)

    def receive(self) -> Received | None:
        """Return the next message, None if none waits."""
        try:
            head = self.socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        first = self.socket.recv(copy=False) if head.more else None
        several = False
        # drop them one by one: a peer may have sent a million frames
        while self.socket.getsockopt(zmq.RCVMORE):
            several = True
            self.socket.recv(copy=False)
        if first is None:
            return Received(head.bytes, b"", "", "")
        address = key = ""
        with contextlib.suppress(zmq.ZMQError):  # a connection may lack a property
            address = str(first.get("Peer-Address"))
            key = str(first.get("User-Id")) if self._keys is not None else ""
        return Received(head.bytes, b"" if several else first.buffer, key, address)

    def send(self, identity: bytes, request: int, message: Message) -> bool:
        """Queue a message; False if the peer is disconnected or its queue full. If too large, it becomes a Failure."""
        try:
            self.socket.send_multipart([identity, encode(request, message)])
        except (ProtocolError, OverflowError) as exc:
            return self.send(identity, request, _too_large(message, exc))
        except zmq.ZMQError:
            return False
        return True

    def send_frame(self, identity: bytes, frame: bytes) -> bool:
        """Queue an encoded message; False if the peer is disconnected or its queue is full."""
        try:
            self.socket.send_multipart([identity, frame])
        except zmq.ZMQError:
            return False
        return True

    @property
    def control_sockets(self) -> list[zmq.Socket[bytes]]:
        """The sockets to poll besides `socket`."""
        return [end.socket for end in (self._zap, self._monitor) if end is not None]

    def turned_away(self) -> Iterator[dict[str, str]]:
        """Answer pending ZAP requests; yield log fields for each refused peer."""
        if self._zap is not None:
            for peer in self._zap.answer():
                reason = (
                    "its key is not in security.allowed; if this is a daemon of yours, add it and run `refitctl reload`"
                )
                yield {"key": peer.key, "address": peer.address, "reason": reason}
        while self._monitor is not None and (failed := self._monitor.receive()) is not None:
            if failed is HandshakeFailure.OTHER_MECHANISM and self._keys is not None:
                yield {"reason": "a peer uses no keys; a daemon needs security.key and security.server_key"}
            elif failed is HandshakeFailure.OTHER_MECHANISM:
                yield {"reason": "a peer uses keys and there are none here; set security.key and security.allowed"}
            elif failed is HandshakeFailure.PROTOCOL and self._keys is not None:
                yield {"reason": f"{failed.value}; a daemon's security.server_key must be {self._keys.own.public}"}

    def _close_sockets(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
        self.socket.close()
        if self._zap is not None:
            self._zap.close()

    def close(self, *, sending_s: float = 0.0) -> None:
        """Close the sockets and remove the socket file; wait up to `sending_s` to send queued messages."""
        if not self.socket.closed:
            self.socket.setsockopt(zmq.LINGER, int(1000 * sending_s))
        self._close_sockets()
        if self._file is not None:
            self._file.unlink(missing_ok=True)


def hear_out(sockets: Iterable[zmq.Socket[bytes]], seconds: float) -> None:
    """Read and drop messages for `seconds`, after a last message was sent and before the sockets are closed.

    The kernel resets a connection that is closed with unread data. A peer whose next write then fails would never read
    the last message.
    """
    poller = zmq.Poller()
    for each in sockets:
        poller.register(each, zmq.POLLIN)
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        for found, _ in poller.poll(int(1000 * left) + 1):
            found.recv_multipart(zmq.NOBLOCK, copy=False)


class Dealer:
    """The connecting end: one peer, to which ZeroMQ reconnects without limit.

    ZeroMQ stops reconnecting to a peer that refuses a handshake. Over TCP the loop polls `control_sockets`, then calls
    `failure`, and from time to time `retry`.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        keys: ClientKeys | None = None,
        *,
        queues: bool = True,
    ) -> None:
        """Start connecting, in the background. Without `queues`, messages before the connection are refused.

        Raises:
            ConfigError: the endpoint is invalid.
        """
        self.endpoint = endpoint
        self._keys = keys
        self._is_refused = False
        self.peer = ""  # address of the last message's sender, as in Received.address
        self.socket = context.socket(zmq.DEALER)
        _bound(self.socket, endpoint)
        self.socket.setsockopt(zmq.SNDTIMEO, 0)
        self.socket.setsockopt(zmq.IMMEDIATE, not queues)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self._monitor = SocketMonitor(self.socket) if endpoint.startswith("tcp://") else None
        if keys is not None:
            _use_key(self.socket, keys.own)
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as exc:
            self.close()
            raise ConfigError(f"{endpoint}: cannot connect to it: {exc.strerror}; tcp://HOST:PORT is expected") from exc

    @property
    def control_sockets(self) -> list[zmq.Socket[bytes]]:
        """The sockets to poll besides `socket`."""
        return [self._monitor.socket] if self._monitor is not None else []

    def failure(self) -> str | None:
        """Return the reason of a handshake failure since the last call, with advice; None if none failed."""
        said = None
        while self._monitor is not None and (failed := self._monitor.receive()) is not None:
            self._is_refused = self._is_refused or failed is not HandshakeFailure.ENDED
            said = f"{self.endpoint}: {failed.value}; {self._advice(failed)}"
        return said

    def _advice(self, failed: HandshakeFailure) -> str:
        if self._keys is None:
            return f"if the coordinator uses keys, set security.key and security.server_key here ({KEYGEN})"
        match failed:
            case HandshakeFailure.KEY_REFUSED:
                return (
                    f"add the line {self._keys.own.public_line!r} to the file security.allowed of the coordinator, "
                    "which `refitctl reload` on a node that it admits, or SIGHUP, makes it read again"
                )
            case HandshakeFailure.OTHER_MECHANISM:
                return "set security.key and security.allowed for the coordinator, too"
        return f"if this goes on, check that the coordinator's key is security.server_key here, {self._keys.server}"

    def retry(self) -> None:
        """Reconnect if the last handshake was refused: the cause may have been fixed."""
        if self._is_refused:
            self._is_refused = False
            self.socket.disconnect(self.endpoint)
            self.socket.connect(self.endpoint)

    def receive(self) -> bytes | None:
        """Return the next frame, None if none waits."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        self.peer = ""
        with contextlib.suppress(zmq.ZMQError):  # a connection may lack this property
            self.peer = str(frames[0].get("Peer-Address"))
        return frames[0].bytes if len(frames) == 1 else b""

    def send_frame(self, frame: bytes) -> bool:
        """Queue an encoded message; False if the queue is full."""
        try:
            self.socket.send(frame)
        except zmq.Again:
            return False
        return True

    def close(self, *, sending_s: float = 0.0) -> None:
        """Close the sockets; wait up to `sending_s` to send queued messages."""
        if self._monitor is not None:
            self._monitor.close()
        if not self.socket.closed:
            self.socket.setsockopt(zmq.LINGER, int(1000 * sending_s))
        self.socket.close()


class CoordinatorSockets:
    """Sends to the leading coordinator and ignores the others; while the leader is unknown, sends to all.

    With one endpoint, that coordinator is always the leader; `follow` is only for several.

    Attributes:
        peer: address of the last message's sender, as in Received.address.
        queues: whether messages wait for a connection; if not, `send` fails without a connection.
        sockets: the sockets that `receive` reads.
        control_sockets: the sockets to poll besides `sockets`; when one is ready, call `failure`.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoints: Sequence[str], keys: ClientKeys | None
    ) -> None:
        """Start to connect in the background.

        Raises:
            ConfigError: an endpoint cannot be connected to.
        """
        several = len(endpoints) > 1
        self.queues = not several
        self._dealers: list[Dealer] = []
        try:
            for endpoint in endpoints:
                self._dealers.append(Dealer(context, endpoint, keys, queues=not several))
        except BaseException:
            self.close()
            raise
        self.sockets = [dealer.socket for dealer in self._dealers]
        self.control_sockets = [sock for dealer in self._dealers for sock in dealer.control_sockets]
        self._leader = None if several else self._dealers[0]
        self._last = self._dealers[0]
        self.peer = ""

    @property
    def is_seeking(self) -> bool:
        """Whether this node has several coordinators and follows none of them."""
        return self._leader is None

    def follow(self, is_up: bool) -> str:
        """If a coordinator is up, keep following it, or follow the last sender; if none is up, follow none.

        Returns:
            The endpoint of a newly followed coordinator out of several, else "".
        """
        if len(self._dealers) == 1:
            return ""
        found = (self._leader or self._last) if is_up else None
        is_new, self._leader = found not in (None, self._leader), found
        return self._last.endpoint if is_new else ""

    def receive(self) -> bytes | None:
        """Return the next frame, None if none waits; drop frames of coordinators other than the followed one."""
        for dealer in self._dealers:
            while (frame := dealer.receive()) is not None:
                if self._leader in (None, dealer):
                    self._last, self.peer = dealer, dealer.peer
                    return frame
        return None

    def send(self, request: int, message: Message) -> bool:
        """Queue a message; return False if the queue is full, or if none of several coordinators is connected."""
        frame = encode(request, message)
        if self._leader is not None:
            return self._leader.send_frame(frame)
        return any([dealer.send_frame(frame) for dealer in self._dealers])

    def failure(self) -> str | None:
        """Return why a handshake failed since the last call, with advice; None if none failed."""
        said = [text for dealer in self._dealers if (text := dealer.failure()) is not None]
        return said[0] if said else None

    def retry(self) -> None:
        """Reconnect to the coordinators that refused the last handshake, because the cause may have been fixed."""
        for dealer in self._dealers:
            dealer.retry()

    def close(self, *, sending_s: float = 0.0) -> None:
        """Close the sockets; continue to send queued messages for up to `sending_s`."""
        for dealer in self._dealers:
            dealer.close(sending_s=sending_s)


_EVENT = struct.Struct("=Hi")  # (event, value); pyzmq's own parser would load asyncio


class HandshakeFailure(enum.Enum):
    """A failed handshake and its cause."""

    KEY_REFUSED = "the other end does not allow our key"
    OTHER_MECHANISM = "one end uses keys and the other does not"
    PROTOCOL = "the other end's bytes make no sense: it has another server key in mind, or is no ZeroMQ"
    ENDED = "the other end has closed the connection without a word"


_EVENTS: dict[int, HandshakeFailure] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: HandshakeFailure.KEY_REFUSED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: HandshakeFailure.PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: HandshakeFailure.ENDED,
}


class SocketMonitor:
    """Reports one socket's failures to the loop that polls `socket`. Create it before that socket binds or connects."""

    def __init__(self, watched: zmq.Socket[bytes]) -> None:
        self._watched = watched
        self.socket = watched.get_monitor_socket(sum(_EVENTS))

    def receive(self) -> HandshakeFailure | None:
        """Return the next failure, None if none waits."""
        try:
            frame, _endpoint = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        event, value = _EVENT.unpack(frame)
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return HandshakeFailure.OTHER_MECHANISM
        return _EVENTS[event]

    def close(self) -> None:
        """Stop watching. Call it before the watched socket is closed."""
        self._watched.disable_monitor()
        self.socket.close()
