"""Swaps that an earlier coordinator decided but did not see end: which ranks have committed since."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import msgspec

from refitd.coordinator.members import Member
from refitd.coordinator.records import SwapRecord
from refitd.coordinator.report import written_report
from refitd.protocol.base import clipped
from refitd.protocol.reports import MemberReport, SwapReport
from refitd.states import MemberState, SwapCause, SwapOutcome

# (replica, rank): a member's id changes when it registers again
_Rank = tuple[str, int]


@dataclass(slots=True)
class _DecidedSwap:
    record: SwapRecord
    report: SwapReport  # at the decision
    deadline: float
    found: dict[_Rank, MemberReport] = field(default_factory=dict)

    def is_complete(self) -> bool:
        return all((m.replica, m.rank) in self.found for m in self.report.members)


class Recovery:
    """Each model's last decided swap, if the journal has no end for it, until its end is known or the deadline passes.

    Each method yields records to journal; their `at` is the time of the decision.
    """

    def __init__(self, newest_first: Iterable[SwapRecord], deadline: float) -> None:
        """Read the journal's records; a rank that has not committed by `deadline` has missed the swap."""
        self._swaps: dict[str, _DecidedSwap] = {}  # by model
        seen: set[str] = set()
        for record in newest_first:
            if not record.is_decided or record.model in seen:
                continue
            seen.add(record.model)  # earlier decisions are superseded
            if record.state == "decided" and (report := written_report(record)) is not None:
                self._swaps[record.model] = _DecidedSwap(record, report, deadline)

    def registered(self, member: Member) -> Iterator[SwapRecord]:
        """Note the version that a registering rank serves."""
        swap = self._swaps.get(member.added.model)
        if swap is None or member.added.staged is not None:
            return
        if (member.added.version, member.added.run) == (swap.record.version, swap.record.run):
            yield from self._found(swap, member, MemberState.COMMITTED)

    def committed(self, swap_id: str, member: Member, paused_s: float) -> Iterator[SwapRecord]:
        """Note that a rank has committed."""
        swap = self._swaps.get(member.added.model)
        if swap is not None and swap.record.swap == swap_id:
            yield from self._found(swap, member, MemberState.COMMITTED, paused_s=paused_s)

    def failed(self, swap_id: str, member: Member, reason: str) -> Iterator[SwapRecord]:
        """Note that a rank could not commit."""
        swap = self._swaps.get(member.added.model)
        if swap is not None and swap.record.swap == swap_id:
            yield from self._found(swap, member, MemberState.FAILED, reason=reason)

    def replaced(self, model: str) -> Iterator[SwapRecord]:
        """Close a model's record, because its next swap begins."""
        swap = self._swaps.get(model)
        if swap is not None:
            yield self._end(swap, "the next swap began")

    def tick(self, now: float) -> Iterator[SwapRecord]:
        """Close the records whose deadline has passed, naming the missing ranks."""
        for swap in [s for s in self._swaps.values() if now >= s.deadline]:
            yield self._end(swap, "the coordinator's deadline for it passed")

    def _found(
        self, swap: _DecidedSwap, member: Member, state: MemberState, paused_s: float = 0.0, reason: str = ""
    ) -> Iterator[SwapRecord]:
        rank = member.added.replica, member.added.rank
        if member.added.role == "target":
            version = swap.record.version if state == MemberState.COMMITTED else None
            swap.found[rank] = MemberReport(
                replica=rank[0],
                rank=rank[1],
                node=member.node,
                host=member.host,
                pid=member.added.pid,
                state=state,
                version=version,
                paused_s=paused_s,
                reason=clipped(reason),
            )
        if swap.is_complete():
            yield self._end(swap, "")

    def _end(self, swap: _DecidedSwap, until: str) -> SwapRecord:
        del self._swaps[swap.record.model]
        members = tuple(
            swap.found.get((m.replica, m.rank))
            or msgspec.structs.replace(
                m, state=MemberState.LOST, reason=f"it had not said that it serves it when {until}"
            )
            for m in swap.report.members
        )
        short = [
            f"{m.replica} rank {m.rank} (node {m.node}, host {m.host}, pid {m.pid})"
            for m in members
            if m.state != MemberState.COMMITTED
        ]
        outcome = SwapOutcome.INCOMPLETE if short else SwapOutcome.COMMITTED
        reason = "the coordinator ended after the decision"
        if short:
            reason += f"; not known to serve it: {', '.join(short)}"
        report = msgspec.structs.replace(
            swap.report,
            outcome=outcome,
            phase="commit" if short else "",
            reason=clipped(reason),
            cause=SwapCause.COORDINATOR if short else SwapCause.NONE,
            members=members,
        )
        return replace(swap.record, state=outcome, reason=report.reason, report=msgspec.json.encode(report))
