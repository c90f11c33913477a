"""Awaitable forms of the client's blocking methods, for engines and trainers with an asyncio loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


def awaitable(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Return the awaitable form of a method: it runs on a thread of its own, and raises what the method raises.

    Cancelling the task stops the waiting, not the method, which ends by its own timeout.
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
            except RuntimeError:  # the loop has been closed: nobody waits any more
                return

        # not asyncio.to_thread: its pool has few threads, and a wait for a version may take minutes
        threading.Thread(target=work, name=f"refitd-{method.__name__}", daemon=True).start()
        return await done

    called.__doc__ = f"Do as `{method.__name__}`, and let the event loop run meanwhile."
    called.__name__ = f"{method.__name__}_async"
    return called
