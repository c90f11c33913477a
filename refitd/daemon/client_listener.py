"""Admits clients and hands them descriptors."""

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

# Time from connecting to Hello. A client needs milliseconds.
HELLO_S = 30.0

# Requests handled for one client before others have their turn.
_BATCH = 16

# A client's datagrams are read before its ZeroMQ messages and before its end is reported. The limit covers a full
# socket buffer (some hundreds of messages) and stops a client that sends without end.
_UNHEARD = 1024

# Descriptors that must stay free to admit a client: it takes three, and its arenas are passed as more.
CLIENT_RESERVE = 16


@dataclass(slots=True)
class _PendingClient:
    socket: socket.socket
    peer: handoff.Peer
    token: bytes
    session: int
    process: int | None = None  # pidfd: a forked child keeps the socket open, but must not keep the session
    was_reset: bool = False
    identity: bytes | None = None  # ZeroMQ's, once the client has said Hello
    address: str = ""  # the peer address that ZeroMQ reports
    deadline: float | None = None  # for Hello


class ClientListener:
    """Accepts clients on the descriptor socket and ties their ZeroMQ identities to kernel-verified peers."""

    def __init__(
        self,
        path: Path,
        endpoint: str,
        allowed_uids: frozenset[int],
        on_change: Callable[[int, int], None],
        on_goodbye: Callable[[int], None],
        on_told: Callable[[int, Told], None],
        on_given: Callable[[int, int, int], int],
    ) -> None:
        """Listen.

        `on_change` is told which descriptors to poll, `on_goodbye` which session is about to close, and `on_told` what
        members report about their commits. `on_given(session, descriptor, bytes)` takes an arena back and returns its
        number, or raises RefitdError.
        """
        self._listener = handoff.listen(path)
        self._path = path
        self._endpoint = endpoint
        self._allowed = allowed_uids
        self._on_change = on_change
        self._on_goodbye = on_goodbye
        self._on_told = on_told
        self._on_given = on_given
        self._clients: dict[int, _PendingClient] = {}  # by descriptor
        self._processes: dict[int, int] = {}  # pidfd -> descriptor
        self._by_identity: dict[bytes, _PendingClient] = {}
        self._sessions = 0
        self._decoder: Decoder[sidecar.FetchArena | sidecar.GiveArena | sidecar.Goodbye | Told] = Decoder(
            sidecar.DescriptorRequest, handoff.MAX_DATAGRAM
        )
        on_change(self._listener.fileno(), select.POLLIN)

    @property
    def listener_fd(self) -> int:
        """The listening descriptor."""
        return self._listener.fileno()

    def owns(self, fd: int) -> bool:
        """Whether a descriptor is a client's connection or its pidfd."""
        return fd in self._clients or fd in self._processes

    def accept(self) -> str:
        """Accept a client, or return why it was turned away ("" if accepted)."""
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
        elif len(self._clients) >= MAX_SESSIONS:
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
            client = _PendingClient(connection, peer, secrets.token_bytes(16), self._sessions)
            handoff.send(connection, encode(0, sidecar.Greeting(token=client.token, endpoint=self._endpoint)))
            client.process = handoff.process_of(connection, peer)
        except PeerLost:
            connection.close()
            return ""
        self._clients[connection.fileno()] = client
        self._on_change(connection.fileno(), select.POLLIN)
        if client.process is not None:
            self._processes[client.process] = connection.fileno()
            self._on_change(client.process, select.POLLIN)
        return ""

    def admit(self, peer: Received, token: bytes) -> tuple[int, handoff.Peer]:
        """Tie a ZeroMQ connection to the descriptor connection with this token; return its session and peer.

        Raises:
            RefusedError: the token is unknown, used, or another process's, or this connection has a session already.
        """
        if peer.identity in self._by_identity:
            raise RefusedError("this connection has a session already; one Hello opens one")
        for client in self._clients.values():
            if not secrets.compare_digest(client.token, token) or client.identity is not None:
                continue
            # a token must not be passed on: by the kernel, both connections must belong to the same process
            if peer.local_peer != (client.peer.uid, client.peer.pid):
                break
            client.identity, client.address = peer.identity, peer.address
            self._by_identity[peer.identity] = client
            return client.session, client.peer
        raise RefusedError("this token opens no session here; connect through refitd.connect()")

    def session_of(self, peer: Received) -> int | None:
        """Return the session of an admitted connection, None if another process has taken its identity over."""
        client = self._by_identity.get(peer.identity)
        return client.session if client is not None and client.address == peer.address else None

    def expire(self, now: float) -> int:
        """Close the connections that have not said Hello in time; return how many."""
        late = 0
        for fd, client in list(self._clients.items()):
            if client.identity is not None:
                continue
            if client.deadline is None:
                client.deadline = now + HELLO_S
            elif now >= client.deadline:
                self._leave(fd)
                late += 1
        return late

    def identity_of(self, session: int) -> bytes | None:
        """Return the ZeroMQ identity of a session, None if it is gone."""
        return next((v.identity for v in self._clients.values() if v.session == session), None)

    def serve(self, fd: int, fetch: Callable[[int, int, bool], tuple[int, int, str]]) -> int | None:
        """Answer a client's datagrams; return its session if it has gone (the caller then calls `leave`).

        `fetch(session, arena, write)` returns (descriptor, bytes, GPU) or raises RefusedError.
        """
        try:
            if fd in self._processes:
                # the process has ended; its last messages are still in the socket
                client = self._clients[self._processes[fd]]
                self._hear(client, fetch, _UNHEARD)
                return client.session
            client = self._clients[fd]
            return None if self._hear(client, fetch, _BATCH) else client.session
        except ProtocolError:
            return client.session

    def hear(self, peer: Received, fetch: Callable[[int, int, bool], tuple[int, int, str]]) -> bool:
        """Handle the datagrams that an admitted peer sent before this message; return False if it must be removed."""
        try:
            self._hear(self._by_identity[peer.identity], fetch, _UNHEARD)  # if the peer has gone, `serve` notices
        except ProtocolError:
            return False
        return True

    def leave(self, session: int) -> None:
        """Close a session's connection."""
        for fd, client in list(self._clients.items()):
            if client.session == session:
                self._leave(fd)

    def _hear(self, client: _PendingClient, fetch: Callable[[int, int, bool], tuple[int, int, str]], most: int) -> bool:
        """Handle at most `most` datagrams of a client; return False if none can follow.

        Raises:
            ProtocolError: a datagram is not a valid message here.
        """
        for _ in range(most):
            try:
                data, fds = handoff.receive(client.socket, 1)
                try:
                    self._answer(client, data, fds, fetch)
                finally:
                    handoff.close_all(fds)
            except BlockingIOError:
                return True
            except PeerLost as exc:
                if isinstance(exc.__cause__, ConnectionResetError) and not client.was_reset:
                    client.was_reset = True  # the peer left replies unread; what it sent can still be read
                    continue
                return False
        return True

    def _answer(
        self,
        client: _PendingClient,
        data: bytes,
        fds: tuple[int, ...],
        fetch: Callable[[int, int, bool], tuple[int, int, str]],
    ) -> None:
        request, message = self._decoder.decode(data)
        if isinstance(message, sidecar.Goodbye):
            self._on_goodbye(client.session)
            return
        if not isinstance(message, sidecar.FetchArena) and client.identity is None:
            raise ProtocolError(f"{type(message).__name__} before Hello")
        if isinstance(message, sidecar.GiveArena):
            handoff.send(client.socket, self._taken_back(client.session, request, message, fds))
            return
        if not isinstance(message, sidecar.FetchArena):
            self._on_told(client.session, message)
            return
        try:
            fd, nbytes, device = fetch(client.session, message.arena, message.write)
            # descriptors of GPU memory cannot be made read-only; the client's mapping is read-only instead
            narrowed = None if message.write or device else read_only(fd)
        except RefitdError as exc:
            handoff.send(client.socket, encode(request, Failure(code=exc.code, message=str(exc))))
            return
        reply = encode(request, sidecar.ArenaDescriptor(arena=message.arena, nbytes=nbytes, device=device))
        if narrowed is None:
            handoff.send(client.socket, reply, (fd,))
            return
        try:
            handoff.send(client.socket, reply, (narrowed,))
        finally:
            handoff.close_all((narrowed,))

    def _taken_back(self, session: int, request: int, message: sidecar.GiveArena, fds: tuple[int, ...]) -> bytes:
        """Return the answer to a client that gives an arena back."""
        try:
            if len(fds) != 1:
                raise ProtocolError(f"GiveArena comes with {len(fds)} descriptors, expected one")
            arena = self._on_given(session, fds[0], message.nbytes)
        except RefitdError as exc:
            return encode(request, Failure(code=exc.code, message=str(exc)))
        return encode(request, sidecar.ArenaGiven(arena=arena))

    def _leave(self, fd: int) -> None:
        client = self._clients.pop(fd)
        if client.identity is not None:
            self._by_identity.pop(client.identity, None)
        self._on_change(fd, 0)
        client.socket.close()
        if client.process is not None:
            del self._processes[client.process]
            self._on_change(client.process, 0)
            os.close(client.process)

    def close(self) -> None:
        """Close every connection and remove the socket file."""
        for fd in list(self._clients):
            self._leave(fd)
        self._on_change(self._listener.fileno(), 0)
        self._listener.close()
        self._path.unlink(missing_ok=True)
