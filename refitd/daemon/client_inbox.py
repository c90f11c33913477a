"""Frames from clients: decoded, admitted and fed to the state. Large ones are read on another thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from refitd.daemon import actions as act
from refitd.daemon.client_listener import ClientListener
from refitd.daemon.state import DaemonState
from refitd.errors import ProtocolError, RefitdError, RefusedError
from refitd.logs import EventLog, Throttle
from refitd.protocol import local, versions
from refitd.protocol.background import LARGE_FRAME, BackgroundThread
from refitd.protocol.base import MAX_MESSAGE_BYTES, PROTOCOL_VERSION
from refitd.protocol.channel import Received, Router
from refitd.protocol.codec import HELLO_BYTES, BadMessage, Decoder, request_of
from refitd.security import Users

# Client messages handled before the loop turns to other work.
_BATCH = 256

# Limits on messages queued behind a large frame: bytes of all clients together, and messages of one client.
MAX_HELD_BYTES = 512 << 20
MAX_HELD = 256


@dataclass(frozen=True, slots=True)
class _Read:
    """A decoded large frame, and the checked registration once that is done."""

    request: int
    message: local.ClientRequest
    prepared: act.Prepared | None = None


class ClientInbox:
    """Reads the daemon's socket for clients."""

    def __init__(
        self,
        router: Router,
        listener: ClientListener,
        users: Users,
        state: DaemonState,
        node: str,
        host: str,
        feed: Callable[[act.Event], None],
        end: Callable[[int, str], None],
        fetch: Callable[[int, int, bool], tuple[int, int, str]],
        wake: Callable[[], None],
        noise: Throttle,
        log: EventLog,
    ) -> None:
        self._router = router
        self._listener = listener
        self._users = users
        self._state = state
        self._node, self._host = node, host
        self._feed = feed
        self._end = end
        self._fetch = fetch
        self._noise = noise
        self._log = log
        self._clients: Decoder[local.ClientRequest] = Decoder(local.ClientRequest)
        self._strangers: Decoder[local.Hello] = Decoder(local.Hello, HELLO_BYTES)
        self._aside = BackgroundThread[tuple[int, Received]]("refitd-reader", wake)
        # by identity: messages that a client sent after a large frame that is still being read
        self._held: dict[bytes, deque[Received]] = {}
        self._held_bytes = 0

    def __len__(self) -> int:
        """Return how many messages wait for a large one before them, or to be read."""
        return len(self._aside) + sum(map(len, self._held.values()))

    def take(self) -> None:
        """Handle the messages of clients, up to a batch."""
        for _ in range(_BATCH):
            if (received := self._router.receive(self._limit_of)) is None:
                break
            self._from_client(received)

    def collect(self) -> None:
        """Continue with large frames that have been decoded."""
        for (session, received), read in self._aside.collect():
            self._has_read(session, received, read)

    def _limit_of(self, sender: Received) -> int:
        return HELLO_BYTES if self._listener.session_of(sender) is None else MAX_MESSAGE_BYTES

    def _from_stranger(self, received: Received) -> None:
        """Accept only a Hello from a peer without a session; nothing else is decoded."""
        identity, request = received.identity, 0
        try:
            if received.too_large:
                text = f"a frame of {received.too_large} bytes before Hello, which has {HELLO_BYTES} at most"
                raise ProtocolError(f"{text}; say Hello with a session token first")
            request, kind = request_of(received.frame)
            if kind != local.Hello.__name__:
                raise RefusedError("say Hello with a session token first")
            reply: local.Welcome | local.Failure = self._hello(received, self._strangers.decode(received.frame)[1])
        except RefitdError as exc:
            self._tell_bad(received, exc)
            reply = local.Failure(code=exc.code, message=str(exc))
        self._router.send(identity, request, reply)

    def _tell_bad(self, received: Received, error: RefitdError) -> None:
        if self._noise.allows(f"bad {received.address}", time.monotonic()):
            session = self._listener.session_of(received)
            self._log("bad-message", session=session, peer=received.address, reason=str(error))

    def _from_client(self, received: Received) -> None:
        identity = received.identity
        session = self._listener.session_of(received)
        if session is None:
            self._from_stranger(received)
            return
        if not self._listener.hear(received, self._fetch):  # the descriptor socket's messages came first
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
            self._router.send(identity, number, local.Failure(code=exc.code, message=str(exc)))
            return
        if isinstance(message, local.Hello):
            self._router.send(identity, request, self._hello(received, message))
            return
        self.said(session, request, message, None)

    def _hold(self, session: int, received: Received) -> None:
        """Decode a large frame on another thread; this client's later messages queue behind it."""
        held = self._held.get(received.identity)
        size = len(received.frame)
        if self._held_bytes + size > MAX_HELD_BYTES or (held is not None and len(held) >= MAX_HELD):
            text = "this client has sent too much at once; wait for answers"
            self._router.send(received.identity, 0, local.Failure(code=RefusedError.code, message=text))
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
        """Continue with a decoded large frame; a registration is first checked on another thread."""
        identity = received.identity
        if isinstance(found, _Read) and self._listener.session_of(received) == session:
            if isinstance(found.message, local.RegisterSource | local.RegisterTarget) and found.prepared is None:
                look = self._state.prepare(session, found.message)
                self._aside.submit((session, received), lambda: replace(found, prepared=look()))
                return
            self.said(session, found.request, found.message, found.prepared)
        elif isinstance(found, ProtocolError):
            number = found.request_id if isinstance(found, BadMessage) else 0
            self._tell_bad(received, found)
            self._router.send(identity, number, local.Failure(code=found.code, message=str(found)))
        elif isinstance(found, Exception):
            self._log("internal-error", session=session, reason=repr(found))
        self._held_bytes -= len(received.frame)
        for later in self._held.pop(identity, ()):
            self._held_bytes -= len(later.frame)
            self._from_client(later)

    def said(self, session: int, request: int, message: local.ClientRequest, prepared: act.Prepared | None) -> None:
        """Feed a client's message to the state; an internal error must not end the daemon."""
        try:
            self._feed(act.ClientSaid(session, request, message, prepared))
        except Exception as exc:
            if self._noise.allows(f"internal {session} {type(message).__name__}", time.monotonic()):
                self._log.failed("internal-error", session=session, message=type(message).__name__)
            text = f"the daemon made a mistake over {type(message).__name__}: {exc!r}; its log has the details"
            identity = self._listener.identity_of(session)
            if identity is not None:
                self._router.send(identity, request, local.Failure(code="internal", message=text))

    def _hello(self, received: Received, hello: local.Hello) -> local.Welcome | local.Failure:
        try:
            versions.check(hello.protocol, "this client", "the daemon")
            session, peer = self._listener.admit(received, hello.token)
        except RefitdError as exc:
            return local.Failure(code=exc.code, message=str(exc))
        self._feed(act.SessionOpened(session, peer.pid, hello.name, self._users.roles_of(peer.uid), peer.uid))
        return local.Welcome(
            protocol=PROTOCOL_VERSION,
            node=self._node,
            host=self._host,
            coordinator=self._state.is_coordinated,
        )
