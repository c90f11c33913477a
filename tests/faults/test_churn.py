"""A short run of each kind of `scripts/faults churn`."""

from __future__ import annotations

import pytest

from tests.faults.churn import joiners, rolling


@pytest.mark.slow
def test_every_version_is_whole_while_ten_swaps_a_second_meet_drains_reloads_restarts_and_an_upgrade() -> None:
    found = rolling(5.0, seed=1)
    assert found["versions compared"], found


@pytest.mark.slow
def test_replicas_that_join_while_relays_die_twice_get_the_live_version() -> None:
    found = joiners(1.0, seed=1)
    assert found["versions compared"], found
