"""ZeroMQ sockets with bounds: one frame a message, limits on sizes and queues, heartbeats, no lingering."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from refitd.buffers.handoff import refuse_if_listening
from refitd.errors import ConfigError, RefusedError
from refitd.protocol.base import MAX_MESSAGE_BYTES, Message
from refitd.protocol.codec import encode

# Messages a peer may leave unread before more are dropped (router) or refused (dealer).
HIGH_WATER_MARK = 10_000


def _bound(sock: zmq.Socket[bytes]) -> None:
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    sock.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    sock.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    sock.setsockopt(zmq.HANDSHAKE_IVL, 5_000)
    sock.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
    sock.setsockopt(zmq.IPV6, 1)


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
    """The listening end: many peers, each known by the identity ZeroMQ gave it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        """Bind.

        Raises:
            RefusedError: the endpoint is in use.
        """
        self.socket = context.socket(zmq.ROUTER)
        _bound(self.socket)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.SNDTIMEO, 0)
        self._file = Path(endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc://") else None
        if self._file is not None:
            refuse_if_listening(self._file)
        try:
            with _private():
                self.socket.bind(endpoint)
        except zmq.ZMQError as exc:
            self.socket.close()
            raise RefusedError(f"{endpoint}: cannot listen here: {exc.strerror}; is another one running?") from exc

    def receive(self) -> tuple[bytes, bytes] | None:
        """Return (identity, frame), None when nothing waits. Messages of several frames are dropped."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return (frames[0], frames[1]) if len(frames) == 2 else (frames[0], b"")

    def send(self, identity: bytes, request: int, message: Message) -> bool:
        """Queue a message; False when the peer is gone or its queue is full."""
        try:
            self.socket.send_multipart([identity, encode(request, message)])
        except (zmq.Again, zmq.ZMQError):
            return False
        return True

    def close(self) -> None:
        """Close the socket and remove its file, which ZeroMQ leaves behind."""
        self.socket.close()
        if self._file is not None:
            self._file.unlink(missing_ok=True)


class Dealer:
    """The calling end: one peer, reconnected to by ZeroMQ for as long as it takes."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        _bound(self.socket)
        self.socket.setsockopt(zmq.SNDTIMEO, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self.socket.connect(endpoint)

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
        """Close the socket."""
        self.socket.close()
