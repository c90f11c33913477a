"""Walks: copies between two strided views as numbers, and the tracer's model of memory made from them.

A copy moves element (i, j, ...) of one view to element (i, j, ...) of the other. As a walk it has an offset on each
side and, for each index, a count and a stride on each side. All numbers count elements.

    w[4:8, :3].t() of a [8, 5] matrix into a new [3, 4] one:
    Walk(a=0, b=20, axes=(Axis(3, 4, 1), Axis(4, 1, 5)))

A split of an axis does not change the copied elements; `along` splits until every axis stays within one dimension.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch

from refitd.describe.layout import row_major
from refitd.errors import PlanError

# Maximum number of pieces of one copy: layouts need a few, at worst one per expert or head.
MAX_PIECES = 1 << 16


@dataclass(frozen=True, slots=True)
class Axis:
    """One index of a walk: its count, and its stride on side a and on side b."""

    count: int
    a: int
    b: int


@dataclass(frozen=True, slots=True)
class Walk:
    """Element a + sum(i * axis.a) belongs to element b + sum(i * axis.b), for every i below each axis' count."""

    a: int
    b: int
    axes: tuple[Axis, ...]

    @property
    def count(self) -> int:
        """The number of pairs."""
        total = 1
        for axis in self.axes:
            total *= axis.count
        return total

    def swapped(self) -> Walk:
        """Return the same pairs with the sides exchanged."""
        return Walk(self.b, self.a, tuple(Axis(x.count, x.b, x.a) for x in self.axes))

    def joined(self) -> Walk:
        """Return the same pairs with adjacent axes merged."""
        axes = list(self.axes)
        while found := next(
            (
                (i, j)
                for i, x in enumerate(axes)
                for j, y in enumerate(axes)
                if i != j and x.a == y.a * y.count and x.b == y.b * y.count
            ),
            None,
        ):
            i, j = found
            axes[i] = Axis(axes[i].count * axes[j].count, axes[j].a, axes[j].b)
            del axes[j]
        return replace(self, axes=tuple(axes))

    def cut(self, index: int, start: int, stop: int) -> Walk:
        """Return the part from `start` to `stop`, exclusive, along axis `index`."""
        axis = self.axes[index]
        axes = list(self.axes)
        axes[index : index + 1] = [] if stop - start == 1 else [replace(axis, count=stop - start)]
        return Walk(self.a + start * axis.a, self.b + start * axis.b, tuple(axes))


def walk_between(shape: Sequence[int], a: tuple[int, Sequence[int]], b: tuple[int, Sequence[int]]) -> Walk:
    """Return the walk between two views of one shape, each given as (offset, strides); adjacent axes are merged."""
    axes: list[Axis] = []
    for count, step_a, step_b in zip(shape, a[1], b[1], strict=True):
        if count == 1:
            continue
        if axes and axes[-1].a == step_a * count and axes[-1].b == step_b * count:
            axes[-1] = Axis(axes[-1].count * count, step_a, step_b)
        else:
            axes.append(Axis(count, step_a, step_b))
    return Walk(a[0], b[0], tuple(axes))


@dataclass(frozen=True, slots=True)
class Laid:
    """A walk whose axes on side b each follow one dimension of a shape.

    The coordinate along dimension d is `start[d] + sum(i * step)` over the axes whose entry in `dims` is d; an axis
    that does not move has -1.
    """

    walk: Walk
    start: tuple[int, ...]
    dims: tuple[int, ...]
    steps: tuple[int, ...]

    def span(self, dim: int) -> tuple[int, int]:
        """Return the first and the last coordinate along a dimension."""
        reach = sum(
            (axis.count - 1) * step
            for axis, d, step in zip(self.walk.axes, self.dims, self.steps, strict=True)
            if d == dim
        )
        return self.start[dim], self.start[dim] + reach


def along(walk: Walk, shape: Sequence[int]) -> Iterator[Laid]:
    """Split a walk until, on side b, each axis follows one dimension of a row-major tensor of this shape.

    Raises:
        PlanError: the walk leaves the tensor, runs backwards, or needs more than MAX_PIECES pieces.
    """
    todo, made = [walk.joined()], 0
    while todo:
        one = todo.pop()
        laid = _laid(one, shape)
        if isinstance(laid, Laid):
            yield laid
        else:
            todo.extend(reversed(laid))
        made += 1
        if made > 2 * MAX_PIECES:
            raise PlanError(f"a copy falls into more than {MAX_PIECES} pieces of a tensor of shape {list(shape)}")


