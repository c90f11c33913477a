"""A plan's rows in parts that name no rank: ranks that copy alike share a part, and parts outlive changes of the fleet.

    rows    3 -> 40: r0 r1 r2    3 -> 44: r0 r1 r2    5 -> 41: r3
    parts   0 -> 1: r0 r1 r2     0 -> 1: r3
    uses    part 0 by ranks 3, 40;    part 0 by ranks 3, 44;    part 1 by ranks 5, 41

Uses are in the order of the rows, so that rows which are put together again are the same rows in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from refitd.plan.columns import Ints, hashed, mixed, numbered, ranges
from refitd.plan.fills import FillTable
from refitd.plan.shared import PLACE_BITS
from refitd.plan.table import NAMED_BY, NAMES, CopyTable, CrossingTable, Int32, PlanTable

_PLACE = (1 << PLACE_BITS) - 1

Column = npt.NDArray[Any]
T = TypeVar("T", bound=PlanTable)


@dataclass(frozen=True, eq=False, slots=True)
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
        count = self.count.astype(np.int64)
        _, at = ranges((np.cumsum(count) - count)[uses], count[uses])
        return Uses(self.part[uses], self.count[uses], self.path[uses], self.hop[uses], self.ranks[at])

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


@dataclass(frozen=True, eq=False, slots=True)
class Parted(Generic[T]):
    """A table in parts. In a part, ranks are positions among the ranks of a use, and task ids are places alone.

    Attributes:
        parts: tables with names of their own.
        uses: the table as uses of them.
        first: the row of the table that each use begins with, shape [uses].
    """

    parts: tuple[T, ...]
    uses: Uses
    first: Ints


def parted(table: T) -> Parted[T]:
    """Return a table in parts: one for each pair of ranks, hop of a path, or rank that fills, and equal ones once.

    Rows of one pair, hop or rank that do not follow each other make several uses.
    """
    columns = _rank_columns(table)
    ranks = [getattr(table, name) for name in columns]
    path, hop = (getattr(table, name, np.zeros(len(table), np.int32)) for name in ("path", "hop"))
    differs = np.logical_or.reduce([np.diff(column) != 0 for column in ranks]) & (path[1:] == 0)
    opens = np.concatenate([[True], differs | (np.diff(path) != 0) | (np.diff(hop) != 0)])[: len(table)]
    first = np.flatnonzero(opens)
    end = np.append(first[1:], len(table))
    positions = [np.full(len(table), i, np.int32) for i in range(len(ranks))]
    of_use = np.column_stack([column[first] for column in ranks]).tolist()
    for use in np.flatnonzero(path[first] > 0).tolist():
        rows = slice(first[use], end[use])
        used, at = np.unique(np.concatenate([column[rows] for column in ranks]), return_inverse=True)
        of_use[use] = used.tolist()
        for position, found in zip(positions, np.split(at.reshape(-1), len(ranks)), strict=True):
            position[rows] = found
    plain = _without_ranks(table, dict(zip(columns, positions, strict=True)))
    example, part = _alike(_columns(plain), first, end)
    uses = Uses(
        part=part.astype(np.int32),
        count=np.array([len(each) for each in of_use], np.int32),
        path=path[first],
        hop=hop[first],
        ranks=np.array([rank for each in of_use for rank in each], np.int32),
    )
    parts = tuple(plain.select(slice(first[use], end[use])).with_own_names() for use in example.tolist())
    return Parted(parts, uses, first)


def _alike(columns: Sequence[Column], first: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Return (an example of each part, the part of each use), for uses of rows first:end of these columns."""
    if not len(first):
        return first, first
    count = end - first
    nth = np.arange(end[-1]) - np.repeat(first, count)
    example, part = numbered(np.add.reduceat(mixed(hashed(columns) ^ mixed(nth)), first))
    alike = example[part]
    same = bool((count == count[alike]).all())
    if same:
        row = np.repeat(first[alike], count) + nth
        same = all(np.array_equal(column, column[row]) for column in columns)
    if not same:  # two contents of one hash: as if no two uses were alike
        return np.arange(len(first)), np.arange(len(first))
    return example, part


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


def _rank_columns(table: PlanTable) -> tuple[str, ...]:
    return ("rank",) if isinstance(table, FillTable) else ("src_rank", "dst_rank")


def _without_ranks(table: T, positions: dict[str, Any]) -> T:
    changes = dict(positions)
    if isinstance(table, CopyTable):
        changes["task_id"] = table.task_id & _PLACE
    if isinstance(table, CrossingTable):
        changes |= {name: np.zeros(len(table), np.int32) for name in ("path", "hop")}
    return replace(table, **changes)


def _columns(table: PlanTable) -> list[Column]:
    return [value for f in fields(table) if isinstance(value := getattr(table, f.name), np.ndarray)]


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
