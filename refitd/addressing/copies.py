"""The work lists of workers: addressed copies from a plan, large ones cut, and conversions after all tensors arrived.

Conversions quantize bfloat16 to MXFP8 and swizzle scales, in pieces for workers. A piece consists of whole blocks; for
swizzled scales, of whole tiles of 128 rows. The result therefore does not depend on how a tensor is cut into pieces:

    row-major    the tensor as one row: 2**20 elements in each piece
    swizzled     a multiple of 128 rows, about 2**20 elements in each piece
    tiles        the same, of one matrix
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod
from typing import ClassVar, Self, TypeVar

import numpy as np
import numpy.typing as npt

from refitd.addressing.places import Int64, Places, ShapeAndStrides, choose, with_pitches
from refitd.buffers.layout import row_major_strides
from refitd.dtypes import TILE_ITEMS
from refitd.errors import TransportError
from refitd.mxfp8.format import BLOCK, ROUNDINGS, TILE, TILE_ROWS, Rounding, swizzled_bytes, tiles_shape
from refitd.plan.columns import Columns, ranges
from refitd.plan.table import BOXES, CopyTable, CrossingTable, FillTable, PlanTable, RegionTable

# Longer copies are cut: several workers can then share one large tensor.
SPLIT_BYTES = 32 << 20

# room for one element of any dtype, in the arena that holds the fill constants
CONSTANT_BYTES = 16

Cuttable = TypeVar("Cuttable", CopyTable, CrossingTable, "CopyList")


@dataclass(frozen=True, eq=False)
class WorkList(Columns):
    """Addressed rows. All columns are int64; those named in BOXES have shape [n, D], the others [n]."""

    ARENAS: ClassVar[tuple[str, ...]] = ("arena",)  # columns of arena ids; the written arena comes last

    @property
    def row_bytes(self) -> Int64:
        """Bytes of each row, shape [n]."""
        raise NotImplementedError

    def arenas(self) -> set[int]:
        """Return the ids of all arenas that the rows touch."""
        columns = (np.unique(getattr(self, name)) for name in self.ARENAS)
        return {arena for column in columns for arena in column.tolist()}

    def in_memory_order(self) -> Int64:
        """Return row numbers in an order that keeps rows with close addresses together."""
        return np.arange(len(self))

    def shared_out(self, workers: int, homes: Mapping[int, int] | None = None) -> list[Int64]:
        """Return the row numbers of each worker: contiguous ranges in memory order, about equal bytes each.

        `homes` maps each GPU arena to the worker of its GPU. That worker gets the rows that write to the arena, and
        the rows that read from it and write to main memory.
        """
        home = np.full(len(self), -1, np.int64)
        for name in self.ARENAS:
            for arena, worker in (homes or {}).items():
                home[getattr(self, name) == arena] = worker
        order = self.in_memory_order()
        order = order[home[order] < 0]
        share = equal_shares(self.row_bytes[order], workers)
        return [np.concatenate([order[share == w], np.flatnonzero(home == w)]) for w in range(workers)]

    def to_bytes(self) -> bytes:
        """Return the rows as one block: rows, dims, then the columns, little-endian int64."""
        parts = [np.array(self.size.shape, dtype="<i8")]
        parts += [np.ascontiguousarray(getattr(self, f.name), dtype="<i8") for f in fields(self)]
        return b"".join(part.tobytes() for part in parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Decode rows.

        Raises:
            ValueError: the length does not match the header.
        """
        rows, dims = struct.unpack("<qq", data[:16]) if len(data) >= 16 else (-1, -1)
        widths = {f.name: dims if f.name in BOXES else 1 for f in fields(cls)}
        if rows < 0 or not 0 < dims <= _MOST_DIMS or len(data) != 16 + 8 * rows * sum(widths.values()):
            raise ValueError(f"{cls.__name__}: {len(data)} bytes do not hold {rows} rows of {dims} dimensions")
        at, columns = 16, {}
        for name, width in widths.items():
            column = np.frombuffer(data, dtype="<i8", count=rows * width, offset=at)
            columns[name] = column.reshape(rows, dims) if name in BOXES else column
            at += column.nbytes
        return cls(**columns)


