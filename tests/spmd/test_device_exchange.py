from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.spmd.pool import Pool

KINDS = ("rounds", "slots")


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_any_size_arrive_in_messages_of_any_size(pool: Pool, kind: str) -> None:
    assert all(pool.run("device_cases:random_exchanges", kind, range(8), timeout=240))


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_do_not_land_are_noticed_by_all(pool: Pool, kind: str) -> None:
    for said in pool.run("device_cases:wrong_bytes_are_noticed", kind):
        assert "the bytes that rank 5 wrote differ from the bytes that rank 0 read" in said


@pytest.mark.parametrize("kind", KINDS)
def test_a_wait_for_a_message_that_never_comes_ends_and_names_who_owes_it(
    small_pool: Callable[[int], Pool], kind: str
) -> None:
    pool = small_pool(2)
    pool.start("device_cases:nobody_waits_for_ever", kind, 3.0, ranks=[1])
    ((said, is_usable),) = pool.run("device_cases:nobody_waits_for_ever", kind, 3.0, ranks=[0])

    assert said.startswith("rank 0") and "rank 1" in said
    assert not is_usable
