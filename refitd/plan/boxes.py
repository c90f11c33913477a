"""Boxes of a tensor: intersect source and destination boxes, list the elements between boxes, check a tiling.

Boxes are rows of two arrays, offset and size, of shape [n, D]. There are two ways to find which part of a destination
box each source box holds; where both apply they give the same result, and tests compare them.

`intersect` works for any boxes. Source boxes are first cut along each other's edges. Replicas that hold different boxes
(TP1 beside TP2) then offer the same cells. Destination boxes are cut in the same way:

    source A holds [0:8], B [0:4], C [4:8]     cells [0:4] from A or B, [4:8] from A or C
    one destination wants [2:6]                pieces [2:4] of the first cell, [4:6] of the second
    another one wants [2:5]                    pieces [2:4], [4:5]; the first destination's become [2:4], [4:5], [5:6]

`lcm_tiling` is the closed form for two even splits of one dimension (the formula of Megatron-Core's
`megatron/core/resharding/planner.py`). A side with world W and stride s cuts the dimension into W*s segments; segment g
is part g // W of shard g % W. With L = lcm(W_src*s_src, W_dst*s_dst) the dimension is L units, each inside one segment
of either side:

    extent 16, source W=2 s=2 (segments of 4), destination W=4 s=1 (segments of 4), L=4, unit 4
    unit 0 -> source shard 0 part 0, destination shard 0      unit 2 -> source shard 0 part 1, destination shard 2

The elements of a local tensor outside its boxes are found by listing each box as runs of adjacent elements:

    rows 0:2, columns 0:3 of [2, 4]  ->  runs [0:3] [4:7]  ->  outside [3:4] [7:8], which is one box, 2 apart 4
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from refitd.plan.coalesce import Rows, coalesced
from refitd.plan.columns import Ints, distinct, numbered, offsets_of, ranges

# Destination boxes are not cut along each other's edges if that makes more than this many times as many pieces of a
# tensor, and more than a few.
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

    Boxes that do not overlap form a layer. The gaps of a layer are filled with more boxes. A cell is the intersection
    of one box of each layer.

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
    """Return the layer of each box: the first one without an earlier box that it overlaps, given overlapping a < b."""
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
    """Return (low, high) of boxes that fill the gaps between two corners; boxes differ from dimension `dim` on."""
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
        for one, other in there:  # a box that continues one of the previous slab is joined with it
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


def lcm_tiling(held_offset: Ints, held_size: Ints, want_offset: Ints, want_size: Ints) -> tuple[Cells, Pieces] | None:
    """Return the result of `intersect` for these boxes in closed form; None if it does not apply.

    It applies if the distinct boxes of both sides are equal segments of one box along one dimension: world times stride
    segments on each side, or a single segment.
    """
    held, wanted = _segments(held_offset, held_size), _segments(want_offset, want_size)
    if held is None or wanted is None:
        return None
    dim = held.dim if len(held.order) > 1 else wanted.dim
    if len(wanted.order) > 1 and wanted.dim != dim:
        return None
    if (held.start != wanted.start).any() or (held.whole != wanted.whole).any():
        return None
    src, dst, place, length = segment_runs(int(held.whole[dim]), len(held.order), len(wanted.order))
    offset, size = np.tile(held.start, (len(place), 1)), np.tile(held.whole, (len(place), 1))
    offset[:, dim] += place
    size[:, dim] = length
    each = np.arange(len(held_offset))
    return Cells(held_offset, held_size, each, each), Pieces(wanted.order[dst], held.order[src], offset, size)


@dataclass(frozen=True, slots=True)
class _Segments:
    """A box (start, size `whole`), cut along `dim` into equal boxes; `order` sorts their indices along it."""

    start: Ints
    whole: Ints
    dim: int
    order: Ints


def _segments(offset: Ints, size: Ints) -> _Segments | None:
    """Return the box that distinct boxes divide evenly along one dimension; None if they do not."""
    if len(offset) == 1:
        return _Segments(offset[0], size[0], 0, np.zeros(1, np.int64))
    moves = (offset != offset[:1]).any(axis=0)
    if moves.sum() != 1 or (size != size[:1]).any():
        return None
    dim = int(moves.argmax())
    order = np.argsort(offset[:, dim])
    first, step, whole = offset[order[0]], size[0, dim], size[0].copy()
    if (offset[order, dim] != first[dim] + np.arange(len(order)) * step).any():
        return None
    whole[dim] *= len(order)
    return _Segments(first, whole, dim, order)


def segment_runs(extent: int, src_segments: int, dst_segments: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Return (source segment, destination segment, first element, elements) of every run of units inside one of each.

    A run begins where a segment of either side begins; the L units form S + D - gcd(S, D) runs.
    """
    units = math.lcm(src_segments, dst_segments)
    src_units, dst_units = units // src_segments, units // dst_segments
    first = np.union1d(np.arange(src_segments) * src_units, np.arange(dst_segments) * dst_units)
    length = np.diff(first, append=units) * (extent // units)
    return first // src_units, first // dst_units, first * (extent // units), length


# more runs cannot be checked in reasonable time and memory
MAX_RUNS = 2**23
StridedBox = tuple[int, Sequence[int], Sequence[int]]  # first element, sizes, strides


def runs_of(boxes: Iterable[StridedBox]) -> tuple[Ints, Ints] | None:
    """Return (first element, length) of every run, unsorted; None if there are more than MAX_RUNS.

    Strides must be nested, as `refitd.describe.layout` requires of tiles.
    """
    starts, lengths, count = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    for offset, size, stride in boxes:
        steps = sorted((s, n) for s, n in zip(stride, size, strict=True) if n > 1)
        length = 1
        while steps and steps[0][0] == length:
            length *= steps.pop(0)[1]
        number = 1
        for _, n in steps:
            number *= n
        count += number
        if count > MAX_RUNS:
            return None
        at = np.array([offset], np.int64)
        for step, n in reversed(steps):
            at = (at[:, None] + np.arange(n) * step).reshape(-1)
        starts.append(at)
        lengths.append(np.full(len(at), length))
    return np.concatenate(starts), np.concatenate(lengths)


def share_a_place(boxes: Iterable[StridedBox]) -> bool:
    """Return whether two boxes share an element; also True if there are too many runs to tell."""
    runs = runs_of(boxes)
    if runs is None:
        return True
    order = np.argsort(runs[0])
    start, length = runs[0][order], runs[1][order]
    return bool((start[:-1] + length[:-1] > start[1:]).any())


def left_out(boxes: Iterable[StridedBox], elements: int) -> Rows | None:
    """Return the elements that disjoint boxes leave out, as few boxes in the `dst` columns of the rows.

    Returns None if they are interleaved too finely.
    """
    runs = runs_of(boxes)
    if runs is None:
        return None
    order = np.argsort(runs[0])
    start, length = runs[0][order], runs[1][order]
    begin = np.concatenate([[0], np.maximum.accumulate(start + length)])
    size = np.append(start, elements) - begin
    begin, size = begin[size > 0], size[size > 0]
    none, column = np.zeros(len(begin), np.int64), (len(begin), 1)
    rows = Rows(
        owner=none,
        tensor=none,
        src_local=none,
        dst_local=none,
        element_size=none,
        cast=none,
        origin=begin.reshape(column),
        size=size.reshape(column),
        src_offset=none,
        src_stride=none.reshape(column),
        dst_offset=begin,
        dst_stride=np.ones(column, np.int64),
    )
    for _ in range(3):  # each round may find one more dimension
        joined = coalesced(rows)
        if len(joined.owner) == len(rows.owner):
            break
        rows = joined
    return rows


Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, size
MAX_TOLD = 100  # overlaps in one text


def layout_violations(shape: Sequence[int], boxes: Sequence[Box]) -> list[str]:
    """Return why boxes (offset, size) do not hold every element of a tensor exactly once; empty boxes are ignored."""
    problems = []
    held = [box for box in boxes if prod(box[1])]
    inside = []
    for offset, size in held:
        if all(o >= 0 and o + n <= end for o, n, end in zip(offset, size, shape, strict=True)):
            inside.append((offset, size))
        else:
            problems.append(
                f"chunk {said_box(offset, size)} lies outside the tensor {said_box((0,) * len(shape), shape)}"
            )
    if inside and shape:
        offsets, sizes = (np.array([box[i] for box in inside], np.int64) for i in (0, 1))
        a, b = overlapping(offsets, sizes, offsets, sizes)
        first = a < b
        pairs = itertools.islice(zip(a[first].tolist(), b[first].tolist(), strict=True), MAX_TOLD)
        problems += [f"chunks {said_box(*inside[i])} and {said_box(*inside[j])} overlap" for i, j in pairs]
    elif len(inside) > 1:
        problems.append(f"{len(inside)} chunks hold the one element")
    gap = _first_gap(shape, inside)
    if gap is not None:
        problems.append(f"no chunk holds {said_box(*gap)}")
    return problems


def slice_intersection(a: slice, b: slice) -> slice:
    """Return the intersection of two slices with bounds; an empty slice at the later start if they do not meet."""
    start = max(a.start, b.start)
    return slice(start, max(start, min(a.stop, b.stop)))


def slice_moved(s: slice, offset: int) -> slice:
    """Return the slice with both bounds `offset` further along."""
    return slice(s.start + offset, s.stop + offset)


def _first_gap(shape: Sequence[int], boxes: Sequence[Box]) -> Box | None:
    """Return a box of the tensor that none of the boxes touches, or None."""
    rest: list[Box] = [((0,) * len(shape), tuple(shape))] if prod(shape) else []
    for offset, size in boxes:
        rest = [part for left in rest for part in _without(left, (offset, size))]
    return min(rest) if rest else None


def _without(box: Box, cut: Box) -> Iterator[Box]:
    """Yield boxes that together are `box` without `cut`."""
    (low, size), (cut_low, cut_size) = box, cut
    both = [
        slice_intersection(slice(a, a + n), slice(b, b + m))
        for a, n, b, m in zip(low, size, cut_low, cut_size, strict=True)
    ]
    if any(s.start >= s.stop for s in both):
        yield box
        return
    start, end = list(low), [a + n for a, n in zip(low, size, strict=True)]
    for dim, s in enumerate(both):
        for a, b in ((start[dim], s.start), (s.stop, end[dim])):
            if a < b:
                yield (
                    (*start[:dim], a, *start[dim + 1 :]),
                    tuple(b - a if d == dim else end[d] - start[d] for d in range(len(low))),
                )
        start[dim], end[dim] = s.start, s.stop


def said_box(offset: Sequence[int], size: Sequence[int]) -> str:
    """Return a box as text: [4:8, 0:3]."""
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(offset, size, strict=True)) + "]"