@dataclass(frozen=True, eq=False)
class CopyList(WorkList):
    """Addressed copies, one per row. Offsets and strides are in bytes.

    For conversions, `element_size` and `row_bytes` are the destination's.
    """

    ARENAS: ClassVar = ("src_arena", "dst_arena")

    element_size: Int64  # [n] of the destination
    cast: Int64  # number of the conversion (refitd.dtypes), 0 for none
    src_arena: Int64  # [n] arena id
    src_offset: Int64  # [n]
    src_stride: Int64  # [n, D]
    dst_arena: Int64  # [n]
    dst_offset: Int64  # [n]
    dst_stride: Int64  # [n, D]
    origin: Int64  # row of the table before the cut

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
    table = with_pitches(table)
    src, dst = source_addresses(table, sources), destination_addresses(table, destinations)
    copies = CopyList(
        size=table.size.astype(np.int64),
        element_size=table.element_size.astype(np.int64),
        cast=table.cast.astype(np.int64),
        src_arena=src.arena,
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


def cut(rows: Cuttable, limit: int = SPLIT_BYTES) -> tuple[Cuttable, Int64, Int64]:
    """Cut rows of more than `limit` bytes along their outermost dimension with more than one element.

    Returns:
        (rows, number of each row within its original row, index of the original row).
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
    offset: Int64
    stride: Int64


def source_addresses(table: CopyTable, places: Mapping[int, Places]) -> Addresses:
    """Return the memory addresses that each row reads; raises like `address`."""
    t = table
    return _addresses(t, t.src_element_size, t.src_rank, t.src_local, t.src_offset, t.src_stride, places)


def destination_addresses(table: CopyTable, places: Mapping[int, Places]) -> Addresses:
    """Return the memory addresses that each row writes; raises like `address`."""
    t = table
    return _addresses(t, t.element_size, t.dst_rank, t.dst_local, t.dst_offset, t.dst_stride, places)


def region_addresses(table: RegionTable, places: Places) -> Addresses:
    """Return the memory addresses of one rank's regions, of a table `with_pitches`; raises like `address`."""
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
    # address rows of equal form and element size together, because there may be as many tensors as rows
    sizes, size_number = np.unique(es, return_inverse=True)
    kinds, number = np.unique(found.form[which] * len(sizes) + size_number, return_inverse=True)
    forms = [_form(found.forms[kind // len(sizes)], int(sizes[kind % len(sizes)])) for kind in kinds.tolist()]
    otherwise = [i for i, (form, size) in enumerate(forms) if not _is_row_major(form, size)]
    order = np.argsort(number, kind="stable") if otherwise else number
    begins = np.searchsorted(number[order], [otherwise, [i + 1 for i in otherwise]])
    for i, begin, end in zip(otherwise, *begins.tolist(), strict=True):
        rows = order[begin:end]
        place, stride[rows] = _in_memory(forms[i][0], offsets[rows], strides[rows], table.size[rows])
        offset[rows] = found.offset[which[rows]] + place
    for i, kind in enumerate(kinds.tolist()):
        if sizes[kind % len(sizes)] in TILE_ITEMS:
            stride[number == i, -1] = found.forms[kind // len(sizes)].strides[-2]
    return Addresses(arena=found.arena[which], offset=offset, stride=stride)


_BLOCK_BYTES = {32, 64, 128, *TILE_ITEMS}


def _form(form: ShapeAndStrides, es: int) -> tuple[ShapeAndStrides, int]:
    """Return a form with the size of its elements; if these are blocks or tiles, in these.

    [256, 512] of 2 bytes, strides (1024, 2), in blocks of 64 bytes  ->  [256, 16], strides (1024, 64)
    the same, in tiles of 32768 bytes                                ->  [2, 4], strides (131072, 256)
    """
    if es not in _BLOCK_BYTES:
        return form, es
    *lead, step = form.strides
    if es in TILE_ITEMS and step == TILE_ITEMS[es] and lead:
        shape = *form.shape[:-2], *(n // TILE for n in form.shape[-2:])
        return ShapeAndStrides(shape, (*lead[:-1], TILE * lead[-1], TILE * step)), es
    if step * BLOCK != es:
        raise ValueError(
            f"the last dimension of a tensor of shape {form.shape} is not contiguous, so its blocks cannot be "
            "converted; make it contiguous before registering it"
        )
    return ShapeAndStrides((*form.shape[:-1], form.shape[-1] // BLOCK), (*lead, es)), es


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


_MOST_DIMS = 16


def equal_shares(nbytes: Int64, shares: int) -> Int64:
    """Return the share of each row: contiguous ranges of about equal bytes.

    A row belongs to the share of its middle byte. If there are at least as many rows as shares, no share is empty.
    """
    done = np.cumsum(nbytes)
    total = int(done[-1]) if len(done) else 0
    return np.minimum(((done - nbytes / 2) * shares / max(1, total)).astype(np.int64), shares - 1)


PIECE = 1 << 20  # elements
GPU_PIECE = 1 << 28  # a GPU converts smaller pieces faster than they can be queued
QUANTIZE, QUANTIZE_SWIZZLED, SWIZZLE, QUANTIZE_TILES = 0, 1, 2, 3
ELEMENT_BYTES = 2  # of bfloat16, the dtype that is quantized
SCALE_BYTES = 4  # of the scale of a tile


@dataclass(frozen=True, slots=True)
class Made:
    """One conversion. Offsets are in bytes; `data` is unused if only scales are swizzled."""

    kind: int
    shape: tuple[int, ...]  # in elements
    read: int  # the arena that it reads, at `source`
    arena: int  # the arena that it writes; it may be the same
    source: int
    data: int
    scale: int
    rounding: Rounding = Rounding.RCEIL


@dataclass(frozen=True, eq=False)
class ConversionList(WorkList):
    """Pieces of conversions, one row each.

    `size` is [rows, columns] of the piece. A row-major piece is one row, a swizzled one consists of whole tensor rows.
    """

    ARENAS = ("read", "arena")

    kind: Int64
    rounding: Int64  # index into ROUNDINGS
    read: Int64
    arena: Int64
    source: Int64  # bytes from the arena's start
    data: Int64
    scale: Int64

    @property
    def row_bytes(self) -> Int64:
        """Bytes that each piece reads, shape [n]."""
        elements: Int64 = np.prod(self.size, axis=1, dtype=np.int64)
        return np.where(self.kind == SWIZZLE, elements // BLOCK, elements * ELEMENT_BYTES)


def check_piece(pieces: ConversionList, row: int) -> tuple[int, int, int, int]:
    """Return kind, rows, columns and rounding of a piece.

    Raises:
        TransportError: the row's kind, size or rounding is invalid.
    """
    kind, rounding = int(pieces.kind[row]), int(pieces.rounding[row])
    rows, columns = pieces.size[row].tolist()
    fits = QUANTIZE <= kind <= QUANTIZE_TILES and 0 <= rounding < len(ROUNDINGS) and rows > 0 and columns > 0
    if not fits or (columns % BLOCK and kind != QUANTIZE_TILES):
        raise TransportError(
            f"conversion {row}: there is no conversion {kind} of [{rows}, {columns}], rounding {rounding}"
        )
    return kind, rows, columns, rounding


def pieces_of(made: Sequence[Made], piece: int = PIECE, on_gpus: Collection[int] = ()) -> ConversionList:
    """Cut conversions into pieces of about `piece` elements; on GPUs, of at least GPU_PIECE elements."""
    sizes = {one.arena: max(piece, GPU_PIECE) if one.arena in on_gpus else piece for one in made}
    found: list[tuple[int, ...]] = []
    for one in made:
        total = prod(one.shape)
        piece = sizes[one.arena]
        head = (one.kind, ROUNDINGS.index(one.rounding), one.read, one.arena)
        if not total:
            continue
        if one.kind == QUANTIZE:
            for start in range(0, total, piece):
                places = one.source + start * ELEMENT_BYTES, one.data + start, one.scale + start // BLOCK
                found.append((*head, *places, 1, min(piece, total - start)))
            continue
        columns = one.shape[-1]
        high = max(1, piece // (TILE_ROWS * columns)) * TILE_ROWS
        if one.kind == QUANTIZE_TILES:
            rows = one.shape[-2]
            tiles = prod(tiles_shape((rows, columns)))
            for number, row in product(range(total // (rows * columns)), range(0, rows, high)):
                at = (number * rows + row) * columns
                scale = one.scale + SCALE_BYTES * (number * tiles + prod(tiles_shape((row, columns))))
                places = one.source + at * ELEMENT_BYTES, one.data + at, scale
                found.append((*head, *places, min(high, rows - row), columns))
            continue
        blocks, rows = columns // BLOCK, total // columns
        for row in range(0, rows, high):
            source = one.source + row * (blocks if one.kind == SWIZZLE else columns * ELEMENT_BYTES)
            places = source, one.data + row * columns, one.scale + swizzled_bytes(row, blocks)
            found.append((*head, *places, min(high, rows - row), columns))
    table = np.array(found, np.int64).reshape(len(found), 9)
    return ConversionList(table[:, 7:], *table[:, :7].T)
