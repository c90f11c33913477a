"""The planner's form of a plan: rows without ranks, jobs that assign rows to pairs of ranks, fills, and regions.

Thousands of ranks of few kinds share few rows; only `expand` makes a row for every pair of ranks. Fills write a
constant into the boxes of destinations' local tensors that hold no canonical element:

    vocabulary of 10 over TP4, padded to 16, 3 columns: rank 2 fills rows 2:4, rank 3 rows 0:4 of its [4, 3]

Regions are elements that several source ranks hold, or that one rank holds twice. All copies must hold the same bytes:

    rank 0 holds [0:8], rank 1 [0:4], rank 2 [4:8]     group 0: [0:4] of ranks 0 and 1, group 1: [4:8] of ranks 0 and 2
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from refitd.dtypes import fill_pattern
from refitd.plan.coalesce import Rows
from refitd.plan.columns import Ints, range_values, ranges
from refitd.plan.layouts import Layouts
from refitd.plan.match import SharedCells
from refitd.plan.table import (
    PLACE_BITS,
    CopyTable,
    Families,
    FillTable,
    Int64,
    RegionTable,
    places_of,
    weights_of,
)

MAX_NAMED = 5  # the most tensors that one refusal names
ADVICE = (
    "replicas of one tensor must be equal. If each rank holds a part, its description lacks that: check "
    "tensor_model_parallel, partition_dim and partition_stride on the parameter, allreduce = False on experts, the "
    "parallel groups, or describe it with tiles; if the ranks have drifted apart, synchronise them"
)


class Digested(NamedTuple):
    """The digests of one holder's regions."""

    label: str  # the holder's name in messages
    group: npt.NDArray[np.integer]  # [n] each region's group
    tensors: Sequence[str]  # canonical names
    tensor: npt.NDArray[np.integer]  # [n] index into `tensors`
    digests: npt.NDArray[np.uint64]  # [n]


@dataclass(frozen=True, eq=False)
class Regions:
    """The regions of a plan.

    Attributes:
        table: one row per box and holder.
        holders: groups of source ranks with equal descriptions, which hold the same boxes.
    """

    table: RegionTable
    holders: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.table)

    @functools.cached_property
    def digest(self) -> str:
        """A digest of the table and its holders."""
        found = xxhash.xxh3_128(repr((self.holders, self.table.tensors, self.table.locals)).encode())
        for column in fields(self.table):
            if isinstance(value := getattr(self.table, column.name), np.ndarray):
                found.update(repr(value.shape).encode())
                found.update(value.tobytes())
        return found.hexdigest()

    @functools.cached_property
    def holder_of(self) -> dict[int, int]:
        """The number of each rank's holder, by rank."""
        return {rank: number for number, ranks in enumerate(self.holders) for rank in ranks}

    def rows_of(self, rank: int) -> Ints:
        """Return the rows of the table that a rank holds."""
        return np.flatnonzero(self.table.holder == self.holder_of[rank])

    def digested(self, label: str, rank: int, digests: npt.NDArray[np.uint64]) -> Digested:
        """Return the digests of a rank's regions; `digests` is in the order of `rows_of`."""
        rows, table = self.rows_of(rank), self.table
        return Digested(label, table.group[rows], table.tensors, table.tensor[rows], digests)


@dataclass(frozen=True, eq=False)
class HeldByClasses:
    """Regions, and the source classes that hold them: class `classes[i]` is holder i of the table."""

    table: RegionTable
    classes: Ints

    def of_ranks(self, layouts: Layouts) -> Regions:
        """Return the regions of a plan for these ranks."""
        rank_class = layouts.source.rank_class
        order = np.argsort(rank_class, kind="stable")
        begin, end = (np.searchsorted(rank_class[order], self.classes, side=side) for side in ("left", "right"))
        ranks = layouts.ranks[order].tolist()
        return Regions(self.table, tuple(tuple(ranks[a:b]) for a, b in zip(begin.tolist(), end.tolist(), strict=True)))


def held_by_classes(layouts: Layouts, shared: SharedCells) -> HeldByClasses:
    """Return the regions of classes: wanted elements that several source ranks hold, or one holds twice."""
    shared, all_tensors, all_locals = _with_members(layouts, shared)
    classes, holder = np.unique(shared.source_class, return_inverse=True)
    tensors, tensor = np.unique(shared.tensor, return_inverse=True)
    names, local = np.unique(shared.local, return_inverse=True)
    # np.unique numbers in order, so groups ascend as spots do
    _, group = np.unique(shared.spot * (1 + int(shared.dtype.max(initial=0))) + shared.dtype, return_inverse=True)
    table = RegionTable(
        tensors=tuple(all_tensors[i] for i in tensors.tolist()),
        locals=tuple(all_locals[i] for i in names.tolist()),
        size=shared.size,
        element_size=shared.element_size.astype(np.int32),
        group=group.astype(np.int32),
        tensor=tensor.astype(np.int32),
        holder=holder.astype(np.int32),
        local=local.astype(np.int32),
        offset=shared.offset,
        stride=shared.stride,
    )
    return HeldByClasses(table, classes)


