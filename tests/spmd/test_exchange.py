from __future__ import annotations

from collections.abc import Callable

from tests.spmd.pool import Pool


def test_nothing_moves_unless_both_ends_say_the_same(pool: Pool) -> None:
    sizes, ids, local = pool.agreed("disagreement_moves_nothing")

    assert "rank 1 is about to send 1 pieces, 36 bytes, and rank 3 expects 1 pieces, 40 bytes" in sizes
    assert "others of that size" in ids
    assert "task (1, 0) of rank 2 with itself has no receive" in local


def test_tensors_of_any_size_arrive_in_messages_of_any_size(pool: Pool) -> None:
    assert all(pool.run("random_exchanges", range(20)))


def test_bytes_that_do_not_land_are_noticed_by_all(pool: Pool) -> None:
    for said in pool.run("wrong_bytes_are_noticed"):
        assert "what rank 5 wrote is not what rank 0 read" in said


def test_a_run_ends_at_its_deadline_and_the_service_with_it(small_pool: Callable[[int], Pool]) -> None:
    pool = small_pool(2)
    ((said, is_usable),) = pool.run("service_waits_no_longer", 0.5, ranks=[0])

    assert "comparing transfers" in said and "0.5 s" in said
    assert "cannot be used any more" in said and not is_usable


def test_a_rank_that_dies_while_sending_is_named(small_pool: Callable[[int], Pool]) -> None:
    """Rank 1 answers nothing, since it is gone: only rank 0 is asked what it saw."""
    pool = small_pool(2)
    pool.start("one_dies_while_sending", 15.0, ranks=[1])
    (said,) = pool.run("one_dies_while_sending", 15.0, ranks=[0], timeout=10)

    assert "rank 1" in said
