"""ZeroMQ sockets with bounds: one frame a message, limits on sizes and queues, heartbeats, no lingering."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import zmq

from refitd.buffers.handoff import refuse_if_listening
from refitd.errors import ConfigError, ProtocolError, RefusedError
from refitd.protocol.base import MAX_MESSAGE_BYTES, Message
from refitd.protocol.codec import encode
from refitd.protocol.doorkeeper import DOMAIN, Doorkeeper
from refitd.protocol.handshakes import Failed, Handshakes
from refitd.protocol.keys import KEYGEN, ClientKeys, KeyPair, ServerKeys
from refitd.protocol.local import Failure

# Messages a peer may leave unread before more are dropped (router) or refused (dealer).
HIGH_WATER_MARK = 10_000

# Messages of one peer that wait here to be read; more wait at the peer. Any of them may be as large as messages get.
UNREAD_MARK = 32


@dataclass(frozen=True, slots=True)
class Received:
    """A message as it came in."""

    identity: bytes  # of the connection
    frame: bytes  # empty, which is no message, where the peer sent several frames or none
    key: str  # the public key that the connection was let in with, "" without keys
    address: str  # where the peer is; of one on this host "localhost:UID:GID:PID", as the kernel says

    @property
    def local_peer(self) -> tuple[int, int] | None:
        """(uid, pid) of a peer on this host, None of another."""
        words = self.address.split(":")
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
        # On one host the kernel says when a peer has ended. One that is only stopped for a while would come back over
        # a connection that nobody knows, and never hear anything again.
        sock.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
    sock.setsockopt(zmq.IPV6, 1)


def _property(frame: zmq.Frame, name: str) -> str:
    """Return what ZeroMQ knows of the connection that a frame came over, "" where it does not."""
    try:
        return str(frame.get(name))
    except zmq.ZMQError:
        return ""


def _use_key(sock: zmq.Socket[bytes], own: KeyPair) -> None:
    sock.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
    sock.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())


@contextmanager
def _private() -> Iterator[None]:
    """Files made inside are 0600: ZeroMQ would make its socket files 0755."""
    old = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(old)


def make_runtime_dir(path: Path) -> None:
    """Make the directory of the sockets, 0700 and ours.

    Raises:
        ConfigError: it exists and belongs to somebody else, is open to others, or cannot be made.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        stat = path.lstat()
    except OSError as exc:
        raise ConfigError(f"node.runtime_dir {path}: {exc.strerror}; choose a directory this user can make") from exc
    if stat.st_uid != os.getuid() or stat.st_mode & 0o077 or path.is_symlink():
        raise ConfigError(
            f"node.runtime_dir {path} must be a directory of uid {os.getuid()} with mode 0700 "
            f"(found uid {stat.st_uid}, mode {stat.st_mode & 0o777:o}); fix it or choose another"
        )


