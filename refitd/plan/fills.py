"""Fills: the boxes of destinations' local tensors that hold no canonical element, and one value for each.

vocabulary of 10 over TP4, padded to 16, 3 columns: rank 2 fills rows 2:4, rank 3 rows 0:4 of its [4, 3]
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np

from refitd.describe.fill import fill_pattern
from refitd.plan.columns import Ints, ranges
from refitd.plan.layouts import Layouts
from refitd.plan.table import Int32, Int64, PlanTable

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


def shared_fills(layouts: Layouts) -> SharedFills:
    """Return the fills of every destination class; `refitd.plan.padding` has checked that all are declared."""
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


def fills_from(table: FillTable, first_local: int) -> SharedFills:
    """Return a table as shared fills with separate rows for each rank; its names are numbered from `first_local`."""
    order = np.argsort(table.rank, kind="stable")
    ranks, start = np.unique(table.rank[order], return_index=True)
    return SharedFills(
        rank=ranks.astype(np.int64),
        kind=np.arange(len(ranks)),
        row_start=np.append(start, len(order)),
        local=table.local[order].astype(np.int64) + first_local,
        element_size=table.element_size[order].astype(np.int64),
        pattern=table.pattern[order],
        size=table.size[order],
        offset=table.offset[order],
        stride=table.stride[order],
    )
