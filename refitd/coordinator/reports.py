"""Reports of the coordinator: a swap and its progress, the status of nodes, models and links."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from refitd.commit.decision import FINAL, Phase, Swap
from refitd.coordinator.eligibility import kept_names
from refitd.coordinator.fleet import Fleet, ModelState, Running
from refitd.coordinator.journals import LiveVersion, SwapRecord
from refitd.coordinator.members import Member, Membership, commit_mode, serving_state
from refitd.protocol.base import PROTOCOL_VERSION, clipped
from refitd.protocol.cluster import EpochPlan
from refitd.protocol.plan_reports import (
    DescribedMember,
    ModelDescription,
)
from refitd.protocol.reports import (
    HEARTBEAT_S,
    ControllerStatus,
    HistoryEntry,
    HistoryReport,
    LinkStatus,
    MemberReport,
    ModelStatus,
    SourceReport,
    SourceStatus,
    StatusReport,
    SwapProgress,
    SwapReport,
    TargetStatus,
)
from refitd.states import LinkState, MemberState, SwapOutcome, TransferMode

# --- swaps ------------------------------------------------------------------------------------------------

# The names of phases in reports; all others are shown as "commit".
_SHOWN = {
    Phase.IDLE: "plan",
    Phase.PLANNED: "plan",
    Phase.HALTING: "pause",
    Phase.STAGING: "stage",
    Phase.PAUSING: "pause",
    Phase.DECIDING: "decide",
    Phase.STAGED: "decide",  # trainers that drive engines call them at "commit", which may be seconds later
}

_OUTCOMES = {
    Phase.DECIDING: SwapOutcome.DECIDED,  # the report that the journal gets with the decision
    Phase.COMMITTED: SwapOutcome.COMMITTED,
    Phase.INCOMPLETE: SwapOutcome.INCOMPLETE,
}


def swap_progress(swap: Swap) -> SwapProgress | None:
    """Return the progress of a running swap; None once it is over."""
    if swap.phase in FINAL:
        return None
    committed = len(swap.members) - len(swap.waiting) if swap.phase is Phase.COMMITTING else 0
    return SwapProgress(
        swap=swap.swap,
        model=swap.model,
        version=swap.version,
        phase=_SHOWN.get(swap.phase, "commit"),
        bytes_done=min(sum(swap.progress.values()), swap.bytes_total),
        bytes_total=swap.bytes_total,
        members_done=committed,
        members_total=len(swap.members),
    )


def swap_report(fleet: Fleet, running: Running, now: float) -> SwapReport:
    """Return the report of a swap, ended or running. It names targets that have left since the swap's begin."""
    swap, at = running.swap, running.swap.entered
    seeds = {member.id for member in running.membership.seeds.values()}
    targets = [m for name, m in running.members.items() if m.added.role == "target" and name not in seeds]
    outcome, phase = _OUTCOMES.get(swap.phase, SwapOutcome.ABORTED), ""
    if outcome not in (SwapOutcome.COMMITTED, SwapOutcome.DECIDED):
        phase = _SHOWN.get(swap.failed_phase or swap.phase, "commit")

    def spent(first: Phase, last: Phase) -> float:
        start = at.get(first)
        return 0.0 if start is None else max(0.0, at.get(last, now) - start)

    # conversions count as work done, not as bytes moved
    written = sum(swap.progress.values())
    converted = sum(m.added.converted_bytes for m in targets if m.id in swap.members)
    if Phase.STAGED not in at:
        converted = max(0, written - (swap.bytes_total - converted))
    kept = [one for m in targets for one in m.described.shard.kept]
    return SwapReport(
        swap=swap.swap,
        model=swap.model,
        version=swap.version,
        run=running.run,
        outcome=outcome,
        phase=phase,
        reason=clipped(swap.reason),
        cause=swap.cause,
        bytes=max(0, written - converted),
        converted_bytes=converted,
        copies=swap.copies,
        digests=swap.copies if fleet.models[swap.model].config.verify else 0,
        plan_s=spent(Phase.IDLE, Phase.HALTING if Phase.HALTING in at else Phase.STAGING),
        stage_s=spent(Phase.STAGING, Phase.PAUSING if Phase.PAUSING in at else Phase.STAGED),
        pause_s=spent(Phase.HALTING, Phase.STAGING) + spent(Phase.PAUSING, Phase.STAGED),
        commit_s=spent(Phase.STAGED, swap.phase),
        total_s=max(0.0, now - swap.started),
        sources=running.sources,
        kind=running.kind,
        events=swap.history,
        kept_tensors=len(kept),
        kept_bytes=sum(one.nbytes for one in kept),
        members=tuple(_member_report(running, m) for m in targets if m.id in swap.members or not swap.members),
        suspended=running.suspended,
        drained=running.drained,
        crossing=running.crossing,
        gpu_paths=tuple(sorted(running.gpu_paths)),
        refused=tuple(
            one for _, node in sorted(fleet.nodes.items()) for one in node.status.refused if one.model == swap.model
        ),
    )


