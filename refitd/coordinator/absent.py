"""Unreachable engine ranks that may still serve: no swap is decided before their permits have ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from refitd.coordinator.members import Member
from refitd.coordinator.records import SwapRecord
from refitd.coordinator.report import written_report

# (model, replica, rank): a member's id changes when it registers again
_Rank = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class _Absent:
    node: str
    member: str  # "" if known only from the journal
    until: float


class AbsentRanks:
    """Ranks lost with their node, or known only to an earlier coordinator, and when their permits end."""

    def __init__(self) -> None:
        self._ranks: dict[_Rank, _Absent] = {}

    def journalled(self, newest_first: Iterable[SwapRecord], until: float) -> None:
        """Add the ranks that each model's last decision names: an earlier coordinator may have let them serve."""
        seen: set[str] = set()
        for record in newest_first:
            if record.model in seen or not record.is_decided:
                continue
            seen.add(record.model)
            report = written_report(record)
            for m in report.members if report is not None else ():
                self._ranks[(record.model, m.replica, m.rank)] = _Absent(m.node, "", until)

    def lost(self, member: Member, until: float) -> None:
        """Note that a rank was lost with its node."""
        if member.added.role == "target":
            self._ranks[_rank_of(member)] = _Absent(member.node, member.id, until)

    def registered(self, member: Member) -> bool:
        """Note that a rank is reachable again: this coordinator now renews its permit. Return whether it was absent.

        A rank of the same name on another daemon is another process; the unreachable one may still serve.
        """
        found = self._ranks.get(_rank_of(member))
        is_same = found is not None and found.node == member.node and found.member in ("", member.id)
        if is_same:
            del self._ranks[_rank_of(member)]
        return is_same

    @property
    def awaits_any(self) -> bool:
        """Whether a rank that an earlier coordinator knew has not registered with this one."""
        return any(not absent.member for absent in self._ranks.values())

    def until(self, model: str, now: float) -> float:
        """Return when the last permit of a model's absent ranks ends; 0 if none may serve any more."""
        for rank in [rank for rank, absent in self._ranks.items() if absent.until <= now]:
            del self._ranks[rank]
        return max((absent.until for rank, absent in self._ranks.items() if rank[0] == model), default=0.0)

    def by_replica(self, model: str, now: float) -> dict[str, float]:
        """Return when the last permit of absent ranks ends, by their replica, where one may serve still."""
        found: dict[str, float] = {}
        for (of, replica, _), absent in self._ranks.items():
            if of == model and absent.until > now:
                found[replica] = max(absent.until, found.get(replica, 0.0))
        return found

    def describe(self, model: str) -> str:
        """Return a model's absent ranks as text for people."""
        found = [f"{r[1]} rank {r[2]} (node {a.node})" for r, a in sorted(self._ranks.items()) if r[0] == model]
        return ", ".join(found[:10])


def _rank_of(member: Member) -> _Rank:
    return member.added.model, member.added.replica, member.added.rank
