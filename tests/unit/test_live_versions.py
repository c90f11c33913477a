"""Knowledge of live versions, and the number of swaps that are remembered."""

from __future__ import annotations

from typing import Any

from refitd.coordinator.live_versions import KEPT_DECISIONS, LiveVersions
from refitd.coordinator.records import LiveVersion


class Nothing:
    """A journal in which nothing is written."""

    id, is_new = "j", False

    def live(self, model: str) -> None:
        return None

    def highest(self, model: str) -> int:
        return -1


def test_what_is_kept_of_swaps_that_were_decided_is_bounded_and_the_last_ones_are_known() -> None:
    past: Any = Nothing()
    lives = LiveVersions(past, 0.0, True, lambda entry: None, lambda: 0.0, lambda *what, **fields: None)
    last = 2 * KEPT_DECISIONS
    for number in range(last + 1):
        lives.decided("policy", LiveVersion(number, "run", number, f"swap {number}"))
    assert len(lives._decided) == KEPT_DECISIONS
    assert lives.was_decided(f"swap {last}") == (last, "run") and lives.was_decided("swap 0") is None
