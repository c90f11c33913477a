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

from refitd.plan.columns import Ints, distinct, hashed, numbered, offsets_of, ranges

# what destinations need alike is not cut out if that makes more than so many times as many pieces
MAX_CUTS = 16


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
    return cells, _cut_alike(pieces) if len(_crossed(want_offset, want_size)) else pieces


def overlapping(a_offset: Ints, a_size: Ints, b_offset: Ints, b_size: Ints) -> tuple[Ints, Ints]:
    """Return every pair (row of a, row of b) whose boxes share an element, by a sweep along one dimension."""
    none = np.zeros(0, np.int64)
    if not len(a_offset) or not len(b_offset):
        return none, none
    dim = max(range(a_offset.shape[1]), key=lambda d: len(distinct(a_offset[:, d])))
    order = np.argsort(a_offset[:, dim], kind="stable")
    starts = a_offset[order, dim]
    # boxes of a are sorted by start: none before the first running end beyond b's start can reach into b
    ends = np.maximum.accumulate(starts + a_size[order, dim])
    first = np.searchsorted(ends, b_offset[:, dim], side="right")
    last = np.searchsorted(starts, b_offset[:, dim] + b_size[:, dim], side="left")
    b, position = ranges(first, np.maximum(last - first, 0))
    a = order[position]
    shared = (a_offset[a] < b_offset[b] + b_size[b]) & (b_offset[b] < a_offset[a] + a_size[a])
    keep = shared.all(axis=1)
    return a[keep], b[keep]


def _cut_alike(pieces: Pieces) -> Pieces:
    """Return the same elements in pieces that are equal or have no element in common; as they are if those are many."""
    first, box = numbered(hashed([pieces.offset, pieces.size]))
    offset, size = pieces.offset[first], pieces.size[first]
    crossed = _crossed(offset, size)
    count = np.ones(len(crossed))
    for edges, begin, extent in zip(_edges(offset[crossed], size[crossed]), offset.T, size.T, strict=True):
        count *= np.searchsorted(edges, (begin + extent)[crossed]) - np.searchsorted(edges, begin[crossed])
    if count.sum() > MAX_CUTS * len(crossed):
        return pieces
    cells = cut(offset, size)
    order = np.argsort(cells.box, kind="stable")
    start = offsets_of(cells.box[order], len(first))
    of, at = ranges(start[box], np.diff(start)[box])
    cell = cells.cell[order[at]]
    return Pieces(pieces.want[of], pieces.cell[of], cells.offset[cell], cells.size[cell])


def _crossed(offset: Ints, size: Ints) -> Ints:
    """Return the distinct boxes that have an element in common with another one."""
    a, b = overlapping(offset, size, offset, size)
    return distinct(a[a != b])


def _edges(offset: Ints, size: Ints) -> list[Ints]:
    """Return where boxes begin or end, for each dimension."""
    return [distinct(np.concatenate([begin, begin + extent])) for begin, extent in zip(offset.T, size.T, strict=True)]


def cut(offset: Ints, size: Ints) -> Cells:
    """Cut distinct boxes into disjoint cells; a box that overlaps no other is one cell."""
    crossed = _crossed(offset, size)
    whole = np.setdiff1d(np.arange(len(offset)), crossed)
    if not len(crossed):
        return Cells(offset, size, whole, whole)
    edges = _edges(offset[crossed], size[crossed])
    numbers: dict[tuple[tuple[int, int], ...], int] = {}
    boxes: list[int] = []
    cells: list[int] = []
    for box in crossed.tolist():
        spans = []
        for d, edge in enumerate(edges):
            inside = edge[(edge >= offset[box, d]) & (edge <= offset[box, d] + size[box, d])].tolist()
            spans.append([(low, high - low) for low, high in itertools.pairwise(inside)])
        for cell in itertools.product(*spans):
            boxes.append(box)
            cells.append(len(whole) + numbers.setdefault(cell, len(numbers)))
    made = np.array(list(numbers), np.int64).reshape(len(numbers), offset.shape[1], 2)
    return Cells(
        offset=np.concatenate([offset[whole], made[:, :, 0]]),
        size=np.concatenate([size[whole], made[:, :, 1]]),
        box=np.concatenate([whole, np.array(boxes, np.int64)]),
        cell=np.concatenate([np.arange(len(whole)), np.array(cells, np.int64)]),
    )


def pieces_of(cells: Cells, offset: Ints, size: Ints) -> Pieces:
    """Return the parts of the wanted boxes (offset, size) in each cell, in no particular order."""
    cell, want = overlapping(cells.offset, cells.size, offset, size)
    low = np.maximum(cells.offset[cell], offset[want])
    high = np.minimum(cells.offset[cell] + cells.size[cell], offset[want] + size[want])
    return Pieces(want, cell, low, high - low)
