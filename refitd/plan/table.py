"""Plan tables, the form of a plan that processes exchange: one row per copy, fill or region, each name stored once.

A table is sent in parts that name no rank. Ranks that copy the same rows share a part, and parts outlive changes of the
fleet:

    rows    3 -> 40: r0 r1 r2    3 -> 44: r0 r1 r2    5 -> 41: r3
    parts   0 -> 1: r0 r1 r2     0 -> 1: r3
    uses    part 0 by ranks 3, 40;    part 0 by ranks 3, 44;    part 1 by ranks 5, 41

Uses are in the order of the rows, so rows that are put together again are the same rows in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from refitd.dtypes import DESTINATION_SIZES, SOURCE_SIZES
from refitd.plan.columns import Columns, Ints, distinct, hashed, name_hashes, range_values, ranges

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
MAX_DIMS = 8
NAMES = ("tensors", "locals")
NAMED_BY = {"tensors": ("tensor",), "locals": ("local", "src_local", "dst_local")}  # the columns that index each
OPTIONAL = ("cast", "path", "hop")  # columns that are not sent if all zero
BOXES = ("size", "stride", "src_stride", "dst_stride")


@dataclass(frozen=True, eq=False)
class PlanTable(Columns):
    """Base of plan tables: shared names, and the wire form.

    Subclasses must annotate their columns as Int32 or Int64, which determines the wire form.
    """

    locals: tuple[str, ...]  # names of local tensors
    element_size: Int32  # [n] bytes

    @property
    def row_bytes(self) -> Int64:
        """Bytes written by each row, shape [n]."""
        nbytes: Int64 = np.prod(self.size, axis=1, dtype=np.int64) * self.element_size
        return nbytes

    @cached_property
    def total_bytes(self) -> int:
        """Bytes written by all rows together."""
        return int(self.row_bytes.sum())

    def with_own_names(self) -> Self:
        """Return the table with only the names that its rows use."""
        changes: dict[str, Any] = {}
        for names, columns in NAMED_BY.items():
            mine = [column for column in columns if hasattr(self, column)]
            if mine:
                used, index = np.unique(np.concatenate([getattr(self, column) for column in mine]), return_inverse=True)
                changes[names] = tuple(getattr(self, names)[i] for i in used.tolist())
                changes |= zip(mine, np.split(index.reshape(-1).astype(np.int32), len(mine)), strict=True)
        return replace(self, **changes)

    def to_wire(self) -> dict[str, Any]:
        """Return the table as plain values: names as lists, columns as little-endian bytes."""
        wire: dict[str, Any] = {"rows": len(self), "dims": int(self.size.shape[1])}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in OPTIONAL and not value.any():
                continue
            if isinstance(value, np.ndarray):
                wire[f.name] = np.ascontiguousarray(value.astype(value.dtype.newbyteorder("<"))).tobytes()
            else:
                wire[f.name] = list(value)
        return wire

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Self:
        """Rebuild a table; raises ValueError when a column is missing, too short or out of range."""
        rows, dims = wire.get("rows"), wire.get("dims")
        if not isinstance(rows, int) or not isinstance(dims, int) or rows < 0 or not 0 < dims <= MAX_DIMS:
            raise ValueError(f"a plan table has rows >= 0 and 1..{MAX_DIMS} dims, found {rows!r} and {dims!r}")
        columns: dict[str, Any] = {}
        for f in fields(cls):
            value = wire.get(f.name)
            if f.name in OPTIONAL and value is None:
                columns[f.name] = np.zeros(rows, np.int32)
                continue
            if f.name in NAMES:
                if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                    raise ValueError(f"plan table: {f.name} must be a list of names")
                columns[f.name] = tuple(value)
                continue
            dtype = np.dtype("<i4" if f.type == "Int32" else "<i8")
            shape = (rows, dims) if f.name in BOXES else (rows,)
            want = dtype.itemsize * int(np.prod(shape))
            if not isinstance(value, bytes) or len(value) != want:
                found = len(value) if isinstance(value, bytes) else type(value).__name__
                raise ValueError(f"plan table: column {f.name} needs {want} bytes, found {found}")
            columns[f.name] = np.frombuffer(value, dtype=dtype).reshape(shape)
        table = cls(**columns)
        if rows:
            table._check_ranges()
        return table

    def _check_ranges(self) -> None:
        """Raise ValueError if a number is out of range; called only for tables with rows."""
        if self.element_size.min() < 1 or self.size.min() < 1:
            raise ValueError("plan table: sizes must be positive")

    @staticmethod
    def _check_names(column: npt.NDArray[Any], names: tuple[str, ...]) -> None:
        if column.min() < 0 or column.max() >= len(names):
            raise ValueError("plan table: a name index is out of range")

    @staticmethod
    def _check_places(*columns: npt.NDArray[Any]) -> None:
        if min(column.min() for column in columns) < 0:
            raise ValueError("plan table: offsets and strides must not be negative")


@dataclass(frozen=True, eq=False)
class CopyTable(PlanTable):
    """Copies between local tensors: each row moves one strided box of elements, in the box's row-major order.

    All boxes have D dimensions; shorter boxes are padded in front with size 1, stride 0. Element (i0, ..., iD-1) of row
    r is read at `src_offset[r] + sum(ik * src_stride[r, k])` of the source's local tensor, and written at the same
    expression with `dst_`. Offsets and strides count elements of the local tensor as if it were row-major; its strides
    in memory do not matter.
    """

    tensors: tuple[str, ...]  # canonical names
    tensor: Int32  # [n] index into `tensors`
    src_rank: Int32  # [n]
    dst_rank: Int32  # [n]
    src_local: Int32  # [n] index into `locals`, which holds names of both sides
    dst_local: Int32  # [n] index into `locals`
    task_id: Int64  # [n] equal on both ends, unique in the plan
    src_offset: Int64  # [n]
    src_stride: Int64  # [n, D]
    dst_offset: Int64  # [n]
    dst_stride: Int64  # [n, D]
    cast: Int32  # [n] number in refitd.dtypes; 0 for none

    @property
    def src_element_size(self) -> Int32:
        """Bytes per element at the source, shape [n]; `element_size` is the destination's."""
        return np.where(self.cast == 0, self.element_size, np.array(SOURCE_SIZES, np.int32)[self.cast])

    def _check_ranges(self) -> None:
        super()._check_ranges()
        if self.cast.min() < 0 or self.cast.max() >= len(DESTINATION_SIZES):
            raise ValueError("plan table: a cast that this version does not know")
        if ((self.cast > 0) & (self.element_size != np.array(DESTINATION_SIZES)[self.cast])).any():
            raise ValueError("plan table: a cast to elements of another size")
        self._check_names(self.tensor, self.tensors)
        self._check_names(self.src_local, self.locals)
        self._check_names(self.dst_local, self.locals)
        self._check_places(self.src_offset, self.dst_offset, self.src_stride, self.dst_stride)


