"""Waits with deadlines, for libraries that have none: polling, and calls that may never return."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from refitd.copy_services.peers import Deadline
from refitd.errors import DeadlineExceeded

_T = TypeVar("_T")

# Waits shorter than this do not sleep, since a sleep takes a tenth of that. Longer ones sleep for a share of the time
# waited so far, up to the longest pause, to leave the processor to others.
_AWAKE_S = 0.001
_LONGEST_PAUSE_S = 0.0005


class Backoff:
    """Growing pauses between two checks for an event."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def take(self, deadline: Deadline, subject: str) -> None:
        """Pause briefly.

        Raises:
            DeadlineExceeded: the deadline has passed; `subject` says what has not happened.
        """
        now = time.monotonic()
        if now >= deadline.at:
            raise DeadlineExceeded(f"{subject} within {deadline.seconds:g} s")
        waited = now - self._since
        time.sleep(0.0 if waited < _AWAKE_S else min(_LONGEST_PAUSE_S, waited / 20))


def poll(is_over: Callable[[], bool], deadline: Deadline, subject: str) -> None:
    """Return once `is_over` returns True.

    Raises:
        DeadlineExceeded: it did not in time; `subject` says what has not happened.
    """
    pause = Backoff()
    while not is_over():
        pause.take(deadline, subject)


def bounded(step: Callable[[], _T], deadline: Deadline, subject: str) -> _T:
    """Run `step` on a thread; return its result or raise its exception.

    Raises:
        DeadlineExceeded: it has not returned in time. It still runs and cannot be stopped: the process should end.
    """
    found: list[_T] = []
    failures: list[BaseException] = []

    def body() -> None:
        try:
            found.append(step())
        except BaseException as exc:  # raised again in the caller's thread
            failures.append(exc)

    thread = threading.Thread(target=body, name=subject[:15], daemon=True)
    thread.start()
    thread.join(deadline.left().total_seconds())
    if failures:
        raise failures[0]
    if not found:
        raise DeadlineExceeded(f"{subject} did not end within {deadline.seconds:g} s")
    return found[0]
