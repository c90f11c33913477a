"""Clients' sockets: admit processes, send descriptors, and decode messages."""

from __future__ import annotations

import os
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import zmq

from refitd.buffers import handoff
from refitd.buffers.arena import read_only
from refitd.buffers.capacity import descriptors_left
from refitd.daemon import actions as act
from refitd.daemon.arena_files import CLIENT_RESERVE, ArenaFiles
from refitd.daemon.state import DaemonState
from refitd.errors import PeerLost, ProtocolError, RefitdError, RefusedError
from refitd.logs import EventLog, Throttle
from refitd.protocol import local, sidecar
from refitd.protocol.base import (
    HELLO_BYTES,
    LARGE_FRAME,
    PROTOCOL_VERSION,
    BackgroundThread,
    BadMessage,
    Decoder,
    check_version,
    encode,
    request_of,
)
from refitd.protocol.channel import Received, Router
from refitd.protocol.local import Failure, Told
from refitd.security import Users

MAX_SESSIONS = 4096

# Limit on the time from connecting to Hello. A client needs milliseconds.
HELLO_S = 30.0

# Requests handled for one client before those of the next client.
_BATCH = 16

# Limit on datagrams read from one client before its ZeroMQ messages, or before its end is reported. It covers a full
# socket buffer (some hundreds of messages) and stops a client that never stops sending.
_UNHEARD = 1024

# Unread messages queued for one client; more are dropped.
_UNREAD = 1000


@dataclass(slots=True)
class _Client:
    socket: socket.socket
    peer: handoff.Peer
    token: bytes
    session: int
    process: int | None = None  # pidfd: detects the end of the process even if a forked child has the socket open
    was_reset: bool = False
    identity: bytes | None = None  # of ZeroMQ, after Hello
    address: str = ""  # the peer address that ZeroMQ reports
    deadline: float | None = None  # for Hello