@dataclass(frozen=True, eq=False)
class CrossingTable(CopyTable):
    """Copies between nodes. Elements that several nodes need may travel over a path, from node to node.

    On a path, a row's source is where the row of the hop before wrote it. Rows of one path are in the same order at
    every hop, and equally large.
    """

    path: Int32  # [n] its path; 0 for a row that is on none
    hop: Int32  # [n] relays before it on its path

    @property
    def is_relayed(self) -> npt.NDArray[np.bool_]:
        """Whether each row reads what a target has received, shape [n]."""
        return self.hop > 0

    def _check_ranges(self) -> None:
        super()._check_ranges()
        if self.path.min() < 0 or self.hop.min() < 0 or (self.is_relayed & (self.path == 0)).any():
            raise ValueError("plan table: a path or a hop is out of range")


MAX_ELEMENT_SIZE = 16


@dataclass(frozen=True, eq=False)
class FillTable(PlanTable):
    """Fills, one per row: write one value into a strided box of a rank's local tensor.

    Offsets and strides count elements of the row-major local tensor, as in a CopyTable.
    """

    rank: Int32  # [n]
    local: Int32  # [n] index into `locals`
    pattern: Int64  # [n] the element's lowest 64 bits, little-endian; all higher bits are zero
    offset: Int64  # [n]
    stride: Int64  # [n, D]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FillTable) and self.to_wire() == other.to_wire()

    __hash__ = None  # type: ignore[assignment]

    def _check_ranges(self) -> None:
        super()._check_ranges()
        self._check_names(self.local, self.locals)
        self._check_places(self.offset, self.stride)
        if self.element_size.max() > MAX_ELEMENT_SIZE:
            raise ValueError(f"plan table: an element of a fill has more than {MAX_ELEMENT_SIZE} bytes")


