"""Boxes are split at each other's edges into few cells, without comparing all pairs."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refitd.describe.dtensors import flat_tiles
from refitd.plan.boxes import cut, intersect, overlapping
from refitd.plan.columns import Ints

Box = tuple[tuple[int, ...], tuple[int, ...]]


@st.composite
def boxes(draw: st.DrawFn) -> list[Box]:
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    corners = st.tuples(*(st.tuples(st.integers(0, n - 1), st.integers(1, n)) for n in shape))
    found = draw(st.lists(corners, min_size=1, max_size=12))
    return [*dict.fromkeys((tuple(min(a, b - 1) for a, b in c), tuple(max(1, b - a) for a, b in c)) for c in found)]


def arrays(some: list[Box]) -> tuple[Ints, Ints]:
    offset, size = (np.array([box[i] for box in some], np.int64).reshape(len(some), -1) for i in range(2))
    return offset, size


def elements(offset: Ints, size: Ints) -> list[tuple[int, ...]]:
    return [*itertools.product(*(range(o, o + s) for o, s in zip(offset.tolist(), size.tolist(), strict=True)))]


def grid(rows: int, columns: int, step: int) -> list[Box]:
    return [((i * step, j * step), (step, step)) for i in range(rows) for j in range(columns)]


@given(boxes())
def test_cells_have_no_element_in_common_and_each_box_is_made_of_its_own(some: list[Box]) -> None:
    offset, size = arrays(some)
    cells = cut(offset, size)
    of_cell = [elements(o, s) for o, s in zip(cells.offset, cells.size, strict=True)]
    assert len({e for some in of_cell for e in some}) == sum(map(len, of_cell))
    for box in range(len(offset)):
        mine = [e for cell in cells.cell[cells.box == box].tolist() for e in of_cell[cell]]
        assert sorted(mine) == elements(offset[box], size[box])


@given(boxes(), boxes())
def test_overlapping_finds_each_pair_that_shares_an_element(one: list[Box], other: list[Box]) -> None:
    if len(one[0][0]) != len(other[0][0]):
        return
    a, b = (arrays(some) for some in (one, other))
    inside = [[set(elements(o, s)) for o, s in zip(*side, strict=True)] for side in (a, b)]
    found = sorted(zip(*(side.tolist() for side in overlapping(*a, *b)), strict=True))
    assert found == [(i, j) for i, x in enumerate(inside[0]) for j, y in enumerate(inside[1]) if x & y]


@settings(max_examples=50)
@given(boxes(), st.integers(1, 40))
def test_boxes_that_would_have_too_many_cells_stay_whole(some: list[Box], most: int) -> None:
    cells = cut(*arrays(some), most=most)
    assert len(cells.box) <= max(most, len(some))
    assert len(cells.box) == len(cut(*arrays(some)).box) or cells.cell.tolist() == [*range(len(some))]


@pytest.mark.parametrize(
    ("layers", "cells"),
    [
        ([grid(64, 64, 8), [((0, 0), (512, 512))]], 4096),
        ([grid(64, 64, 8), grid(1, 2, 256), [((0, 0), (512, 512))]], 4096 + 2048),
        ([grid(20, 20, 12), grid(15, 15, 16)], 30 * 30),
    ],
    ids=["whole", "halves", "grids"],
)
def test_thousands_of_tiles_are_cut_in_little_memory(layers: list[list[Box]], cells: int) -> None:
    offset, size = arrays([box for layer in layers for box in layer])
    tracemalloc.start()
    found = cut(offset, size)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found.offset) <= cells and peak < 40 << 20


def test_flat_slices_are_cut_only_where_they_overlap() -> None:
    shape = (1000, 1000)
    some = [
        (tile.offset, tile.size)
        for world in (7, 5)
        for rank in range(world)
        for tile in flat_tiles("w", shape, rank * 10**6 // world, (rank + 1) * 10**6 // world)
    ]
    offset, size = arrays([*dict.fromkeys(some)])
    assert len(cut(offset, size).offset) <= 3 * len(offset)
    _, pieces = intersect(np.zeros((1, 2), np.int64), np.array([shape], np.int64), offset, size)
    assert len(pieces.want) <= 4 * len(offset)
