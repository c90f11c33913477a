"""One connection to the node's daemon: requests with deadlines, notifications, descriptors. No torch here."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import zmq

from refitd.buffers import handoff
from refitd.buffers.arena import MappedArena
from refitd.buffers.cuda import MappedDeviceArena, index_of
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
from refitd.protocol.base import PROTOCOL_VERSION, Message
from refitd.protocol.channel import Dealer
from refitd.protocol.codec import Decoder, encode
from refitd.protocol.reports import SwapProgress

R = TypeVar("R", bound=Message)

# Notifications that are kept for members which nobody listens for yet.
EARLY = 64


class Connection:
    """A session with the daemon in `directory`. Its own thread does all ZeroMQ work; any thread may ask."""

    def __init__(self, directory: Path, name: str, timeout: float) -> None:
        """Connect and say hello within `timeout` seconds.

        Raises:
            TransportError: no daemon runs there, or it does not answer.
            RefusedError: this user is not allowed in.
        """
        self.directory = directory
        self._descriptors = _connect(directory, timeout)
        self._fetching = threading.Lock()
        self._decoder: Decoder[local.ClientReply] = Decoder(local.ClientReply)
        self._small: Decoder[sidecar.DescriptorReply] = Decoder(sidecar.DescriptorReply, handoff.MAX_DATAGRAM)
        self.daemon = handoff.peer_of(self._descriptors)
        try:
            greeting = self._receive_descriptor()[0]
            if not isinstance(greeting, sidecar.Session):
                raise ProtocolError(f"the daemon in {directory} greeted with {type(greeting).__name__}")
        except BaseException:
            self._descriptors.close()
            raise
        self._lock = threading.Lock()
        self._waiters: dict[int, queue.SimpleQueue[Message]] = {}
        self._listeners: dict[str, Callable[[Message], None]] = {}
        # what was said of a member before its registration was answered, or had a listener
        self._early: deque[tuple[str, Message]] = deque(maxlen=EARLY)
        self._outgoing: deque[tuple[int, Message]] = deque()
        self._number = 0
        self._lost: RefitdError | None = None
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._thread = threading.Thread(
            target=self._serve, args=(greeting.endpoint,), name="refitd-client", daemon=True
        )
        self._thread.start()
        hello = local.Hello(protocol=PROTOCOL_VERSION, token=greeting.token, name=name)
        try:
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
            PeerLost: the daemon has gone.
            RefitdError: the error that the daemon or the coordinator answered with.
        """
        answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._check_lost()
        with self._lock:
            self._number += 1
            number = self._number
            self._waiters[number] = answers
        try:
            self._push(number, message)
            deadline = time.monotonic() + timeout
            while True:
                try:
                    answer = answers.get(timeout=max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    raise DeadlineExceeded(
                        f"{type(message).__name__}: no answer from node {self._where()} within {timeout:.1f} s; "
                        "look at `refitctl status` and the daemon's log"
                    ) from None
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
            with self._lock:
                self._waiters.pop(number, None)

    def tell(self, message: Message) -> None:
        """Send a message that has no reply."""
        self._check_lost()
        self._push(0, message)

    def listen(self, member: str, listener: Callable[[Message], None]) -> None:
        """Have `listener` called, on the connection's thread, with every notification for a member.

        When the daemon is lost the listener is called with a Failure.
        """
        with self._lock:
            self._listeners[member] = listener
            early = [message for name, message in self._early if name == member]
            for message in early:
                self._early.remove((member, message))
        for message in early:
            listener(message)

    def unlisten(self, member: str) -> None:
        """Stop listening."""
        self._listeners.pop(member, None)

    def map_arena(self, arena: int, *, write: bool) -> MappedArena | MappedDeviceArena:
        """Fetch an arena's descriptor and map it; raises ArenaError where this process does not see its GPU."""
        with self._fetching:
            handoff.send(self._descriptors, encode(0, sidecar.FetchArena(arena=arena, write=write)))
            reply, fds = self._receive_descriptor()
        try:
            match reply:
                case local.Failure(code, text):
                    raise from_code(code, text)
                case sidecar.ArenaDescriptor(_, nbytes, "") if len(fds) == 1:
                    return MappedArena(fds[0], nbytes, write=write)
                case sidecar.ArenaDescriptor(_, nbytes, device) if len(fds) == 1:
                    return MappedDeviceArena(fds[0], nbytes, index_of(device), write=write)
            raise ProtocolError(f"FetchArena was answered with {type(reply).__name__} and {len(fds)} descriptors")
        finally:
            handoff.close_all(fds)

    def close(self) -> None:
        """End the session; the daemon forgets its registrations."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            os.eventfd_write(self._wake, 1)
        with contextlib.suppress(RefitdError, OSError):
            # here, and not by ZeroMQ: it arrives before this process or its end of the connection is gone
            self._descriptors.settimeout(0)
            handoff.send(self._descriptors, encode(0, sidecar.Goodbye()))
        self._thread.join()  # it wakes at once: its only wait is on what has just been written
        self._descriptors.close()
        os.close(self._wake)

    # --- the connection's own thread ----------------------------------------------------------------------

    def _serve(self, endpoint: str) -> None:
        dealer = Dealer(self._context, endpoint)
        poller = zmq.Poller()
        poller.register(dealer.socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        # a closed SEQPACKET peer shows as POLLHUP, which ZeroMQ calls POLLERR: the daemon's death, at once
        poller.register(self._descriptors.fileno(), zmq.POLLERR)
        try:
            while not self._closing:
                ready = dict(poller.poll(10_000))
                if self._closing:
                    break
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                while self._outgoing:
                    dealer.send(*self._outgoing.popleft())
                while (frame := dealer.receive()) is not None:
                    self._dispatch(frame)
                if any(fd not in (dealer.socket, self._wake) for fd in ready):
                    self._lose(PeerLost(f"the refitd daemon of node {self._where()} has ended"))
                    break
        finally:
            self._lose(PeerLost("this connection to the refitd daemon is closed"))
            dealer.close()
            self._context.term()

    def _dispatch(self, frame: bytes) -> None:
        try:
            number, message = self._decoder.decode(frame)
        except ProtocolError as exc:
            self._lose(exc)
            return
        with self._lock:
            waiter = self._waiters.get(number)
        if waiter is not None:
            waiter.put(message)
        elif number == 0 and (member := getattr(message, "member", "")):
            with self._lock:
                listener = self._listeners.get(member)
                if listener is None:
                    self._early.append((member, message))
            if listener is not None:
                listener(message)

    def _lose(self, error: RefitdError) -> None:
        with self._lock:
            if self._lost is not None:
                return
            self._lost = error
            waiters = list(self._waiters.values())
        failure = local.Failure(code=error.code, message=str(error))
        for waiter in waiters:
            waiter.put(failure)
        for listener in list(self._listeners.values()):
            listener(failure)

    def _check_lost(self) -> None:
        # another error each time: one that is kept would keep the frames it was raised in, and what those hold
        if self._lost is not None:
            raise from_code(self._lost.code, str(self._lost))

    def _push(self, number: int, message: Message) -> None:
        with self._lock:
            self._check_lost()
            if self._closing:
                raise PeerLost("this connection to the refitd daemon is closed")
            self._outgoing.append((number, message))
            # close() closes it under the same lock, and only after _closing is set
            os.eventfd_write(self._wake, 1)

    # --- details ------------------------------------------------------------------------------------------

    def _receive_descriptor(self) -> tuple[sidecar.DescriptorReply, tuple[int, ...]]:
        try:
            data, fds = handoff.receive(self._descriptors)
        except TimeoutError as exc:
            raise DeadlineExceeded(f"the refitd daemon in {self.directory} does not answer; look at its log") from exc
        message = self._small.decode(data)[1]
        if isinstance(message, local.Failure) and not fds and not hasattr(self, "welcome"):
            raise from_code(message.code, message.message)
        return message, fds

    def _where(self) -> str:
        welcome = getattr(self, "welcome", None)
        return welcome.node if welcome is not None else str(self.directory)


def _connect(directory: Path, timeout: float) -> socket.socket:
    path = directory / "refitd.fds"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(timeout)
    try:
        sock.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError) as exc:
        sock.close()
        raise TransportError(
            f"no refitd daemon is running in {directory}; start one with `refitd serve --standalone`, or give the "
            "directory of a running one (refitd.connect(DIR), refitctl --address DIR, REFITD_RUNTIME_DIR)"
        ) from exc
    except PermissionError as exc:
        sock.close()
        raise RefusedError(
            f"{path}: permission denied; run as the daemon's user or have its admin allow yours"
        ) from exc
    except OSError as exc:
        sock.close()
        raise TransportError(f"{path}: {exc.strerror or exc}") from exc
    return sock
