"""Unreachable engine ranks that may still serve: no swap is decided before their permits have ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from refitd.coordinator.members import Member
from refitd.coordinator.records import SwapRecord
from refitd.coordinator.report import written_report


@dataclass(frozen=True, slots=True, order=True)
class _Absent:
    model: str
    replica: str
    rank: int
    node: str
    member: str  # "" if known only from the journal; a member's id changes when it registers again


class AbsentRanks:
    """Ranks lost with their node, or known only to an earlier coordinator, and when their permits end."""

    def __init__(self) -> None:
        self._ranks: dict[_Absent, float] = {}  # until when each may serve
        self._complete: set[str] = set()  # models with all ranks named by the journal

    def journalled(self, newest_first: Iterable[SwapRecord], until: float) -> None:
        """Add the ranks that each model's last decisions name: an earlier coordinator may have let them serve.

        A catch-up names only the ranks that lagged behind. So the ranks of earlier decisions count too, up to the last
        one about the whole model.
        """
        read: set[str] = set()
        for record in newest_first:
            if record.model in read or not record.is_decided:
                continue
            report = written_report(record)
            if report is None:  # another version of refitd wrote it
                read.add(record.model)
                continue
            for m in report.members:
                self._ranks[_Absent(record.model, m.replica, m.rank, m.node, "")] = until
            if report.kind != "catch-up":
                read.add(record.model)
                self._complete.add(record.model)

    def lost(self, member: Member, until: float) -> None:
        """Note that a rank was lost with its node."""
        if member.added.role == "target":
            self._ranks[_absent(member, member.id)] = until

    def registered(self, member: Member) -> bool:
        """Note that a rank is reachable again: this coordinator now renews its permit. Return whether it was absent.

        A rank of the same name on another daemon is another process; the unreachable one may still serve.
        """
        same = [one for one in (_absent(member, member.id), _absent(member, "")) if one in self._ranks]
        for one in same:
            del self._ranks[one]
        return bool(same)

    @property
    def awaits_any(self) -> bool:
        """Whether a rank that an earlier coordinator knew has not registered with this one."""
        return any(not absent.member for absent in self._ranks)

    def names_all(self, model: str) -> bool:
        """Return whether the journal's records name all ranks of a model; old and unreadable ones may be missing."""
        return model in self._complete

    def until(self, model: str, now: float) -> float:
        """Return when the last permit of a model's absent ranks ends; 0 if none may serve any more."""
        for ended in [one for one, until in self._ranks.items() if until <= now]:
            del self._ranks[ended]
        return max((until for one, until in self._ranks.items() if one.model == model), default=0.0)

    def by_replica(self, model: str, now: float) -> dict[str, float]:
        """Return when the last permit of absent ranks ends, by their replica, where one may serve still."""
        found: dict[str, float] = {}
        for one, until in self._ranks.items():
            if one.model == model and until > now:
                found[one.replica] = max(until, found.get(one.replica, 0.0))
        return found

    def describe(self, model: str) -> str:
        """Return a model's absent ranks as text for people."""
        found = [
            f"{one.replica} rank {one.rank} (node {one.node})" for one in sorted(self._ranks) if one.model == model
        ]
        return ", ".join(found[:10])


def _absent(member: Member, member_id: str) -> _Absent:
    return _Absent(member.added.model, member.added.replica, member.added.rank, member.node, member_id)
