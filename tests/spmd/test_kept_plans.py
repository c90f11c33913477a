"""`execute_reshard_plan`: a plan that is built once and executed repeatedly, between real ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.spmd.pool import Pool


def test_a_plan_serves_many_steps_whatever_the_layouts(pool: Pool) -> None:
    pool.run("kept_plan_cases:random_layouts_over_steps", range(8), timeout=60)


def test_what_a_plan_moves_is_what_numpy_slices(pool: Pool) -> None:
    said = pool.run("kept_plan_cases:gathered_and_sliced")

    assert said == [[128, 0]] * 3 + [[0, 96]] * 4 + [[0, 0]]


def test_a_plan_serves_other_modules_of_the_layout_and_may_be_built_without_memory(pool: Pool) -> None:
    pool.run("kept_plan_cases:other_modules_of_the_layout")


def test_declared_casts_are_part_of_the_plan(pool: Pool) -> None:
    pool.run("kept_plan_cases:casts_are_remembered")


def test_one_plan_is_executed_with_any_transform_and_with_none(pool: Pool) -> None:
    pool.run("kept_plan_cases:transforms")


def test_a_transform_that_changes_the_dtype_is_part_of_the_plan(pool: Pool) -> None:
    for said in pool.run("kept_plan_cases:a_transform_that_changes_the_dtype"):
        assert "w: dtype is float32" in said


def test_ties_are_found_and_declared_ones_remembered(pool: Pool) -> None:
    for cut, other in pool.run("kept_plan_cases:ties_and_aliases"):
        assert "of the source on rank 0" in cut and "aliases ('head.weight',), it is ()" in cut
        assert "aliases ('head.weight',), it is ('another',)" in other


def test_modules_that_the_plan_was_not_built_for_are_refused_on_every_rank(pool: Pool) -> None:
    larger, wider, swapped, more, gone, renamed, expanded = pool.agreed("kept_plan_cases:wrong_modules")

    assert "w of the target on rank 3: the plan was made for shape (4, 3), it is (8, 3)" in larger
    assert "dtype float32, it is float64" in wider
    assert "on rank 5: the plan was made for tensor_parallel_group_ranks [4, 5], it is [5, 4]" in swapped
    assert "more of the target on rank 6: the plan was made without it" in more
    assert "w of the target on rank 7: the plan was made with it" in gone
    assert "v of the source on rank 0" in renamed and "w of the source on rank 0" in renamed
    assert "w on rank 2: several of its elements lie in one place" in expanded


def test_plans_that_are_not_everyones_are_refused_on_every_rank(pool: Pool) -> None:
    pure, mixed, anothers = pool.agreed("kept_plan_cases:wrong_plans")

    assert "rank 6: plan is a ReshardPlan, expected what build_centralized_reshard_plan returned" in pure
    assert "rank 0 and rank 1 execute different plans" in mixed
    assert "rank 2: the plan is rank 4's" in anothers


def test_replicas_are_compared_before_a_plan_is_executed_first(pool: Pool) -> None:
    for said in pool.run("kept_plan_cases:replicas_are_compared_once"):
        assert "w: rank 0 and rank 1" in said


@pytest.mark.parametrize("where", ["coming", "moving"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_ends_the_wait_of_all_others(
    small_pool: Callable[[int], Pool], victim: int, where: str
) -> None:
    pool = small_pool(4)
    others = [rank for rank in range(4) if rank != victim]
    pool.start("kept_plan_cases:one_dies", victim, where, 100.0)
    assert all(pool.collect(60.0, others))
