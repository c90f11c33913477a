"""Strided copies that walk along the dimensions of a shape: every source element keeps its destination."""

from __future__ import annotations

from itertools import product

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from refitd.describe.layout import row_major
from refitd.errors import PlanError
from refitd.tracing.walks import Laid, Walk, along, inside, walk_between

SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


def pairs(walk: Walk) -> list[tuple[int, int]]:
    found = [(walk.a, walk.b)]
    for axis in walk.axes:
        found = [(a + i * axis.a, b + i * axis.b) for a, b in found for i in range(axis.count)]
    return found


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, ...], torch.Tensor]:
    """A shape, and a view of its element numbers that slices, permutes, merges and repeats dimensions."""
    shape = draw(SHAPES)
    view = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["slice", "permute", "merge", "split", "expand"]))
        dim = draw(st.integers(0, view.dim() - 1))
        n = view.shape[dim]
        if kind == "slice":
            start = draw(st.integers(0, n - 1))
            step = draw(st.integers(1, 3))
            index = [slice(None)] * view.dim()
            index[dim] = slice(start, draw(st.integers(start + 1, n)), step)
            view = view[tuple(index)]
        elif kind == "permute":
            view = view.permute(draw(st.permutations(range(view.dim()))))
        elif kind == "merge" and dim + 1 < view.dim():
            view = view.flatten(dim, dim + 1) if view.is_contiguous() else view
        elif kind == "split":
            parts = draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))
            view = view.unflatten(dim, (parts, n // parts))
        elif kind == "expand":
            view = view.unsqueeze(dim).expand(*view.shape[:dim], 2, *view.shape[dim:])
    return shape, view


def follow(view: torch.Tensor) -> Walk:
    size = tuple(view.shape)
    return walk_between(size, (0, row_major(size)), (view.storage_offset(), view.stride()))


def coordinates(laid: Laid) -> list[tuple[int, tuple[int, ...]]]:
    """Return side a of each pair, and the coordinates of side b as the walk reports them."""
    found = [(laid.walk.a, laid.start)]
    for axis, dim, step in zip(laid.walk.axes, laid.dims, laid.steps, strict=True):
        found = [
            (a + i * axis.a, tuple(c + i * step * (d == dim) for d, c in enumerate(at)))
            for a, at in found
            for i in range(axis.count)
        ]
    return found


@given(views())
@settings(max_examples=300, deadline=None)
def test_splitting_along_a_shape_keeps_every_pair(case: tuple[tuple[int, ...], torch.Tensor]) -> None:
    shape, view = case
    expected = list(enumerate(view.reshape(-1).tolist()))
    walk = follow(view)
    assert sorted(pairs(walk)) == expected
    found = []
    strides = row_major(shape)
    for laid in along(walk, shape):
        for a, at in coordinates(laid):
            assert all(0 <= c < n for c, n in zip(at, shape, strict=True)), "outside of the shape"
            found.append((a, sum(c * s for c, s in zip(at, strides, strict=True))))
    assert sorted(found) == expected


@given(views(), st.data())
@settings(max_examples=300, deadline=None)
def test_what_lies_in_a_box_is_all_that_is_left_of_it(
    case: tuple[tuple[int, ...], torch.Tensor], data: st.DataObject
) -> None:
    shape, view = case
    start = [data.draw(st.integers(0, n - 1)) for n in shape]
    size = [data.draw(st.integers(1, n - s)) for n, s in zip(shape, start, strict=True)]
    box = {
        sum(c * s for c, s in zip(at, row_major(shape), strict=True))
        for at in product(*(range(s, s + n) for s, n in zip(start, size, strict=True)))
    }
    expected = [(a, b) for a, b in enumerate(view.reshape(-1).tolist()) if b in box]
    found = [
        pair for laid in along(follow(view), shape) for part in inside(laid, start, size) for pair in pairs(part.walk)
    ]
    assert sorted(found) == expected


@pytest.mark.parametrize(
    ("walk", "says"),
    [
        (Walk(0, 24, ()), "outside of a tensor"),
        (walk_between((1 << 17,), (0, (1,)), (0, (7,))), "diagonally"),
        (walk_between((5,), (0, (1,)), (0, (6,))), "leaves the tensor"),
        (walk_between((2,), (0, (1,)), (3, (-1,))), "backwards"),
    ],
)
def test_a_walk_that_does_not_follow_the_shape_is_refused(walk: Walk, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        list(along(walk, (4, 6)))


def test_neighbouring_axes_are_joined() -> None:
    assert (
        walk_between((2, 3, 4), (0, (12, 4, 1)), (5, (12, 4, 1))).axes == walk_between((24,), (0, (1,)), (0, (1,))).axes
    )