def _with_members(layouts: Layouts, shared: SharedCells) -> tuple[SharedCells, tuple[str, ...], tuple[str, ...]]:
    """Return the cells of all tensors of families, and the names of tensors and local tensors."""
    if (families := layouts.families) is None:
        return shared, layouts.tensors, layouts.locals
    row, tensor, local = families.members(shared.tensor, shared.local)
    found = replace(shared.select(row), tensor=tensor, local=local)
    spot = found.spot * len(families.tensors) + tensor
    order = np.lexsort((found.source_class, spot))
    return replace(found, spot=spot).select(order), families.tensors, families.locals


def differences(held: Sequence[Digested]) -> list[str]:
    """Return an error line for each tensor whose holders' values differ; [] if all are equal."""
    if not held:
        return []
    group, value = (np.concatenate([getattr(each, column) for each in held]) for column in ("group", "digests"))
    counts = np.array([len(each.digests) for each in held])
    who, at = (
        np.repeat(np.arange(len(held)), counts),
        np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts),
    )
    order = np.argsort(group, kind="stable")
    first = order[np.searchsorted(group[order], group)]  # of each row's group
    lines: dict[str, str] = {}
    for row in np.flatnonzero(value != value[first]).tolist():
        holder = held[who[row]]
        name = holder.tensors[int(holder.tensor[at[row]])]
        if name not in lines:
            one, other = held[who[first[row]]].label, held[who[row]].label
            between = f"{one} and {other} describe the same elements of it and hold"
            if one == other:
                between = f"{one} describes the same elements of it twice and holds"
            lines[name] = f"{name}: {between} different values"
    said = list(lines.values())
    if len(said) > MAX_NAMED:
        said = [*said[:MAX_NAMED], f"and {len(said) - MAX_NAMED} more tensors"]
    return [*said[:-1], f"{said[-1]}; {ADVICE}"] if said else []


