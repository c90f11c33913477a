"""Swaps that were decided, and whose coordinator died before it knew how they ended: who has taken them over since."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import msgspec

from refitd.commit.journal import Record
from refitd.coordinator.fleet import Member
from refitd.coordinator.report import written_report
from refitd.protocol.base import clipped
from refitd.protocol.reports import MemberReport, SwapReport

# (replica, rank): members have other names when they register again
_Rank = tuple[str, int]


@dataclass(slots=True)
class _Swap:
    record: Record
    report: SwapReport  # as it was decided
    deadline: float
    found: dict[_Rank, MemberReport] = field(default_factory=dict)

    def is_complete(self) -> bool:
        return all((m.replica, m.rank) in self.found for m in self.report.members)


class Unfinished:
    """The last decided swap of each model whose end is not in the journal, until it is known or too late.

    Each method yields what is to be written to the journal; `at` in it is when it was decided.
    """

    def __init__(self, newest_first: Iterable[Record], deadline: float) -> None:
        """Take the journal's records; whoever has not taken its version over by `deadline` has missed it."""
        self._swaps: dict[str, _Swap] = {}  # by model
        seen: set[str] = set()
        for record in newest_first:
            if not record.is_decided or record.model in seen:
                continue
            seen.add(record.model)  # what was decided earlier has been replaced by this
            if record.state == "decided" and (report := written_report(record)) is not None:
                self._swaps[record.model] = _Swap(record, report, deadline)

    def registered(self, member: Member) -> Iterator[Record]:
        """A rank says, as it registers, what it serves."""
        swap = self._swaps.get(member.added.model)
        if swap is not None and member.added.staged is None and member.added.version == swap.record.version:
            yield from self._found(swap, member, "committed")

    def committed(self, swap_id: str, member: Member, paused_s: float) -> Iterator[Record]:
        """A rank has taken a version over."""
        swap = self._swaps.get(member.added.model)
        if swap is not None and swap.record.swap == swap_id:
            yield from self._found(swap, member, "committed", paused_s=paused_s)

    def failed(self, swap_id: str, member: Member, reason: str) -> Iterator[Record]:
        """A rank could not."""
        swap = self._swaps.get(member.added.model)
        if swap is not None and swap.record.swap == swap_id:
            yield from self._found(swap, member, "failed", reason=reason)

    def replaced(self, model: str) -> Iterator[Record]:
        """Another swap of the model begins."""
        swap = self._swaps.get(model)
        if swap is not None:
            yield self._end(swap, "the next swap began")

    def tick(self, now: float) -> Iterator[Record]:
        """Give up whoever has not come by its deadline."""
        for swap in [s for s in self._swaps.values() if now >= s.deadline]:
            yield self._end(swap, "the coordinator's deadline for it passed")

    def _found(
        self, swap: _Swap, member: Member, state: str, paused_s: float = 0.0, reason: str = ""
    ) -> Iterator[Record]:
        rank = member.added.replica, member.added.rank
        if member.added.role == "target":
            version = swap.record.version if state == "committed" else None
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

    def _end(self, swap: _Swap, until: str) -> Record:
        del self._swaps[swap.record.model]
        members = tuple(
            swap.found.get((m.replica, m.rank))
            or msgspec.structs.replace(m, state="lost", reason=f"it had not said that it serves it when {until}")
            for m in swap.report.members
        )
        short = [f"{m.replica} rank {m.rank} (host {m.host}, pid {m.pid})" for m in members if m.state != "committed"]
        outcome = "incomplete" if short else "committed"
        reason = "the coordinator ended after the decision"
        if short:
            reason += f"; not known to serve it: {', '.join(short)}"
        report = msgspec.structs.replace(
            swap.report, outcome=outcome, phase="commit" if short else "", reason=clipped(reason), members=members
        )
        return replace(swap.record, state=outcome, reason=report.reason, report=msgspec.json.encode(report))