class ClientListener:
    """Accepts clients on the descriptor socket and maps their ZeroMQ identities to kernel-verified peers."""

    def __init__(
        self,
        path: Path,
        endpoint: str,
        allowed_uids: frozenset[int],
        on_change: Callable[[int, int], None],
        files: ArenaFiles,
        on_goodbye: Callable[[int], None],
        on_told: Callable[[int, Told], None],
    ) -> None:
        """Listen. `files` has the arenas that clients fetch and give back.

        `on_change` receives descriptors to poll, `on_goodbye` sessions that are about to close, and `on_told` members'
        reports about their commits.
        """
        self._listener = handoff.listen(path)
        self._path = path
        self._endpoint = endpoint
        self._allowed = allowed_uids
        self._on_change = on_change
        self._files = files
        self._on_goodbye = on_goodbye
        self._on_told = on_told
        self._clients: dict[int, _Client] = {}  # by session
        self._by_identity: dict[bytes, _Client] = {}
        self._sessions = 0
        self._decoder: Decoder[sidecar.FetchArena | sidecar.GiveArena | local.Goodbye | Told] = Decoder(
            sidecar.DescriptorRequest, handoff.MAX_DATAGRAM
        )
        self.listener_fd = self._listener.fileno()
        self.fds: dict[int, _Client] = {}  # connections and pidfds to poll; when one is ready, call `hear`
        self.identities: dict[int, bytes] = {}  # of ZeroMQ, by session
        on_change(self.listener_fd, select.POLLIN)

    def accept(self) -> str:
        """Accept a client; return the reason if it was refused, else ""."""
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
            client = _Client(connection, peer, secrets.token_bytes(16), self._sessions)
            handoff.send(connection, encode(0, sidecar.Greeting(token=client.token, endpoint=self._endpoint)))
            client.process = handoff.process_of(connection, peer)
        except PeerLost:
            connection.close()
            return ""
        self._clients[client.session] = client
        for fd in (connection.fileno(), client.process):
            if fd is not None:
                self.fds[fd] = client
                self._on_change(fd, select.POLLIN)
        return ""

    def admit(self, peer: Received, token: bytes) -> tuple[int, handoff.Peer]:
        """Map a ZeroMQ connection to the descriptor connection with this token; return its session and peer.

        Raises:
            RefusedError: the token is unknown, used, or another process's, or this connection has a session already.
        """
        if peer.identity in self._by_identity:
            raise RefusedError("this connection has a session already; one Hello opens one")
        for client in self._clients.values():
            if not secrets.compare_digest(client.token, token) or client.identity is not None:
                continue
            # a token is valid only for its process: the kernel must report the same one for both connections
            if peer.local_peer != (client.peer.uid, client.peer.pid):
                break
            client.identity, client.address = peer.identity, peer.address
            self._by_identity[peer.identity] = client
            self.identities[client.session] = peer.identity
            return client.session, client.peer
        raise RefusedError("this token opens no session here; connect through refitd.connect()")

    def session_of(self, peer: Received) -> int | None:
        """Return the session of an admitted connection, None if it is not admitted or its address has changed."""
        client = self._by_identity.get(peer.identity)
        return client.session if client is not None and client.address == peer.address else None

    def expire(self, now: float) -> int:
        """Close the connections that did not send Hello in time; return how many."""
        late = 0
        for client in list(self._clients.values()):
            if client.identity is not None:
                continue
            if client.deadline is None:
                client.deadline = now + HELLO_S
            elif now >= client.deadline:
                self.leave(client.session)
                late += 1
        return late

    def hear(self, of: int | bytes) -> int | None:
        """Handle datagrams of a client, named by its ZeroMQ identity or by a descriptor in `fds`.

        Returns:
            Its session if it must be removed: a datagram is invalid, its connection is closed or its process has ended.
            The caller then calls `leave`. A closed connection counts only when a descriptor is ready.
        """
        client = self._by_identity[of] if isinstance(of, bytes) else self.fds[of]
        # if the process has ended, its last messages are still in the socket
        most, has_ended = (_UNHEARD, of == client.process) if of != client.socket.fileno() else (_BATCH, False)
        try:
            for _ in range(most):
                try:
                    data, fds = handoff.receive(client.socket, 1)
                    try:
                        self._answer(client, data, fds)
                    finally:
                        if fds:
                            handoff.close_all(fds)
                except BlockingIOError:
                    break
                except PeerLost as exc:
                    if isinstance(exc.__cause__, ConnectionResetError) and not client.was_reset:
                        client.was_reset = True  # closed with unread replies; its own messages can still be read
                        continue
                    has_ended = not isinstance(of, bytes)
                    break
        except ProtocolError:
            has_ended = True
        return client.session if has_ended else None

    def _answer(self, client: _Client, data: bytes, fds: tuple[int, ...]) -> None:
        request, message = self._decoder.decode(data)
        if isinstance(message, local.Goodbye):
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
            fd, nbytes, device = self._files.fetch(client.session, message.arena, message.write)
            # a descriptor of GPU memory cannot be made read-only; the client maps it read-only instead
            narrowed = None if message.write or device else read_only(fd)
        except RefitdError as exc:
            handoff.send(client.socket, encode(request, Failure(code=exc.code, message=str(exc))))
            return
        reply = encode(request, local.ArenaDescriptor(arena=message.arena, nbytes=nbytes, device=device))
        if narrowed is None:
            handoff.send(client.socket, reply, (fd,))
            return
        try:
            handoff.send(client.socket, reply, (narrowed,))
        finally:
            handoff.close_all((narrowed,))

    def _taken_back(self, session: int, request: int, message: sidecar.GiveArena, fds: tuple[int, ...]) -> bytes:
        """Adopt a client's arena; return the answer."""
        try:
            if len(fds) != 1:
                raise ProtocolError(f"GiveArena comes with {len(fds)} descriptors, expected one")
            arena = self._files.given_back(session, fds[0], message.nbytes)
        except RefitdError as exc:
            return encode(request, Failure(code=exc.code, message=str(exc)))
        return encode(request, local.ArenaDescriptor(arena=arena, nbytes=message.nbytes))

    def leave(self, session: int) -> None:
        """Close a session's connection; ignore a session that has ended."""
        client = self._clients.pop(session, None)
        if client is None:
            return
        if client.identity is not None:
            self._by_identity.pop(client.identity, None)
            del self.identities[session]
        for fd in (client.socket.fileno(), client.process):
            if fd is not None:
                del self.fds[fd]
                self._on_change(fd, 0)
        client.socket.close()
        if client.process is not None:
            os.close(client.process)

    def close(self) -> None:
        """Close every connection and remove the socket file."""
        for session in list(self._clients):
            self.leave(session)
        self._on_change(self.listener_fd, 0)
        self._listener.close()
        self._path.unlink(missing_ok=True)


