"""From metadata to tiles."""

from __future__ import annotations

import pytest

from refitd import PlanError, Repeat, Tile
from refitd.describe.layout import global_shape_of, layout_problems, row_major, tiles_of
from tests.support.layouts import meta, tp


def test_a_contiguous_shard_is_one_tile() -> None:
    shard = tp("w", (4, 4), [0, 1])[1]
    assert tiles_of(shard) == (Tile("w", (4, 0), (4, 4), 0, (4, 1)),)
    assert global_shape_of(shard) == (8, 4)


def test_a_stride_is_one_tile_that_repeats() -> None:
    # 8 rows in two halves, two ranks: rank 1 holds 2:4 and 6:8
    shard = tp("w", (4, 3), [0, 1], partition_stride=2)[1]
    assert tiles_of(shard) == (Tile("w", (2, 0), (2, 3), 0, (3, 1), Repeat(0, 2, 4, 6)),)
    assert global_shape_of(shard) == (8, 3)


def test_partition_sizes_are_one_tile_each_and_empty_blocks_none() -> None:
    shard = tp("w", (2, 6), [0, 1], dim=1, partition_sizes=[1, 0, 5])[1]
    assert tiles_of(shard) == (
        Tile("w", (0, 1), (2, 1), 0, (6, 1)),
        Tile("w", (0, 7), (2, 5), 1, (6, 1)),
    )
    assert global_shape_of(shard) == (2, 12)


def test_uneven_shards_start_where_those_before_them_end() -> None:
    shard = tp("w", (3,), [0, 1, 2])[1]
    assert tiles_of(shard, [4, 3, 3]) == (Tile("w", (4,), (3,), 0, (1,)),)
    assert global_shape_of(shard, [4, 3, 3]) == (10,)


def test_a_replicated_tensor_is_itself() -> None:
    assert tiles_of(meta("w", (2, 3))) == (Tile("w", (0, 0), (2, 3), 0, (3, 1)),)
    assert tiles_of(meta("w", ())) == (Tile("w", (), (), 0, ()),)


def test_an_empty_shard_has_no_tiles() -> None:
    assert tiles_of(tp("w", (0, 3), [0, 1])[1]) == ()


def test_tiles_carry_the_canonical_name() -> None:
    assert tiles_of(meta("layers.0.w", (2,), resolved_name="layers.8.w"))[0].tensor == "layers.8.w"


def test_explicit_tiles_replace_the_fields() -> None:
    tile = Tile("q", (2,), (2,), 1, (1,))
    found = meta("qkv", (4,), is_tp=True, tensor_parallel_group_ranks=[0, 1], tiles=(tile,))
    assert tiles_of(found) == (tile,)
    assert global_shape_of(found) is None


def test_a_group_without_the_owner_is_refused() -> None:
    with pytest.raises(PlanError, match=r"rank None is not in its tensor-parallel group \[0, 1\]"):
        tiles_of(meta("w", (4,), None, is_tp=True, tensor_parallel_group_ranks=[0, 1]))


def test_uneven_shards_that_cannot_be_cut_alike_are_refused() -> None:
    shard = tp("w", (4,), [0, 1], partition_stride=2)[0]
    assert "cannot be cut into 2 parts" in layout_problems(shard, [4, 3])[0]


def test_problems_are_returned_together() -> None:
    found = layout_problems(meta("w", (4,), dtype="int8", element_size=2, global_shape=(-1,)))
    assert len(found) == 2


def test_row_major_strides() -> None:
    assert row_major((2, 3, 4)) == (12, 4, 1)
    assert row_major((5,)) == (1,)
    assert row_major(()) == ()
