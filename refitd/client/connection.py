"""One connection to the node's daemon: requests with deadlines, notifications, descriptors. It never loads torch.

A signal handler can interrupt any code, so no function here waits for a lock that the calling thread may already hold.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import zmq

from refitd.buffers import handoff
from refitd.buffers.arena import MappedArena
from refitd.buffers.capacity import CLIENT_DESCRIPTORS, require_descriptors
from refitd.buffers.cuda import MappedDeviceArena, index_of, release_dropped
from refitd.buffers.permits import PAGE_ARENA
from refitd.client import processes
from refitd.client.calls import Turn, check_process, encoded
from refitd.client.notifications import Listener, Notifications
from refitd.errors import (
    DeadlineExceeded,
    PeerLost,
    ProtocolError,
    RefitdError,
    RefusedError,
    TransportError,
    from_code,
)
from refitd.protocol import local, sidecar
from refitd.protocol.base import PROTOCOL_VERSION, Decoder, Message, UnknownKind, encode
from refitd.protocol.channel import Dealer, local_peer
from refitd.protocol.keys import check_names
from refitd.protocol.reports import SwapProgress

if TYPE_CHECKING:
    from refitd.client.reconnect import ArenaFiles

R = TypeVar("R", bound=Message)

_log = logging.getLogger("refitd.client")

# The number of abandoned requests to remember: their replies may still come and must be undone.
ABANDONED = 1024
CLOSED = "this connection to the refitd daemon is closed; refitd.connect() opens another"

# Requests that are undone when abandoned, and how many seconds the next such request waits for the undoing.
_UNDONE = (local.RegisterSource, local.RegisterTarget, local.CreateArena, local.RegisterController)
SETTLE_S, _LOOK_S = 1.0, 0.005

# How long closing waits for queued messages to be sent; a running daemon reads them immediately.
FLUSH_S = 2.0


class Connection:
    """A session with the daemon in `directory`. One thread does all ZeroMQ work; any thread may send requests.

    Only the process that made it can use it, not a forked child.
    """

    def __init__(
        self, directory: Path, name: str, timeout: float, uid: int | None = None, *, may_be_link: bool = True
    ) -> None:
        """Connect and say hello within `timeout` seconds.

        `uid` and `may_be_link` are as in `refitd.client.processes`.

        Raises:
            TransportError: no daemon runs there, or it does not answer.
            RefusedError: the daemon does not admit this user, the daemon's user is not trusted, or this process can
                open too few descriptors.
            ConfigError: `uid`, or REFITD_DAEMON_UID, is not a user id.
        """
        self.directory = Path(os.path.abspath(directory))  # stays valid if the working directory changes
        self.pid = os.getpid()
        # whether the owner waits for the next daemon when this one ends; then losing the daemon is not final
        self.is_awaited = False
        self.files: ArenaFiles | None = None  # where descriptors of arenas are kept
        require_descriptors(CLIENT_DESCRIPTORS, "a connection to the refitd daemon")
        self._permit_page: MappedArena | MappedDeviceArena | None = None
        whose = processes.trusted(uid)
        self._descriptors, self.daemon = processes.enter(self.directory, whose, timeout, may_be_link=may_be_link)
        self._fetching = Turn("an arena is being fetched")
        self._decoder: Decoder[local.ClientReply] = Decoder(local.ClientReply)
        self._small: Decoder[sidecar.DescriptorReply] = Decoder(sidecar.DescriptorReply, handoff.MAX_DATAGRAM)
        try:
            greeting = self._receive_descriptor()[0]
            if not isinstance(greeting, sidecar.Greeting):
                raise ProtocolError(f"the daemon in {directory} greeted with {type(greeting).__name__}")
            endpoint = processes.message_socket(self.directory, greeting.endpoint, self.daemon)
        except BaseException:
            self._descriptors.close()
            raise
        # Threads share these without a lock: single operations on them are atomic in Python.
        self._numbers = itertools.count(1)
        self._abandoned: deque[int] = deque(maxlen=ABANDONED)  # requests whose replies must be undone
        self._waiters: dict[int, queue.SimpleQueue[tuple[Message, int]]] = {}
        self._outgoing: deque[tuple[int, bytes]] = deque()
        self.is_lost = False  # the daemon has ended, or the connection has failed for another reason
        self._lost: RefitdError | None = None  # the reason
        self._inside: set[tuple[int, object]] = set()  # current users of the descriptors: (thread id, unique mark)
        self._closer: dict[str, tuple[int, object]] = {}  # the first call of `close`, under the key ""
        self._closing = self._closed = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._close_wake = weakref.finalize(self, os.close, self._wake)
        self._close_wake.atexit = False
        self._thread = threading.Thread(target=self._serve, args=(endpoint,), name="refitd-client", daemon=True)
        self._notifications = Notifications()
        self._thread.start()
        _open.add(self)
        hello = local.Hello(protocol=PROTOCOL_VERSION, token=greeting.token, name=name)
        try:
            check_names(hello)  # the daemon checks the names in later requests
            self.welcome = self.request(hello, local.Welcome, timeout)
        except BaseException:
            self.close()
            raise

    def request(
        self,
        message: Message,
        reply: type[R],
        timeout: float,
        on_progress: Callable[[SwapProgress], None] | None = None,
    ) -> R:
        """Send a request and return its reply.

        Raises:
            DeadlineExceeded: no reply came within `timeout` seconds.
            PeerLost: the daemon has ended.
            RefitdError: the daemon or the coordinator answered with this error.
        """
        check_process(self.pid)
        answers: queue.SimpleQueue[tuple[Message, int]] = queue.SimpleQueue()
        number = next(self._numbers)
        frame = encoded(number, message)
        until = time.monotonic() + timeout
        if isinstance(message, _UNDONE):
            release_dropped()  # the daemon may need their memory for the request
            self._settle(min(until, time.monotonic() + SETTLE_S))
        self._waiters[number] = answers  # before _push checks for a lost daemon: _lose wakes the waiters in this dict
        is_answered = False
        try:
            try:
                self._push(number, frame)
            except RefitdError:
                is_answered = True  # it was not sent
                raise
            while True:
                try:
                    answer, noticed = answers.get(timeout=max(0.0, until - time.monotonic()))
                except queue.Empty:
                    raise DeadlineExceeded(
                        f"{type(message).__name__}: no answer from node {self._where()} within {timeout:.1f} s; "
                        "look at `refitctl status` and the daemon's log"
                    ) from None
                is_answered = not isinstance(answer, SwapProgress)
                self._notifications.wait_until_heard(noticed)
                if isinstance(answer, local.Failure):
                    raise from_code(answer.code, answer.message)
                if isinstance(answer, SwapProgress) and reply is not SwapProgress:
                    if on_progress is not None:
                        on_progress(answer)
                    continue
                if isinstance(answer, reply):
                    return answer
                raise ProtocolError(f"{type(message).__name__} was answered with {type(answer).__name__}")
        finally:
            if not is_answered:
                self._abandon(number, message)
            self._waiters.pop(number, None)
            with contextlib.suppress(queue.Empty):
                while not is_answered:  # replies that arrived since the timeout
                    self._undo(number, answers.get_nowait()[0])

    def _abandon(self, number: int, message: Message) -> None:
        """Undo the effect of a request whose caller has stopped waiting."""
        match message:
            case local.Publish(member, version, None) | local.BeginPublish(member, version):
                # the daemon reads Withdraw right after the request, so it undoes that request and no later one
                with contextlib.suppress(RefitdError):
                    self._push(0, encoded(0, local.Withdraw(member=member, version=version)))
            case _ if isinstance(message, _UNDONE):
                self._abandoned.append(number)

    def _settle(self, until: float) -> None:
        """Wait until replies to abandoned requests have arrived and are undone, so they cannot block the next one."""
        while self._abandoned and not self.is_lost and time.monotonic() < until:
            time.sleep(_LOOK_S)

    def _undo(self, number: int, reply: Message) -> None:
        if number not in self._abandoned:
            return
        try:
            self._push_undo(reply)
        finally:
            with contextlib.suppress(ValueError):  # another thread has removed it
                self._abandoned.remove(number)

    def _push_undo(self, reply: Message) -> None:
        undo: Message
        match reply:
            case local.Registered(member):
                undo = local.Deregister(member=member)
            case local.ArenaDescriptor(arena):
                undo = local.FreeArena(arena=arena)
            case _:
                return
        with contextlib.suppress(RefitdError):
            self._push(0, encoded(0, undo))

    def tell(self, message: Message) -> None:
        """Send a message that has no reply.

        When this returns, a member's messages about its commits (`local.Told`) are in the daemon's kernel buffer. The
        daemon reads them before it notices this process's end, and before any later request.

        Raises:
            PeerLost: the daemon has ended, or does not read.
        """
        check_process(self.pid)
        frame = encoded(0, message)
        if isinstance(message, local.Told) and len(frame) <= handoff.MAX_DATAGRAM:
            with self._using():
                handoff.send(self._descriptors, frame)
        else:
            self._push(0, frame)

    def listen(self, member: str, listener: Listener) -> None:
        """Call `listener`, on a thread of the connection, with every notification for a member.

        Notifications that arrived earlier have been handled when this returns. When the daemon is lost, the listener is
        called with a Failure.
        """
        self._notifications.listen(member, listener)
        if (lost := self._lost) is not None:
            listener(local.Failure(code=lost.code, message=str(lost)))  # the notifier thread may have ended

    def unlisten(self, member: str) -> None:
        """Stop calling the member's listener."""
        self._notifications.unlisten(member)

    def map_arena(self, arena: int, *, write: bool) -> MappedArena | MappedDeviceArena:
        """Fetch an arena's descriptor and map it; raises ArenaError if this process does not see its GPU."""
        check_process(self.pid)
        with self._using(), self._fetching.taken(self._descriptors.gettimeout() or 0.0):
            handoff.send(self._descriptors, encode(0, sidecar.FetchArena(arena=arena, write=write)))
            reply, fds = self._receive_descriptor()
        try:
            match reply:
                case local.Failure(code, text):
                    raise from_code(code, text)
                case local.ArenaDescriptor(_, nbytes, "") if len(fds) == 1:
                    if self.files is not None and arena != PAGE_ARENA:
                        self.files.keep(fds[0])
                    return MappedArena(fds[0], nbytes, write=write)
                case local.ArenaDescriptor(_, nbytes, device) if len(fds) == 1:
                    return MappedDeviceArena(fds[0], nbytes, index_of(device), write=write)
            raise ProtocolError(f"FetchArena was answered with {type(reply).__name__} and {len(fds)} descriptors")
        finally:
            handoff.close_all(fds)

    def give_arena(self, fd: int, nbytes: int) -> int:
        """Return an arena of an earlier daemon to this one; return the arena's new number.

        Raises:
            ArenaError, RefusedError: the daemon does not adopt it; the text gives the reason.
        """
        check_process(self.pid)
        with self._using(), self._fetching.taken(self._descriptors.gettimeout() or 0.0):
            handoff.send(self._descriptors, encode(0, sidecar.GiveArena(nbytes=nbytes)), (fd,))
            reply, fds = self._receive_descriptor()
        handoff.close_all(fds)
        match reply:
            case local.Failure(code, text):
                raise from_code(code, text)
            case local.ArenaDescriptor(arena):
                return arena
        raise ProtocolError(f"GiveArena was answered with {type(reply).__name__}")

    def permit_page(self) -> MappedArena | MappedDeviceArena:
        """Return the page of permits, mapped once."""
        if self._permit_page is None:
            self._permit_page = self.map_arena(PAGE_ARENA, write=False)
        return self._permit_page

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a forked child of the owner: it has no session, and locks may be held forever."""
        return os.getpid() != self.pid

    def close(self, *, goodbye: bool = True) -> None:
        """Send queued messages, say goodbye, and end the session; the daemon forgets its registrations.

        Without `goodbye` the daemon treats this as a crash, and retains targets for restarted engines. `close` may be
        called repeatedly, by any thread and from a signal handler. If another call is already closing, this call waits
        for it, unless it has interrupted that call on the same thread.
        """
        if self.is_foreign:
            return  # `_disown` has closed the child's descriptors; the session belongs to the parent
        me = (threading.get_ident(), object())
        closer = self._closer.setdefault("", me)
        if closer is not me:
            until = time.monotonic() + 2 * FLUSH_S
            while not self._closed and closer[0] != me[0] and time.monotonic() < until:
                time.sleep(0.001)
            return
        try:
            self._end_threads()
        finally:
            with contextlib.suppress(RefitdError, OSError):
                # on this socket, unlike on ZeroMQ's, the goodbye is sure to arrive before the hang-up
                self._descriptors.settimeout(0)
                if goodbye:
                    handoff.send(self._descriptors, encode(0, local.Goodbye()))
            with contextlib.suppress(OSError):
                # forked children may hold it open too: shutdown hangs up for all of them
                self._descriptors.shutdown(socket.SHUT_RDWR)
            self._let_go()
            self._permit_page = None
            self._closed = True
            _open.discard(self)

    def _end_threads(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * FLUSH_S)
        self._notifications.join(FLUSH_S)  # it ends when the other thread has ended

    def _let_go(self) -> None:
        """Close the descriptors; if they are still in use after FLUSH_S, they close when this object is deleted."""
        until = time.monotonic() + FLUSH_S
        while others := [one for one in self._inside.copy() if one[0] != threading.get_ident()]:
            if time.monotonic() > until:
                break
            time.sleep(0.001)
        if not others and not self._inside and not self._thread.is_alive():
            self._descriptors.close()
            self._close_wake()

    # --- the connection's own threads ---------------------------------------------------------------------

    def _serve(self, endpoint: str) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        lost: RefitdError = PeerLost(CLOSED)
        linger_ms = 0
        try:
            dealer = Dealer(context, endpoint)
            try:
                self._work(dealer)
                linger_ms = int(FLUSH_S * 1000)
            finally:
                dealer.socket.setsockopt(zmq.LINGER, linger_ms)
                dealer.close()
        except RefitdError as exc:
            lost = exc
        except Exception as exc:
            _log.exception("the connection to the daemon in %s has failed", self.directory)
            lost = TransportError(f"the connection to the daemon in {self.directory} has failed: {exc!r}")
        finally:
            self._lose(lost)
            context.term()  # returns once lingering messages have been sent

    def _work(self, dealer: Dealer) -> None:
        """Send and receive until the connection is closed; raise RefitdError when the daemon is lost."""
        poller = zmq.Poller()
        poller.register(dealer.socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        # a closed SEQPACKET peer shows as POLLHUP, which ZeroMQ reports as POLLERR: the daemon has died
        hang_up, checked = self._descriptors.fileno(), ""
        poller.register(hang_up, zmq.POLLERR)
        while True:
            ready = dict(poller.poll(10_000))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            is_closing = self._closing  # read first: messages queued before closing are then sent below
            while self._outgoing:
                number, frame = self._outgoing.popleft()
                try:
                    dealer.socket.send(frame)
                except zmq.Again:
                    if (waiter := self._waiters.get(number)) is not None:
                        text = f"node {self._where()}: too much waits to be sent to the daemon, which does not read"
                        waiter.put((local.Failure(code=TransportError.code, message=text), 0))
            while (received := dealer.receive()) is not None:
                if dealer.peer != checked and local_peer(dealer.peer) != (self.daemon.uid, self.daemon.pid):
                    raise RefusedError(
                        f"{self.directory}: messages come from {dealer.peer!r}, and the daemon here is pid "
                        f"{self.daemon.pid} of uid {self.daemon.uid}; this session has ended"
                    )
                checked = dealer.peer
                self._dispatch(received)
            if is_closing:
                return
            if hang_up in ready:
                raise PeerLost(f"the refitd daemon of node {self._where()} has ended")

    def _dispatch(self, frame: bytes) -> None:
        message: Message
        try:
            number, message = self._decoder.decode(frame)
        except UnknownKind as exc:  # a newer daemon sent it
            number, message = exc.request_id, local.Failure(code=exc.code, message=str(exc))
        waiter = self._waiters.get(number)
        if waiter is not None:
            waiter.put((message, self._notifications.arrived))
        elif number in self._abandoned:
            self._undo(number, message)
        elif number == 0 and (member := getattr(message, "member", "")):
            self._notifications.add(member, message)

    def _lose(self, error: RefitdError) -> None:
        self.is_awaited = self.is_awaited and isinstance(error, PeerLost)  # other errors would recur
        self._lost, self.is_lost = error, True
        failure = local.Failure(code=error.code, message=str(error))
        for waiter in list(self._waiters.values()):
            waiter.put((failure, 0))
        self._notifications.end(failure)

    # --- details ------------------------------------------------------------------------------------------

    def _push(self, number: int, frame: bytes) -> None:
        with self._using():
            self._outgoing.append((number, frame))
            os.eventfd_write(self._wake, 1)

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        """Keep the descriptors open inside the block; raise if the connection is lost or closed."""
        mark = (threading.get_ident(), object())
        self._inside.add(mark)  # before the check of _closing, because `_let_go` waits for the users in this set
        try:
            if (lost := self._lost) is not None:
                # raise a new error each time: a stored one would keep its traceback's frames and their objects alive
                raise from_code(lost.code, str(lost))
            if self._closing:
                raise PeerLost(CLOSED)
            yield
        finally:
            self._inside.discard(mark)

    def _receive_descriptor(self) -> tuple[sidecar.DescriptorReply, tuple[int, ...]]:
        try:
            data, fds = handoff.receive(self._descriptors)
        except (TimeoutError, BlockingIOError) as exc:  # BlockingIOError if the timeout is 0
            raise DeadlineExceeded(f"the refitd daemon in {self.directory} does not answer; look at its log") from exc
        message = self._small.decode(data)[1]
        if isinstance(message, local.Failure) and not fds and not hasattr(self, "welcome"):
            raise from_code(message.code, message.message)
        return message, fds

    def _where(self) -> str:
        welcome = getattr(self, "welcome", None)
        return welcome.node if welcome is not None else str(self.directory)

    def _disown(self) -> None:
        """In a forked child, close the inherited descriptors: they would keep the parent's session open."""
        self._descriptors.close()
        self._close_wake()


_open: weakref.WeakSet[Connection] = weakref.WeakSet()


def _forked() -> None:
    for connection in list(_open):
        connection._disown()
    _open.clear()


os.register_at_fork(after_in_child=_forked)


def close_all(*, goodbye: bool) -> None:
    """Close every connection of this process that is still open."""
    for connection in list(_open):
        connection.close(goodbye=goodbye)
