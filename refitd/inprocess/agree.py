"""Agree on one plan: every rank describes its modules, rank 0 plans for all, every rank gets its part.

every rank   describe both modules                        a failure is sent to the others, and every rank raises it
all ranks    compare digests of the descriptions          if all have cached the plan for them: done
rank 0       gather, plan, scatter                        a PlanError is raised on every rank with the same text
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import xxhash

from refitd.caches import BoundedCache
from refitd.copy_services.peers import Deadline, Peers
from refitd.describe.roster import Roster
from refitd.errors import PlanError, ProtocolError, RefitdError
from refitd.inprocess.rank_plan import RankPlan, RegionCheck, rank_plans, regions_of_rank
from refitd.inprocess.request import RankTensors, Request, collect_tensors
from refitd.inprocess.wire import (
    ANSWERS,
    DESCRIPTIONS,
    NoPlan,
    NotDescribed,
    RankDescribed,
    part_of,
    plan_of,
    texts,
)
from refitd.plan.build import plan_copies
from refitd.protocol.codec import encode
from refitd.protocol.shards import metadata_of

PlanKey = tuple[Any, bytes]  # the group, and the digest of all descriptions
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
    plan = plan_copies(rosters)
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
