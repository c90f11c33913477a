"""Tiles of a tensor that a device mesh splits: any number of mesh dimensions on any tensor dimensions.

Each mesh dimension cuts what the ones before it left over, as torch.chunk does: ceil(n / ranks) elements each,
so that the last ranks may hold less or nothing. A split factor f > 1 (torch's _StridedShard) deals f times as
many chunks round robin, which is what FSDP over TP on the same dimension means:

    12 elements, f=2 over 2 ranks:  rank 0 holds [0:3] [6:9], rank 1 holds [3:6] [9:12]
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from refitd.describe.layout import row_major
from refitd.describe.tiles import Tile

Run = tuple[int, int]  # first element, number of elements


@dataclass(frozen=True, slots=True)
class Split:
    """One mesh dimension's cut: this rank is `index` of `count` along tensor dimension `dim`."""

    dim: int
    count: int
    index: int
    factor: int = 1


def split_tiles(
    tensor: str, global_shape: Sequence[int], splits: Sequence[Split]
) -> tuple[tuple[int, ...], tuple[Tile, ...]]:
    """Return the local shape and the tiles of what the splits, in mesh order, leave to this rank."""
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


def _take(runs: list[Run], split: Split) -> list[Run]:
    """Return the runs that this rank keeps of `runs`, in order, neighbours joined."""
    total = sum(size for _, size in runs)
    chunk = -(-total // (split.count * split.factor))
    kept: list[Run] = []
    for part in range(split.factor):
        begin = (part * split.count + split.index) * chunk
        for start, size in _between(runs, begin, begin + chunk):
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
