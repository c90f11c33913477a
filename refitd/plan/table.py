"""Plan tables: one row per copy, integers in columns, each name stored once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from refitd.describe.casts import DESTINATION_SIZES, SOURCE_SIZES
from refitd.plan.columns import Columns

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

MAX_DIMS = 8
UNSET: Int32 = np.zeros(0, np.int32)  # stands for a column of zeros
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
    expression with `dst_`. Offsets and strides count elements of the local tensor as if it were row-major, whatever its
    strides in memory are.
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
    cast: Int32 = field(default_factory=lambda: UNSET)  # [n] number in refitd.describe.casts; by default none

    def __post_init__(self) -> None:
        if self.cast is UNSET:
            object.__setattr__(self, "cast", np.zeros(len(self), np.int32))

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
    """Copies between nodes. What several nodes need alike may travel over a path: from node to node.

    On a path, a row's source is where the row of the hop before wrote it. Rows of one path are in the same order at
    every hop, and equally large.
    """

    path: Int32 = field(default_factory=lambda: UNSET)  # [n] its path; 0 for a row that is on none
    hop: Int32 = field(default_factory=lambda: UNSET)  # [n] relays before it on its path

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("path", "hop"):
            if getattr(self, name) is UNSET:
                object.__setattr__(self, name, np.zeros(len(self), np.int32))

    @classmethod
    def of(cls, table: CopyTable) -> Self:
        """Return the rows of a table, none of them on a path."""
        return cls(**{f.name: getattr(table, f.name) for f in fields(CopyTable)})

    @property
    def is_relayed(self) -> npt.NDArray[np.bool_]:
        """Whether each row reads what a target has received, shape [n]."""
        return self.hop > 0

    def _check_ranges(self) -> None:
        super()._check_ranges()
        if self.path.min() < 0 or self.hop.min() < 0 or (self.is_relayed & (self.path == 0)).any():
            raise ValueError("plan table: a path or a hop is out of range")
