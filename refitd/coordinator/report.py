"""What a swap's state looks like to the people who wait for it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from refitd.commit.journal import Record
from refitd.commit.machine import Phase, Swap
from refitd.coordinator.fleet import Member
from refitd.protocol.base import clipped
from refitd.protocol.reports import MemberReport, SourceReport, SwapProgress, SwapReport

_PHASES = {Phase.IDLE: "plan", Phase.PLANNED: "plan", Phase.PAUSING: "pause", Phase.STAGING: "stage"}


def swap_progress(swap: Swap) -> SwapProgress | None:
    """Return what a progress bar shows; None once the swap is over."""
    if swap.phase.is_final:
        return None
    committed = len(swap.members) - len(swap.waiting) if swap.phase is Phase.COMMITTING else 0
    return SwapProgress(
        swap=swap.swap,
        model=swap.model,
        version=swap.version,
        phase=_PHASES.get(swap.phase, "commit"),
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
    """Return how a swap ended, or stands; `is_verified`: what was staged was compared with its source."""
    outcome = {Phase.COMMITTED: "committed", Phase.INCOMPLETE: "incomplete"}.get(swap.phase, "aborted")
    at = swap.entered

    def spent(first: Phase, last: Phase) -> float:
        start = at.get(first.value)
        return 0.0 if start is None else max(0.0, at.get(last.value, now) - start)

    # engines that are asked stand still after staging, those that are written in place before it
    asked_at = at.get(Phase.PAUSING.value, 0.0)
    staged = Phase.PAUSING if asked_at > at.get(Phase.STAGING.value, now) else Phase.STAGED
    # what is converted counts as work done, not as bytes that were moved
    converted = sum(m.added.converted_bytes for m in members.values() if m.id in swap.members)
    if Phase.STAGED.value not in at:
        converted = max(0, swap.bytes_done - (swap.bytes_total - converted))
    return SwapReport(
        swap=swap.swap,
        model=swap.model,
        version=swap.version,
        outcome=outcome,
        phase="" if outcome == "committed" else _PHASES_BY_VALUE.get(swap.failed_phase, "commit"),
        reason=clipped(swap.reason),
        bytes=max(0, swap.bytes_done - converted),
        converted_bytes=converted,
        copies=swap.copies,
        digests=swap.copies if is_verified else 0,
        plan_s=spent(Phase.IDLE, Phase.STAGING),
        stage_s=spent(Phase.STAGING, staged),
        pause_s=spent(Phase.PAUSING, Phase.STAGED if staged is Phase.PAUSING else Phase.STAGING),
        commit_s=spent(Phase.STAGED, swap.phase) if Phase.STAGED.value in at else 0.0,
        total_s=max(0.0, now - swap.started),
        sources=sources,
        kind=kind,
        members=tuple(
            _member_report(swap, member)
            for member_id, member in members.items()
            if member.added.role == "target" and (member_id in swap.members or not swap.members)
        ),
    )


def decided_report(report: SwapReport) -> SwapReport:
    """Return what is known of a swap when it is decided: nobody has taken its version over yet."""
    staged = tuple(msgspec.structs.replace(member, state="staged") for member in report.members)
    return msgspec.structs.replace(report, outcome="decided", phase="", members=staged)


def written_report(record: Record) -> SwapReport | None:
    """Return the report in the journal; None where there is none, or one that another version of refitd has written."""
    try:
        return msgspec.json.decode(record.report, type=SwapReport) if record.report else None
    except msgspec.DecodeError:  # what was decided is told by the record itself; a coordinator must start all the same
        return None


_PHASES_BY_VALUE = {phase.value: name for phase, name in _PHASES.items()}


def _member_report(swap: Swap, member: Member) -> MemberReport:
    state, reason = "aborted", ""
    if member.id in swap.paused:
        state = "committed"
    elif member.id in swap.failed:
        state, reason = "failed", swap.failed[member.id]
    elif member.id in swap.culprit.split(", "):
        state, reason = "failed", swap.reason
    if swap.phase is Phase.ABORTED and member.id in swap.poisoned:
        state, reason = "poisoned", member.poisoned
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
