"""Runs work of more than a few milliseconds on one thread, in order, beside a loop that must answer."""

from __future__ import annotations

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, cast

K = TypeVar("K")
M = TypeVar("M")

# While a thread computes, the loop waits this long for the interpreter. With Python's default of 5 ms, a few system
# calls of the loop would take a tenth of a second.
_SWITCH_S = 0.001

# Larger frames are decoded on the thread; that takes 10 ms or more.
LARGE_FRAME = 128 << 10


class BackgroundThread(Generic[K]):
    """One background thread. Its owning loop calls `submit` and, when told, `collect`."""

    def __init__(self, name: str, tell: Callable[[], None]) -> None:
        """`tell` is called on the background thread when there is something to collect."""
        self._name = name
        self._tell = tell
        self._todo: queue.SimpleQueue[tuple[K, Callable[[], object]] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[K, Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, key: K, work: Callable[[], object]) -> None:
        """Call `work` on the thread; `collect` returns its result with `key`."""
        self._todo.put((key, work))
        if self._thread is None:
            sys.setswitchinterval(_SWITCH_S)
            # a daemon thread: the process may end without waiting for it
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()

    def __len__(self) -> int:
        """Return how much work has not begun."""
        return self._todo.qsize()

    def collect(self) -> Iterator[tuple[K, Any]]:
        """Yield key and result, or exception, of finished work."""
        while True:
            try:
                yield self._done.get_nowait()
            except queue.Empty:
                return

    def close(self) -> None:
        """End the thread once it has done what was submitted; its results are lost."""
        if self._thread is not None:
            self._todo.put(None)

    def _work(self) -> None:
        while True:
            if (todo := self._todo.get()) is None:
                return
            key, work = todo
            result: object
            try:
                result = work()
            except Exception as exc:
                result = exc
            self._done.put((key, result))
            del todo, work, result  # free the frame that it was made from
            self._tell()


class OrderedDecoder(Generic[M]):
    """Decodes one peer's large messages on the thread; later messages wait for them, so that order is kept."""

    def __init__(self, name: str, tell: Callable[[], None]) -> None:
        """`tell` is as in BackgroundThread."""
        self._reader = BackgroundThread[None](name, tell)
        self._waiting: deque[tuple[bool, Any]] = deque()  # (is being decoded, else the message)

    def read(self, work: Callable[[], M]) -> None:
        """Decode a message on the thread; `collect` yields it, or the exception."""
        self._waiting.append((True, None))
        self._reader.submit(None, work)

    def __len__(self) -> int:
        """Return how many messages wait, read or not."""
        return len(self._waiting)

    def holds(self, message: M) -> bool:
        """Whether a message must wait for earlier ones; `collect` then yields it."""
        if self._waiting:
            self._waiting.append((False, message))
        return bool(self._waiting)

    def collect(self) -> Iterator[M | Exception]:
        """Yield decoded messages, and those that waited for them."""
        for _, read in self._reader.collect():
            self._waiting.popleft()
            yield read
            while self._waiting and not self._waiting[0][0]:
                yield cast("M", self._waiting.popleft()[1])
