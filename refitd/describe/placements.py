"""Tiles of a tensor that a device mesh splits: any number of mesh dimensions on any tensor dimensions.

Each split divides what the outer splits left, as torch.chunk does: ceil(n / ranks) elements each, so that the last
ranks may hold less or nothing. The outermost split is not always the first mesh dimension: FSDP over TP splits for TP
first, though FSDP's mesh dimension comes first. torch writes that as a _StridedShard, whose split factor is the number
of shards that the outer splits have made; `cut_order` reads it:

    7 rows, [_StridedShard(0, split_factor=2), Shard(0)] on 2 x 2, TP inside the mesh and outside the cut:
        rank (0,0) rows 0:2   rank (0,1) rows 4:6   rank (1,0) rows 2:4   rank (1,1) rows 6:7

A split that keeps a factor f > 1 first divides the dimension into f chunks, then each chunk over its ranks. A strided
shard means this if it is the only split of its dimension (a view of a fused tensor):

    7 elements, f=2 over 2 ranks:  rank 0 holds [0:2] [4:6], rank 1 holds [2:4] [6:7]
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from refitd.describe.layout import row_major
from refitd.describe.tiles import Tile

Run = tuple[int, int]  # first element, number of elements


@dataclass(frozen=True, slots=True)
class MeshSplit:
    """One mesh dimension's split: this rank is `index` of `count` along tensor dimension `dim`.

    `factor` is torch's split factor; once `cut_order` has read the order from it, the number of chunks made first.
    """

    dim: int
    count: int
    index: int
    factor: int = 1


def cut_order(splits: Sequence[MeshSplit]) -> list[int] | None:
    """Return the positions of the splits; those of one tensor dimension from the outermost to the innermost.

    `splits` are in the order of the mesh. A split with factor f lies inside splits of later mesh dimensions that
    together make f shards. Returns None if there are no such splits, so that the factors give no order.
    """
    orders: dict[int, list[int]] = {}
    for position in reversed(range(len(splits))):
        split = splits[position]
        order = orders.setdefault(split.dim, [])
        outside = itertools.accumulate((splits[other].count for other in order), operator.mul, initial=1)
        place = next((i for i, shards in enumerate(outside) if shards == split.factor), None)
        if place is None:
            return None
        order.insert(place, position)
    return [position for order in orders.values() for position in order]


def split_tiles(
    tensor: str, global_shape: Sequence[int], splits: Sequence[MeshSplit]
) -> tuple[tuple[int, ...], tuple[Tile, ...]]:
    """Return this rank's local shape and tiles after the splits, which are given outermost first."""
    runs: list[list[Run]] = [[(0, size)] for size in global_shape]
    for split in splits:
        runs[split.dim] = _take(runs[split.dim], split)
    shape = tuple(sum(size for _, size in dim_runs) for dim_runs in runs)
    strides = row_major(shape)
    placed = [_with_local_starts(dim_runs) for dim_runs in runs]
    tiles = tuple(
        Tile(
            tensor,
            tuple(start for start, _, _ in box),
            tuple(size for _, size, _ in box),
            sum(local * stride for (_, _, local), stride in zip(box, strides, strict=True)),
            strides,
        )
        for box in itertools.product(*placed)
    )
    return shape, tiles if 0 not in shape else ()


def _take(runs: list[Run], split: MeshSplit) -> list[Run]:
    """Return the part of `runs` that this rank keeps, in order, with adjacent runs joined."""
    total = sum(size for _, size in runs)
    part = -(-total // split.factor)
    kept: list[Run] = []
    for first in range(0, total, max(part, 1)):
        end = min(first + part, total)
        chunk = -(-(end - first) // split.count)
        begin = first + split.index * chunk
        for start, size in _between(runs, min(begin, end), min(begin + chunk, end)):
            if kept and sum(kept[-1]) == start:
                kept[-1] = (kept[-1][0], kept[-1][1] + size)
            else:
                kept.append((start, size))
    return kept


def _between(runs: list[Run], begin: int, end: int) -> list[Run]:
    """Return the part of the concatenated runs from position `begin` to `end`."""
    found, position = [], 0
    for start, size in runs:
        low, high = max(begin, position), min(end, position + size)
        if low < high:
            found.append((start + low - position, high - low))
        position += size
    return found


def _with_local_starts(runs: list[Run]) -> list[tuple[int, int, int]]:
    """Return (global start, size, local start) of each run."""
    starts = itertools.accumulate((size for _, size in runs), initial=0)
    return [(start, size, local) for (start, size), local in zip(runs, starts, strict=False)]
