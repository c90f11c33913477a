"""How the client's blocking methods behave in signal handlers, forked children and asyncio loops."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from refitd.errors import DeadlineExceeded, RefusedError

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


class Turn:
    """A lock that makes other threads wait, and refuses its holder's thread, which would otherwise deadlock.

    Python runs signal handlers between any two instructions of the main thread, so a handler may interrupt the holder.
    """

    def __init__(self, what: str) -> None:
        """`what` names the holder's activity in error messages."""
        self._what = what
        # reentrant: a handler that runs between `acquire` and `_taken = True` may acquire it, and releases it again
        self._lock = threading.RLock()
        self._taken = False

    @contextlib.contextmanager
    def taken(self, timeout: float) -> Iterator[None]:
        """Wait for the lock for at most `timeout` seconds, and hold it for the block.

        Raises:
            RefusedError: this thread already holds it, so the caller is in a signal handler or a callback.
            DeadlineExceeded: another thread still holds it.
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
    """Raise RefusedError unless this is process `pid`, which made the client; a forked child cannot use the client."""
    if os.getpid() != pid:
        raise RefusedError(
            f"this client belongs to pid {pid}, and this is its forked child {os.getpid()}; connect again after fork "
            "(refitd.connect()), or start the process with spawn"
        )


def awaitable(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Return the awaitable form of a method: each call runs on a new thread and raises the method's errors.

    Cancelling the task stops only the waiting; the method continues until its timeout.
    """

    @wraps(method)
    async def called(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[R] = loop.create_future()

        def settle(result: R | None, error: BaseException | None) -> None:
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]  # R itself may be None

        def work() -> None:
            result, error = None, None
            try:
                result = method(self, *args, **kwargs)
            except BaseException as exc:
                error = exc
            try:
                loop.call_soon_threadsafe(settle, result, error)
            except RuntimeError:  # the loop has been closed: the result is not needed
                return

        # not asyncio.to_thread: its pool has few threads, and a wait for a version may take minutes
        threading.Thread(target=work, name=f"refitd-{method.__name__}", daemon=True).start()
        return await done

    called.__doc__ = f"Do as `{method.__name__}`, and let the event loop run meanwhile."
    called.__name__ = f"{method.__name__}_async"
    return called
