"""Cut one tensor into runs for a rank, and place the runs as boxes of the local tensor."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from refitd.describe.layout import row_major
from refitd.describe.tiles import Repeat, spaced
from refitd.offline.layouts import group_of
from refitd.offline.values import Layout, Split, TensorSpec

Run = tuple[int, int, int]  # number of the canonical tensor, first element in it, number of elements
Box = tuple[int, int, int, int, Repeat | None]  # number of the tensor, first element, elements, local place, repeat


@dataclass(frozen=True, slots=True)
class RankCut:
    """The part of a tensor that ranks of one kind hold: local shape, tiles by number of the canonical tensor."""

    shape: tuple[int, ...]
    tiles: tuple[tuple[int, tuple[int, ...], tuple[int, ...], int, Repeat | None], ...]
    strides: tuple[int, ...]


def cut_of(spec: TensorSpec, layout: Layout, index: int, place: int, fsdp: int) -> RankCut:
    """Cut a tensor for position `index` of its group and position `place` among the `fsdp` ranks that share a copy."""
    dim = spec.split.dim if spec.split is not None else 0
    runs: list[Run] = [(0, 0, spec.shape[dim])] if spec.shape else []
    if spec.split is not None:
        runs = _runs(spec, spec.split, group_of(spec, layout)[1], index)
    lead: Run = (0, 0, spec.shape[0]) if spec.shape else (0, 0, 1)
    if spec.shape and dim == 0:
        runs = _chunk(runs, fsdp, place)
    elif spec.shape:
        (lead,) = _chunk([lead], fsdp, place) or [(0, 0, 0)]
    shape = list(spec.shape)
    if shape:
        shape[0] = lead[2]
        shape[dim] = sum(size for _, _, size in runs)
    strides = row_major(shape)
    if 0 in shape:
        return RankCut(tuple(shape), (), strides)
    tiles = []
    for number, start, size, local, repeat in _boxes(runs, dim, strides[dim]) if shape else [(0, 0, 1, 0, None)]:
        offset, sizes = [0] * len(shape), list(shape)
        if shape:
            offset[0], sizes[0] = lead[1], lead[2]
            offset[dim], sizes[dim] = start, size
        tiles.append((number, tuple(offset), tuple(sizes), local, repeat))
    return RankCut(tuple(shape), tuple(tiles), strides)


def _runs(spec: TensorSpec, split: Split, ways: int, index: int) -> list[Run]:
    """Return the runs that position `index` of `ways` holds along the split dimension, in local order."""
    size = spec.shape[split.dim]
    if split.uneven:
        return _chunk([(0, 0, size)], ways, index)
    if spec.interleave is not None:
        here = spec.interleave // ways
        return [
            (number, group * (part.size // spec.interleave), part.size // spec.interleave)
            for group in range(index * here, (index + 1) * here)
            for number, part in enumerate(spec.parts or ())
        ]
    if spec.parts is not None:
        return [(number, *_share(part.size, part.units, ways, index)) for number, part in enumerate(spec.parts)]
    blocks = split.sizes or (size // split.stride,) * split.stride
    starts = itertools.accumulate(blocks, initial=0)
    shares = [(start, *_share(block, split.units, ways, index)) for start, block in zip(starts, blocks, strict=False)]
    return [(0, start + offset, held) for start, offset, held in shares]


def _share(size: int, units: int | None, ways: int, index: int) -> tuple[int, int]:
    """Return (first element, elements) of an equal share; if there are fewer units than ranks, ranks share units."""
    if units is not None and units < ways:
        index, ways = index // (ways // units), units
    return index * (size // ways), size // ways


def _chunk(runs: list[Run], ways: int, index: int) -> list[Run]:
    """Return the part of the runs that torch.chunk gives to position `index` of `ways`."""
    if ways == 1:
        return runs
    each = -(-sum(size for _, _, size in runs) // ways)
    found, position, begin, end = [], 0, index * each, (index + 1) * each
    for number, start, size in runs:
        low, high = max(begin, position), min(end, position + size)
        if low < high:
            found.append((number, start + low - position, high - low))
        position += size
    return found


def _boxes(runs: list[Run], dim: int, step: int) -> list[Box]:
    """Place runs one after the other; equally spaced runs of one tensor become one box with a repeat."""
    places = itertools.accumulate((size for _, _, size in runs), initial=0)
    by_tensor: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (number, start, size), local in zip(runs, places, strict=False):
        by_tensor.setdefault((number, size), []).append((start, local * step))
    return [
        (number, start, size, local, repeat)
        for (number, size), spots in by_tensor.items()
        for start, local, repeat in spaced(spots, size, dim)
    ]
