"""Agree on one plan: every rank describes its modules, rank 0 plans for all, every rank gets its part.

every rank   describe both modules                        a failure is sent to the others, and every rank raises it
all ranks    compare digests of the descriptions          if all have cached the plan for them: done
rank 0       gather, plan, scatter                        a PlanError is raised on every rank with the same text

A plan that a caller keeps is checked on all ranks before it is executed again. Before a plan's first exchange, rank 0
compares the elements that several source ranks hold.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import xxhash

from refitd.caches import BoundedCache
from refitd.copy_services.peers import Peers
from refitd.copy_services.waits import Deadline
from refitd.describe.metadata import ParameterMetadata, Roster, Tile
from refitd.describe.names import digest_of
from refitd.errors import PlanError, ProtocolError, RefitdError
from refitd.inprocess.rank_plan import (
    ANSWERS,
    COMPARED,
    DESCRIPTIONS,
    DIGESTED,
    HeldRegion,
    NoPlan,
    NotDescribed,
    RankDescribed,
    RankPlan,
    RankRegionDigests,
    RegionCheck,
    RegionsCompared,
    part_of,
    plan_of,
    rank_plans,
    regions_of_rank,
    texts,
)
from refitd.inprocess.request import RankTensors, Request, collect_tensors
from refitd.mxfp8.buffers import is_quantized
from refitd.plan.build import plan_copies
from refitd.plan.ops import ReshardPlan
from refitd.plan.shared import Digested, differences
from refitd.protocol.base import encode
from refitd.protocol.shards import Shard, metadata_of

PlanKey = tuple[Any, bytes]  # the group, and the digest of all descriptions
# added to a refusal that advises names=
_NAMES_OF_SOURCE = (
    "in this call, names= is for the source, and a target's padding is not filled: if the target has fewer rows than "
    "the source, give the source Padded(name, rows=the target's rows); if it has more, build it with the source's "
    "rows, or use client.register_target, which takes names="
)
_RECORD = struct.Struct("<16sq")  # digest and length of a description
PlanCache = BoundedCache[PlanKey, RankPlan]


def agree_on_plan(request: Request, peers: Peers, deadline: Deadline, cache: PlanCache) -> tuple[RankPlan, RankTensors]:
    """Return this rank's part of the plan for all ranks' requests, and this rank's tensors. Collective.

    Raises:
        PlanError: on every rank; lists the problems of all ranks.
        DeadlineExceeded, PeerLost: a rank did not take part.
    """
    failure: Exception | None = None
    tensors: RankTensors | None = None
    try:
        tensors = collect_tensors(request, peers.rank)
        frame = encode(0, tensors.described)
    except Exception as exc:  # any failure must be sent to the other ranks, which would wait otherwise
        failure = exc
        frame = encode(0, NotDescribed(texts(said_of(exc, peers.rank))))
    peers.meet(deadline, "planning a refit")
    records = peers.all_gather(_RECORD.pack(xxhash.xxh3_128_digest(frame), len(frame)), deadline, "comparing layouts")
    key = peers.group, xxhash.xxh3_128_digest(b"".join(records))
    known = cache.get(key)
    mine = b"\0" if known is None else b"\1" if known.check.is_due else b"\2"
    hits = peers.all_gather(mine, deadline, "comparing plans")
    if known is not None and tensors is not None and b"\0" not in hits:
        known.check.is_due = b"\1" in hits
        return known, tensors
    lengths = [_RECORD.unpack(record)[1] for record in records]
    frames = peers.gather(frame, lengths, deadline, "gathering layouts")
    answers = None
    if frames is not None:
        try:
            answers = _parts(frames, peers.ranks)
        except Exception as exc:
            failure = failure or exc
            answers = [encode(0, NoPlan(texts(said_of(exc, peers.rank))))] * len(peers)
    _, answer = ANSWERS.decode(peers.scatter(answers, deadline, "scattering the plan"))
    if isinstance(answer, NoPlan):
        raise PlanError(answer.violations) from failure
    if tensors is None:
        raise ProtocolError(f"rank {peers.ranks[0]} has planned for rank {peers.rank}, which could not describe itself")
    plan = plan_of(answer)
    cache.put(key, plan)
    return plan, tensors


def _parts(frames: Sequence[bytes], ranks: Sequence[int]) -> list[bytes]:
    """Return the answer to every rank's description."""
    rosters: list[Roster] = []
    problems: list[str] = []
    checks = True
    for frame, rank in zip(frames, ranks, strict=True):
        _, said = DESCRIPTIONS.decode(frame)
        match said:
            case NotDescribed(found):
                problems += found
            case RankDescribed(claimed):
                if claimed != rank:
                    raise ProtocolError(f"rank {rank} describes itself as rank {claimed}")
                checks = checks and said.check_replicas
                rosters.append(
                    Roster(rank, metadata_of(said.source, rank), metadata_of(said.destination, rank), said.node)
                )
    if problems:
        raise PlanError(problems)
    try:
        plan = plan_copies(rosters)
    except PlanError as error:
        if any("names=" in line for line in error.violations):
            raise PlanError([*error.violations, _NAMES_OF_SOURCE]) from None
        raise
    if len(plan.fills) or plan.table.cast.any():
        raise PlanError("declared fills and cast_from are performed by the service only; here pass `casts` to the call")
    # compare regions only if every rank wants to, because the comparison is collective
    check = RegionCheck(is_due=checks and len(plan.regions) > 0)
    answers = []
    for part in rank_plans(plan, rosters):
        regions = regions_of_rank(plan.regions, part.rank) if check.is_due else ()
        answers.append(encode(0, part_of(replace(part, check=check, regions=regions))))
    return answers