def _none() -> Ints:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class SharedFills:
    """Fills without ranks: rank `rank[i]` performs rows row_start[k]:row_start[k + 1], k = kind[i].

    Ranks are sorted. `local` indexes the plan's names.
    """

    rank: Ints = field(default_factory=_none)
    kind: Ints = field(default_factory=_none)
    row_start: Ints = field(default_factory=lambda: np.zeros(1, np.int64))
    local: Ints = field(default_factory=_none)
    element_size: Ints = field(default_factory=_none)
    pattern: Ints = field(default_factory=_none)
    size: Ints = field(default_factory=lambda: np.zeros((0, 1), np.int64))
    offset: Ints = field(default_factory=_none)
    stride: Ints = field(default_factory=lambda: np.zeros((0, 1), np.int64))

    def columns(self) -> list[Ints]:
        """Return all columns, for a digest."""
        return [getattr(self, f.name) for f in fields(self)]

    def expand(self, names: tuple[str, ...]) -> FillTable:
        """Return one row per rank and box, sorted by (rank, local tensor, place)."""
        start = self.row_start[self.kind]
        owner, at = ranges(start, self.row_start[self.kind + 1] - start)
        return FillTable(
            locals=names,
            rank=self.rank[owner].astype(np.int32),
            local=self.local[at].astype(np.int32),
            element_size=self.element_size[at].astype(np.int32),
            pattern=self.pattern[at],
            size=self.size[at],
            offset=self.offset[at],
            stride=self.stride[at],
        )


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
    families: Families | None = None

    @functools.cached_property
    def places(self) -> Ints:
        """The part of each row's task id that does not depend on the rank: a hash of tensor and place written."""
        rows = self.rows
        return places_of(self.tensors, self.locals, rows.tensor, rows.dst_local, rows.dst_offset)

    def places_of(self, at: Ints) -> tuple[Ints, Ints]:
        """Return (index into `at`, place) of every tensor that some rows stand for."""
        if (families := self.families) is None:
            return np.arange(len(at)), self.places[at]
        tensor, local, offset = (column[at] for column in (self.rows.tensor, self.rows.dst_local, self.rows.dst_offset))
        row, tensor, local = families.members(tensor, local)
        return row, places_of(families.tensors, families.locals, tensor, local, offset[row])

    @property
    def row_bytes(self) -> Ints:
        """The bytes that each row writes, in all members of its tensor's family."""
        rows = self.rows
        each: Ints = np.prod(rows.size, axis=1, dtype=np.int64) * rows.element_size
        return each * weights_of(self.families, rows.tensor)

    def whole(self) -> SharedPlan:
        """Return the plan with rows for all tensors of the families."""
        if (families := self.families) is None:
            return self
        rows, fills = self.rows, self.fills
        row, tensor, src, dst = families.members(rows.tensor, rows.src_local, rows.dst_local)
        before = np.append(0, np.cumsum(families.count[rows.tensor]))
        return SharedPlan(
            tensors=families.tensors,
            locals=families.locals,
            rows=replace(rows.select(row), tensor=tensor, src_local=src, dst_local=dst).in_order(),
            row_start=before[self.row_start],
            job_rows=self.job_rows,
            job_src=self.job_src,
            job_dst=self.job_dst,
            fills=replace(fills, local=families.local[families.local_start[fills.local]]),
        )

    def __len__(self) -> int:
        return int((self.row_start[self.job_rows + 1] - self.row_start[self.job_rows]).sum())

    def columns(self, row: Ints, src: Ints, dst: Ints) -> dict[str, Any]:
        """Return the columns of a CopyTable with these rows between these ranks, except the task ids."""
        rows = self.rows

        def column(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return values.take(row, axis=0)

        return {
            "tensors": self.tensors,
            "locals": self.locals,
            "tensor": column(rows.tensor.astype(np.int32)),
            "src_rank": src.astype(np.int32),
            "dst_rank": dst.astype(np.int32),
            "src_local": column(rows.src_local.astype(np.int32)),
            "dst_local": column(rows.dst_local.astype(np.int32)),
            "element_size": column(rows.element_size.astype(np.int32)),
            "size": column(rows.size),
            "src_offset": column(rows.src_offset),
            "src_stride": column(rows.src_stride),
            "dst_offset": column(rows.dst_offset),
            "dst_stride": column(rows.dst_stride),
            "cast": column(rows.cast.astype(np.int32)),
        }

    def expand(self) -> CopyTable:
        """Return one row per copy, sorted by (destination rank, source rank, tensor, place)."""
        start = self.row_start[self.job_rows]
        count = self.row_start[self.job_rows + 1] - start
        row = range_values(start, count)
        dst = np.repeat(self.job_dst, count)
        columns = self.columns(row, np.repeat(self.job_src.astype(np.int32), count), dst)
        return CopyTable(task_id=(dst << PLACE_BITS) | self.places.take(row), **columns)

    def digest(self) -> str:
        """Return a digest of the whole plan."""
        digest = xxhash.xxh3_128()
        rows = self.rows
        for names in (self.tensors, self.locals):
            digest.update("\0".join(names).encode())
        digest.update(b"" if self.families is None else self.families.digest)
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
        few: the copies; rows that several ranks or tensors share are stored once.
        unused_sources: canonical names that some rank offers and none wants.
        is_lcm: for each of `shared.tensors`, whether LCM tiling planned it.
        digest: identifies the plan's copies and fills.
        regions: elements that several source ranks hold, to be compared before anything moves.
    """

    few: SharedPlan
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
    def shared(self) -> SharedPlan:
        """The copies, with rows for every tensor; rows that several ranks share are stored once."""
        return self.few.whole()

    @functools.cached_property
    def table(self) -> CopyTable:
        """The copies, one row each."""
        return self.shared.expand()

    @functools.cached_property
    def fills(self) -> FillTable:
        """The fills, one row per rank and box."""
        return self.shared.fills.expand(self.shared.locals)


def shared_fills(layouts: Layouts) -> SharedFills:
    """Return the fills of every destination class; `refitd.plan.layouts` has checked that all are declared."""
    side, geometries = layouts.destination, layouts.geometries
    entries = layouts.padded(side)
    if not len(entries):
        return SharedFills()
    classes, kind_of_entry = np.unique(side.entry_class[entries], return_inverse=True)
    geometry = side.entry_geometry[entries]
    padding = geometries.padding[geometry]
    start = geometries.paddings.start[padding]
    of, box = ranges(start, geometries.paddings.start[padding + 1] - start)
    local, offset = side.entry_local[entries][of], geometries.paddings.offset[box]
    order = np.lexsort((offset, local, kind_of_entry[of]))
    of, box, local, offset = of[order], box[order], local[order], offset[order]
    receivers = np.flatnonzero(np.isin(side.rank_class, classes))
    return SharedFills(
        rank=layouts.ranks[receivers],
        kind=np.searchsorted(classes, side.rank_class[receivers]),
        row_start=np.searchsorted(kind_of_entry[of], np.arange(len(classes) + 1)),
        local=local,
        element_size=geometries.element_size[geometry][of],
        pattern=fill_patterns(layouts, geometry)[of],
        size=geometries.paddings.size[box],
        offset=offset,
        stride=geometries.paddings.stride[box],
    )


def fill_patterns(layouts: Layouts, geometry: Ints) -> Int64:
    """Return the bits of each geometry's declared fill; all must have one."""
    geometries = layouts.geometries
    pairs = list(zip(geometries.fill[geometry].tolist(), geometries.dtype[geometry].tolist(), strict=True))
    known = {(f, d): fill_pattern(geometries.fills[f], geometries.dtypes[d]) for f, d in set(pairs)}
    return np.array([known[pair] for pair in pairs], np.uint64).view(np.int64)
