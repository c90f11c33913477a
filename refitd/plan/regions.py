"""Regions: elements that several source ranks hold, or one rank holds twice. All copies must hold the same bytes.

rank 0 holds [0:8], rank 1 [0:4], rank 2 [4:8]     group 0: [0:4] of ranks 0 and 1, group 1: [4:8] of ranks 0 and 2
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from refitd.plan.columns import Ints
from refitd.plan.layouts import Layouts
from refitd.plan.match import SharedCells
from refitd.plan.table import Int32, Int64, PlanTable

MAX_NAMED = 5  # the most tensors that one refusal names

ADVICE = (
    "replicas of one tensor must be equal. If each rank holds a part, its description lacks that: check "
    "tensor_model_parallel, partition_dim and partition_stride on the parameter, allreduce = False on experts, the "
    "parallel groups, or describe it with tiles; if the ranks have drifted apart, synchronise them"
)


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


class Digested(NamedTuple):
    """The digests of one holder's regions."""

    label: str  # the holder's name in messages
    group: npt.NDArray[np.integer]  # [n] each region's group
    tensor_of: Callable[[int], str]  # canonical name of a region's tensor
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
        """A digest that identifies which boxes of which ranks are compared."""
        found = xxhash.xxh3_128(repr((self.holders, self.table.tensors, self.table.locals)).encode())
        for column in fields(self.table):
            if isinstance(value := getattr(self.table, column.name), np.ndarray):
                found.update(repr(value.shape).encode())
                found.update(value.tobytes())
        return found.hexdigest()

    @functools.cached_property
    def holder_of(self) -> dict[int, int]:
        """{rank: its holder's number}, for ranks that hold regions."""
        return {rank: number for number, ranks in enumerate(self.holders) for rank in ranks}

    def rows_of(self, rank: int) -> Ints:
        """Return the rows of the table that a rank holds."""
        return np.flatnonzero(self.table.holder == self.holder_of[rank])

    def digested(self, label: str, rank: int, digests: npt.NDArray[np.uint64]) -> Digested:
        """Return the digests of a rank's regions; `digests` is in the order of `rows_of`."""
        rows, table = self.rows_of(rank), self.table
        return Digested(label, table.group[rows], lambda i: table.tensors[int(table.tensor[rows[i]])], digests)


@dataclass(frozen=True, eq=False)
class HeldByClasses:
    """Regions, and the source classes that hold them: those with number `classes[i]` are holder i of the table."""

    table: RegionTable
    classes: Ints

    def of_ranks(self, layouts: Layouts) -> Regions:
        """Return the regions of a plan, whose ranks are of these classes."""
        rank_class = layouts.source.rank_class
        order = np.argsort(rank_class, kind="stable")
        begin, end = (np.searchsorted(rank_class[order], self.classes, side=side) for side in ("left", "right"))
        ranks = layouts.ranks[order].tolist()
        return Regions(self.table, tuple(tuple(ranks[a:b]) for a, b in zip(begin.tolist(), end.tolist(), strict=True)))


def held_by_classes(layouts: Layouts, shared: SharedCells) -> HeldByClasses:
    """Return the regions of classes: wanted elements that several source ranks hold, or one holds twice."""
    classes, holder = np.unique(shared.source_class, return_inverse=True)
    tensors, tensor = np.unique(shared.tensor, return_inverse=True)
    names, local = np.unique(shared.local, return_inverse=True)
    # np.unique numbers in order, so groups ascend as spots do
    _, group = np.unique(shared.spot * (1 + int(shared.dtype.max(initial=0))) + shared.dtype, return_inverse=True)
    table = RegionTable(
        tensors=tuple(layouts.tensors[i] for i in tensors.tolist()),
        locals=tuple(layouts.locals[i] for i in names.tolist()),
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
        name = held[who[row]].tensor_of(int(at[row]))
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
