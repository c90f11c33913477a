"""The steps of a run: when a service read, converted, sent, received, placed and digested its pieces.

A kind of step has one line, whatever the number of pieces. Steps overlap if several kinds are busy at one time. On a
GPU these are the times at which the host queues the work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

AWAIT, READ, CONVERT, COMPARE = "await publication", "read", "convert", "compare with base"
SEND, RECEIVE, PLACE, DIGEST = "send", "receive", "place", "digest"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """All steps of one kind: from `began_s` to `ended_s` seconds before the end of the run, busy for `busy_s`."""

    kind: str
    began_s: float
    ended_s: float
    busy_s: float


class Steps:
    """Adds up the steps of one run."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[float, float, float]] = {}  # kind -> first begin, last end, busy seconds

    def add(self, kind: str, began: float) -> None:
        """Add a step that ends now; time that several steps of a kind share counts once. Clock: time.perf_counter."""
        ended = time.perf_counter()
        first, last, busy = self._of.get(kind, (began, began, 0.0))
        self._of[kind] = min(first, began), ended, busy + ended - max(began, last)

    def time(self, kind: str, step: Callable[..., object], *args: object) -> None:
        """Call `step` and add it."""
        began = time.perf_counter()
        step(*args)
        self.add(kind, began)

    def times(self) -> tuple[StepTimes, ...]:
        """Return the kinds by their first step; the run ends now."""
        now = time.perf_counter()
        found = sorted(self._of.items(), key=lambda one: one[1])
        return tuple(StepTimes(kind, now - first, now - last, busy) for kind, (first, last, busy) in found)
