"""The oracle detects different elements, elements without a holder, and replicas that disagree."""

from __future__ import annotations

import numpy as np
import pytest

from refitd import ParameterMetadata, Tile
from refitd.testing import oracle

SHAPES = {"w": (4, 6), "b": (6,)}


def shards(world: int, dim: int) -> list[tuple[int, ParameterMetadata, np.ndarray]]:
    whole = {name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for name, shape in SHAPES.items()}
    found = []
    for rank in range(world):
        for name, split in (("w", True), ("b", False)):
            array = np.split(whole[name], world, axis=dim)[rank].copy() if split else whole[name].copy()
            group = list(range(world))
            meta = ParameterMetadata(
                name, array.shape, "float32", 4, is_tp=split, partition_dim=dim, tensor_parallel_group_ranks=group
            )
            found.append((rank, meta, array))
    return found


def test_gathered_shards_cut_another_way_are_what_the_other_side_holds() -> None:
    oracle.compare(oracle.gather(SHAPES, shards(2, 0)), shards(3, 1))


def test_one_element_that_differs_is_named() -> None:
    whole, held = oracle.gather(SHAPES, shards(2, 0)), shards(3, 1)
    held[4][2][1, 1] += 1
    with pytest.raises(AssertionError, match="1 of 8 elements differ: w: rank 2"):
        oracle.compare(whole, held)


def test_minus_zero_is_not_zero() -> None:
    whole, held = oracle.gather(SHAPES, shards(1, 0)), shards(1, 0)
    held[0][2][0, 0] = -0.0
    with pytest.raises(AssertionError, match="1 of 24"):
        oracle.compare(whole, held)


def test_elements_that_no_rank_holds_and_replicas_that_differ_are_no_whole() -> None:
    held = shards(2, 0)
    with pytest.raises(AssertionError, match=r"no rank holds: \{'w': 12\}"):
        oracle.gather(SHAPES, [held[0], held[1]])
    held[3][2][0] = 7
    with pytest.raises(AssertionError, match="1 of 6 elements differ: b: rank 1"):
        oracle.gather(SHAPES, held)


def test_a_fused_tensor_is_taken_apart_by_its_tiles() -> None:
    tiles = (Tile("w", (0, 0), (4, 6), 0, (6, 1)), Tile("b", (0,), (6,), 24, (1,)))
    meta = ParameterMetadata("fused", (30,), "float32", 4, tiles=tiles)
    whole = oracle.gather(SHAPES, [(0, meta, np.arange(30, dtype=np.float32))])
    assert whole["w"][3, 5] == 23 and whole["b"][0] == 24
