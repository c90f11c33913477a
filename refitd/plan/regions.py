"""Regions that source ranks hold as parts of different cuts: there, too, all of them must hold the same bytes.

    rank 0 holds [0:8], rank 1 [0:4], rank 2 [4:8]     group 0: [0:4] of ranks 0 and 1, group 1: [4:8] of ranks 0 and 2

Ranks that hold equal boxes are compared piece by piece (`refitd.plan.replica_digests`); of ranks that describe all
the same, one stands for all here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from refitd.plan.layouts import Layouts
from refitd.plan.match import CrossedCells
from refitd.plan.table import Int32, Int64, PlanTable

# Each costs a digest on a worker. Cuts of one model cross in a few hundred places.
MAX_REGIONS = 1 << 16


@dataclass(frozen=True, eq=False)
class RegionTable(PlanTable):
    """Row i is a strided box of a rank's local tensor; rows of one group must hold the same bytes.

    Offsets and strides count elements of the local tensor laid out row-major in its own shape, as in a CopyTable.
    """

    tensors: tuple[str, ...]  # canonical names
    group: Int32  # [n] ascending
    tensor: Int32  # [n] index into `tensors`
    rank: Int32  # [n]
    local: Int32  # [n] index into `locals`
    offset: Int64  # [n]
    stride: Int64  # [n, D]

    def _check_ranges(self) -> None:
        super()._check_ranges()
        self._check_names(self.tensor, self.tensors)
        self._check_names(self.local, self.locals)
        self._check_places(self.offset, self.stride)
        if min(self.group.min(), self.rank.min()) < 0:
            raise ValueError("plan table: groups and ranks of regions must not be negative")


def regions_of(layouts: Layouts, crossed: CrossedCells) -> tuple[RegionTable, tuple[str, ...]]:
    """Return the regions to compare, and the tensors that are cut into too many of them to be compared."""
    left_out: tuple[str, ...] = ()
    rows = np.arange(len(crossed.spot))
    if len(rows) > MAX_REGIONS:
        # whole tensors, those of the fewest regions first
        counts = np.bincount(crossed.tensor, minlength=len(layouts.tensors))
        order = np.argsort(counts, kind="stable")
        kept = order[np.cumsum(counts[order]) <= MAX_REGIONS]
        rows = np.flatnonzero(np.isin(crossed.tensor, kept))
        left_out = tuple(layouts.tensors[i] for i in np.setdiff1d(np.flatnonzero(counts), kept).tolist())
    classes, first = np.unique(layouts.source.rank_class, return_index=True)
    rank_of = np.zeros(max(1, layouts.source.classes), np.int64)
    rank_of[classes[classes >= 0]] = layouts.ranks[first[classes >= 0]]
    tensors, tensor = np.unique(crossed.tensor[rows], return_inverse=True)
    names, local = np.unique(crossed.local[rows], return_inverse=True)
    _, group = np.unique(crossed.spot[rows], return_inverse=True)
    table = RegionTable(
        tensors=tuple(layouts.tensors[i] for i in tensors.tolist()),
        locals=tuple(layouts.locals[i] for i in names.tolist()),
        size=crossed.size[rows],
        element_size=crossed.element_size[rows].astype(np.int32),
        group=group.astype(np.int32),
        tensor=tensor.astype(np.int32),
        rank=rank_of[crossed.source_class[rows]].astype(np.int32),
        local=local.astype(np.int32),
        offset=crossed.offset[rows],
        stride=crossed.stride[rows],
    )
    return table, left_out