T = TypeVar("T", bound=PlanTable)


@dataclass(frozen=True, eq=False)
class Uses:
    """The parts that make up a table, and their ranks. The ranks of all uses are in one column, end to end."""

    part: Int32  # [n]
    count: Int32  # [n] ranks of each use
    path: Int32  # [n] the path of its rows (CrossingTable.path)
    hop: Int32  # [n]
    ranks: Int32  # [sum of count] plan-wide ranks

    def __len__(self) -> int:
        return len(self.part)

    def select(self, uses: Ints) -> Uses:
        """Return only the given uses, by index."""
        at = range_values(self._start[uses], self.count[uses].astype(np.int64))
        return Uses(self.part[uses], self.count[uses], self.path[uses], self.hop[uses], self.ranks[at])

    @functools.cached_property
    def _start(self) -> Ints:
        """Where the ranks of each use begin."""
        return np.cumsum(self.count, dtype=np.int64) - self.count

    def to_wire(self) -> dict[str, bytes]:
        """Return the columns as little-endian bytes."""
        return {f.name: getattr(self, f.name).astype("<i4").tobytes() for f in fields(self)}

    @classmethod
    def from_wire(cls, wire: Mapping[str, bytes]) -> Uses:
        """Rebuild the uses; raises ValueError if a column is missing, too short or has impossible numbers."""
        columns = {f.name: wire.get(f.name, b"") for f in fields(cls)}
        if any(len(column) % 4 for column in columns.values()):
            raise ValueError("uses of plan parts: a column's length is no multiple of 4 bytes")
        uses = cls(**{name: np.frombuffer(column, "<i4") for name, column in columns.items()})
        if any(len(column) != len(uses) for column in (uses.count, uses.path, uses.hop)):
            raise ValueError("uses of plan parts: the columns are not equally long")
        if any(getattr(uses, name).min(initial=0) < 0 for name in columns):
            raise ValueError("uses of plan parts: a number is negative")
        if int(uses.count.sum(dtype=np.int64)) != len(uses.ranks):
            raise ValueError(f"uses of plan parts: {uses.count.sum()} ranks are used, {len(uses.ranks)} are named")
        return uses

    def with_parts(self, part: Ints) -> Uses:
        """Return the uses with other numbers for their parts."""
        return replace(self, part=part.astype(np.int32))


