"""Waits that end, for libraries whose own do not: polling, and calls that may never return."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from refitd.copy_services.peers import Deadline
from refitd.errors import DeadlineExceeded

_T = TypeVar("_T")

# What takes less is waited for without sleeping, as a sleep takes a tenth of it; then sleeps are a part of the time
# waited so far, up to the longest, so that a long wait leaves the processor to others.
_AWAKE_S = 0.001
_LONGEST_PAUSE_S = 0.0005


class Backoff:
    """Time passed between two looks at something that has not happened yet, longer each time."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def take(self, deadline: Deadline, subject: str) -> None:
        """Let a little time pass.

        Raises:
            DeadlineExceeded: the deadline has passed; `subject` tells who has done nothing.
        """
        now = time.monotonic()
        if now >= deadline.at:
            raise DeadlineExceeded(f"{subject} within {deadline.seconds:g} s")
        waited = now - self._since
        time.sleep(0.0 if waited < _AWAKE_S else min(_LONGEST_PAUSE_S, waited / 20))


def poll(is_over: Callable[[], bool], deadline: Deadline, subject: str) -> None:
    """Return once `is_over` says so.

    Raises:
        DeadlineExceeded: it did not in time; `subject` tells who has done nothing.
    """
    pause = Backoff()
    while not is_over():
        pause.take(deadline, subject)


def bounded(step: Callable[[], _T], deadline: Deadline, subject: str) -> _T:
    """Return what `step` returns, or pass on what it raises; it runs on a thread of its own.

    Raises:
        DeadlineExceeded: it has not returned in time. It still runs and nobody can end it: the process should end.
    """
    found: list[_T] = []
    failures: list[BaseException] = []

    def body() -> None:
        try:
            found.append(step())
        except BaseException as exc:  # carried to the caller's thread
            failures.append(exc)

    thread = threading.Thread(target=body, name=subject[:15], daemon=True)
    thread.start()
    thread.join(deadline.left().total_seconds())
    if failures:
        raise failures[0]
    if not found:
        raise DeadlineExceeded(f"{subject} did not end within {deadline.seconds:g} s")
    return found[0]
