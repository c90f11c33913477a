"""The planner's form of a plan: rows without ranks, and jobs that assign rows to pairs of ranks.

Thousands of ranks of few kinds share few rows; only `expand` makes a row for every pair of ranks.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from refitd.plan.coalesce import Rows
from refitd.plan.columns import Ints, hashed, name_hashes, numbered, offsets_of, range_values, ranges
from refitd.plan.fills import FillTable, SharedFills, fills_from
from refitd.plan.regions import Regions
from refitd.plan.table import CopyTable

# a task id is the destination's rank followed by a hash of the tensor and of the place written
PLACE_BITS = 43


@dataclass(frozen=True, eq=False)
class SharedPlan:
    """Rows, and jobs that perform them. Jobs are sorted by (dst, src).

    Job j copies rows row_start[k]:row_start[k + 1], k = job_rows[j], from job_src[j] to job_dst[j]. `rows.owner` is k;
    `rows.tensor` and both locals index the names.
    """

    tensors: tuple[str, ...]
    locals: tuple[str, ...]
    rows: Rows
    row_start: Ints
    job_rows: Ints
    job_src: Ints
    job_dst: Ints
    fills: SharedFills = field(default_factory=SharedFills)

    @functools.cached_property
    def places(self) -> Ints:
        """The part of each row's task id that does not depend on the rank: a hash of tensor and place written."""
        tensors, names = name_hashes(self.tensors), name_hashes(self.locals)
        rows = self.rows
        place = hashed([tensors[rows.tensor], names[rows.dst_local], rows.dst_offset])
        return (place & np.uint64(2**PLACE_BITS - 1)).astype(np.int64)

    def __len__(self) -> int:
        return int((self.row_start[self.job_rows + 1] - self.row_start[self.job_rows]).sum())

    def expanded(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return what is said of each row for each copy, in the order of `expand`."""
        start = self.row_start[self.job_rows]
        return values.take(range_values(start, self.row_start[self.job_rows + 1] - start), axis=0)

    def expand(self) -> CopyTable:
        """Return one row per copy, sorted by (destination rank, source rank, tensor, place)."""
        start = self.row_start[self.job_rows]
        count = self.row_start[self.job_rows + 1] - start
        at = range_values(start, count)
        dst = np.repeat(self.job_dst, count)
        rows = self.rows

        def column(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return values.take(at, axis=0)

        return CopyTable(
            tensors=self.tensors,
            locals=self.locals,
            tensor=column(rows.tensor.astype(np.int32)),
            src_rank=np.repeat(self.job_src.astype(np.int32), count),
            dst_rank=dst.astype(np.int32),
            src_local=column(rows.src_local.astype(np.int32)),
            dst_local=column(rows.dst_local.astype(np.int32)),
            element_size=column(rows.element_size.astype(np.int32)),
            task_id=(dst << PLACE_BITS) | column(self.places),
            size=column(rows.size),
            src_offset=column(rows.src_offset),
            src_stride=column(rows.src_stride),
            dst_offset=column(rows.dst_offset),
            dst_stride=column(rows.dst_stride),
            cast=column(rows.cast.astype(np.int32)),
        )

    def digest(self) -> str:
        """Return a digest of the whole plan."""
        digest = xxhash.xxh3_128()
        rows = self.rows
        for names in (self.tensors, self.locals):
            digest.update("\0".join(names).encode())
        for column in (
            rows.tensor,
            rows.src_local,
            rows.dst_local,
            rows.element_size,
            rows.size,
            rows.src_offset,
            rows.src_stride,
            rows.dst_offset,
            rows.dst_stride,
            self.row_start,
            self.job_rows,
            self.job_src,
            self.job_dst,
            *([rows.cast] if rows.cast.any() else ()),
            *(self.fills.columns() if len(self.fills.rank) else ()),
        ):
            digest.update(repr(column.shape).encode())
            digest.update(column.tobytes())
        return digest.hexdigest()


class Planner(enum.Enum):
    """The method that planned a tensor. Where LCM tiling applies, both plan the same copies."""

    LCM = "lcm"
    INTERSECT = "intersect"


@dataclass(frozen=True, eq=False)
class GlobalPlan:
    """Every copy of a refit, and every fill.

    Attributes:
        shared: the copies; rows that several ranks share are stored once.
        unused_sources: canonical names that some rank offers and none wants.
        is_lcm: for each of `shared.tensors`, whether LCM tiling planned it.
        digest: identifies the plan's copies and fills.
        regions: elements that several source ranks hold, to be compared before anything moves.
    """

    shared: SharedPlan
    unused_sources: tuple[str, ...]
    is_lcm: npt.NDArray[np.bool_]
    digest: str
    regions: Regions

    def planner_of(self, tensor: str) -> Planner | None:
        """Return the method that planned a canonical tensor; None if the plan does not move it."""
        if tensor not in self.shared.tensors:
            return None
        number = self.shared.tensors.index(tensor)
        if not (self.shared.rows.tensor == number).any():
            return None
        return Planner.LCM if self.is_lcm[number] else Planner.INTERSECT

    @functools.cached_property
    def table(self) -> CopyTable:
        """The copies, one row each."""
        return self.shared.expand()

    @functools.cached_property
    def fills(self) -> FillTable:
        """The fills, one row per rank and box."""
        return self.shared.fills.expand(self.shared.locals)


def shared_from(table: CopyTable, fills: FillTable | None) -> SharedPlan:
    """Return tables as a shared plan: the inverse of `expand`, except for the order of rows."""
    order = np.lexsort((np.arange(len(table)), table.src_rank, table.dst_rank))
    sorted_table = table.select(order)
    src, dst = (column.astype(np.int64) for column in (sorted_table.src_rank, sorted_table.dst_rank))
    rows = Rows(
        owner=np.zeros(len(table), np.int64),
        tensor=sorted_table.tensor.astype(np.int64),
        src_local=sorted_table.src_local.astype(np.int64),
        dst_local=sorted_table.dst_local.astype(np.int64),
        element_size=sorted_table.element_size.astype(np.int64),
        cast=sorted_table.cast.astype(np.int64),
        origin=np.zeros_like(sorted_table.size),
        size=sorted_table.size,
        src_offset=sorted_table.src_offset,
        src_stride=sorted_table.src_stride,
        dst_offset=sorted_table.dst_offset,
        dst_stride=sorted_table.dst_stride,
    )
    opens = np.concatenate([[True], (np.diff(src) != 0) | (np.diff(dst) != 0)])[: len(src)]
    job_start = np.flatnonzero(opens)
    count = np.diff(np.append(job_start, len(src)))
    content = hashed([getattr(rows, f.name) for f in fields(rows)])
    sums = np.add.reduceat(content, job_start) if len(content) else content
    example, kind = numbered(sums)
    owner, at = ranges(job_start[example], count[example])
    return SharedPlan(
        tensors=table.tensors,
        locals=table.locals if fills is None else table.locals + fills.locals,
        rows=replace(rows.select(at), owner=owner),
        row_start=offsets_of(owner, len(example)),
        job_rows=kind,
        job_src=src[job_start],
        job_dst=dst[job_start],
        fills=SharedFills() if fills is None else fills_from(fills, len(table.locals)),
    )
