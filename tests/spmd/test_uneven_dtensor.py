from __future__ import annotations

from pathlib import Path

import pytest

from tests.spmd.pool import Pool


@pytest.mark.parametrize("first", [0, pytest.param(13, marks=pytest.mark.slow)])
def test_uneven_shards_are_found_gathered_and_split(pool: Pool, first: int) -> None:
    assert pool.run("dtensor_cases:random_uneven", range(first, first + 13), timeout=240) == [13] * 8


def test_even_shards_are_where_torch_puts_them(pool: Pool) -> None:
    pool.run("dtensor_cases:torchs_own_shards")


def test_sections_that_do_not_sum_are_refused(pool: Pool) -> None:
    for short, negative, nothing, dim in pool.run("dtensor_cases:splits"):
        assert "[3, 6] sum to 9" in short and "sum to 10" in short
        assert "[12, -2]" in negative
        assert "expected 1 or more" in nothing
        assert "dim is 5" in dim


def test_gaps_overlaps_and_replicas_that_differ_are_found_by_every_rank(pool: Pool) -> None:
    gap, overlap, end, replicas, short = pool.agreed("dtensor_cases:violations")

    assert "no chunk holds [7:8, 0:3]" in gap
    assert "chunks [6:8, 0:3] and [7:9, 0:3] overlap" in overlap and "no chunk holds [9:10, 0:3]" in overlap
    assert "no chunk holds [14:15, 0:3]" in end
    assert "replicas along mesh dim 0 have different chunks" in replicas
    assert "dim 0: the shards have 16 elements together, expected 17" in short


def test_a_checkpoint_of_uneven_shards_loads_into_other_shards(pool: Pool, tmp_path: Path) -> None:
    pool.run("dtensor_cases:saved_and_loaded", str(tmp_path / "saved"))


@pytest.mark.parametrize(
    "mesh", [(2, 2, 2), *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ((4, 2), (2, 4)))], ids=str
)
def test_models_that_torch_has_sharded_with_fsdp_over_tensor_parallelism_are_swapped(
    pool: Pool, mesh: tuple[int, ...]
) -> None:
    pool.run("dtensor_cases:fsdp_over_tensor_parallelism", mesh, [1, 2, 3, 5, 7, 8, 9, 13, 16, 97], timeout=240)


def test_shards_lie_in_the_order_that_torch_gathers_them_in(pool: Pool) -> None:
    pool.run("dtensor_cases:shards_in_an_order_of_their_own", timeout=240)
