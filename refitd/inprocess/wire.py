"""The messages by which the processes of a group agree on a plan."""

from __future__ import annotations

from refitd.errors import ProtocolError
from refitd.inprocess.rank_plan import HeldRegion, RankPlan, RegionCheck
from refitd.plan.table import CopyTable
from refitd.protocol.base import MAX_TEXT_BYTES, Count, Label, Message, Name, Text, Value
from refitd.protocol.codec import Decoder
from refitd.protocol.shards import Shard


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
