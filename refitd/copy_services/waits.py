"""Waits that end at a deadline, for libraries that have none: polling, calls that may never return, CUDA streams."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch

from refitd.errors import ConfigError, DeadlineExceeded

_T = TypeVar("_T")

# Waits shorter than this do not sleep, since a sleep takes a tenth of that. Longer ones sleep for a share of the time
# waited so far, up to the longest pause, to leave the processor to other threads.
_AWAKE_S = 0.001
_LONGEST_PAUSE_S = 0.0005


@dataclass(frozen=True, slots=True)
class Deadline:
    """The time (of time.monotonic) at which every wait ends, and the timeout that set it."""

    at: float
    seconds: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the deadline `seconds` from now.

        Raises:
            ConfigError: not a positive, finite number of seconds.
        """
        try:
            found = math.nan if isinstance(seconds, str | bytes | bool) else float(seconds)
        except (TypeError, ValueError, RuntimeError):
            found = math.nan
        if not 0 < found < 1e9:
            raise ConfigError(f"timeout is {seconds!r}, expected seconds above 0")
        return cls(time.monotonic() + found, found)

    def left(self) -> timedelta:
        """Return the time left, at least a millisecond: to torch 0 means "forever"."""
        return timedelta(seconds=max(0.001, self.at - time.monotonic()))


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


def make_current(device: torch.device) -> torch.device:
    """Make a GPU the current one of this thread, and return it."""
    torch.cuda.set_device(device)
    return device


class DeviceStream:
    """A private CUDA stream of one device. Work on it neither waits for other streams nor delays them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    @property
    def handle(self) -> int:
        """The stream's handle in CUDA's C interface."""
        return int(self._stream.cuda_stream)

    @contextmanager
    def work(self, deadline: Deadline, subject: str) -> Iterator[None]:
        """Queue torch's work inside the block on this stream, after the work of the caller's stream.

        All of it is done when the block ends without an error.

        Raises:
            DeadlineExceeded: it is not done in time.
        """
        with torch.cuda.device(self.device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                yield
                self.settle(deadline, subject)

    @contextmanager
    def queue(self) -> Iterator[None]:
        """Queue torch's work inside the block on this stream, without waiting for other streams."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event:
        """Return an event that completes after everything queued so far."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def settle(self, deadline: Deadline, subject: str) -> None:
        """Return once everything queued so far is done.

        Raises:
            DeadlineExceeded: it is not done in time.
        """
        poll(self.mark().query, deadline, f"{subject}: {self.device} has not done its queued work")


@contextmanager
def on_streams(gpus: Sequence[int], timeout: float, subject: str) -> Iterator[None]:
    """Run torch's work inside the block on a new stream of each of these GPUs; it is done when the block ends.

    Raises:
        DeadlineExceeded: a GPU is not done in time.
    """
    deadline = Deadline.after(timeout)
    with ExitStack() as streams:
        for gpu in gpus:
            streams.enter_context(DeviceStream(torch.device("cuda", gpu)).work(deadline, subject))
        yield
