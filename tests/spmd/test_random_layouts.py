from __future__ import annotations

import pytest

from tests.spmd.pool import Pool

PAIRS, AT_ONCE = 300, 30


@pytest.mark.parametrize("first", range(0, PAIRS, AT_ONCE))
def test_random_pairs_of_layouts_arrive_bit_for_bit(pool: Pool, first: int) -> None:
    counts = pool.run("random_pairs", range(first, first + AT_ONCE), timeout=60)

    assert counts == [AT_ONCE] * pool.size
