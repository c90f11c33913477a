"""Intersect the boxes of a tensor that sources hold with the boxes that destinations want.

It works for any boxes: other dimensions, other strides, uneven sizes. Boxes are rows of two arrays, offset and size,
of shape [n, D]. Source boxes are first cut along each other's edges, so that replicas that hold different boxes (TP1
beside TP2) offer the same cells:

    source A holds [0:8], B [0:4], C [4:8]     cells [0:4] from A or B, [4:8] from A or C
    a destination wants [2:6]                  pieces [2:4] of the first cell, [4:6] of the second

So are pieces, so that what destinations that are cut differently need alike are the same pieces:

    another destination wants [2:5]            pieces [2:4], [4:5]; the first one's are [2:4], [4:5], [5:6]
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from refitd.plan.columns import Ints, distinct, numbered, offsets_of, ranges

# What destinations need alike is not cut out if that makes more pieces of a tensor than so many times as many, and
# more than a few.
MAX_CUTS = 3
FEW = 512
# Nor if boxes overlap more others than that, on average.
MAX_LAYERS = 16

Corner = list[int]


@dataclass(frozen=True, eq=False)
class Cells:
    """Disjoint cells, and the boxes that contain them: box[i] contains cell[i]."""

    offset: Ints  # [cells, D]
    size: Ints  # [cells, D]
    box: Ints
    cell: Ints


@dataclass(frozen=True, eq=False)
class Pieces:
    """The parts of wanted boxes inside cells, one per row."""

    want: Ints
    cell: Ints
    offset: Ints  # [pieces, D], canonical
    size: Ints  # [pieces, D]


def intersect(held_offset: Ints, held_size: Ints, want_offset: Ints, want_size: Ints) -> tuple[Cells, Pieces]:
    """Return the cells of the held boxes and the wanted boxes' parts in them. Boxes of a side must be distinct."""
    cells = cut(held_offset, held_size)
    pieces = pieces_of(cells, want_offset, want_size)
    alike = cut(want_offset, want_size, most=max(FEW, MAX_CUTS * len(pieces.want)))
    if len(alike.box) == len(want_offset):
        return cells, pieces
    parts = pieces_of(cells, alike.offset, alike.size)
    order = np.argsort(alike.cell, kind="stable")
    start = offsets_of(alike.cell[order], len(alike.offset))
    of, at = ranges(start[parts.want], np.diff(start)[parts.want])
    if len(of) > max(FEW, MAX_CUTS * len(pieces.want)):
        return cells, pieces
    return cells, Pieces(alike.box[order[at]], parts.cell[of], parts.offset[of], parts.size[of])


def overlapping(a_offset: Ints, a_size: Ints, b_offset: Ints, b_size: Ints) -> tuple[Ints, Ints]:
    """Return every pair (row of a, row of b) whose boxes share an element, by a sweep along one dimension."""
    none = np.zeros(0, np.int64)
    if not len(a_offset) or not len(b_offset):
        return none, none
    dim = max(range(a_offset.shape[1]), key=lambda d: len(distinct(a_offset[:, d])))
    found = [(none, none)]
    # few long boxes would have many short ones compared with each other
    length = np.frexp(a_size[:, dim].astype(np.float64))[1]
    for each in distinct(length):
        some = np.flatnonzero(length == each)
        of, b = _overlapping_along(dim, a_offset[some], a_size[some], b_offset, b_size)
        found.append((some[of], b))
    a, b = (np.concatenate(column) for column in zip(*found, strict=True))
    return a, b


def _overlapping_along(dim: int, a_offset: Ints, a_size: Ints, b_offset: Ints, b_size: Ints) -> tuple[Ints, Ints]:
    order = np.argsort(a_offset[:, dim], kind="stable")
    starts = a_offset[order, dim]
    # boxes of a are sorted by start: none before the first running end beyond b's start can reach into b
    ends = np.maximum.accumulate(starts + a_size[order, dim])
    first = np.searchsorted(ends, b_offset[:, dim], side="right")
    last = np.searchsorted(starts, b_offset[:, dim] + b_size[:, dim], side="left")
    b, position = ranges(first, np.maximum(last - first, 0))
    a = order[position]
    for d in range(a_offset.shape[1]):
        shared = (a_offset[a, d] < b_offset[b, d] + b_size[b, d]) & (b_offset[b, d] < a_offset[a, d] + a_size[a, d])
        a, b = a[shared], b[shared]
    return a, b


