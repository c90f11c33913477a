"""Whether deltas are worth their while over a cable: learned from how long whole runs and runs with deltas take."""

from __future__ import annotations

from dataclasses import dataclass

# Runs with deltas are slower than whole ones if they take this many times as long, and this many seconds more.
SLOWER, NOISE_S = 1.1, 0.1

LONGEST_REST = 16


@dataclass(slots=True)
class Pace:
    """How quickly a stream goes whole and as deltas, over its cable and between its two processors.

    Deltas that are slower two runs in a row rest for a run, then, if they are slower again, for two, four, and so on.
    """

    whole: float = 0.0  # bytes of pieces a second, in the last run; 0 before it
    slow: int = 0  # runs with deltas, in a row, that were slower
    rest: int = 0  # runs that go whole before the next try

    def wants_deltas(self) -> bool:
        """Whether the next run should send deltas. To be asked once for each."""
        self.rest, rests = max(0, self.rest - 1), self.rest > 0
        return not rests

    def took(self, seconds: float, nbytes: int, *, as_deltas: bool) -> None:
        """Learn how long a run took for so many bytes."""
        if not as_deltas:
            self.whole = nbytes / seconds
            return
        is_slow = self.whole > 0 and seconds > SLOWER * nbytes / self.whole + NOISE_S
        self.slow = self.slow + 1 if is_slow else 0
        self.rest = min(LONGEST_REST, 1 << (self.slow - 2)) if self.slow >= 2 else 0
