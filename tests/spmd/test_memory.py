"""The in-process API refuses memory that it cannot read or write exactly: by name, on every rank, before a transfer."""

from __future__ import annotations

from tests.spmd.pool import Pool


def test_tensors_that_cannot_be_read_or_written_are_refused_by_name_on_every_rank(pool: Pool) -> None:
    said = pool.agreed("memory_cases:unusable", timeout=240)

    for what, text in said.items():
        side, _, kind = what.partition(": ")
        assert kind in text and text.startswith(f"w on rank {int(side == 'target')}: "), what


def test_models_on_the_meta_device_can_be_planned(pool: Pool) -> None:
    pool.run("memory_cases:meta_models_can_be_planned")


def test_targets_that_share_memory_are_refused_by_name_on_every_rank(pool: Pool) -> None:
    *overlapping, untied, tiles = pool.agreed("memory_cases:overlapping")

    assert all("a and b on rank 1: they share memory" in text for text in (*overlapping, tiles))
    assert "a" in untied and "b" in untied and "tied" in untied


def test_targets_that_lie_between_each_other_or_are_tied_are_written(pool: Pool) -> None:
    pool.run("memory_cases:apart_and_tied")


def test_bools_of_any_byte_keep_it_whatever_the_strides(pool: Pool) -> None:
    pool.run("memory_cases:bytes_of_bools")


def test_arguments_of_one_rank_that_are_none_are_named_on_every_rank(pool: Pool) -> None:
    said = pool.agreed("memory_cases:arguments", timeout=240)

    for what, text in said:
        assert what.partition(" is")[0] in text and "expected" in text and "RecursionError" not in text, text


def test_a_timeout_group_or_backend_that_is_none_is_refused_at_once(pool: Pool) -> None:
    pool.run("memory_cases:arguments_of_this_rank")
