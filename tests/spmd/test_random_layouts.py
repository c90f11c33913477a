from __future__ import annotations

import pytest

from tests.spmd.pool import Pool

PAIRS, AT_ONCE, QUICK = 300, 30, 60


@pytest.mark.parametrize(
    "first",
    [pytest.param(n, marks=() if n < QUICK else pytest.mark.slow) for n in range(0, PAIRS, AT_ONCE)],
)
def test_random_pairs_of_layouts_arrive_bit_for_bit(pool: Pool, first: int) -> None:
    counts = pool.run("random_pairs", range(first, first + AT_ONCE), timeout=240)

    assert counts == [AT_ONCE] * pool.size
