"""Decide whether deltas pay off over a cable, from the durations of whole runs and of runs with deltas."""

from __future__ import annotations

from dataclasses import dataclass

# Runs with deltas count as slower if they take this many times as long as whole ones, and this many seconds more.
SLOWER, NOISE_S = 1.1, 0.1

LONGEST_REST = 16


@dataclass(slots=True)
class Pace:
    """The speed of a stream, sent whole and as deltas, over its cable and between its two processors.

    Deltas that are slower two runs in a row rest for a run, then, if they are slower again, for two, four, and so on.
    """

    whole: float = 0.0  # bytes of pieces a second, in the last run; 0 before it
    slow: int = 0  # runs with deltas, in a row, that were slower
    rest: int = 0  # runs that go whole before the next try

    def wants_deltas(self) -> bool:
        """Return whether the next run should send deltas. Call it once per run."""
        self.rest, rests = max(0, self.rest - 1), self.rest > 0
        return not rests

    def took(self, seconds: float, nbytes: int, *, as_deltas: bool) -> None:
        """Record the duration of a run and its bytes."""
        if not as_deltas:
            self.whole = nbytes / seconds
            return
        is_slow = self.whole > 0 and seconds > SLOWER * nbytes / self.whole + NOISE_S
        self.slow = self.slow + 1 if is_slow else 0
        self.rest = min(LONGEST_REST, 1 << (self.slow - 2)) if self.slow >= 2 else 0
