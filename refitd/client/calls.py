"""Calls of the client: their arguments, and how they behave in signal handlers, forked children and asyncio loops.

Arguments are converted to the types of messages. If a conversion fails, the error names the argument.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math
import operator
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import msgspec

from refitd.errors import DeadlineExceeded, RefitdError, RefusedError
from refitd.protocol.base import Message, encode
from refitd.protocol.keys import check_names
from refitd.text import mismatch, shown

if TYPE_CHECKING:
    from refitd.describe.metadata import ParameterMetadata
    from refitd.describe.renames import Names

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


# --- arguments --------------------------------------------------------------------------------------------

MAX_COUNT = 1 << 62
MAX_SMALL = 1 << 20
MAX_PID = 1 << 22
MAX_SECONDS = 1e9
MAX_NAME = 512


def whole(what: str, value: Any, low: int = 0, high: int = MAX_COUNT) -> int:
    """Return a whole number (of Python, numpy, torch or an enumeration) as an int.

    Raises:
        RefusedError: the value is not a whole number, or not in low..high.
    """
    try:
        if isinstance(value, bool):  # an int for Python, and a mistake here
            raise TypeError
        found = operator.index(value.value if isinstance(value, enum.Enum) else value)
    except Exception:
        raise RefusedError(f"{what} is {shown(value)}, expected a whole number in {low}..{high}") from None
    if not low <= found <= high:
        raise RefusedError(f"{what} is {found}, expected a whole number in {low}..{high}")
    return int(found)


def seconds(what: str, value: Any) -> float:
    """Return a number of seconds as a float.

    Raises:
        RefusedError: the value is not a number, negative, or above MAX_SECONDS: every wait must end.
    """
    found = math.nan
    if not isinstance(value, str | bytes | bytearray | bool) and value is not None:
        try:
            found = float(value)
        except Exception:
            found = math.nan
    if not 0.0 <= found <= MAX_SECONDS:
        raise RefusedError(f"{what} is {shown(value)}, expected seconds in 0..{MAX_SECONDS:.0e}: every wait has an end")
    return found


def text(what: str, value: Any, *, least: int = 1, most: int = MAX_NAME) -> str:
    """Return a name or text as a str.

    Raises:
        RefusedError: the value is not a text, is too short or too long, or is not valid Unicode.
    """
    if isinstance(value, enum.Enum):
        value = value.value
    if not isinstance(value, str):
        raise RefusedError(f"{what} is {shown(value)}, expected a text")
    found = str.__str__(value)
    if not least <= len(found) <= most:
        raise RefusedError(f"{what} has {len(found)} characters, expected {least}..{most}")
    try:
        found.encode()
    except UnicodeEncodeError as exc:
        raise RefusedError(f"{what} is {found[:60]!r}, which is not valid Unicode: {exc.reason}") from None
    return found


def flag(what: str, value: Any) -> bool:
    """Return a truth value (of Python, numpy or torch) as a bool.

    Raises:
        RefusedError: the value is not a truth value.
    """
    if not isinstance(value, bool):
        kind, dims = str(getattr(value, "dtype", "")), getattr(value, "ndim", None)
        if kind.removeprefix("torch.") != "bool" or dims != 0:
            raise RefusedError(f"{what} is {shown(value)}, expected True or False")
    return bool(value)


def hook(what: str, value: Callable[..., object] | None) -> None:
    """Raise RefusedError unless the value is None or callable."""
    if value is not None and not callable(value):
        raise RefusedError(f"{what} is {shown(value)}, expected a function")


@dataclass(frozen=True, slots=True)
class Layout:
    """The position of a rank's tensors in the model; see `Client.register_source`."""

    rank: int = 0
    world_size: int = 1
    metadata: Sequence[ParameterMetadata] | None = None
    pg_collection: Any = None
    num_experts: int | None = None
    names: Names | None = None

    def checked(self) -> Layout:
        """Return a copy with Python ints; raises RefusedError for invalid numbers."""
        experts = self.num_experts
        return replace(
            self,
            rank=whole("rank", self.rank, 0, MAX_SMALL),
            world_size=whole("world_size", self.world_size, 0, MAX_SMALL),
            num_experts=None if experts is None else whole("num_experts", experts, 0, MAX_SMALL),
        )


def encoded(number: int, message: Message) -> bytes:
    """Return a message's frame, checked as the daemon will check it.

    Raises:
        RefusedError: a field's value is invalid.
        ProtocolError: the message is too large.
    """
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message), strict=True)
        return encode(number, message)
    except RefitdError:
        raise
    except Exception as exc:  # msgspec and Unicode each raise their own errors
        check_names(message)  # raises an error that names the field or tensor, if a name cannot be encoded
        place, said = mismatch(str(exc))
        raise RefusedError(f"{place or type(message).__name__}: {said}; correct the argument of that name") from exc
