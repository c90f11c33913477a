"""Source ranks that claim equal elements must have them: the in-process API compares before it sends."""

from __future__ import annotations

from tests.spmd.pool import Pool


def test_one_flipped_bit_of_any_replica_is_refused_by_name(pool: Pool) -> None:
    said = pool.run("replica_cases:any_replica_that_differs_is_named", range(12), timeout=240)

    assert len(said[0]) > 5 and all(each == said[0] for each in said)


def test_experts_that_do_not_say_they_are_split_are_refused_with_what_to_check(pool: Pool) -> None:
    for said in pool.run("replica_cases:experts_without_attributes"):
        assert "experts.linear_fc1.weight0: rank 0 and rank 1 describe the same elements" in said
        assert "tensor_model_parallel" in said


def test_twins_are_compared_at_the_first_exchange_of_a_plan_only(pool: Pool) -> None:
    pool.run("replica_cases:later_exchanges_compare_nothing")


def test_tied_copies_of_a_pipelines_ends_are_twins(pool: Pool) -> None:
    for said in pool.run("replica_cases:tied_copies_differ"):
        assert "rank 0 and rank 1 describe the same elements" in said


def test_one_wrong_element_of_any_cut_is_refused_by_name(pool: Pool) -> None:
    said = pool.run("replica_cases:any_cut_that_differs_is_named", range(12), timeout=240)

    assert said[0] > 7 and all(each == said[0] for each in said)


def test_tied_copies_in_different_cuts_must_agree(pool: Pool) -> None:
    for said in pool.run("replica_cases:tied_copies_in_different_cuts_differ"):
        assert "rank 1 and rank 4 describe the same elements" in said