def _laid(walk: Walk, shape: Sequence[int]) -> Laid | list[Walk]:
    """Return the walk along the shape, or the walks that it must be split into first."""
    strides = row_major(shape)
    rest, start = walk.b, []
    for stride in strides:
        start.append(rest // stride if stride else 0)
        rest -= start[-1] * stride
    if walk.b < 0 or (start and start[0] >= shape[0]) or (not shape and walk.b):
        raise PlanError(f"element {walk.b} is outside of a tensor of shape {list(shape)}")
    dims: list[int] = []
    steps: list[int] = []
    for axis in walk.axes:
        if axis.b < 0:
            raise PlanError("a copy that runs backwards is not followed")
        fits = [d for d, (n, stride) in enumerate(zip(shape, strides, strict=True)) if n > 1 and stride <= axis.b]
        if axis.b and not fits:
            raise PlanError(f"a step of {axis.b} elements leaves a tensor of shape {list(shape)}")
        dim = fits[0] if axis.b else -1
        if dim >= 0 and axis.b % strides[dim]:  # the axis runs diagonally
            if axis.count > MAX_PIECES:
                raise PlanError(f"a copy runs diagonally through a tensor of shape {list(shape)}, {axis.count} steps")
            index = len(dims)
            return [walk.cut(index, i, i + 1) for i in range(axis.count)]
        dims.append(dim)
        steps.append(axis.b // strides[dim] if dim >= 0 else 0)
    found = Laid(walk, tuple(start), tuple(dims), tuple(steps))
    for dim, size in enumerate(shape):
        if found.span(dim)[1] >= size:
            return _split(found, dim, size)
    return found


def _split(laid: Laid, dim: int, size: int) -> list[Walk]:
    """Split the axis that runs over the end of a dimension, by a cut at the end or into an inner and an outer axis."""
    walk, start = laid.walk, laid.start[dim]
    mine = [i for i, d in enumerate(laid.dims) if d == dim]
    index = max(mine, key=lambda i: laid.steps[i])
    axis, step = walk.axes[index], laid.steps[index]
    within = laid.span(dim)[1] - start - (axis.count - 1) * step  # how far the other axes of this dimension reach
    if dim == 0:
        raise PlanError(f"a copy leaves the tensor: {size} elements along its first dimension")
    if size % step == 0 and start + within < step:
        per = size // step
        if axis.count % per == 0:
            axes = list(walk.axes)
            axes[index : index + 1] = [
                x
                for x in (Axis(axis.count // per, axis.a * per, axis.b * per), Axis(per, axis.a, axis.b))
                if x.count > 1
            ]
            return [Walk(walk.a, walk.b, tuple(axes))]
        at = axis.count - axis.count % per if axis.count > per else 0
    else:
        at = (size - 1 - start - within) // step + 1
    if not 0 < at < axis.count:  # the other axes of this dimension also run over its end
        return [walk.cut(index, i, i + 1) for i in range(axis.count)]
    return [walk.cut(index, 0, at), walk.cut(index, at, axis.count)]


def inside(laid: Laid, start: Sequence[int], size: Sequence[int]) -> Iterator[Laid]:
    """Yield the parts of a walk whose side b is inside a box of the shape.

    Raises:
        PlanError: there are more than MAX_PIECES parts.
    """
    todo, made = [laid], 0
    while todo:
        one = todo.pop()
        made += 1
        if made > MAX_PIECES:
            raise PlanError(f"a copy falls into more than {MAX_PIECES} pieces")
        for dim, (low, n) in enumerate(zip(start, size, strict=True)):
            first, last = one.span(dim)
            if last < low or first >= low + n:
                break
            if first >= low and last < low + n:
                continue
            todo.extend(_clipped(one, dim, low, low + n))
            break
        else:
            yield one


def _clipped(laid: Laid, dim: int, low: int, high: int) -> list[Laid]:
    """Cut the widest axis of a dimension to low..high, or into single indices if other axes move along it too."""
    mine = [i for i, d in enumerate(laid.dims) if d == dim]
    index = max(mine, key=lambda i: laid.steps[i])
    axis, step, first = laid.walk.axes[index], laid.steps[index], laid.start[dim]
    if len(mine) == 1:
        cuts = [(max(0, -(-(low - first) // step)), min(axis.count, (high - 1 - first) // step + 1))]
    else:
        cuts = [(i, i + 1) for i in range(axis.count)]
    return [_part(laid, index, i, j) for i, j in cuts if i < j]


def _part(laid: Laid, index: int, start: int, stop: int) -> Laid:
    moved = list(laid.start)
    moved[laid.dims[index]] += start * laid.steps[index]
    gone = stop - start == 1
    dims, steps = (
        tuple(v for i, v in enumerate(values) if not (gone and i == index)) for values in (laid.dims, laid.steps)
    )
    return Laid(laid.walk.cut(index, start, stop), tuple(moved), dims, steps)


@dataclass(frozen=True, slots=True)
class Origin:
    """A canonical tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class OriginBox:
    """A box of a storage whose elements come from a canonical tensor, at `offset` and with a stride per dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    origin: Origin
    offset: int
    strides: tuple[int, ...]


@dataclass(slots=True)
class TracedStorage:
    """One storage as a row-major tensor of `shape`, and where its elements come from."""

    keep: torch.Tensor  # keeps the storage alive and therefore its address unique
    shape: tuple[int, ...]
    boxes: list[OriginBox] = field(default_factory=list)
    fill: float | None = None  # of the elements outside all boxes
    through: frozenset[torch.dtype] = frozenset()  # dtypes that its elements were rounded to
    tainted: frozenset[str] = frozenset()  # computed from these
    is_tainted: bool = False
    is_reordered: bool = False  # the loader's tensor has other strides than `keep`, which is row-major


@dataclass(slots=True)
class Written:
    """The writes to one of the engine's tensors so far."""

    name: str
    tensor: torch.Tensor
    writes: list[tuple[Walk, Origin | float]] = field(default_factory=list)  # in order; side a: the tensor's memory
    computed: set[str] = field(default_factory=set)
    is_computed: bool = False


def bits_of(number: float) -> bytes:
    """Return a number's bits: the two zeros differ, and a NaN is equal to itself."""
    return struct.pack("d", number)


def view_of(tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """Return the offset and strides of a tensor in its storage."""
    return int(tensor.storage_offset()), tuple(tensor.stride())


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's storage; 0, 0 without memory."""
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    return (start, start + storage.nbytes()) if start else (0, 0)


def ordered_like(made: torch.Tensor) -> torch.Tensor:
    """Return an operator's result if it is row-major, else an empty row-major tensor to follow instead."""
    if made.is_contiguous() and not made.storage_offset():
        return made
    return torch.empty(made.shape, dtype=made.dtype, device="meta")


def grid_of(tensor: torch.Tensor, count: int) -> tuple[int, ...]:
    """Return the shape of the memory around a view, as far as the view's strides tell."""
    if not tensor.dim():
        return (count,)
    strides, sizes = list(tensor.stride()), list(tensor.shape)
    order = sorted(range(len(sizes)), key=lambda d: -strides[d])
    if order != list(range(len(sizes))) or strides[-1] != 1:
        return (count,)
    grid = [strides[d - 1] // strides[d] for d in range(1, len(sizes))]
    inner = prod(grid)
    return (count // inner, *grid) if inner and count % inner == 0 else (count,)


def walk_through(piece: Laid, box: OriginBox) -> Walk:
    """Move side b of a walk from a box to the box's origin."""
    b = box.offset + sum((c - s) * t for c, s, t in zip(piece.start, box.start, box.strides, strict=True))
    axes = tuple(
        Axis(axis.count, axis.a, step * box.strides[dim] if dim >= 0 else 0)
        for axis, dim, step in zip(piece.walk.axes, piece.dims, piece.steps, strict=True)
    )
    return Walk(piece.walk.a, b, axes)


def constant_walk(target: torch.Tensor, offset: int) -> Walk:
    """Return the walk that writes one element to every place of a view."""
    shape = tuple(target.shape)
    return walk_between(shape, view_of(target), (offset, (0,) * len(shape)))


def reach_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range of storage elements that a tensor spans: the first, and the one after the last."""
    low = view_of(tensor)[0]
    return low, low + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1


def overlap(one: OriginBox, other: OriginBox) -> bool:
    """Whether two boxes of one storage share elements."""
    sides = zip(one.start, one.size, other.start, other.size, strict=True)
    return all(a < c + d and c < a + b for a, b, c, d in sides)


def meets(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage may share elements."""
    if not one.numel() or not other.numel():
        return False
    (a, b), (c, d) = reach_of(one), reach_of(other)
    return a < d and c < b
