"""Copies between arenas as boxes of bytes: checked, with merged dimensions, and cut into the units that a GPU copies.

    row      [4, 32] bfloat16, strides (128, 2) -> (64, 2)
    box      4 ranges of 64 bytes, 128 apart at the source, 64 apart at the destination
    entry    the same in units: 4 ranges of 4 units of 16 bytes

A misaligned box gets three entries: a head and a tail in small units, and a body in large ones. If its ends have
different misalignments, each unit of the body is joined from two words of the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd, prod

import numpy as np
import numpy.typing as npt

from refitd.addressing.copies import CopyList
from refitd.buffers.layout import extent
from refitd.dtypes import CASTS, DESTINATION_SIZES, SOURCE_SIZES
from refitd.errors import TransportError

# bytes of a unit -> units that one program copies
UNITS = {16: 1024, 4: 2048, 2: 2048, 1: 2048}
COLUMNS = 16  # of a table: a cache line per entry
ROW = 2  # the column with the row's number
_DIMS = 3  # dimensions of an entry, around its contiguous range
_MOST_UNITS = 1 << 30  # index arithmetic of the kernel has 32 bits
_LEAST_BODY = 16  # units that are worth entries of their own

_ENDS = {side: tuple(f"{side}_{name}" for name in ("arena", "offset", "stride")) for side in ("src", "dst")}

Dim = tuple[int, int, int]  # count, source stride, destination stride; strides in bytes


@dataclass(frozen=True, slots=True)
class End:
    """One end of a copy: an arena, and a place in it; offset and strides in bytes."""

    arena: int
    offset: int
    stride: list[int]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a CopyList that is inside its arenas and not empty."""

    row: int
    size: list[int]
    element: int  # bytes at the destination
    cast: int
    source: End
    destination: End

    @property
    def nbytes(self) -> int:
        """Bytes to write."""
        return prod(self.size) * self.element

    @property
    def reads(self) -> tuple[int, int, int]:
        """The arena that it reads, its first byte there, and the byte behind the last one."""
        begin, held = self.source.offset, SOURCE_SIZES[self.cast] or self.element
        return self.source.arena, begin, begin + extent(self.size, self.source.stride, held)


def rows(copies: CopyList, sizes: Mapping[int, int], written: set[int]) -> Iterator[Row]:
    """Yield the rows that are not empty.

    Args:
        copies: rows between arenas.
        sizes: bytes of each arena.
        written: ids of the writable arenas.

    Raises:
        TransportError: a copy leaves its arena, writes to a read-only one, or has an unknown conversion.
    """
    columns = ("size", "element_size", "cast", *_ENDS["src"], *_ENDS["dst"])
    listed = zip(*(getattr(copies, name).tolist() for name in columns), strict=True)
    for row, (size, element, cast, *ends) in enumerate(listed):
        if cast and (cast not in CASTS or element != DESTINATION_SIZES[cast]):
            raise TransportError(f"copy {row}: conversion {cast} to elements of {element} bytes does not exist")
        source, destination = End(*ends[:3]), End(*ends[3:])
        for end, held in ((source, SOURCE_SIZES[cast] or element), (destination, element)):
            nbytes = sizes.get(end.arena)
            if nbytes is None:
                raise TransportError(f"copy {row}: arena {end.arena} is not mapped here")
            last = end.offset + extent(size, end.stride, held)
            if end.offset < 0 or min(end.stride) < 0 or last > nbytes:
                raise TransportError(
                    f"copy {row}: bytes {end.offset}..{last} leave arena {end.arena} of {nbytes} bytes"
                )
        if destination.arena not in written:
            raise TransportError(f"copy {row}: arena {destination.arena} is mapped for reading only")
        if 0 not in size:
            yield Row(row, size, element, cast, source, destination)