# Client messages handled per turn of the loop.
_MESSAGES = 256

# Limits on messages queued behind a large frame: bytes of all clients together, messages of each client.
MAX_HELD_BYTES = 512 << 20
MAX_HELD = 256


@dataclass(frozen=True, slots=True)
class _Read:
    """A decoded large frame, with the checked registration once it is checked."""

    request: int
    message: local.ClientRequest
    prepared: act.Prepared | None = None


class ClientInbox:
    """Reads the daemon's sockets for clients, and ends sessions.

    Attributes:
        listener: the descriptor sockets.
        router: the ZeroMQ socket.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        directory: Path,
        users: Users,
        state: DaemonState,
        files: ArenaFiles,
        feed: Callable[[act.Event], None],
        watch: Callable[[int, int], None],
        wake: Callable[[], None],
        noise: Throttle,
        log: EventLog,
    ) -> None:
        """Listen in `directory`.

        Raises:
            RefusedError: another daemon listens there.
        """
        endpoint = f"ipc://{directory / 'refitd.sock'}"
        self.listener = ClientListener(
            directory / "refitd.fds",
            endpoint,
            users.uids,
            watch,
            files,
            lambda session: feed(act.SessionLeaves(session)),
            lambda session, told: feed(act.ClientSaid(session, 0, told)),
        )
        self.router = Router(context, endpoint, uids=users.uids, unsent=_UNREAD)
        self._users = users
        self._state = state
        self._feed = feed
        self._noise = noise
        self._log = log
        self._clients: Decoder[local.ClientRequest] = Decoder(local.ClientRequest)
        self._strangers: Decoder[local.Hello] = Decoder(local.Hello, HELLO_BYTES)
        self._aside = BackgroundThread[tuple[int, Received]]("refitd-reader", wake)
        # by identity: messages that a client sent after a large frame that is still being decoded
        self._held: dict[bytes, deque[Received]] = {}
        self._held_bytes = 0

    def __len__(self) -> int:
        """Return how many messages are being decoded, or wait behind a large one."""
        return len(self._aside) + sum(map(len, self._held.values()))

    def take(self) -> None:
        """Handle up to a batch of clients' messages."""
        for _ in range(_MESSAGES):
            if (received := self.router.receive()) is None:
                break
            self._from_client(received)

    def hear(self, fd: int) -> None:
        """Handle datagrams of the client with this descriptor; if it has left, end its session."""
        session = self.listener.hear(fd)
        if session is not None:
            self.take()  # handle the messages that it sent before its end
            self._end(session, "its process has ended or closed the connection")

    def _end(self, session: int, reason: str) -> None:
        self.listener.leave(session)
        self._feed(act.SessionClosed(session, reason))

    def collect(self) -> None:
        """Continue with large frames that have been decoded."""
        for (session, received), read in self._aside.collect():
            self._has_read(session, received, read)

    def _from_stranger(self, received: Received) -> None:
        """Accept a Hello from a peer without a session; refuse other messages without decoding them."""
        identity, request = received.identity, 0
        try:
            if len(received.frame) > HELLO_BYTES:
                text = f"a frame of {len(received.frame)} bytes before Hello, which has {HELLO_BYTES} at most"
                raise ProtocolError(f"{text}; say Hello with a session token first")
            request, kind = request_of(received.frame)
            if kind != local.Hello.__name__:
                raise RefusedError("say Hello with a session token first")
            reply: local.Welcome | local.Failure = self._hello(received, self._strangers.decode(received.frame)[1])
        except RefitdError as exc:
            self._tell_bad(received, exc)
            reply = local.Failure(code=exc.code, message=str(exc))
        self.router.send(identity, request, reply)

    def _tell_bad(self, received: Received, error: RefitdError) -> None:
        if self._noise.allows(f"bad {received.address}", time.monotonic()):
            session = self.listener.session_of(received)
            self._log("bad-message", session=session, peer=received.address, reason=str(error))

    def _from_client(self, received: Received) -> None:
        identity = received.identity
        session = self.listener.session_of(received)
        if session is None:
            self._from_stranger(received)
            return
        if self.listener.hear(identity) is not None:  # messages on the descriptor socket were sent earlier
            self._end(session, "it has sent what is no message over its connection")
            return
        if identity in self._held or len(received.frame) > LARGE_FRAME:
            self._hold(session, received)
            return
        try:
            request, message = self._clients.decode(received.frame)
        except ProtocolError as exc:
            number = exc.request_id if isinstance(exc, BadMessage) else 0
            self._tell_bad(received, exc)
            self.router.send(identity, number, local.Failure(code=exc.code, message=str(exc)))
            return
        if isinstance(message, local.Hello):
            self.router.send(identity, request, self._hello(received, message))
            return
        self._feed(act.ClientSaid(session, request, message))

    def _hold(self, session: int, received: Received) -> None:
        """Decode a large frame on another thread; this client's later messages queue behind it."""
        held = self._held.get(received.identity)
        size = len(received.frame)
        if self._held_bytes + size > MAX_HELD_BYTES or (held is not None and len(held) >= MAX_HELD):
            text = "this client has sent too much at once; wait for answers"
            self.router.send(received.identity, 0, local.Failure(code=RefusedError.code, message=text))
            return
        self._held_bytes += size
        if held is not None:
            held.append(received)
            return
        self._held[received.identity] = deque()

        def read() -> _Read:
            request, message = self._clients.decode(received.frame)
            return _Read(request, message)

        self._aside.submit((session, received), read)

    def _has_read(self, session: int, received: Received, found: object) -> None:
        """Continue with a decoded large frame; first check a registration on another thread."""
        identity = received.identity
        if isinstance(found, _Read) and self.listener.session_of(received) == session:
            if isinstance(found.message, local.RegisterSource | local.RegisterTarget) and found.prepared is None:
                registering = self._state.registering(session, found.message)
                self._aside.submit((session, received), lambda: replace(found, prepared=registering.check()))
                return
            self._feed(act.ClientSaid(session, found.request, found.message, found.prepared))
        elif isinstance(found, ProtocolError):
            number = found.request_id if isinstance(found, BadMessage) else 0
            self._tell_bad(received, found)
            self.router.send(identity, number, local.Failure(code=found.code, message=str(found)))
        elif isinstance(found, Exception):
            self._log("internal-error", session=session, reason=repr(found))
        self._held_bytes -= len(received.frame)
        for later in self._held.pop(identity, ()):
            self._held_bytes -= len(later.frame)
            self._from_client(later)

    def _hello(self, received: Received, hello: local.Hello) -> local.Welcome | local.Failure:
        try:
            check_version(hello.protocol, "this client", "the daemon")
            session, peer = self.listener.admit(received, hello.token)
        except RefitdError as exc:
            return local.Failure(code=exc.code, message=str(exc))
        self._feed(act.SessionOpened(session, peer.pid, hello.name, self._users.roles_of(peer.uid), peer.uid))
        return local.Welcome(
            protocol=PROTOCOL_VERSION,
            node=self._state.node,
            host=self._state.host,
            coordinator=self._state.link.is_up,
        )
