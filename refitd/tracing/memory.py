"""The tracer's model of memory: where canonical elements lie, as strided walks."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from math import prod

import torch

from refitd.describe.walks import Axis, Laid, Walk, walk_between


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

    keep: torch.Tensor  # keeps the storage alive, so that its address stays unique
    shape: tuple[int, ...]
    boxes: list[OriginBox] = field(default_factory=list)
    fill: float | None = None  # of the elements outside all boxes
    through: frozenset[torch.dtype] = frozenset()  # dtypes that its elements were rounded to
    tainted: frozenset[str] = frozenset()  # computed from these
    is_tainted: bool = False
    is_reordered: bool = False  # the loader's own has other strides than `keep`, whose order is row-major


@dataclass(slots=True)
class Written:
    """The writes to one of the engine's tensors so far."""

    name: str
    tensor: torch.Tensor
    writes: list[tuple[Walk, Origin | float]] = field(default_factory=list)  # in order; side a: the tensor's memory
    computed: set[str] = field(default_factory=set)
    is_computed: bool = False


def bits_of(number: float) -> bytes:
    """Return a number's bits: two zeros differ, and a NaN is equal to itself."""
    return struct.pack("d", number)


def view_of(tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """Return where a tensor lies in its storage: offset and strides."""
    return int(tensor.storage_offset()), tuple(tensor.stride())


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's storage; 0, 0 without memory."""
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    return (start, start + storage.nbytes()) if start else (0, 0)


def ordered_like(made: torch.Tensor) -> torch.Tensor:
    """Return a result of an operator, or another one with the same elements in row-major order, which is followed."""
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
