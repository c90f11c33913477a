"""Datagrams with descriptors between processes of one machine, and the identity of the peer."""

from __future__ import annotations

import array
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from refitd.errors import PeerLost, ProtocolError, RefusedError

# A datagram contains one small message; plans are sent as memory files.
MAX_DATAGRAM = 64 << 10


@dataclass(frozen=True, slots=True)
class Peer:
    """The connected process, as reported by the kernel."""

    pid: int
    uid: int


def refuse_if_listening(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> None:
    """Refuse a socket file that a process listens on; ZeroMQ would silently replace it.

    Raises:
        RefusedError: a process listens there.
    """
    probe = socket.socket(socket.AF_UNIX, kind)
    try:
        probe.connect(str(path))
    except OSError:
        return
    finally:
        probe.close()
    raise RefusedError(
        f"{path}: another refitd process is already listening here; stop it, or choose another node.runtime_dir"
    )


def listen(path: Path) -> socket.socket:
    """Listen for clients on a 0600 SEQPACKET socket.

    Raises:
        RefusedError: a process listens there already. A stale socket file is replaced without an error.
    """
    refuse_if_listening(path, socket.SOCK_SEQPACKET)
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    old = os.umask(0o177)
    try:
        server.bind(str(path))
    except OSError as exc:
        server.close()
        raise RefusedError(f"{path}: cannot listen here: {exc.strerror}; check node.runtime_dir") from exc
    finally:
        os.umask(old)
    server.listen(256)
    server.setblocking(False)
    return server


def peer_of(connection: socket.socket) -> Peer:
    """Return the credentials of the process at the other end (SO_PEERCRED)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return Peer(*struct.unpack("3i", raw)[:2])


# Missing in some versions of Python's socket module; the number is the kernel's (asm-generic/socket.h).
_SO_PEERPIDFD = 77


def process_of(connection: socket.socket, peer: Peer) -> int | None:
    """Return a pidfd of the connected process; it becomes readable when that process ends.

    The socket is not enough, because forked children keep it open. Return None if the kernel has no pidfds (before
    Linux 5.3), or hides the process (another pid namespace).

    Raises:
        PeerLost: the process has ended already.
    """
    try:
        found: int = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        return found
    except ProcessLookupError as exc:
        raise PeerLost(f"the peer (pid {peer.pid}) has ended") from exc
    except OSError:
        pass  # before Linux 6.5
    try:
        return os.pidfd_open(peer.pid)
    except ProcessLookupError as exc:
        raise PeerLost(f"the peer (pid {peer.pid}) has ended") from exc
    except OSError:
        return None


def send(connection: socket.socket, data: bytes, fds: tuple[int, ...] = ()) -> None:
    """Send one datagram with descriptors.

    Raises:
        PeerLost: the peer has ended or does not read.
    """
    if len(data) > MAX_DATAGRAM:
        raise ProtocolError(f"datagram of {len(data)} bytes: the limit is {MAX_DATAGRAM}")
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        connection.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
    except (BrokenPipeError, ConnectionResetError, BlockingIOError, TimeoutError) as exc:
        raise PeerLost(f"the peer is gone or does not read: {exc.strerror or exc}") from exc


def receive(connection: socket.socket, max_fds: int = 1) -> tuple[bytes, tuple[int, ...]]:
    """Return one datagram and its descriptors, which the caller closes.

    Raises:
        PeerLost: the connection has ended.
        ProtocolError: the datagram exceeds MAX_DATAGRAM or carries too many descriptors.
    """
    fds = array.array("i")
    try:
        data, ancillary, flags, _ = connection.recvmsg(
            MAX_DATAGRAM, socket.CMSG_SPACE(max(1, max_fds) * fds.itemsize), socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionResetError as exc:
        raise PeerLost("the peer closed the connection") from exc
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if flags & socket.MSG_CTRUNC and not fds:
        raise ProtocolError(
            "a descriptor could not be taken in: this process may open no more files; raise its limit (`ulimit -n`)"
        )
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(fds) > max_fds:
        close_all(tuple(fds))
        raise ProtocolError("a datagram was longer, or carried more descriptors, than this socket allows")
    if not data:
        close_all(tuple(fds))
        raise PeerLost("the peer closed the connection")
    return data, tuple(fds)


def close_all(fds: tuple[int, ...]) -> None:
    """Close descriptors that came with a datagram."""
    for fd in fds:
        os.close(fd)
