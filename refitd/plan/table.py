"""The columnar form of a plan: one row per copy, integers in arrays, names once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

MAX_DIMS = 8


@dataclass(frozen=True, eq=False)
class CopyTable:
    """Copies between local tensors: row i moves one strided box of elements, in row-major order of the box.

    A box has D dimensions (the same D for every row; short boxes are padded in front with size 1, stride 0).
    Element (i0, ..., iD-1) of row r is read at `src_offset[r] + sum(ik * src_stride[r, k])` of the source's
    local tensor and written at the same expression with `dst_`. Offsets and strides count elements of the
    local tensor laid out row-major in its own shape, whatever its strides in memory are.
    """

    tensors: tuple[str, ...]  # canonical names
    locals: tuple[str, ...]  # names of local tensors, of both sides
    tensor: Int32  # [n] index into `tensors`
    src_rank: Int32  # [n]
    dst_rank: Int32  # [n]
    src_local: Int32  # [n] index into `locals`
    dst_local: Int32  # [n] index into `locals`
    element_size: Int32  # [n] bytes
    task_id: Int64  # [n] the same on both ends, unique in the plan
    size: Int64  # [n, D] elements
    src_offset: Int64  # [n]
    src_stride: Int64  # [n, D]
    dst_offset: Int64  # [n]
    dst_stride: Int64  # [n, D]

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def row_bytes(self) -> Int64:
        """Bytes moved by each row, shape [n]."""
        nbytes: Int64 = np.prod(self.size, axis=1, dtype=np.int64) * self.element_size
        return nbytes

    @property
    def total_bytes(self) -> int:
        """Bytes moved by all rows together."""
        return int(self.row_bytes.sum())

    def select(self, rows: npt.NDArray[Any]) -> CopyTable:
        """Return the table with only these rows (a boolean mask or indices); names are kept as they are."""
        picked = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in picked.items():
            if isinstance(value, np.ndarray):
                picked[name] = value[rows]
        return CopyTable(**picked)

    def to_wire(self) -> dict[str, Any]:
        """Return the table as plain values: names as lists, columns as little-endian bytes."""
        wire: dict[str, Any] = {"rows": len(self), "dims": int(self.size.shape[1])}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, np.ndarray):
                wire[f.name] = np.ascontiguousarray(value.astype(value.dtype.newbyteorder("<"))).tobytes()
            else:
                wire[f.name] = list(value)
        return wire

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> CopyTable:
        """Rebuild a table; raises ValueError when a column is missing, too short or out of range."""
        rows, dims = wire.get("rows"), wire.get("dims")
        if not isinstance(rows, int) or not isinstance(dims, int) or rows < 0 or not 0 < dims <= MAX_DIMS:
            raise ValueError(f"a plan table has rows >= 0 and 1..{MAX_DIMS} dims, found {rows!r} and {dims!r}")
        columns: dict[str, Any] = {}
        for f in fields(cls):
            value = wire.get(f.name)
            if f.name in ("tensors", "locals"):
                if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                    raise ValueError(f"plan table: {f.name} must be a list of names")
                columns[f.name] = tuple(value)
                continue
            dtype = np.dtype("<i4" if f.type == "Int32" else "<i8")
            shape = (rows, dims) if f.name in ("size", "src_stride", "dst_stride") else (rows,)
            want = dtype.itemsize * int(np.prod(shape))
            if not isinstance(value, bytes) or len(value) != want:
                found = len(value) if isinstance(value, bytes) else type(value).__name__
                raise ValueError(f"plan table: column {f.name} needs {want} bytes, found {found}")
            columns[f.name] = np.frombuffer(value, dtype=dtype).reshape(shape)
        table = cls(**columns)
        table._check_ranges()
        return table

    def _check_ranges(self) -> None:
        if not len(self):
            return
        for column, limit in (
            (self.tensor, len(self.tensors)),
            (self.src_local, len(self.locals)),
            (self.dst_local, len(self.locals)),
        ):
            if column.min() < 0 or column.max() >= limit:
                raise ValueError("plan table: a name index is out of range")
        if self.element_size.min() < 1 or self.size.min() < 1:
            raise ValueError("plan table: sizes must be positive")
        if min(self.src_offset.min(), self.dst_offset.min(), self.src_stride.min(), self.dst_stride.min()) < 0:
            raise ValueError("plan table: offsets and strides must not be negative")
