"""A plan's rows in parts that name no rank: ranks that copy alike share a part, and parts outlive changes of the fleet.

    rows    3 -> 40: r0 r1 r2    3 -> 44: r0 r1 r2    5 -> 41: r3
    parts   0 -> 1: r0 r1 r2     0 -> 1: r3
    uses    part 0 by ranks 3, 40;    part 0 by ranks 3, 44;    part 1 by ranks 5, 41

Uses are in the order of the rows, so that rows which are put together again are the same rows in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np
import xxhash

from refitd.plan.columns import Ints, distinct, range_values, ranges
from refitd.plan.fills import FillTable
from refitd.plan.shared import PLACE_BITS
from refitd.plan.table import NAMED_BY, NAMES, CopyTable, CrossingTable, Int32, PlanTable

T = TypeVar("T", bound=PlanTable)


@dataclass(frozen=True, eq=False)
class Uses:
    """Which parts make up a table, and for which ranks. The ranks of all uses stand end to end."""

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
            raise ValueError("uses of plan parts: a column is not made of numbers of 4 bytes")
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
class PartRows(Generic[T]):
    """The rows of all parts. In a part, ranks are positions among the ranks of a use, and task ids are places alone.

    Part i has rows start[i] : start[i + 1]; `start` has the shape [parts + 1].
    """

    rows: T
    start: Ints

    def __len__(self) -> int:
        return len(self.start) - 1

    def part(self, number: int) -> T:
        """Return a part, with only the names that its rows use."""
        return self.rows.select(slice(int(self.start[number]), int(self.start[number + 1]))).with_own_names()

    @functools.cached_property
    def contents(self) -> list[bytes]:
        """A digest of each part's content: its rows, and all names. Equal parts of other names differ."""
        rows, names = self.rows, xxhash.xxh3_128(type(self.rows).__name__.encode())
        for name in NAMES:
            names.update(_digest_of(getattr(rows, name, None)))
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
