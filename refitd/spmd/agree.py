"""Agree on one plan: every rank describes what it has, rank 0 plans for all, every rank gets its part.

every rank   describe both modules                        a failure is told, not kept: everyone raises it
all          compare digests of the descriptions          all have the plan for them: done
rank 0       gather, plan, scatter                        a PlanError is raised on every rank with one text
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import xxhash

from refitd.describe.layout import canonical_name
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.module import describe_module
from refitd.describe.roster import Roster
from refitd.dtypes import dtype_name
from refitd.errors import PlanError, ProtocolError, RefitdError
from refitd.plan.build import plan_copies
from refitd.protocol.base import Message
from refitd.protocol.codec import encode
from refitd.protocol.shards import metadata_of, shard_of
from refitd.spmd.caches import BoundedCache
from refitd.spmd.peers import Deadline, Peers
from refitd.spmd.rank_plan import RankPlan, rank_plans
from refitd.spmd.wire import (
    ANSWERS,
    DESCRIPTIONS,
    Described,
    NoPlan,
    NotDescribed,
    RankPart,
    part_of,
    plan_of,
    texts,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

PlanKey = tuple[Any, bytes]  # the group, and the digest of all descriptions
_RECORD = struct.Struct("<16sq")  # digest and length of a description
PlanCache = BoundedCache[PlanKey, RankPlan]


@dataclass(frozen=True, slots=True)
class Request:
    """What one rank brings to a refit. None for a module that it does not have.

    Attributes:
        source: the module, or virtual pipeline chunks, that is read.
        destination: the one that is written.
        num_experts: experts in the whole model; by default what the modules' configs say.
        src_rank_offset: added to the ranks in the source's parallel groups, where they number their own world.
        dst_rank_offset: the same for the destination's.
        casts: canonical names, or patterns with "*", of tensors whose source values are converted, and to what.
    """

    source: nn.Module | Sequence[nn.Module] | None
    destination: nn.Module | Sequence[nn.Module] | None
    num_experts: int | None = None
    src_rank_offset: int = 0
    dst_rank_offset: int = 0
    casts: Mapping[str, torch.dtype] | None = None


@dataclass(frozen=True, slots=True)
class Agreement:
    """This rank's part of the plan, and the dtypes that its sources are converted to, by local name."""

    plan: RankPlan
    casts: Mapping[str, torch.dtype]


def agree_on_plan(request: Request, peers: Peers, deadline: Deadline, cache: PlanCache) -> Agreement:
    """Return this rank's part of the plan that all ranks' requests lead to. Collective.

    Raises:
        PlanError: on every rank, with everything that is wrong on any of them.
        DeadlineExceeded, PeerLost: someone did not take part.
    """
    failure: Exception | None = None
    casts: dict[str, torch.dtype] = {}
    try:
        frame = encode(0, _described(request, peers.rank, casts))
    except Exception as exc:  # whatever it is, the others must not wait for it
        failure = exc
        frame = encode(0, NotDescribed(texts(_said(exc, peers.rank))))
    peers.meet(deadline, "planning a refit")
    records = peers.all_gather(_RECORD.pack(xxhash.xxh3_128_digest(frame), len(frame)), deadline, "comparing layouts")
    key = peers.group, xxhash.xxh3_128_digest(b"".join(records))
    known = cache.get(key)
    hits = peers.all_gather(b"\1" if known else b"\0", deadline, "comparing plans")
    if known is not None and all(hit == b"\1" for hit in hits):
        return Agreement(known, casts)
    lengths = [_RECORD.unpack(record)[1] for record in records]
    frames = peers.gather(frame, lengths, deadline, "gathering layouts")
    answers = None
    if frames is not None:
        try:
            answers = _parts(frames, peers.ranks)
        except Exception as exc:
            failure = failure or exc
            answers = [encode(0, NoPlan(texts(_said(exc, peers.rank))))] * len(peers)
    _, answer = ANSWERS.decode(peers.scatter(answers, deadline, "scattering the plan"))
    match answer:
        case NoPlan(violations):
            raise PlanError(violations) from failure
        case RankPart():
            plan = plan_of(answer)
            cache.put(key, plan)
            return Agreement(plan, casts)


def _described(request: Request, rank: int, casts: dict[str, torch.dtype]) -> Message:
    """Describe both sides; `casts` is given the conversions of this rank's sources."""
    source = _side(request.source, rank, request.num_experts, request.src_rank_offset)
    destination = _side(request.destination, rank, request.num_experts, request.dst_rank_offset)
    for meta in source:
        if (dtype := _cast_of(meta, request.casts)) is not None:
            casts[meta.name] = meta.dtype = dtype
            meta.element_size = dtype.itemsize
    return Described(rank, platform.node()[:512], shard_of(source), shard_of(destination))


def _side(
    module: nn.Module | Sequence[nn.Module] | None, rank: int, num_experts: int | None, offset: int
) -> list[ParameterMetadata]:
    if module is None:
        return []
    return describe_module(module, rank, num_experts=num_experts, rank_offset=offset)


def _cast_of(meta: ParameterMetadata, casts: Mapping[str, torch.dtype] | None) -> torch.dtype | None:
    """Return the dtype that a source tensor's values are declared to be converted to; None where they are not."""
    name = canonical_name(meta)
    for pattern, dtype in (casts or {}).items():
        if fnmatchcase(name, pattern) and dtype_name(dtype) != dtype_name(meta.dtype):
            return dtype
    return None


def _parts(frames: Sequence[bytes], ranks: Sequence[int]) -> list[bytes]:
    """Return the answer to every rank's description."""
    rosters: list[Roster] = []
    problems: list[str] = []
    for frame, rank in zip(frames, ranks, strict=True):
        _, said = DESCRIPTIONS.decode(frame)
        match said:
            case NotDescribed(found):
                problems += found
            case Described(claimed):
                if claimed != rank:
                    raise ProtocolError(f"rank {rank} describes itself as rank {claimed}")
                rosters.append(
                    Roster(rank, metadata_of(said.source, rank), metadata_of(said.destination, rank), said.node)
                )
    if problems:
        raise PlanError(problems)
    return [encode(0, part_of(plan)) for plan in rank_plans(plan_copies(rosters), rosters)]


def _said(exc: Exception, rank: int) -> tuple[str, ...]:
    match exc:
        case PlanError():
            return exc.violations
        case RefitdError():
            return (f"rank {rank}: {exc}",)
        case _:
            return (f"rank {rank}: {type(exc).__name__}: {exc}",)
