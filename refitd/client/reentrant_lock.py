"""Mutual exclusion that is safe when a signal handler interrupts the owner."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from refitd.errors import DeadlineExceeded, RefusedError


class Turn:
    """A lock that other threads wait for, and that refuses its own thread, which would otherwise deadlock.

    Python runs signal handlers between any two instructions of the main thread.
    """

    def __init__(self, what: str) -> None:
        """`what` says in error messages what the holder is doing."""
        self._what = what
        # reentrant: a handler that runs between `acquire` and `_taken = True` may take it, and ends before we go on
        self._lock = threading.RLock()
        self._taken = False

    @contextlib.contextmanager
    def taken(self, timeout: float) -> Iterator[None]:
        """Wait for the turn for at most `timeout` seconds.

        Raises:
            RefusedError: this thread already has it, so the caller is in a signal handler or a callback.
            DeadlineExceeded: another thread has kept it.
        """
        if not self._lock.acquire(timeout=max(0.0, min(timeout, threading.TIMEOUT_MAX))):
            raise DeadlineExceeded(f"{self._what} on another thread, and has not ended within {timeout:.1f} s")
        try:
            if self._taken:
                raise RefusedError(
                    f"{self._what} on this very thread, which a signal handler or a callback has interrupted and "
                    "would wait for; note what is to be done, and do it after that"
                )
            self._taken = True
            try:
                yield
            finally:
                self._taken = False
        finally:
            self._lock.release()


def check_process(pid: int) -> None:
    """Raise RefusedError unless this is process `pid`, which made the client: forked children cannot use it."""
    if os.getpid() != pid:
        raise RefusedError(
            f"this client belongs to pid {pid}, and this is its forked child {os.getpid()}; connect again after fork "
            "(refitd.connect()), or start the process with spawn"
        )