def said_of(exc: Exception, rank: int) -> tuple[str, ...]:
    """Return the error texts that other ranks raise for a failure on this rank."""
    match exc:
        case PlanError():
            return exc.violations
        case RefitdError():
            return (f"rank {rank}: {exc}",)
        case _:
            return (f"rank {rank}: {type(exc).__name__}: {exc}",)


_LENGTH = struct.Struct("<q")


def compare_regions(plan: RankPlan, tensors: RankTensors, peers: Peers, deadline: Deadline) -> None:
    """Let rank 0 compare the digests of all regions. Collective; moves no weights.

    Raises:
        PlanError: on every rank; names the tensors whose values differ, and the ranks that hold them.
    """
    try:
        # tensors in MXFP8 are not compared
        regions = [region for region in plan.regions if not is_quantized(tensors.sources[region.local])]
        frame = encode(0, RankRegionDigests(tuple(regions), _digests(regions, tensors)))
    except Exception as exc:  # any failure must be sent to the other ranks, which would wait otherwise
        frame = encode(0, NotDescribed(texts(said_of(exc, peers.rank))))
    lengths = [_LENGTH.unpack(r)[0] for r in peers.all_gather(_LENGTH.pack(len(frame)), deadline, "comparing replicas")]
    frames = peers.gather(frame, lengths, deadline, "comparing replicas")
    answers = None
    if frames is not None:
        try:
            problems = _compared(frames, peers)
        except Exception as exc:
            problems = said_of(exc, peers.rank)
        answers = [encode(0, RegionsCompared(texts(tuple(problems))))] * len(peers)
    _, answer = COMPARED.decode(peers.scatter(answers, deadline, "comparing replicas"))
    if answer.problems:
        raise PlanError(answer.problems)
    plan.check.is_due = False


def _digests(regions: Sequence[HeldRegion], tensors: RankTensors) -> bytes:
    found = []
    for region in regions:
        tile = Tile(region.tensor, (0,) * len(region.size), region.size, region.offset, region.stride)
        found.append(digest_of(tensors.sources[region.local], tile))
    return np.array(found, "<u8").tobytes()


def _compared(frames: list[bytes], peers: Peers) -> tuple[str, ...]:
    held: list[Digested] = []
    failed: list[str] = []
    for frame, rank in zip(frames, peers.ranks, strict=True):
        _, said = DIGESTED.decode(frame)
        if isinstance(said, NotDescribed):
            failed += said.problems
        else:
            groups = np.array([group for group, *_ in said.regions], np.int64)
            names = [tensor for _, tensor, *_ in said.regions]
            each = np.arange(len(names))
            held.append(Digested(f"rank {rank}", groups, names, each, np.frombuffer(said.digests, "<u8")))
    return tuple(failed or differences(held))


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

    `changes` replaces fields of the plan's request: the modules, and overridden arguments. Collective; moves no
    weights.

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
    """Yield the differences between a module and the module of the plan."""
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