class Router:
    """The listening end: many peers, each known by the identity ZeroMQ gave it.

    With keys only peers that have an allowed one, and know this end's, are heard; the loop that polls `doors` calls
    `turned_away`. One such end per context.
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
            endpoint: where to listen.
            keys: this end's, and those that are let in.
            uids: over ipc: the users that are let in, by the kernel's word; none: whoever can open the file.
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
        self._doorkeeper = Doorkeeper(context, keys.allowed) if keys is not None else None
        self._handshakes = Handshakes(self.socket) if endpoint.startswith("tcp://") else None
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

    def receive(self) -> Received | None:
        """Return the next message, None when nothing waits."""
        try:
            head = self.socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        first = self.socket.recv(copy=False) if head.more else None
        several = False
        # one by one: a peer may have sent a million frames
        while self.socket.getsockopt(zmq.RCVMORE):
            several = True
            self.socket.recv(copy=False)
        if first is None:
            return Received(head.bytes, b"", "", "")
        frame = b"" if several else first.bytes
        return Received(head.bytes, frame, _property(first, "User-Id"), _property(first, "Peer-Address"))

    def send(self, identity: bytes, request: int, message: Message) -> bool:
        """Queue a message; False when the peer is gone or its queue is full. One too large goes as a Failure."""
        try:
            frame = encode(request, message)
        except (ProtocolError, OverflowError) as exc:
            frame = encode(request, Failure(code=ProtocolError.code, message=f"{type(message).__name__}: {exc}"))
        try:
            self.socket.send_multipart([identity, frame])
        except (zmq.Again, zmq.ZMQError):
            return False
        return True

    @property
    def doors(self) -> list[zmq.Socket[bytes]]:
        """What to poll besides `socket`."""
        return [end.socket for end in (self._doorkeeper, self._handshakes) if end is not None]

    def turned_away(self) -> Iterator[dict[str, str]]:
        """Decide over the peers that knock; yield what a log should say of each that may not come in."""
        if self._doorkeeper is not None:
            for peer in self._doorkeeper.answer():
                reason = "its key is not in security.allowed; if it is a daemon of yours, add it there and start again"
                yield {"key": peer.key, "address": peer.address, "reason": reason}
        while self._handshakes is not None and (failed := self._handshakes.receive()) is not None:
            if failed is Failed.OTHER_MECHANISM and self._keys is not None:
                yield {"reason": "a peer uses no keys; a daemon needs security.key and security.server_key"}
            elif failed is Failed.OTHER_MECHANISM:
                yield {"reason": "a peer uses keys and there are none here; set security.key and security.allowed"}
            elif failed is Failed.PROTOCOL and self._keys is not None:
                yield {"reason": f"{failed.value}; a daemon's security.server_key must be {self._keys.own.public}"}

    def _close_sockets(self) -> None:
        if self._handshakes is not None:
            self._handshakes.close()
        self.socket.close()
        if self._doorkeeper is not None:
            self._doorkeeper.close()

    def close(self) -> None:
        """Close the sockets and remove the file, which ZeroMQ leaves behind."""
        self._close_sockets()
        if self._file is not None:
            self._file.unlink(missing_ok=True)


class Dealer:
    """The calling end: one peer, reconnected to by ZeroMQ for as long as it takes.

    ZeroMQ gives up on a peer that refuses a handshake. Over tcp the loop that polls `doors` calls `failure`, and
    `retry` now and then.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: ClientKeys | None = None) -> None:
        """Connect, which goes on in the background.

        Raises:
            ConfigError: the endpoint is none that can be connected to.
        """
        self._endpoint = endpoint
        self._keys = keys
        self._is_refused = False
        self.socket = context.socket(zmq.DEALER)
        _bound(self.socket, endpoint)
        self.socket.setsockopt(zmq.SNDTIMEO, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self._handshakes = Handshakes(self.socket) if endpoint.startswith("tcp://") else None
        if keys is not None:
            _use_key(self.socket, keys.own)
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as exc:
            self.close()
            raise ConfigError(f"{endpoint}: cannot connect to it: {exc.strerror}; tcp://HOST:PORT is expected") from exc

    @property
    def doors(self) -> list[zmq.Socket[bytes]]:
        """What to poll besides `socket`."""
        return [self._handshakes.socket] if self._handshakes is not None else []

    def failure(self) -> str | None:
        """Return why a handshake has failed since the last call and what to do; None if none has."""
        said = None
        while self._handshakes is not None and (failed := self._handshakes.receive()) is not None:
            self._is_refused = self._is_refused or failed is not Failed.ENDED
            said = f"{self._endpoint}: {failed.value}; {self._advice(failed)}"
        return said

    def _advice(self, failed: Failed) -> str:
        if self._keys is None:
            return f"if the coordinator uses keys, set security.key and security.server_key here ({KEYGEN})"
        match failed:
            case Failed.KEY_REFUSED:
                return (
                    f"add the line {self._keys.own.public_line!r} to the file security.allowed of the coordinator "
                    "and start that again"
                )
            case Failed.OTHER_MECHANISM:
                return "set security.key and security.allowed for the coordinator, too"
        return f"if this goes on, check that the coordinator's key is security.server_key here, {self._keys.server}"

    def retry(self) -> None:
        """Connect again if the last handshake was refused: somebody may have mended the reason."""
        if self._is_refused:
            self._is_refused = False
            self.socket.disconnect(self._endpoint)
            self.socket.connect(self._endpoint)

    def receive(self) -> bytes | None:
        """Return a frame, None when nothing waits."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return frames[0] if len(frames) == 1 else b""

    def send(self, request: int, message: Message) -> bool:
        """Queue a message; False when the queue is full."""
        try:
            self.socket.send(encode(request, message))
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Close the sockets."""
        if self._handshakes is not None:
            self._handshakes.close()
        self.socket.close()
