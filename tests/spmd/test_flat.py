"""Modules that a framework has flattened and cut are offered in place: real FSDP1, and ZeRO-3 by its attributes."""

from __future__ import annotations

import pytest

from tests.spmd.pool import Pool


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("use_orig", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_what_fsdp1_ranks_offer_is_the_model_and_follows_the_optimizer(
    pool: Pool, strategy: str, use_orig: bool, nested: bool
) -> None:
    pool.run("flat_cases:fsdp1_is_what_it_was", strategy, use_orig, nested)


def test_a_gathered_fsdp1_module_is_refused(pool: Pool) -> None:
    for said in pool.run("flat_cases:fsdp1_gathered_is_refused"):
        assert "FSDP has gathered its parameters" in said


def test_a_module_of_fsdp1_itself_is_refused_by_the_frameworks_word(pool: Pool) -> None:
    """Its parameters look like small tensors of different shapes on each rank."""
    for said in pool.run("flat_cases:fsdp1_itself_is_refused"):
        assert "net: FSDP1 has flattened its parameters" in said and "fsdp1_tensors(model, rank)" in said


def test_what_zero3_ranks_offer_is_the_model(pool: Pool) -> None:
    pool.run("flat_cases:zero3_is_what_it_was")
