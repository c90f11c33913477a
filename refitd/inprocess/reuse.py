"""Reuse a plan: check on all ranks that they have the same plan and that it fits their modules."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import xxhash

from refitd.copy_services.peers import Deadline, Peers
from refitd.describe.metadata import ParameterMetadata
from refitd.errors import PlanError
from refitd.inprocess.agree import said_of
from refitd.inprocess.rank_plan import RankPlan
from refitd.inprocess.request import RankTensors, Request, collect_tensors
from refitd.inprocess.wire import RankDescribed
from refitd.plan.ops import ReshardPlan
from refitd.protocol.shards import Shard, metadata_of

_READY = struct.Struct("<16s??")  # digest of the plan, whether replicas are still uncompared, whether to compare them


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedPlan(ReshardPlan):
    """One rank's part of a plan that all ranks of a group have agreed on.

    Attributes:
        part: the rank's rows of the plan.
        asked: the request that the plan was made for, without the modules.
        described: the rank's roster when the plan was made.
    """

    part: RankPlan = field(repr=False, compare=False)
    asked: Request = field(repr=False, compare=False)
    described: RankDescribed = field(repr=False, compare=False)


def agreed_plan(part: RankPlan, request: Request, described: RankDescribed) -> AgreedPlan:
    """Return the plan for callers to keep; it holds no reference to the modules."""
    ops = part.ops
    asked = replace(request, source=None, destination=None, is_plan_only=False)
    return AgreedPlan(
        send_ops=ops.send_ops,
        recv_ops=ops.recv_ops,
        transform=request.transform,
        part=part,
        asked=asked,
        described=described,
    )


def collect_for(
    plan: AgreedPlan, changes: Mapping[str, Any], peers: Peers, deadline: Deadline
) -> tuple[RankTensors, bool]:
    """Check that every rank has the same plan and fitting modules; return (this rank's tensors, compare replicas?).

    `changes` are fields that replace those of the plan's request: the modules, and overridden arguments. Collective;
    moves no weights.

    Raises:
        PlanError: on every rank, with the text of the first rank that cannot execute the plan.
        DeadlineExceeded, PeerLost: a rank did not take part.
    """
    failure: Exception | None = None
    tensors: RankTensors | None = None
    record, trouble = _READY.pack(b"", False, False), ""
    try:
        tensors = _collected(plan, changes, peers.rank)
        digest = xxhash.xxh3_128_digest(plan.part.digest.encode())
        record = _READY.pack(digest, plan.part.check.is_due, tensors.described.check_replicas)
    except Exception as exc:  # any failure must be sent to the other ranks, which would wait otherwise
        failure, trouble = exc, "; ".join(said_of(exc, peers.rank))
    peers.meet(deadline, "executing a plan")
    if trouble := peers.first_trouble(trouble, deadline, "comparing modules with the plan"):
        raise PlanError([trouble]) from failure
    assert tensors is not None  # otherwise this rank's trouble would have been raised
    records = [_READY.unpack(each) for each in peers.all_gather(record, deadline, "comparing plans")]
    digests = [digest for digest, _, _ in records]
    if other := next((i for i, digest in enumerate(digests) if digest != digests[0]), 0):
        raise PlanError(
            f"{peers.label(0)} and {peers.label(other)} execute different plans; build the plan again, on every rank"
        )
    return tensors, all(may for _, _, may in records) and any(due for _, due, _ in records)


def _collected(plan: ReshardPlan, changes: Mapping[str, Any], rank: int) -> RankTensors:
    if not isinstance(plan, AgreedPlan):
        raise PlanError(
            f"rank {rank}: plan is a {type(plan).__name__}, expected what build_centralized_reshard_plan returned: "
            "no other plan says which modules it is for"
        )
    if plan.part.rank != rank:
        raise PlanError(f"rank {rank}: the plan is rank {plan.part.rank}'s; each rank executes what it was given")
    tensors = collect_tensors(replace(plan.asked, **changes), rank)
    sides = (
        ("source", plan.described.source, tensors.described.source),
        ("target", plan.described.destination, tensors.described.destination),
    )
    if found := [text for side, then, now in sides for text in _differences(side, then, now, rank)]:
        raise PlanError(found)
    return tensors


def _differences(side: str, then: Shard, now: Shard, rank: int) -> Iterator[str]:
    """Yield the differences between a module and the one that the plan was made for."""
    if then == now:
        return
    before, after = ({meta.name: meta for meta in metadata_of(shard, rank)} for shard in (then, now))
    again = "build the plan again"
    for name in sorted({*before, *after}):
        where = f"{name} of the {side} on rank {rank}"
        if name not in after:
            yield f"{where}: the plan was made with it, the module has none; {again}"
        elif name not in before:
            yield f"{where}: the plan was made without it; {again}"
        elif changed := _changed(before[name], after[name]):
            yield f"{where}: the plan was made for {changed}; {again}"


def _changed(before: ParameterMetadata, after: ParameterMetadata) -> str:
    found = []
    for each in fields(ParameterMetadata):
        old, new = getattr(before, each.name), getattr(after, each.name)
        if old != new:
            found.append(f"{each.name} {old}, it is {new}")
    return ", ".join(found)
