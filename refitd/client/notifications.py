"""Pass a daemon's notifications to the listeners of its members, in order, on a separate thread."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from refitd.protocol import local
from refitd.protocol.base import Message

Listener = Callable[[Message], None]

_log = logging.getLogger("refitd.client")

# The number of notifications stored for members that have no listener yet; the oldest are dropped.
EARLY = 64

# How long a reply waits until listeners have handled earlier notifications. Listeners are fast, but they block if the
# waiting thread is in a signal handler and holds a lock that they need.
ORDER_S = 5.0


@dataclass(frozen=True, slots=True)
class _Listen:
    member: str
    listener: Listener
    heard: queue.SimpleQueue[bool]  # receives True once the listener has handled earlier notifications


@dataclass(frozen=True, slots=True)
class _Unlisten:
    member: str


@dataclass(frozen=True, slots=True)
class _Notice:
    member: str
    message: Message


class Notifications:
    """The thread that calls listeners; separate, because a listener may wait for a thread that awaits a reply.

    Attributes:
        arrived: the number of notifications received.
    """

    def __init__(self) -> None:
        self.arrived = self._heard = 0
        self._notices: queue.SimpleQueue[_Listen | _Unlisten | _Notice | local.Failure] = queue.SimpleQueue()
        self._listeners: dict[str, Listener] = {}
        self._thread = threading.Thread(target=self._work, name="refitd-notify", daemon=True)
        self._thread.start()

    def listen(self, member: str, listener: Listener) -> None:
        """Call `listener` with every notification for a member; wait until it has handled the earlier ones."""
        heard: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._notices.put(_Listen(member, listener, heard))
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            with contextlib.suppress(queue.Empty):
                heard.get(timeout=ORDER_S)

    def unlisten(self, member: str) -> None:
        """Stop calling the member's listener."""
        self._notices.put(_Unlisten(member))
        self._listeners.pop(member, None)

    def add(self, member: str, message: Message) -> None:
        """Queue a notification for the member's listener."""
        self._notices.put(_Notice(member, message))
        self.arrived += 1

    def end(self, failure: local.Failure) -> None:
        """Pass the failure to all listeners, and end the thread."""
        self._notices.put(failure)

    def join(self, timeout: float) -> None:
        """Wait for the end of the thread, unless the thread itself calls this."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def wait_until_heard(self, arrived: int) -> None:
        """Wait until listeners have handled the first `arrived` notifications; a reply must not overtake them."""
        until = time.monotonic() + ORDER_S
        while self._heard < arrived and self._thread.is_alive() and time.monotonic() < until:
            if threading.current_thread() is self._thread:
                return
            time.sleep(0.0002)

    def _work(self) -> None:
        # notifications for members that have no listener yet
        early: deque[_Notice] = deque(maxlen=EARLY)
        while self._take(early):
            pass

    def _take(self, early: deque[_Notice]) -> bool:
        """Handle the next notice; return False after the last. A separate function holds no notice while it waits."""
        calls: list[tuple[Listener, Message]] = []
        match notice := self._notices.get():
            case _Listen(member, listener):
                self._listeners[member] = listener
                for one in [one for one in early if one.member == member]:
                    early.remove(one)
                    calls.append((listener, one.message))
            case _Unlisten(member):
                self._listeners.pop(member, None)
            case _Notice(member, message):
                if (found := self._listeners.get(member)) is not None:
                    calls.append((found, message))
                else:
                    early.append(notice)
            case local.Failure():
                calls += [(listener, notice) for listener in self._listeners.values()]
                self._listeners.clear()
        for listener, message in calls:
            try:
                listener(message)
            except Exception:  # a failure with one notification must not stop the others
                _log.exception("a listener could not take %s", type(message).__name__)
        match notice:
            case _Listen():
                notice.heard.put(True)
            case _Notice():
                self._heard += 1
            case local.Failure():
                with contextlib.suppress(queue.Empty):
                    while True:
                        if isinstance(late := self._notices.get_nowait(), _Listen):
                            late.heard.put(True)  # `Connection.listen` itself checks whether the connection is lost
                return False
        return True
