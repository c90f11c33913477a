"""The daemon's doors: who may come in, and descriptors for those who are."""

from __future__ import annotations

import os
import secrets
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from refitd.buffers import handoff
from refitd.buffers.arena import read_only
from refitd.buffers.capacity import descriptors_left
from refitd.errors import PeerLost, ProtocolError, RefitdError, RefusedError
from refitd.protocol import sidecar
from refitd.protocol.channel import Received
from refitd.protocol.codec import Decoder, encode
from refitd.protocol.local import Failure, Told

MAX_SESSIONS = 4096

# From connecting to Hello; a client takes milliseconds.
HELLO_S = 30.0

# Requests that one client is answered before the others have their turn.
_BATCH = 16

# What a client has sent on its connection is heard before what it has sent otherwise, and before its end; a socket's
# buffer holds some hundreds of messages, and one that sends more all the time is heard no further.
_UNHEARD = 1024

# A client takes three descriptors and its arenas travel as more: with fewer than this free nobody else comes in.
CLIENT_RESERVE = 16


@dataclass(slots=True)
class _PendingClient:
    socket: socket.socket
    peer: handoff.Peer
    token: bytes
    session: int
    process: int | None = None  # a pidfd: forked children keep the socket open, and hold no session by that
    was_reset: bool = False
    identity: bytes | None = None  # ZeroMQ's, once it has said hello
    address: str = ""  # and what ZeroMQ says of where it is
    deadline: float | None = None  # to say hello


