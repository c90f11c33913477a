"""Check that boxes make up a tensor: each element in exactly one of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from refitd.plan.intersect import overlapping

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
    """Return what two slices with bounds have in common; an empty slice at the later start where that is nothing."""
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
