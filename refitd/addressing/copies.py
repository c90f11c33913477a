"""Turns a plan and the places of tensors into addressed copies, large ones cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from refitd.addressing.places import Int64, Places, ShapeAndStrides, choose
from refitd.addressing.work import WorkList
from refitd.buffers.layout import row_major_strides
from refitd.plan.columns import ranges
from refitd.plan.fills import FillTable
from refitd.plan.regions import RegionTable
from refitd.plan.table import CopyTable, CrossingTable, PlanTable

# Longer copies are cut, so that several workers can share one large tensor.
SPLIT_BYTES = 32 << 20

# room for one element of any dtype, in the arena that holds the fill constants
CONSTANT_BYTES = 16

Cuttable = TypeVar("Cuttable", CopyTable, CrossingTable, "CopyList")


@dataclass(frozen=True, eq=False)
class CopyList(WorkList):
    """Addressed copies, one per row. Offsets and strides are in bytes.

    For conversions, `element_size` and `row_bytes` are the destination's.
    """

    ARENAS: ClassVar = ("src_arena", "dst_arena")

    element_size: Int64  # [n] of the destination
    cast: Int64  # number of the conversion (refitd.describe.casts), 0 for none
    src_arena: Int64  # [n] arena id or PROCESS_MEMORY
    src_pid: Int64  # [n] for PROCESS_MEMORY
    src_offset: Int64  # [n]
    src_stride: Int64  # [n, D]
    dst_arena: Int64  # [n]
    dst_offset: Int64  # [n]
    dst_stride: Int64  # [n, D]
    origin: Int64  # row of the table that this copy was cut from

    @property
    def row_bytes(self) -> Int64:
        """Bytes that each copy writes, shape [n]."""
        nbytes: Int64 = np.prod(self.size, axis=1, dtype=np.int64) * self.element_size
        return nbytes

    def in_memory_order(self) -> Int64:
        """See WorkList: in destination order."""
        return np.lexsort((self.dst_offset, self.dst_arena))


def address(
    table: CopyTable,
    sources: Mapping[int, Places],
    destinations: Mapping[int, Places],
) -> CopyList:
    """Address every row of a plan.

    Args:
        table: the rows to perform.
        sources: rank -> places of the source tensors.
        destinations: rank -> places of the tensors to write.

    Raises:
        KeyError: a tensor in the plan has no place.
        ValueError: a box cannot be addressed in its tensor.
    """
    src, dst = source_addresses(table, sources), destination_addresses(table, destinations)
    copies = CopyList(
        size=table.size.astype(np.int64),
        element_size=table.element_size.astype(np.int64),
        cast=table.cast.astype(np.int64),
        src_arena=src.arena,
        src_pid=src.pid,
        src_offset=src.offset,
        src_stride=src.stride,
        dst_arena=dst.arena,
        dst_offset=dst.offset,
        dst_stride=dst.stride,
        origin=np.arange(len(table), dtype=np.int64),
    )
    return cut(copies)[0]


def fill_copies(
    fills: FillTable,
    destinations: Mapping[int, Places],
    constants: int,
    first_origin: int = 0,
) -> CopyList:
    """Turn fills into copies that read one element repeatedly, from the arena that holds `constant_bytes(fills)`.

    Args:
        fills: the rows to perform.
        destinations: rank -> places of the tensors to write.
        constants: id of the arena whose first bytes are `constant_bytes(fills)`.
        first_origin: `origin` of the first fill: the number of copies that the fills are appended to.

    Raises:
        KeyError: a tensor in the fills has no place.
    """
    dst = _addresses(fills, fills.element_size, fills.rank, fills.local, fills.offset, fills.stride, destinations)
    _, slot = np.unique(fills.pattern, return_inverse=True)
    n = len(fills)
    copies = CopyList(
        size=fills.size.astype(np.int64),
        element_size=fills.element_size.astype(np.int64),
        cast=np.zeros(n, dtype=np.int64),
        src_arena=np.full(n, constants, dtype=np.int64),
        src_pid=np.zeros(n, dtype=np.int64),
        src_offset=slot.reshape(-1).astype(np.int64) * CONSTANT_BYTES,
        src_stride=np.zeros_like(dst.stride),
        dst_arena=dst.arena,
        dst_offset=dst.offset,
        dst_stride=dst.stride,
        origin=np.arange(first_origin, first_origin + n, dtype=np.int64),
    )
    return cut(copies)[0]


def constant_bytes(fills: FillTable) -> bytes:
    """Return the distinct bit patterns of the fills in ascending order, CONSTANT_BYTES each."""
    patterns = np.unique(fills.pattern)
    slots = np.zeros((len(patterns), CONSTANT_BYTES // 8), dtype="<i8")
    slots[:, 0] = patterns
    return slots.tobytes()


def joined(parts: Sequence[CopyList]) -> CopyList:
    """Concatenate copies; boxes with fewer dimensions are padded in front."""
    dims = max(part.size.shape[1] for part in parts)

    def padded(part: CopyList) -> CopyList:
        lead = np.zeros((len(part), dims - part.size.shape[1]), np.int64)
        return replace(
            part,
            size=np.concatenate([lead + 1, part.size], axis=1),
            src_stride=np.concatenate([lead, part.src_stride], axis=1),
            dst_stride=np.concatenate([lead, part.dst_stride], axis=1),
        )

    return CopyList.concatenated([padded(part) for part in parts])


def whole_tensors(sources: Places, destinations: Places, element_size: Int64) -> CopyList:
    """Return copies of whole tensors, row i to row i; shapes are equal, elements have `element_size` [n] bytes."""
    n, longest = len(sources), [len(form.shape) for form in sources.forms]
    dims = max(longest, default=1) or 1

    def padded(of: Places, name: str, lead: int) -> Int64:
        boxes = [(lead,) * (dims - len(form.shape)) + getattr(form, name) for form in of.forms]
        return np.array(boxes, np.int64).reshape(-1, dims)[of.form]

    copies = CopyList(
        size=padded(sources, "shape", 1),
        element_size=element_size,
        cast=np.zeros(n, dtype=np.int64),
        src_arena=sources.arena,
        src_pid=sources.pid,
        src_offset=sources.offset,
        src_stride=padded(sources, "strides", 0),
        dst_arena=destinations.arena,
        dst_offset=destinations.offset,
        dst_stride=padded(destinations, "strides", 0),
        origin=np.arange(n, dtype=np.int64),
    )
    return cut(copies.select(np.flatnonzero(np.prod(copies.size, axis=1) > 0)))[0]


def cut(rows: Cuttable, limit: int = SPLIT_BYTES) -> tuple[Cuttable, Int64, Int64]:
    """Cut rows of more than `limit` bytes along their outermost dimension that has more than one element.

    Returns:
        (rows, number of each within the row it was cut from, that row's index).
    """
    nbytes, size, every = rows.row_bytes, rows.size, np.arange(len(rows))
    if not (nbytes > limit).any():
        return rows, np.zeros_like(every), every
    dim = np.argmax(size > 1, axis=1)
    length = size[every, dim]
    step = np.where(nbytes > limit, np.maximum(1, length * limit // np.maximum(nbytes, 1)), length)
    owner, part = ranges(np.zeros_like(every), -(-length // np.maximum(step, 1)))
    found = rows.select(owner)
    start = part * step[owner]
    at = np.arange(len(owner)), dim[owner]
    found.size[at] = np.minimum(step[owner], length[owner] - start)
    found.src_offset[:] += start * found.src_stride[at]
    found.dst_offset[:] += start * found.dst_stride[at]
    return found, part, owner


@dataclass(frozen=True, eq=False)
class Addresses:
    """One end of addressed copies, one value per row."""

    arena: Int64
    pid: Int64
    offset: Int64
    stride: Int64


def source_addresses(table: CopyTable, places: Mapping[int, Places]) -> Addresses:
    """Return where each row reads in memory; raises like `address`."""
    t = table
    return _addresses(t, t.src_element_size, t.src_rank, t.src_local, t.src_offset, t.src_stride, places)


def destination_addresses(table: CopyTable, places: Mapping[int, Places]) -> Addresses:
    """Return where each row writes in memory; raises like `address`."""
    t = table
    return _addresses(t, t.element_size, t.dst_rank, t.dst_local, t.dst_offset, t.dst_stride, places)


def region_addresses(table: RegionTable, places: Places) -> Addresses:
    """Return where the regions of one rank lie in memory; raises like `address`."""
    t, rank = table, np.zeros(len(table), np.int32)
    return _addresses(t, t.element_size, rank, t.local, t.offset, t.stride, {0: places})


def _addresses(
    table: PlanTable,
    element_size: npt.NDArray[np.int32],
    ranks: npt.NDArray[np.int32],
    local: npt.NDArray[np.int32],
    offsets: Int64,
    strides: Int64,
    places: Mapping[int, Places],
) -> Addresses:
    """Turn one end's row-major element addresses into byte addresses in memory."""
    names = len(table.locals) + 1
    keys, which = np.unique(ranks.astype(np.int64) * names + local.astype(np.int64), return_inverse=True)
    found = choose(places, keys // names, [table.locals[key] for key in (keys % names).tolist()])
    es = element_size.astype(np.int64)
    offset = offsets * es + found.offset[which]
    stride = strides * es[:, None]
    # rows of equal form and element size are addressed together: there may be as many tensors as rows
    sizes, size_number = np.unique(es, return_inverse=True)
    kinds, number = np.unique(found.form[which] * len(sizes) + size_number, return_inverse=True)
    forms = [(found.forms[kind // len(sizes)], int(sizes[kind % len(sizes)])) for kind in kinds.tolist()]
    otherwise = [i for i, (form, size) in enumerate(forms) if not _is_row_major(form, size)]
    order = np.argsort(number, kind="stable") if otherwise else number
    begins = np.searchsorted(number[order], [otherwise, [i + 1 for i in otherwise]])
    for i, begin, end in zip(otherwise, *begins.tolist(), strict=True):
        rows = order[begin:end]
        place, stride[rows] = _in_memory(forms[i][0], offsets[rows], strides[rows], table.size[rows])
        offset[rows] = found.offset[which[rows]] + place
    return Addresses(arena=found.arena[which], pid=found.pid[which], offset=offset, stride=stride)


def _is_row_major(form: ShapeAndStrides, es: int) -> bool:
    want = row_major_strides(form.shape, es)
    return form.strides == want or all(n == 1 or a == b for n, a, b in zip(form.shape, form.strides, want, strict=True))


def _in_memory(form: ShapeAndStrides, offset: Int64, strides: Int64, size: Int64) -> tuple[Int64, Int64]:
    """Convert row-major element addresses to byte addresses in strided tensors: (byte offsets, byte strides).

    A [4, 6] tensor stored transposed has strides (2, 8): row-major stride 6 means dimension 0, hence 2 bytes.
    """
    steps = row_major_strides(form.shape, 1)
    place, rest = np.zeros_like(offset), offset
    for step, held in zip(steps, form.strides, strict=True):
        place += rest // step * held
        rest = rest % step
    # a stride moves along the dimension with the largest step that divides it
    best, dim = np.zeros_like(strides), np.full_like(strides, -1)
    for number, step in enumerate(steps):
        fits = (strides % step == 0) & (step > best)
        best[fits], dim[fits] = step, number
    walked = size != 1
    shape, held_strides = np.array([*form.shape, 0], np.int64), np.array([*form.strides, 0], np.int64)
    times = strides // np.maximum(best, 1)
    if (walked & ((size - 1) * times >= shape[dim])).any():
        raise ValueError(
            f"a copy walks across dimensions of a tensor of shape {form.shape} that is not contiguous; "
            "make it contiguous before registering it"
        )
    return place, np.where(walked, times * held_strides[dim], 0)
