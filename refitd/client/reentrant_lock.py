"""One at a time, where a signal handler may be what comes second."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from refitd.errors import DeadlineExceeded, RefusedError


class Turn:
    """A lock that other threads wait for, and that its own thread is refused: it would wait for itself for ever.

    Python runs signal handlers between two instructions of the main thread, whatever that is in the middle of.
    """

    def __init__(self, what: str) -> None:
        """`what` is under way while it is taken, as an error says it."""
        self._what = what
        # reentrant: a handler that comes between taking it and saying so finds it free, and is done before that goes on
        self._lock = threading.RLock()
        self._taken = False

    @contextlib.contextmanager
    def taken(self, timeout: float) -> Iterator[None]:
        """Wait for the turn for at most `timeout` seconds.

        Raises:
            RefusedError: this very thread has it: it is in a signal handler, or a callback.
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
    """Raise RefusedError where this is not the process that made a client, but a child that it has forked."""
    if os.getpid() != pid:
        raise RefusedError(
            f"this client belongs to pid {pid}, and this is its forked child {os.getpid()}; connect again after fork "
            "(refitd.connect())"
        )
