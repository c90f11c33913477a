"""Progress and reports of a swap, for its callers."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from refitd.coordinator.decision import Phase, Swap
from refitd.coordinator.members import Member
from refitd.coordinator.membership import Membership
from refitd.coordinator.records import SwapRecord
from refitd.protocol.base import clipped
from refitd.protocol.reports import MemberReport, SourceReport, SwapProgress, SwapReport
from refitd.states import MemberState, SwapOutcome, TransferMode

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

_OUTCOMES = {Phase.COMMITTED: SwapOutcome.COMMITTED, Phase.INCOMPLETE: SwapOutcome.INCOMPLETE}


def swap_progress(swap: Swap) -> SwapProgress | None:
    """Return the progress of a running swap; None once it is over."""
    if swap.phase.is_final:
        return None
    committed = len(swap.members) - len(swap.waiting) if swap.phase is Phase.COMMITTING else 0
    return SwapProgress(
        swap=swap.swap,
        model=swap.model,
        version=swap.version,
        phase=_SHOWN.get(swap.phase, "commit"),
        bytes_done=min(swap.bytes_done, swap.bytes_total),
        bytes_total=swap.bytes_total,
        members_done=committed,
        members_total=len(swap.members),
    )


def swap_report(
    swap: Swap,
    members: Mapping[str, Member],
    sources: tuple[SourceReport, ...],
    kind: str,
    now: float,
    is_verified: bool = True,
) -> SwapReport:
    """Return the report of a swap, ended or running; `is_verified` says whether staged bytes were compared."""
    outcome = _OUTCOMES.get(swap.phase, SwapOutcome.ABORTED)
    at = swap.entered

    def spent(first: Phase, last: Phase) -> float:
        start = at.get(first)
        return 0.0 if start is None else max(0.0, at.get(last, now) - start)

    # conversions count as work done, not as bytes moved
    converted = sum(m.added.converted_bytes for m in members.values() if m.id in swap.members)
    if Phase.STAGED not in at:
        converted = max(0, swap.bytes_done - (swap.bytes_total - converted))
    kept = [one for m in members.values() if m.added.role == "target" for one in m.shard.kept]
    return SwapReport(
        swap=swap.swap,
        model=swap.model,
        version=swap.version,
        outcome=outcome,
        phase="" if outcome == SwapOutcome.COMMITTED else _SHOWN.get(swap.failed_phase or swap.phase, "commit"),
        reason=clipped(swap.reason),
        cause=swap.cause,
        bytes=max(0, swap.bytes_done - converted),
        converted_bytes=converted,
        copies=swap.copies,
        digests=swap.copies if is_verified else 0,
        plan_s=spent(Phase.IDLE, Phase.HALTING if Phase.HALTING in at else Phase.STAGING),
        stage_s=spent(Phase.STAGING, Phase.PAUSING if Phase.PAUSING in at else Phase.STAGED),
        pause_s=spent(Phase.HALTING, Phase.STAGING) + spent(Phase.PAUSING, Phase.STAGED),
        commit_s=spent(Phase.STAGED, swap.phase),
        total_s=max(0.0, now - swap.started),
        sources=sources,
        kind=kind,
        events=swap.history,
        kept_tensors=len(kept),
        kept_bytes=sum(one.nbytes for one in kept),
        members=tuple(
            _member_report(swap, member)
            for member_id, member in members.items()
            if member.added.role == "target" and (member_id in swap.members or not swap.members)
        ),
    )


def decided_report(report: SwapReport) -> SwapReport:
    """Return the report of a swap at its decision: no rank has committed yet."""
    staged = tuple(msgspec.structs.replace(member, state=MemberState.STAGED) for member in report.members)
    return msgspec.structs.replace(report, outcome=SwapOutcome.DECIDED, phase="", members=staged)


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
    reason = f"it is decided and goes on; late after {spent:.1f} s: {late}"
    if swap.failed:
        reason += "; failed: " + "; ".join(
            f"{swap.names.get(who, who)}: {text}" for who, text in sorted(swap.failed.items())
        )
    return msgspec.structs.replace(
        report, outcome=SwapOutcome.DECIDED, phase="commit", reason=clipped(reason), members=members
    )


def apart_report(report: SwapReport, apart: Mapping[tuple[str, int], str]) -> SwapReport:
    """Return the report with a note on each rank that may not have committed in the same step as its replica."""
    members = tuple(
        msgspec.structs.replace(member, reason=clipped(f"flipped in its own next poll, not with its replica: {why}"))
        if member.state == "committed" and (why := apart.get((member.replica, member.rank)))
        else member
        for member in report.members
    )
    return msgspec.structs.replace(report, members=members)


def written_report(record: SwapRecord) -> SwapReport | None:
    """Return the journalled report; None if there is none or another refitd version wrote it."""
    try:
        return msgspec.json.decode(record.report, type=SwapReport) if record.report else None
    except msgspec.DecodeError:  # the record itself has the decision; an unreadable report must not stop a coordinator
        return None


def _member_report(swap: Swap, member: Member) -> MemberReport:
    state, reason = MemberState.ABORTED, ""
    if member.id in swap.paused:
        state = MemberState.COMMITTED
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
        host=member.host,
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
        SourceReport(m.added.rank, m.node, m.host, m.modes.get(version, way), m.mode_reason, m.added.replica)
        for m in model.givers()
    )