def late_report(report: SwapReport, swap: Swap, now: float) -> SwapReport:
    """Return the report of a decided swap for callers whose timeout passes before all ranks have committed."""
    spent = now - swap.entered[Phase.COMMITTING]
    why = f"has not taken the version over after {spent:.1f} s, and does at its next commit point"
    members = tuple(
        msgspec.structs.replace(member, state=MemberState.LATE, reason=why)
        if member.state == MemberState.ABORTED
        else member
        for member in report.members
    )
    late = ", ".join(swap.names.get(who, who) for who in sorted(swap.waiting))
    reason = (
        f"it is decided and goes on; late after {spent:.1f} s: {late}; a rank commits when its engine calls poll(), "
        "within deadlines.commit_s"
    )
    if swap.failed:
        reason += "; failed: " + "; ".join(
            f"{swap.names.get(who, who)}: {text}" for who, text in sorted(swap.failed.items())
        )
    return msgspec.structs.replace(
        report, outcome=SwapOutcome.DECIDED, phase="commit", reason=clipped(reason), members=members
    )


def _member_report(running: Running, member: Member) -> MemberReport:
    swap, reason = running.swap, ""
    state = MemberState.STAGED if swap.phase is Phase.DECIDING else MemberState.ABORTED
    if member.id in swap.paused:
        state = MemberState.COMMITTED
        if why := running.apart.get((member.added.replica, member.added.rank)):
            reason = f"flipped in its own next poll, not with its replica: {why}"
    elif member.id in swap.failed:
        state, reason = MemberState.FAILED, swap.failed[member.id]
    elif member.id in swap.culprit.split(", "):
        state, reason = MemberState.FAILED, swap.reason
    if swap.phase is Phase.ABORTED and member.id in swap.poisoned:
        state, reason = MemberState.POISONED, member.poisoned
    return MemberReport(
        replica=member.added.replica,
        rank=member.added.rank,
        node=member.node,
        host=member.place.host,
        pid=member.added.pid,
        state=state,
        version=member.version,
        paused_s=swap.paused.get(member.id, 0.0),
        reason=clipped(reason),
    )


def source_reports(model: Membership, version: int) -> tuple[SourceReport, ...]:
    """Return how each source rank, or each seed, provides this version."""
    way = TransferMode.ARENA if model.seeds else TransferMode.NONE
    return tuple(
        SourceReport(m.added.rank, m.node, m.place.host, m.source.modes.get(version, way), m.added.replica)
        for m in model.givers()
    )


# --- the cluster ------------------------------------------------------------------------------------------


def status_report(fleet: Fleet, now: float) -> StatusReport:
    """Return the current status of the cluster."""
    states = [state for _, state in sorted(fleet.models.items())]
    service = fleet.config.transport.service
    late = fleet.awaited.values() if now - fleet.started > 2 * HEARTBEAT_S else ()
    return StatusReport(
        coordinator_pid=fleet.pid,
        uptime_s=max(0.0, now - fleet.started),
        nodes=tuple(
            msgspec.structs.replace(node.status, silent_s=max(0.0, now - node.last_heard))
            for _, node in sorted(fleet.nodes.items())
        ),
        models=tuple(_model_status(state) for state in states),
        links=tuple(link for state in states for link in _links(state, service)),
        drained=tuple(sorted(fleet.drained)),
        protocol=PROTOCOL_VERSION,
        protocols={name: node.protocol for name, node in sorted(fleet.nodes.items())},
        host=fleet.host,
        lost=tuple(lost.report(now) for lost in (*fleet.lost.values(), *late)),
    )


def history_report(records: Sequence[SwapRecord]) -> HistoryReport:
    """Return journal records as a report, in the order given."""
    return HistoryReport(
        swaps=tuple(
            HistoryEntry(
                swap=r.swap,
                model=r.model,
                version=r.version,
                state=SwapOutcome(r.state),
                at=r.at,
                reason=r.reason,
                report=r.written_report(),
                run=r.run,
            )
            for r in records
        )
    )