@dataclass(frozen=True, eq=False)
class Families:
    """Tensors that are planned as one, and the local tensors of each: tables name lists of them (`plan/families.py`).

    Tensor t of such a table is tensor[tensor_start[t] : tensor_start[t + 1]], and its local tensors are as many, in
    this order.
    """

    tensors: tuple[str, ...]  # canonical names
    locals: tuple[str, ...]
    tensor_start: Ints
    tensor: Ints  # index into `tensors`
    local_start: Ints
    local: Ints  # index into `locals`

    @cached_property
    def count(self) -> Ints:
        """The number of tensors in each."""
        return np.diff(self.tensor_start)

    def members(self, tensor: Ints | Int32, *local: Ints | Int32) -> tuple[Ints, ...]:
        """Return rows for the members of each row: (number of the row, tensor, each local tensor)."""
        row, at = ranges(self.tensor_start[tensor], self.count[tensor])
        nth = at - self.tensor_start[tensor][row]
        return row, self.tensor[at], *(self.local[self.local_start[each][row] + nth] for each in local)

    def spread(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the values of all tensors, from the values of their representatives."""
        found = np.empty(len(self.tensors), values.dtype)
        found[self.tensor] = np.repeat(values, self.count)
        return found

    def expanded(self, table: T) -> T:
        """Return the copies of all members; task ids are places alone (PartRows)."""
        assert isinstance(table, CopyTable)
        row, tensor, src, dst = self.members(table.tensor, table.src_local, table.dst_local)
        rows = table.select(row)
        return replace(
            rows,
            tensors=self.tensors,
            locals=self.locals,
            tensor=tensor.astype(np.int32),
            src_local=src.astype(np.int32),
            dst_local=dst.astype(np.int32),
            task_id=places_of(self.tensors, self.locals, tensor, dst, rows.dst_offset),
        )

    @cached_property
    def digest(self) -> bytes:
        """A digest of all names and members."""
        found = xxhash.xxh3_128(_digest_of(self.tensors) + _digest_of(self.locals))
        for column in (self.tensor_start, self.tensor, self.local_start, self.local):
            found.update(column.tobytes())
        return found.digest()


def weights_of(families: Families | None, tensor: npt.NDArray[Any]) -> Ints:
    """Return how many tensors each one in a table is."""
    return np.ones(len(tensor), np.int64) if families is None else families.count[tensor]


def places_of(
    tensors: tuple[str, ...], names: tuple[str, ...], tensor: Ints, dst_local: Ints, dst_offset: Ints
) -> Ints:
    """Return the part of each task id that does not depend on the rank: a hash of tensor and place written."""
    place = hashed([name_hashes(tensors)[tensor], name_hashes(names)[dst_local], dst_offset])
    return (place & np.uint64(2**PLACE_BITS - 1)).astype(np.int64)


@dataclass(frozen=True, eq=False)
class PartRows(Generic[T]):
    """The rows of all parts. In a part, ranks are positions among the ranks of a use, and task ids are places alone.

    Part i has rows start[i] : start[i + 1]; `start` has the shape [parts + 1]. Rows of `families` are one for all
    members; a part has all.
    """

    rows: T
    start: Ints
    families: Families | None = None

    def __len__(self) -> int:
        return len(self.start) - 1

    def part(self, number: int) -> T:
        """Return a part, with only the names that its rows use."""
        rows = self.rows.select(slice(int(self.start[number]), int(self.start[number + 1])))
        return (rows if self.families is None else self.families.expanded(rows)).with_own_names()

    @functools.cached_property
    def contents(self) -> list[bytes]:
        """A digest of each part's content: its rows, and all names. Equal parts of other names differ."""
        rows, names = self.rows, xxhash.xxh3_128(type(self.rows).__name__.encode())
        for name in NAMES:
            names.update(_digest_of(getattr(rows, name, None)))
        names.update(b"" if self.families is None else self.families.digest)
        columns = [value for f in fields(rows) if isinstance(value := getattr(rows, f.name), np.ndarray)]
        matrix = np.column_stack([column.astype("<i8") for column in columns])
        names.update(repr(matrix.shape[1]).encode())
        bounds, named = self.start.tolist(), names.digest()
        return [named + xxhash.xxh3_128_digest(matrix[first:end].data) for first, end in pairwise(bounds)]


@dataclass(frozen=True, eq=False, slots=True)
class Parted(Generic[T]):
    """A table as uses of parts."""

    parts: PartRows[T]
    uses: Uses

    @staticmethod
    def of(parts: PartRows[T], part: Ints, count: Ints, ranks: Ints | Int32, path: Ints, hop: Ints) -> Parted[T]:
        """Return a table of parts that are used as the other columns say (Uses)."""
        return Parted(parts, Uses(*(column.astype(np.int32, copy=False) for column in (part, count, path, hop, ranks))))

    def rows_of(self, uses: Ints) -> T:
        """Return the rows of some uses, in their order, with only the names that they use."""
        some = self.uses.select(uses)
        used = distinct(some.part)
        parts = [self.parts.part(number) for number in used.tolist()]
        some = some.with_parts(np.searchsorted(used, some.part))
        return assembled(type(self.parts.rows), some, parts).with_own_names()

    def whole(self) -> T:
        """Return all rows, put together."""
        return self.rows_of(np.arange(len(self.uses)))


def assembled(kind: type[T], uses: Uses, parts: Sequence[T]) -> T:
    """Return the rows of all uses, in their order.

    Raises:
        ValueError: a use names no part, or too few ranks.
    """
    if not len(uses):
        return kind.from_wire(_no_rows(kind))
    if int(uses.part.max()) >= len(parts):
        raise ValueError(f"uses of plan parts: part {uses.part.max()} of {len(parts)}")
    lengths = np.array([len(part) for part in parts], np.int64)
    if len({part.size.shape[1] for part in parts}) > 1:
        raise ValueError("plan parts: their boxes have different numbers of dimensions")
    together = _joined(kind, parts)
    use, row = ranges((np.cumsum(lengths) - lengths)[uses.part], lengths[uses.part])
    table = together.select(row)
    begin = np.cumsum(uses.count, dtype=np.int64) - uses.count
    changes: dict[str, Any] = {}
    for name in _rank_columns(table):
        at = getattr(table, name)
        if (at < 0).any() or (at >= uses.count[use]).any():
            raise ValueError("uses of plan parts: a use names fewer ranks than its part has")
        changes[name] = uses.ranks[begin[use] + at]
    if isinstance(table, CopyTable):
        changes["task_id"] = (changes["dst_rank"].astype(np.int64) << PLACE_BITS) | table.task_id
    if isinstance(table, CrossingTable):
        changes |= {"path": uses.path[use], "hop": uses.hop[use]}
    return replace(table, **changes)


@functools.lru_cache(maxsize=8)
def _digest_of(names: tuple[str, ...] | None) -> bytes:
    return xxhash.xxh3_128_digest(repr(names).encode())


def _rank_columns(table: PlanTable) -> tuple[str, ...]:
    return ("rank",) if isinstance(table, FillTable) else ("src_rank", "dst_rank")


def _joined(kind: type[T], parts: Sequence[T]) -> T:
    """Return all rows of the parts, with the names of all in order."""
    columns: dict[str, Any] = {}
    for f in fields(kind):
        if f.name not in NAMES:
            columns[f.name] = np.concatenate([getattr(part, f.name) for part in parts])
    for names in (f.name for f in fields(kind) if f.name in NAMES):
        known = sorted({name for part in parts for name in getattr(part, names)})
        number = {name: i for i, name in enumerate(known)}
        columns[names] = tuple(known)
        for column in NAMED_BY[names]:
            if column in columns:
                columns[column] = np.concatenate(
                    [
                        np.array([number[name] for name in getattr(part, names)], np.int32)[getattr(part, column)]
                        for part in parts
                    ]
                )
    return kind(**columns)


def _no_rows(kind: type[PlanTable]) -> dict[str, Any]:
    return {f.name: [] if f.name in NAMES else b"" for f in fields(kind)} | {"rows": 0, "dims": 1}


# a task id is the destination's rank followed by a hash of the tensor and of the place written
PLACE_BITS = 43


@dataclass(frozen=True, eq=False)
class RegionTable(PlanTable):
    """Strided boxes of holders' local tensors, one per row; rows of one group must hold the same bytes.

    Offsets and strides count elements of the row-major local tensor, as in a CopyTable.
    """

    tensors: tuple[str, ...]  # canonical names
    group: Int32  # [n] ascending
    tensor: Int32  # [n] index into `tensors`
    holder: Int32  # [n] index into `Regions.holders`
    local: Int32  # [n] index into `locals`
    offset: Int64  # [n]
    stride: Int64  # [n, D]

    def _check_ranges(self) -> None:
        super()._check_ranges()
        self._check_names(self.tensor, self.tensors)
        self._check_names(self.local, self.locals)
        self._check_places(self.offset, self.stride)
        if min(self.group.min(), self.holder.min()) < 0:
            raise ValueError("plan table: groups and holders of regions must not be negative")
