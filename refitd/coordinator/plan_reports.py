"""The report of a plan: its traffic, the paths of its bytes, and the memory that targets need to go live."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from refitd.coordinator.actions import Answer, Waiter
from refitd.coordinator.members import Membership, commit_mode
from refitd.coordinator.paths import Wiring, paths_of
from refitd.coordinator.plans import LoadedPlan, Routed
from refitd.plan.cost import Cables, Traffic, loads_of
from refitd.plan.relays import Relays
from refitd.protocol.base import Message
from refitd.protocol.plan_reports import (
    CableTraffic,
    KeptTraffic,
    LinkTraffic,
    LiveMemory,
    PairTraffic,
    ParameterTraffic,
    PlanReport,
    Relaying,
    RelayPath,
)
from refitd.protocol.reports import SwapReport
from refitd.states import MemberState, SwapOutcome


def plan_answer(
    waiter: Waiter, membership: Membership, plan: LoadedPlan, wiring: Wiring, last: SwapReport | None
) -> Answer:
    """Return an operator's answer about a plan: the bytes per pair of ranks; `completed` adds the rest.

    `last` is the model's last swap, with the pauses of its ranks.
    """
    names = {
        plan.members[m.id]: (
            f"source rank {m.added.rank}" if m.added.role == "source" else f"{m.added.replica} rank {m.added.rank}"
        )
        for m in membership.members()
    }
    report = PlanReport(
        model=membership.name,
        digest=plan.digest,
        bytes=plan.nbytes,
        converted_bytes=sum(m.added.converted_bytes for m in membership.targets.values()),
        staging_bytes=sum(m.added.staging_bytes for m in membership.targets.values()),
        held_bytes=sum(m.added.held_bytes for m in membership.targets.values()),
        copies=plan.traffic.total_copies,
        plan_s=plan.plan_s,
        pairs=tuple(
            PairTraffic(source=names[src], target=names[dst], bytes=nbytes, copies=copies)
            for src, dst, nbytes, copies in _pairs(plan.traffic)
        ),
        parameters=(),
        unused_sources=plan.unused_sources,
        kept=_kept(membership),
        links=_plan_links(plan),
        relays=_relaying(plan.routed.relays, plan.routed.cables),
        cables=_cable_loads(plan.routed),
        speeds=plan.routed.cables.name,
        memory=_memory(membership, last),
    )
    return Answer(*waiter, report, plan, wiring)


def completed(answer: Answer) -> Message:
    """Return the report of an answer. Call it on another thread: a plan may have very many parameters."""
    report, plan, wiring = answer.report, answer.plan, answer.wiring
    if isinstance(report, PlanReport) and plan is not None and wiring is not None:
        parameters, paths = _parameters(plan.traffic), paths_of(plan.routed, wiring)
        return msgspec.structs.replace(report, parameters=parameters, paths=paths)
    return report


def _memory(membership: Membership, last: SwapReport | None) -> tuple[LiveMemory, ...]:
    """Return what each target needs to go live. The pause of a controlled replica is its controller's."""
    members = () if last is None else last.members
    pauses = {(m.replica, m.rank): m.paused_s for m in members if m.state == MemberState.COMMITTED}
    pauses |= {
        (replica, rank): controller.paused_s
        for (replica, rank) in membership.targets
        if (controller := membership.controllers.get(replica)) is not None and controller.paused_s
    }
    return tuple(
        LiveMemory(
            replica=replica,
            rank=rank,
            mode=commit_mode(m.added),
            device=m.added.device,
            held_bytes=m.added.held_bytes,
            staging_bytes=m.added.staging_bytes,
            pause_s=pauses.get((replica, rank)),
            stage_s=last.stage_s if last is not None and last.outcome == SwapOutcome.COMMITTED else None,
        )
        for (replica, rank), m in sorted(membership.targets.items())
    )


def _plan_links(plan: LoadedPlan) -> tuple[LinkTraffic, ...]:
    node_of = plan.routed.node_of
    needed: dict[tuple[str, str], int] = {}
    for src, dst, nbytes, _ in _pairs(plan.traffic):
        link = node_of[src], node_of[dst]
        needed[link] = needed.get(link, 0) + nbytes
    moved = plan.routed.links.by_nodes()
    between = sorted(link for link in moved.keys() | needed.keys() if link[0] != link[1])
    return tuple(LinkTraffic(*link, moved.get(link, 0), needed.get(link, 0)) for link in between)


def _relaying(relays: Relays, cables: Cables) -> Relaying:
    paths = tuple(RelayPath(path.source, path.nodes, path.nbytes) for path in relays.paths)
    if not cables.are_known:
        return Relaying(paths, relays.bytes, relays.direct_bytes)
    return Relaying(paths, relays.bytes, relays.direct_bytes, _sent(relays.seconds), _sent(relays.direct_seconds))


def _sent(seconds: float) -> float:
    """Return seconds as far as messages take them (protocol.base.Seconds)."""
    return min(seconds, 1e9)


def _cable_loads(routed: Routed) -> tuple[CableTraffic, ...]:
    """Return the bytes and seconds of each cable, the slowest first."""
    if not routed.cables.are_known:
        return ()
    links = ((*link, nbytes) for link, nbytes in routed.links.by_nodes().items() if link[0] != link[1])
    return tuple(
        CableTraffic(load.node, load.is_send, load.nbytes, round(load.speed), _sent(load.seconds))
        for load in loads_of(links, routed.cables)
    )


def _kept(membership: Membership) -> tuple[KeptTraffic, ...]:
    nbytes: dict[str, int] = {}
    for one in (one for m in membership.targets.values() for one in m.described.shard.kept):
        nbytes[one.name] = nbytes.get(one.name, 0) + one.nbytes
    return tuple(KeptTraffic(name=name, bytes=size) for name, size in sorted(nbytes.items(), key=lambda at: -at[1]))


def _pairs(traffic: Traffic) -> Iterator[tuple[int, int, int, int]]:
    """Yield (source rank, target rank, bytes, copies) of each pair, in order."""
    order = np.lexsort((traffic.dst, traffic.src))
    columns = (traffic.src, traffic.dst, traffic.bytes, traffic.copies)
    return zip(*(column[order].tolist() for column in columns), strict=True)


def _parameters(traffic: Traffic) -> tuple[ParameterTraffic, ...]:
    order = np.argsort(-traffic.tensor_bytes, kind="stable")
    rows = zip(order.tolist(), traffic.tensor_bytes[order].tolist(), traffic.tensor_copies[order].tolist(), strict=True)
    return tuple(ParameterTraffic(name=traffic.tensors[i], bytes=moved, copies=count) for i, moved, count in rows)
