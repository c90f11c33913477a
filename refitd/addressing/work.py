"""The common form of work lists: columns, their encoding, and how rows are split over workers."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Self

import numpy as np

from refitd.addressing.places import PROCESS_MEMORY, Int64
from refitd.plan.columns import Columns
from refitd.plan.table import BOXES

_MOST_DIMS = 16


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
        return {arena for column in columns for arena in column.tolist()} - {PROCESS_MEMORY}

    def in_memory_order(self) -> Int64:
        """Return row numbers in an order that keeps rows together that are close in memory."""
        return np.arange(len(self))

    def shared_out(self, workers: int, homes: Mapping[int, int] | None = None) -> list[Int64]:
        """Return the row numbers of each worker: contiguous runs in memory order, about equal bytes each.

        `homes` maps each GPU arena to the worker of its GPU. That worker gets the rows that write to the arena, and
        those that read from it and write to main memory.
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


def equal_shares(nbytes: Int64, shares: int) -> Int64:
    """Return the share of each row: contiguous runs of about equal bytes.

    A row belongs to the share in which its middle byte lies. No share is empty unless there are fewer rows than shares.
    """
    done = np.cumsum(nbytes)
    total = int(done[-1]) if len(done) else 0
    return np.minimum(((done - nbytes / 2) * shares / max(1, total)).astype(np.int64), shares - 1)
