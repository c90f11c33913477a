"""Pass a daemon's notifications to the listeners of its members, in order, on a thread of its own."""

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

# The number of notifications kept for members that have no listener yet.
EARLY = 64

# How long a reply waits until listeners have handled earlier notifications. They are quick, unless the waiting thread
# is in a signal handler and holds a lock that they need.
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
    """The thread that calls listeners; a thread of its own, because a listener may wait for one that awaits a reply.

    Attributes:
        arrived: the number of notifications that have come.
    """

    def __init__(self) -> None:
        self.arrived = self._heard = 0
        self._notices: queue.SimpleQueue[_Listen | _Unlisten | _Notice | local.Failure] = queue.SimpleQueue()
        self._listeners: dict[str, Listener] = {}
        self._thread = threading.Thread(target=self._work, name="refitd-notify", daemon=True)
        self._thread.start()

    def listen(self, member: str, listener: Listener) -> None:
        """Call `listener` with every notification for a member; those that came earlier are handled on return."""
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
        """Pass a notification on."""
        self._notices.put(_Notice(member, message))
        self.arrived += 1

    def end(self, failure: local.Failure) -> None:
        """Pass the failure to all listeners, and end the thread."""
        self._notices.put(failure)

    def join(self, timeout: float) -> None:
        """Wait for the end of the thread, unless it is the caller's."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def wait_until_heard(self, arrived: int) -> None:
        """Wait until listeners have handled the notifications that came before a reply; callers rely on that order."""
        until = time.monotonic() + ORDER_S
        while self._heard < arrived and self._thread.is_alive() and time.monotonic() < until:
            if threading.current_thread() is self._thread:
                return
            time.sleep(0.0002)

    def _work(self) -> None:
        # notifications for members whose listener is not there yet
        early: deque[_Notice] = deque(maxlen=EARLY)
        while self._take(early):
            pass

    def _take(self, early: deque[_Notice]) -> bool:
        """Handle the next notice; return False after the last. A separate call, to keep no reference while waiting."""
        match self._notices.get():
            case _Listen(member, listener, heard):
                self._listeners[member] = listener
                for notice in [notice for notice in early if notice.member == member]:
                    early.remove(notice)
                    _call(listener, notice.message)
                heard.put(True)
            case _Unlisten(member):
                self._listeners.pop(member, None)
            case _Notice(member, message) as notice:
                if (found := self._listeners.get(member)) is not None:
                    _call(found, message)
                else:
                    early.append(notice)
                self._heard += 1
            case local.Failure() as failure:
                listeners = list(self._listeners.values())
                self._listeners.clear()
                for listener in listeners:
                    _call(listener, failure)
                with contextlib.suppress(queue.Empty):
                    while True:
                        if isinstance(late := self._notices.get_nowait(), _Listen):
                            late.heard.put(True)  # `Connection.listen` itself checks whether the connection is lost
                return False
        return True


def _call(listener: Listener, message: Message) -> None:
    try:
        listener(message)
    except Exception:  # a failure with one notification must not stop the others
        _log.exception("a listener could not take %s", type(message).__name__)
