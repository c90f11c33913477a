"""Boxes of a local tensor as runs of adjacent elements, and the parts of the tensor that they leave out.

rows 0:2, columns 0:3 of [2, 4]  ->  runs [0:3] [4:7]  ->  left out [3:4] [7:8], which is one box, 2 apart 4
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from refitd.plan.coalesce import Rows, coalesced
from refitd.plan.columns import Ints

# more runs cannot be checked in reasonable time and memory
MAX_RUNS = 2**23

Box = tuple[int, Sequence[int], Sequence[int]]  # first element, sizes, strides


def runs_of(boxes: Iterable[Box]) -> tuple[Ints, Ints] | None:
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


def share_a_place(boxes: Iterable[Box]) -> bool:
    """Return whether two boxes share an element; also True if there are too many runs to tell."""
    runs = runs_of(boxes)
    if runs is None:
        return True
    order = np.argsort(runs[0])
    start, length = runs[0][order], runs[1][order]
    return bool((start[:-1] + length[:-1] > start[1:]).any())


def left_out(boxes: Iterable[Box], elements: int) -> Rows | None:
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