def cut(offset: Ints, size: Ints, most: int | None = None) -> Cells:
    """Cut distinct boxes into disjoint cells; a box that overlaps no other is one cell.

    Boxes that do not overlap are a layer. What a layer leaves out is cut into boxes, too, so that all layers are full,
    and a cell is what a box of each has in common.

    Args:
        offset: [boxes, D]
        size: [boxes, D]
        most: the boxes are returned as they are if each of them together would have more cells.
    """
    whole = Cells(offset, size, np.arange(len(offset)), np.arange(len(offset)))
    a, b = overlapping(offset, size, offset, size)
    a, b = a[a < b], b[a < b]
    if not len(a) or (most is not None and len(a) > most * MAX_LAYERS):
        return whole
    crossed = np.zeros(len(offset), bool)
    crossed[a], crossed[b] = True, True
    which, alone = np.flatnonzero(crossed), np.flatnonzero(~crossed)
    layer = _layers(len(offset), a, b)[which]
    low, high = offset[which].min(axis=0), (offset[which] + size[which]).max(axis=0)
    cell_offset, cell_size = low[None], (high - low)[None]
    for each in range(1 + int(layer.max())):
        mine = which[layer == each]
        full = _filled(offset[mine], size[mine], low, high)
        parts = pieces_of(Cells(cell_offset, cell_size, mine, mine), *full)
        cell_offset, cell_size = parts.offset, parts.size
        if most is not None and len(cell_offset) > most:
            return whole
    cell, box = overlapping(cell_offset, cell_size, offset[which], size[which])
    if most is not None and len(alone) + len(cell) > most:
        return whole
    first, number = numbered(cell)
    used = cell[first]
    return Cells(
        offset=np.concatenate([offset[alone], cell_offset[used]]),
        size=np.concatenate([size[alone], cell_size[used]]),
        box=np.concatenate([alone, which[box]]),
        cell=np.concatenate([np.arange(len(alone)), len(alone) + number]),
    )


def _layers(count: int, a: Ints, b: Ints) -> Ints:
    """Return the first layer of each box in which it overlaps none before it, of pairs a < b of boxes that overlap."""
    order = np.argsort(b, kind="stable")
    before, start = a[order].tolist(), offsets_of(b[order], count).tolist()
    layer = [0] * count
    for box, (begin, end) in enumerate(itertools.pairwise(start)):
        taken = {layer[other] for other in before[begin:end]}
        layer[box] = next(i for i in range(len(taken) + 1) if i not in taken)
    return np.array(layer, np.int64)


def _filled(offset: Ints, size: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """Return boxes that have no element in common, and boxes of all other elements between two corners."""
    if int(np.prod(size, axis=1).sum()) == int(np.prod(high - low)):
        return offset, size
    rest = np.array(_rest(offset.tolist(), (offset + size).tolist(), low.tolist(), high.tolist(), 0), np.int64)
    rest = rest.reshape(len(rest), 2, offset.shape[1])
    return np.concatenate([offset, rest[:, 0]]), np.concatenate([size, rest[:, 1] - rest[:, 0]])


def _rest(low: list[Corner], high: list[Corner], begin: Corner, end: Corner, dim: int) -> list[tuple[Corner, Corner]]:
    """Return (low, high) of boxes of what no box has between two corners; boxes differ from dimension `dim` on."""
    if not low:
        return [(begin, end)]
    if dim == len(begin):
        return []
    edges = sorted({begin[dim], end[dim], *(corner[dim] for corner in (*low, *high))})
    found: list[tuple[Corner, Corner]] = []
    open_until: dict[tuple[object, ...], int] = {}
    by_start = sorted(range(len(low)), key=lambda i: low[i][dim])
    active: list[int] = []
    at = 0
    for start, stop in itertools.pairwise(edges):
        while at < len(by_start) and low[by_start[at]][dim] <= start:
            active.append(by_start[at])
            at += 1
        active = [i for i in active if high[i][dim] > start]
        there = _rest(
            [low[i] for i in active],
            [high[i] for i in active],
            [*begin[:dim], start, *begin[dim + 1 :]],
            [*end[:dim], stop, *end[dim + 1 :]],
            dim + 1,
        )
        still: dict[tuple[object, ...], int] = {}
        for one, other in there:  # what continues the slab before is one box with it
            key = (*one[:dim], *one[dim + 1 :], *other[:dim], *other[dim + 1 :])
            if key in open_until:
                still[key] = open_until[key]
                found[still[key]] = (found[still[key]][0], other)
            else:
                still[key] = len(found)
                found.append((one, other))
        open_until = still
    return found


def pieces_of(cells: Cells, offset: Ints, size: Ints) -> Pieces:
    """Return the parts of the wanted boxes (offset, size) in each cell, in no particular order."""
    cell, want = overlapping(cells.offset, cells.size, offset, size)
    low = np.maximum(cells.offset[cell], offset[want])
    high = np.minimum(cells.offset[cell] + cells.size[cell], offset[want] + size[want])
    return Pieces(want, cell, low, high - low)
