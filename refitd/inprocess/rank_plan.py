"""One rank's part of a plan, and the messages of a group's processes to agree on it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from refitd.describe.metadata import Roster
from refitd.errors import ProtocolError
from refitd.plan.ops import ReshardPlan, RowBox, Slices, TransferOp, op_task_id, row_pieces
from refitd.plan.shared import GlobalPlan, Regions
from refitd.plan.table import PLACE_BITS, CopyTable
from refitd.protocol.base import MAX_TEXT_BYTES, Count, Decoder, Label, Message, Name, Text, Value
from refitd.protocol.shards import Shard

Shape = tuple[int, ...]


class Sliced(NamedTuple):
    """One piece of a row, as slices of both local tensors."""

    task_id: int
    src_slices: Slices
    dst_slices: Slices


class HeldRegion(NamedTuple):
    """A box of one of this rank's source tensors that other ranks also hold."""

    group: int  # equal for all holders of these elements
    tensor: str  # canonical
    local: str
    offset: int  # elements into the local tensor
    size: Shape
    stride: Shape  # elements


@dataclass(slots=True)
class RegionCheck:
    """Whether the regions still have to be compared. Mutable; it changes on all ranks together."""

    is_due: bool


@dataclass(frozen=True, eq=False)
class RankPlan:
    """One rank's sends and receives.

    Attributes:
        rank: the rank, as parallel groups number ranks.
        table: every row that reads or writes its tensors.
        src_shapes: local shapes of the tensors read, by (rank, local name).
        dst_shapes: local shapes of the tensors written, by (rank, local name).
        digest: the digest of the whole plan, equal on all ranks.
        unused_sources: canonical names that some rank offers and none wants.
        regions: the rank's regions, in the order of Regions.rows_of.
        check: whether the regions still have to be compared.
    """

    rank: int
    table: CopyTable
    src_shapes: Mapping[tuple[int, str], Shape]
    dst_shapes: Mapping[tuple[int, str], Shape]
    digest: str
    unused_sources: tuple[str, ...]
    regions: tuple[HeldRegion, ...] = ()
    check: RegionCheck = field(default_factory=lambda: RegionCheck(is_due=False))

    @functools.cached_property
    def ops(self) -> ReshardPlan:
        """The rows as TransferOps, as `plan_reshard` returns them."""
        table = self.table
        sends: list[TransferOp] = []
        receives: list[TransferOp] = []
        for row in range(len(table)):
            src, dst = int(table.src_rank[row]), int(table.dst_rank[row])
            for task_id, src_slices, dst_slices in self.sliced(row):
                if src == self.rank:
                    name = table.locals[int(table.src_local[row])]
                    sends.append(TransferOp(name, dst, True, src_slices, dst_slices, task_id))
                if dst == self.rank:
                    name = table.locals[int(table.dst_local[row])]
                    receives.append(TransferOp(name, src, False, dst_slices, src_slices, task_id))
        return ReshardPlan(send_ops=sends, recv_ops=receives)

    def sliced(self, row: int) -> Iterator[Sliced]:
        """Yield the pieces of a row that slices can express, in the same order on both ends."""
        table = self.table
        src, dst = int(table.src_rank[row]), int(table.dst_rank[row])
        box = RowBox(
            tuple(table.size[row].tolist()),
            int(table.src_offset[row]),
            tuple(table.src_stride[row].tolist()),
            int(table.dst_offset[row]),
            tuple(table.dst_stride[row].tolist()),
        )
        src_shape = self.src_shapes[src, table.locals[int(table.src_local[row])]]
        dst_shape = self.dst_shapes[dst, table.locals[int(table.dst_local[row])]]
        place = int(table.task_id[row]) & (2**PLACE_BITS - 1)
        for number, (src_slices, dst_slices) in enumerate(row_pieces(box, src_shape, dst_shape)):
            yield Sliced(op_task_id(dst, place, number), src_slices, dst_slices)


def rank_plans(plan: GlobalPlan, rosters: Sequence[Roster]) -> Iterator[RankPlan]:
    """Yield each roster's part of the plan, in the order of rosters."""
    table = plan.table
    src_shapes = {(r.rank, m.name): tuple(m.shape) for r in rosters for m in r.source}
    dst_shapes = {(r.rank, m.name): tuple(m.shape) for r in rosters for m in r.destination}
    ranks = [roster.rank for roster in rosters]
    by_src = _rows_of(table.src_rank, ranks)
    by_dst = _rows_of(table.dst_rank, ranks)
    for i, rank in enumerate(ranks):
        rows = table.select(np.union1d(by_src[i], by_dst[i])).with_own_names()
        yield RankPlan(
            rank=rank,
            table=rows,
            src_shapes=_shapes_used(rows, rows.src_rank, rows.src_local, src_shapes),
            dst_shapes=_shapes_used(rows, rows.dst_rank, rows.dst_local, dst_shapes),
            digest=plan.digest,
            unused_sources=plan.unused_sources,
        )