@dataclass(frozen=True, slots=True)
class Box:
    """Equal bytes at two places: `run` contiguous bytes, repeated along `dims`, of which the outermost comes first.

    `source` and `destination` are offsets in arenas, or addresses.
    """

    row: int
    source: int
    destination: int
    dims: tuple[Dim, ...]
    run: int

    @property
    def nbytes(self) -> int:
        """Bytes to copy."""
        return prod(count for count, _, _ in self.dims) * self.run

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of both ends."""
        return tuple(stride for _, *strides in self.dims for stride in strides)

    def moved(self, source: int, destination: int) -> Box:
        """Return the box with both ends moved by some bytes."""
        return replace(self, source=self.source + source, destination=self.destination + destination)

    def part(self, start: int, stop: int) -> Box:
        """Return indices `start` to `stop` of the outermost dimension; a single index has no such dimension."""
        (_, source, destination), *inner = self.dims
        dims = inner if stop - start == 1 else [(stop - start, source, destination), *inner]
        return replace(self.moved(start * source, start * destination), dims=tuple(dims))

    def cut(self, most: int) -> Iterator[Box]:
        """Yield the box in parts of at most `most` bytes."""
        if self.nbytes <= most:
            yield self
        elif self.dims:
            half = self.dims[0][0] // 2
            yield from self.part(0, half).cut(most)
            yield from self.part(half, self.dims[0][0]).cut(most)
        else:
            for at in range(0, self.run, most):
                yield replace(self.moved(at, at), run=min(most, self.run - at))

    def packed(self, *, source: int | None = None, destination: int | None = None) -> Box:
        """Return the box with the given end replaced by contiguous memory from there on."""
        dims: list[Dim] = []
        step = self.run
        for count, here, there in reversed(self.dims):
            dims.insert(0, (count, here if source is None else step, there if destination is None else step))
            step *= count
        moved = replace(self, dims=tuple(dims))
        if source is not None:
            moved = replace(moved, source=source)
        return moved if destination is None else replace(moved, destination=destination)

    def planes(self, most_pitch: int) -> Iterator[Box]:
        """Yield boxes of at most one dimension, whose ranges neither overlap nor are over `most_pitch` bytes apart."""
        if not self.dims or (len(self.dims) == 1 and self.run <= min(self.strides) and max(self.strides) <= most_pitch):
            yield self
        else:
            for index in range(self.dims[0][0]):
                yield from self.part(index, index + 1).planes(most_pitch)


def box(row: Row) -> Box:
    """Return a row without a conversion as a box with as few dimensions as possible."""
    run = row.element
    dims: list[Dim] = []
    # the order of the elements does not matter, so the smallest strides come last
    steps = sorted(zip(row.destination.stride, row.source.stride, row.size, strict=True))
    for there, here, count in steps:
        if count == 1:
            continue
        if not dims and here == run == there:
            run *= count
        elif dims and (here, there) == (dims[0][0] * dims[0][1], dims[0][0] * dims[0][2]):
            dims[0] = (dims[0][0] * count, *dims[0][1:])
        else:
            dims.insert(0, (count, here, there))
    return Box(row.row, row.source.offset, row.destination.offset, tuple(dims), run)


@dataclass(frozen=True, slots=True, order=True)
class Kind:
    """The properties that all entries of a table share.

    Attributes:
        unit: bytes of a unit.
        is_flat: they have no dimensions.
        is_skewed: their sources begin 1 to 3 bytes after a multiple of the unit, which is 4.
    """

    unit: int
    is_flat: bool
    is_skewed: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Table:
    """Entries of one kind as the kernel reads them.

    The columns are: source and destination address, row, units, first tile, units of a range, then sizes of the inner
    two dimensions, three source strides and three destination strides in units, from the innermost dimension on.
    """

    kind: Kind
    entries: npt.NDArray[np.int64]  # [n, COLUMNS]
    tiles: npt.NDArray[np.int32]  # the entry of each tile
    tile_bytes: npt.NDArray[np.int64]  # the bytes of each tile


def tables(boxes: Iterable[Box]) -> list[Table]:
    """Return the tables of boxes whose ends are addresses, each with the entries of one kind."""
    found: dict[Kind, list[list[int]]] = {}
    for whole in boxes:
        for kind, part in entries(whole):
            found.setdefault(kind, []).append(_columns(kind, part))
    return [_table(kind, columns) for kind, columns in sorted(found.items())]


def entries(whole: Box) -> Iterator[tuple[Kind, Box]]:
    """Yield the parts of a box (addresses) that the kernel copies, each with its kind."""
    if len(whole.dims) > _DIMS:
        for index in range(whole.dims[0][0]):
            yield from entries(whole.part(index, index + 1))
        return
    wide = gcd(16, whole.source - whole.destination, *whole.strides)
    small = gcd(wide, whole.run, whole.source)
    is_skewed = wide < 4 and gcd(4, *whole.strides) == 4
    unit = 4 if is_skewed else wide
    head = -whole.destination % unit
    body = (whole.run - head) // unit * unit
    if small == unit or body < _LEAST_BODY * unit:
        yield from _fitting(whole, small)
        return
    tail = whole.run - head - body
    for start, run, size in ((0, head, small), (head, body, unit), (head + body, tail, small)):
        if run:
            yield from _fitting(replace(whole.moved(start, start), run=run), size, is_skewed=is_skewed and run == body)


def _fitting(part: Box, unit: int, *, is_skewed: bool = False) -> Iterator[tuple[Kind, Box]]:
    """Yield a box in pieces whose offsets, in units, the kernel's arithmetic can express."""
    unit = 4 if unit == 8 else unit
    most = _MOST_UNITS * unit
    if not part.dims:
        for at in range(0, part.run, most):
            yield Kind(unit, True, is_skewed), replace(part.moved(at, at), run=min(most, part.run - at))
    elif max(part.nbytes, *(_reach(part, side) for side in (1, 2))) <= most:
        yield Kind(unit, False, is_skewed), part
    else:
        half = part.dims[0][0] // 2
        yield from _fitting(part.part(0, half), unit, is_skewed=is_skewed)
        yield from _fitting(part.part(half, part.dims[0][0]), unit, is_skewed=is_skewed)


def _reach(part: Box, side: int) -> int:
    return sum((dim[0] - 1) * dim[side] for dim in part.dims) + part.run


def _columns(kind: Kind, part: Box) -> list[int]:
    dims = [*reversed(part.dims), *[(1, 0, 0)] * (_DIMS - len(part.dims))]
    in_units = [count // kind.unit for count in (part.run, *(dim[1] for dim in dims), *(dim[2] for dim in dims))]
    sizes = [count for count, _, _ in dims[:2]]
    return [part.source, part.destination, part.row, part.nbytes // kind.unit, 0, in_units[0], *sizes, *in_units[1:]]


def _table(kind: Kind, columns: list[list[int]]) -> Table:
    made = np.zeros((len(columns), COLUMNS), np.int64)
    made[:, : len(columns[0])] = columns
    units = made[:, 3]
    counts = -(-units // UNITS[kind.unit])
    made[1:, 4] = np.cumsum(counts)[:-1]
    tiles = np.repeat(np.arange(len(made), dtype=np.int32), counts)
    at = np.arange(len(tiles)) - made[tiles, 4]
    tile_bytes = np.minimum(UNITS[kind.unit], units[tiles] - at * UNITS[kind.unit]) * kind.unit
    return Table(kind, made, tiles, tile_bytes)