def model_description(model: Membership) -> ModelDescription:
    """Return what every member holds; equal descriptions appear once."""
    digests = {m.added.digest: m.described.shard for m in model.members()}
    index = {digest: i for i, digest in enumerate(digests)}
    return ModelDescription(
        model=model.name,
        shards=tuple(digests.values()),
        members=tuple(
            DescribedMember(
                role=m.added.role,
                replica=m.added.replica,
                rank=m.added.rank,
                world_size=m.added.world_size,
                node=m.node,
                host=m.place.host,
                shard=index[m.added.digest],
            )
            for m in model.members()
        ),
    )


def _links(state: ModelState, service: str) -> list[LinkStatus]:
    plan = state.plan
    if plan is None:
        return []
    epoch = plan.epoch
    is_up = epoch is not None and plan.loaded_on.issuperset(epoch.nodes)
    return [
        LinkStatus(
            model=state.membership.name,
            source=source,
            target=target,
            service=_service_of(epoch, source, target) if epoch is not None else service,
            lanes=epoch.lanes if epoch is not None else 0,
            bytes=nbytes,
            state=LinkState.UP if is_up else LinkState.DOWN,
            seconds=plan.crossing_s.get(target, 0.0),
        )
        for (source, target), nbytes in plan.routed.links.by_nodes().items()
    ]


def _service_of(epoch: EpochPlan, source: str, target: str) -> str:
    """Return the service from one node to another: the GPUs' if both have GPUs that take part."""
    gpus = dict(zip(epoch.nodes, epoch.gpus, strict=False))
    return epoch.gpu_service if gpus.get(source) and gpus.get(target) else epoch.service


def _model_status(state: ModelState) -> ModelStatus:
    membership, offered = state.membership, state.membership.offered()
    return ModelStatus(
        model=membership.name,
        source_world_size=offered.world,
        complete_versions=tuple(offered.complete),
        auto_swap=membership.auto_swap,
        sources=_source_rows(membership),
        live=None if state.live is None else state.live.version,
        live_run="" if state.live is None else state.live.run,
        next_version=state.highest + 1 if state.highest >= 0 else 1,
        queued=len(state.queue),
        targets=_target_rows(membership, state.live),
        swap=swap_progress(state.running.swap) if state.running else None,
        swap_events=state.running.swap.history if state.running else (),
        last_swap=state.last,
        verify=state.config.verify,
        controllers=tuple(
            ControllerStatus(c.added.replica, c.node, c.host, c.added.pid, c.step.value, c.swap)
            for _, c in sorted(membership.controllers.items())
        ),
        begun=membership.forming(),
    )


def _source_rows(model: Membership) -> tuple[SourceStatus, ...]:
    """Return the report rows of the sources."""
    return tuple(
        SourceStatus(
            rank=rank,
            node=m.node,
            host=m.place.host,
            pid=m.added.pid,
            attached=m.source.attached,
            tensors=len(m.described.shard.tensors),
            bytes=m.described.bytes,
            versions=tuple(sorted(m.source.versions)),
            mode=m.source.mode,
            run=m.run,
            is_partial=m.described.shard.is_partial,
        )
        for rank, m in sorted(model.sources.items())
    )


def _target_rows(model: Membership, live: LiveVersion | None) -> tuple[TargetStatus, ...]:
    """Return the report rows of the targets; `live` is the version decided last."""
    drained = {*model.drained()}
    return tuple(
        TargetStatus(
            replica=replica,
            rank=rank,
            world_size=m.added.world_size,
            node=m.node,
            host=m.place.host,
            pid=m.added.pid,
            tensors=len(m.described.shard.tensors),
            bytes=m.described.bytes,
            state=serving_state(m, live),
            version=m.version,
            staged=None if m.pending is None else m.pending[1],
            held_bytes=m.added.held_bytes,
            staging_bytes=m.added.staging_bytes,
            run=m.run if m.version is not None else "",
            step=m.told[0],
            events=m.told[1],
            mode=commit_mode(m.added),
            kept_tensors=len(m.described.shard.kept),
            kept_bytes=sum(tensor.nbytes for tensor in m.described.shard.kept),
            kept=kept_names(m.described.shard.kept),
            is_drained=replica in drained,
        )
        for (replica, rank), m in sorted(model.targets.items())
    )