def regions_of_rank(regions: Regions, rank: int) -> tuple[HeldRegion, ...]:
    """Return the regions that a rank holds."""
    if rank not in regions.holder_of:
        return ()
    t = regions.table.select(regions.rows_of(rank))
    return tuple(
        HeldRegion(int(group), t.tensors[tensor], t.locals[local], int(offset), tuple(size), tuple(stride))
        for group, tensor, local, offset, size, stride in zip(
            t.group.tolist(),
            t.tensor.tolist(),
            t.local.tolist(),
            t.offset.tolist(),
            t.size.tolist(),
            t.stride.tolist(),
            strict=True,
        )
    )


def _rows_of(column: Any, ranks: Sequence[int]) -> list[Any]:
    order = np.argsort(column, kind="stable")
    low = np.searchsorted(column[order], ranks, side="left")
    high = np.searchsorted(column[order], ranks, side="right")
    return [order[a:b] for a, b in zip(low.tolist(), high.tolist(), strict=True)]


def _shapes_used(
    table: CopyTable, ranks: Any, local: Any, shapes: Mapping[tuple[int, str], Shape]
) -> dict[tuple[int, str], Shape]:
    pairs = np.unique(np.stack([ranks, local], axis=1), axis=0).tolist()
    return {(rank, table.locals[name]): shapes[rank, table.locals[name]] for rank, name in pairs}


class RankDescribed(Message, frozen=True):
    """One rank's roster."""

    rank: Count
    node: Label
    source: Shard
    destination: Shard
    check_replicas: bool = True


class NotDescribed(Message, frozen=True):
    """One rank's modules cannot be described."""

    problems: tuple[Text, ...]


class LocalShape(Value, frozen=True, array_like=True):
    """The shape of a local tensor of a rank."""

    rank: Count
    name: Name
    shape: tuple[Count, ...]


WireRegion = tuple[Count, Name, Name, Count, tuple[Count, ...], tuple[Count, ...]]  # HeldRegion


class RankPart(Message, frozen=True):
    """One rank's part of a plan. `table` is CopyTable.to_wire()."""

    rank: Count
    table: dict[str, int | bytes | list[str]]
    src_shapes: tuple[LocalShape, ...]
    dst_shapes: tuple[LocalShape, ...]
    digest: Label
    unused_sources: tuple[Name, ...]
    regions: tuple[WireRegion, ...] = ()
    check_replicas: bool = False


class RankRegionDigests(Message, frozen=True):
    """The digests of one rank's regions: little-endian uint64."""

    regions: tuple[WireRegion, ...]
    digests: bytes


class RegionsCompared(Message, frozen=True):
    """The differences between regions; empty if all are equal."""

    problems: tuple[Text, ...] = ()


class NoPlan(Message, frozen=True):
    """Planning failed; the texts of the PlanError that every rank raises."""

    violations: tuple[Text, ...]


DESCRIPTIONS = Decoder[RankDescribed | NotDescribed](RankDescribed | NotDescribed)
ANSWERS = Decoder[RankPart | NoPlan](RankPart | NoPlan)
DIGESTED = Decoder[RankRegionDigests | NotDescribed](RankRegionDigests | NotDescribed)
COMPARED = Decoder[RegionsCompared](RegionsCompared)


def part_of(plan: RankPlan) -> RankPart:
    """Pack a rank's part of a plan."""
    src, dst = (
        tuple(LocalShape(rank, name, shape) for (rank, name), shape in shapes.items())
        for shapes in (plan.src_shapes, plan.dst_shapes)
    )
    return RankPart(
        plan.rank,
        plan.table.to_wire(),
        src,
        dst,
        plan.digest,
        plan.unused_sources,
        plan.regions,
        plan.check.is_due,
    )


def plan_of(part: RankPart) -> RankPlan:
    """Unpack a rank's part of a plan.

    Raises:
        ProtocolError: the table is malformed.
    """
    try:
        table = CopyTable.from_wire(part.table)
    except ValueError as exc:
        raise ProtocolError(str(exc)) from exc
    src, dst = ({(s.rank, s.name): s.shape for s in shapes} for shapes in (part.src_shapes, part.dst_shapes))
    check = RegionCheck(is_due=part.check_replicas)
    return RankPlan(
        part.rank,
        table,
        src,
        dst,
        part.digest,
        part.unused_sources,
        tuple(HeldRegion(*region) for region in part.regions),
        check,
    )


def texts(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Truncate each line to MAX_TEXT_BYTES characters."""
    return tuple(line if len(line) <= MAX_TEXT_BYTES else line[: MAX_TEXT_BYTES - 4] + " ..." for line in lines)
