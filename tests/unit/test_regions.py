"""Elements that several source ranks hold are compared, and only these."""

from __future__ import annotations

import numpy as np
import torch

from refitd import ParameterMetadata, Roster, Tile
from refitd.describe.digests import digest_of
from refitd.plan.build import plan_copies
from refitd.plan.regions import differences
from tests.support.layouts import meta, tp


def described(rank: int, **fields: object) -> ParameterMetadata:
    return meta("w", (4, 2), rank, **fields)


def compare(metas: list[ParameterMetadata], tensors: list[torch.Tensor], wanted: ParameterMetadata) -> list[str]:
    plan = plan_copies([*(Roster(r, [m]) for r, m in enumerate(metas)), Roster(9, (), [wanted])])
    table, held = plan.regions.table, []
    for rank, tensor in enumerate(tensors):
        if rank in plan.regions.holder_of:
            boxes = [(table.size[row], table.offset[row], table.stride[row]) for row in plan.regions.rows_of(rank)]
            tiles = [Tile("w", (0,) * len(n), tuple(n.tolist()), int(at), tuple(by.tolist())) for n, at, by in boxes]
            digests = np.array([digest_of(tensor, tile) for tile in tiles], np.uint64)
            held.append(plan.regions.digested(f"rank {rank}", rank, digests))
    return differences(held)


def test_only_the_same_elements_are_compared() -> None:
    one, two = torch.zeros(4, 2), torch.ones(4, 2)
    wanted = meta("w", (4, 2), 9)
    (said,) = compare([described(0), described(1)], [one, two], wanted)
    assert said.startswith("w: rank 0 and rank 1 describe the same elements")
    assert not compare([described(0), described(1)], [one, one.clone()], wanted)
    split = tp("w", (4, 2), [0, 1])
    assert not compare([split[0], split[1]], [one, two], meta("w", (8, 2), 9))
    tiles = [Tile("w", (rank, 0), (3, 2), 0, (2, 1)) for rank in range(2)]  # they overlap
    parts = [meta("w", (3, 2), rank, tiles=(tile,), global_shape=(4, 2)) for rank, tile in enumerate(tiles)]
    assert not compare(parts, [one[:3], one[1:]], wanted)
    assert compare(parts, [one[:3], two[:3]], wanted)


def test_replicated_heads_inside_of_packed_tensors_are_compared() -> None:
    tiles = [(Tile("q", (2 * r,), (2,), 0, (1,)), Tile("k", (0,), (1,), 2, (1,))) for r in range(2)]
    metas = [meta("qk", (3,), r, tiles=tiles[r]) for r in range(2)]
    wanted = meta("k", (1,), 9)
    assert not compare(metas, [torch.tensor([1, 2, 9]), torch.tensor([3, 4, 9])], wanted)
    (said,) = compare(metas, [torch.tensor([1, 2, 9]), torch.tensor([3, 4, 8])], wanted)
    assert said.startswith("k: rank 0 and rank 1")


def test_uneven_replicas_are_compared_however_small_the_shard() -> None:
    metas = [
        meta("w", (rows, 2), r, tiles=(Tile("w", (first, 0), (rows, 2), 0, (2, 1)),), global_shape=(5, 2))
        for r, (first, rows) in enumerate([(0, 4), (4, 1)] * 2)
    ]
    tensors = [torch.zeros(4, 2), torch.ones(1, 2), torch.zeros(4, 2), torch.full((1, 2), 3.0)]
    (said,) = compare(metas, tensors, meta("w", (5, 2), 9))
    assert said.startswith("w: rank 1 and rank 3")