class ClientListener:
    """Accepts clients on the descriptor socket and ties their ZeroMQ identities to what the kernel says of them."""

    def __init__(
        self,
        path: Path,
        endpoint: str,
        allowed_uids: frozenset[int],
        on_change: Callable[[int, int], None],
        on_goodbye: Callable[[int], None],
        on_told: Callable[[int, Told], None],
    ) -> None:
        """Listen. `on_change` is told which descriptors to poll, `on_goodbye` which session is about to be closed.

        `on_told` is given what the members of a session say of their commits.
        """
        self._listener = handoff.listen(path)
        self._path = path
        self._endpoint = endpoint
        self._allowed = allowed_uids
        self._on_change = on_change
        self._on_goodbye = on_goodbye
        self._on_told = on_told
        self._visitors: dict[int, _PendingClient] = {}  # by descriptor
        self._processes: dict[int, int] = {}  # pidfd -> descriptor
        self._by_identity: dict[bytes, _PendingClient] = {}
        self._sessions = 0
        self._decoder: Decoder[sidecar.FetchArena | sidecar.Goodbye | Told] = Decoder(
            sidecar.DescriptorRequest, handoff.MAX_DATAGRAM
        )
        on_change(self._listener.fileno(), select.POLLIN)

    @property
    def listener_fd(self) -> int:
        """The listening descriptor."""
        return self._listener.fileno()

    def owns(self, fd: int) -> bool:
        """Whether a descriptor is a client's connection, or its process."""
        return fd in self._visitors or fd in self._processes

    def accept(self) -> str:
        """Let a client in, or return why it was turned away."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return ""
        except OSError as exc:
            return f"a client could not be let in: {exc.strerror}"
        connection.setblocking(False)
        peer = handoff.peer_of(connection)
        refusal = ""
        if peer.uid not in self._allowed:
            refusal = f"uid {peer.uid} (pid {peer.pid}) may not use this daemon; add it to node.allowed_uids"
        elif len(self._visitors) >= MAX_SESSIONS:
            refusal = f"this daemon has {MAX_SESSIONS} clients already"
        elif (left := descriptors_left()) < CLIENT_RESERVE:
            refusal = (
                f"this daemon can open only {left} more files (RLIMIT_NOFILE) and keeps {CLIENT_RESERVE} free; "
                "close registrations or clients, or raise its limit (`ulimit -Hn`, LimitNOFILE=)"
            )
        try:
            if refusal:
                handoff.send(connection, encode(0, Failure(code=RefusedError.code, message=refusal)))
                connection.close()
                return refusal
            self._sessions += 1
            visitor = _PendingClient(connection, peer, secrets.token_bytes(16), self._sessions)
            handoff.send(connection, encode(0, sidecar.Greeting(token=visitor.token, endpoint=self._endpoint)))
            visitor.process = handoff.process_of(connection, peer)
        except PeerLost:
            connection.close()
            return ""
        self._visitors[connection.fileno()] = visitor
        self._on_change(connection.fileno(), select.POLLIN)
        if visitor.process is not None:
            self._processes[visitor.process] = connection.fileno()
            self._on_change(visitor.process, select.POLLIN)
        return ""

    def admit(self, peer: Received, token: bytes) -> tuple[int, handoff.Peer]:
        """Tie a ZeroMQ connection to the one that was given this token; return its session and whose it is.

        Raises:
            RefusedError: nobody was given this token, it has been used, another process was given it, or this
                connection has a session already.
        """
        if peer.identity in self._by_identity:
            raise RefusedError("this connection has a session already; one Hello opens one")
        for visitor in self._visitors.values():
            if not secrets.compare_digest(visitor.token, token) or visitor.identity is not None:
                continue
            # tokens are not for passing on: both connections are of one process, by the kernel's word
            if peer.local_peer != (visitor.peer.uid, visitor.peer.pid):
                break
            visitor.identity, visitor.address = peer.identity, peer.address
            self._by_identity[peer.identity] = visitor
            return visitor.session, visitor.peer
        raise RefusedError("this token opens no session here; connect through refitd.connect()")

    def session_of(self, peer: Received) -> int | None:
        """Return the session of an admitted connection. An identity that another process has taken over has none."""
        visitor = self._by_identity.get(peer.identity)
        return visitor.session if visitor is not None and visitor.address == peer.address else None

    def expire(self, now: float) -> int:
        """Close the connections that have not said hello in time; return how many there were."""
        late = 0
        for fd, visitor in list(self._visitors.items()):
            if visitor.identity is not None:
                continue
            if visitor.deadline is None:
                visitor.deadline = now + HELLO_S
            elif now >= visitor.deadline:
                self._leave(fd)
                late += 1
        return late

    def identity_of(self, session: int) -> bytes | None:
        """Return the ZeroMQ identity of a session, None when it is gone."""
        return next((v.identity for v in self._visitors.values() if v.session == session), None)

    def serve(self, fd: int, fetch: Callable[[int, int, bool], tuple[int, int, str]]) -> int | None:
        """Answer what a client asked on its connection; return its session if it has gone, which `leave` then closes.

        `fetch(session, arena, write)` returns (descriptor, bytes, GPU) or raises RefusedError.
        """
        try:
            if fd in self._processes:
                # its process has ended, and what it has said lies in the socket
                visitor = self._visitors[self._processes[fd]]
                self._hear(visitor, fetch, _UNHEARD)
                return visitor.session
            visitor = self._visitors[fd]
            return None if self._hear(visitor, fetch, _BATCH) else visitor.session
        except ProtocolError:
            return visitor.session

    def hear(self, peer: Received, fetch: Callable[[int, int, bool], tuple[int, int, str]]) -> bool:
        """Take what an admitted peer has said on its other connection before this; return False to put it out."""
        try:
            self._hear(self._by_identity[peer.identity], fetch, _UNHEARD)  # should it have ended, `serve` will see
        except ProtocolError:
            return False
        return True

    def leave(self, session: int) -> None:
        """Close a session's connection."""
        for fd, visitor in list(self._visitors.items()):
            if visitor.session == session:
                self._leave(fd)

    def _hear(
        self, visitor: _PendingClient, fetch: Callable[[int, int, bool], tuple[int, int, str]], most: int
    ) -> bool:
        """Take at most so many datagrams of a visitor's; return False where there is nothing more to come.

        Raises:
            ProtocolError: one of them is none that belongs here.
        """
        for _ in range(most):
            try:
                data, fds = handoff.receive(visitor.socket, 1)
                handoff.close_all(fds)
                self._answer(visitor, data, fetch)
            except BlockingIOError:
                return True
            except PeerLost as exc:
                if isinstance(exc.__cause__, ConnectionResetError) and not visitor.was_reset:
                    visitor.was_reset = True  # it left something unread; what it has sent can be read all the same
                    continue
                return False
        return True

    def _answer(
        self, visitor: _PendingClient, data: bytes, fetch: Callable[[int, int, bool], tuple[int, int, str]]
    ) -> None:
        request, message = self._decoder.decode(data)
        if isinstance(message, sidecar.Goodbye):
            self._on_goodbye(visitor.session)
            return
        if not isinstance(message, sidecar.FetchArena):
            if visitor.identity is None:
                raise ProtocolError(f"{type(message).__name__} before Hello")
            self._on_told(visitor.session, message)
            return
        try:
            fd, nbytes, device = fetch(visitor.session, message.arena, message.write)
            # a descriptor of GPU memory knows no reading only: the client's mapping does
            narrowed = None if message.write or device else read_only(fd)
        except RefitdError as exc:
            handoff.send(visitor.socket, encode(request, Failure(code=exc.code, message=str(exc))))
            return
        reply = encode(request, sidecar.ArenaDescriptor(arena=message.arena, nbytes=nbytes, device=device))
        if narrowed is None:
            handoff.send(visitor.socket, reply, (fd,))
            return
        try:
            handoff.send(visitor.socket, reply, (narrowed,))
        finally:
            handoff.close_all((narrowed,))

    def _leave(self, fd: int) -> None:
        visitor = self._visitors.pop(fd)
        if visitor.identity is not None:
            self._by_identity.pop(visitor.identity, None)
        self._on_change(fd, 0)
        visitor.socket.close()
        if visitor.process is not None:
            del self._processes[visitor.process]
            self._on_change(visitor.process, 0)
            os.close(visitor.process)

    def close(self) -> None:
        """Close every connection and remove the socket file."""
        for fd in list(self._visitors):
            self._leave(fd)
        self._on_change(self._listener.fileno(), 0)
        self._listener.close()
        self._path.unlink(missing_ok=True)
