"""The live version of each model, and the ranks that may still serve another one.

The live version is the journal's, or the daemons' if the journal is lost, older or belongs to another cluster. Ranks
that serve another version are fenced. Ranks that cannot be reached may serve until their permits end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from refitd.coordinator.actions import Remember
from refitd.coordinator.journals import MAX_SEQUENCE, Journal, LiveVersion, Recovered, SwapRecord
from refitd.coordinator.members import Member
from refitd.protocol.base import clipped
from refitd.protocol.cluster import LiveClaim
from refitd.protocol.reports import MemberReport, SwapReport
from refitd.states import MemberState, SwapCause, SwapOutcome
from refitd.text import target_rank

if TYPE_CHECKING:
    from refitd.coordinator.fleet import Turn

# Daemons register within about a second of each other. A daemon that missed its coordinator's goodbye is 5 s late. A
# coordinator waits this long after the first daemon before it begins a swap, if its journal is new, if daemons know
# more than it, or if ranks that an earlier coordinator knew are missing.
SETTLE_S = 6.0

# Limit on decided swaps remembered from daemons; late ranks ask about one of the last.
KEPT_DECISIONS = 4096


@dataclass(slots=True)
class _Known:
    live: LiveVersion | None
    decided_here: bool = False  # decided by this coordinator: no earlier decision outranks it
    confirmed: bool = False  # a daemon learned it from this journal
    highest: int = -1  # of all versions that were ever live


@dataclass(slots=True)
class LiveVersions:
    """The live versions."""

    past: Journal
    started: float
    is_standalone: bool  # started by a standalone daemon, usually the only daemon to wait for
    _known: dict[str, _Known] = field(default_factory=dict)
    _continued: set[str] = field(default_factory=set)  # ids of continued journals, written yet or not
    _decided: dict[str, tuple[int, str]] = field(default_factory=dict)  # swap -> (version, run), as told to daemons
    _greeted: float | None = None  # when the first daemon was heard
    is_settled: bool = False  # swaps may begin
    is_in_doubt: bool = False  # daemons or engines contradict the journal or know more than it

    def of(self, model: str) -> LiveVersion | None:
        """Return the live version of a model."""
        return self._found(model).live

    def keep(self, model: str) -> None:
        """Cache what the journal knows of a model; models that are only queried are not cached."""
        self._of(model)

    def _found(self, model: str) -> _Known:
        return self._known.get(model) or _Known(self.past.live(model), highest=self.past.highest(model))

    def _of(self, model: str) -> _Known:
        return self._known.setdefault(model, self._found(model))

    def models(self) -> list[str]:
        """Return the models with a known live version."""
        return sorted(model for model, known in self._known.items() if known.live is not None)

    def highest(self, model: str) -> int:
        """Return the highest version that is known to have been live, -1 for none."""
        known = self._found(model)
        return max(known.highest, -1 if known.live is None else known.live.version)

    def decided(self, model: str, live: LiveVersion) -> LiveClaim:
        """Note a decision of this coordinator about a model with members; return the claim for daemons."""
        known = self._known[model]
        known.live, known.decided_here = live, True
        known.highest = max(known.highest, live.version)
        self.told(live.swap, live.version, live.run)
        return LiveClaim(model, live.version, live.run, live.sequence, live.swap, self.past.id, known.highest)

    def was_decided(self, swap: str) -> tuple[int, str] | None:
        """Return (version, run) of a swap that daemons know to be decided, even if the journal does not."""
        return self._decided.get(swap)

    def told(self, swap: str, version: int, run: str) -> None:
        """Note that daemons were told to commit this swap."""
        self._decided.pop(swap, None)
        self._decided[swap] = version, run
        if len(self._decided) > KEPT_DECISIONS:
            del self._decided[next(iter(self._decided))]

    def said(self, turn: Turn, node: str, claims: Iterable[LiveClaim]) -> list[str]:
        """Handle a daemon's claims of live versions; return the models whose live version changed."""
        changed = []
        for claim in claims:
            if claim.sequence <= MAX_SEQUENCE:
                self.told(claim.swap, claim.version, claim.run)
                if self._said(turn, node, claim):
                    changed.append(claim.model)
        return changed

    def _said(self, turn: Turn, node: str, claim: LiveClaim) -> bool:
        known = self._of(claim.model)
        ours, theirs = known.live, LiveVersion(claim.version, claim.run, claim.sequence, claim.swap)
        is_mine = claim.journal in self._continued or self.past.continues(claim.journal)
        if ours == theirs or (is_mine and ours is not None and ours.sequence >= theirs.sequence):
            known.confirmed = known.confirmed or ours == theirs
            return False
        if is_mine:
            reason = "the journal is older than what this daemon was told"
        elif ours is None:
            reason = "the journal has no decision about it: it was lost, or is a new one"
        else:
            reason = "this daemon was told so from another journal"
        if known.decided_here or (known.confirmed and not is_mine):
            # raise the sequence: older claims must rank below it
            assert ours is not None
            if is_mine or ours.sequence <= theirs.sequence:
                known.live = replace(ours, sequence=theirs.sequence + 1)
                self._keep(turn, claim.model, known.live, claim.journal)
            turn.log("live-outranked", model=claim.model, node=node, said=str(theirs), live=str(ours), reason=reason)
            return known.live is not ours
        self.is_in_doubt = True
        known.highest = max(known.highest, claim.highest, claim.version)
        if ours is not None and not is_mine:
            theirs = replace(theirs, sequence=max(ours.sequence, theirs.sequence) + 1)
        known.live = theirs
        self._keep(turn, claim.model, theirs, claim.journal)
        was = "nothing" if ours is None else str(ours)
        turn.log("live-recovered", model=claim.model, node=node, live=str(theirs), was=was, reason=reason)
        return True

    def serves(self, turn: Turn, model: str, who: str, version: int, run: str) -> bool:
        """Use a rank's version as the live one if no journal or daemon knows another; return whether it was used."""
        known = self._of(model)
        ours = known.live
        unsure = ours is None or (not ours.sequence and version > ours.version)
        if known.decided_here or not unsure:
            return False
        known.live = LiveVersion(version, run)
        self.is_in_doubt = True
        self._keep(turn, model, known.live, "")
        turn.log(
            "live-recovered", model=model, member=who, live=str(known.live), reason="no journal and no daemon knows"
        )
        return True

    def _keep(self, turn: Turn, model: str, live: LiveVersion, journal: str) -> None:
        self._continued.add(journal)
        turn.effects.append(Remember(Recovered(model, live, journal, turn.wall, self.highest(model))))

    # --- when swaps may begin -----------------------------------------------------------------------------

    def settle(self, now: float) -> None:
        """Let swaps begin if all daemons have had time to report what they know."""
        self.is_settled = self.is_settled or (self._greeted is not None and now >= self._greeted + SETTLE_S)

    def greeted(self, now: float) -> None:
        """Note that a daemon has introduced itself."""
        if self._greeted is None:
            self._greeted = now

    def heard(self) -> None:
        """Note that daemons have reported all they know."""
        if not self.is_in_doubt and (self.is_standalone or not self.past.is_new):
            self.is_settled = True

    def deadline(self) -> float | None:
        """Return when swaps may begin; None if they may now, or if no daemon is there."""
        return None if self.is_settled or self._greeted is None else self._greeted + SETTLE_S

    def claim(self, model: str) -> LiveClaim | None:
        """Return the claim of a live version for daemons to remember."""
        known = self._found(model)
        live = known.live
        if live is None:
            return None
        highest = max(live.version, known.highest)
        return LiveClaim(model, live.version, live.run, live.sequence, live.swap, self.past.id, highest)


# --- ranks that cannot be reached -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class _Absent:
    model: str
    replica: str
    rank: int
    node: str
    member: str  # "" if known only from the journal; a member's id changes when it registers again


class AbsentRanks:
    """Ranks lost with their node, or known only to an earlier coordinator, and when their permits end."""

    def __init__(self, unknown_until: float = 0.0) -> None:
        """`unknown_until`: when the permits end that earlier coordinators gave."""
        self._ranks: dict[_Absent, float] = {}  # until when each may serve
        self._unknown_until = unknown_until
        self.complete: set[str] = set()  # models with all ranks named by the journal, or decided by this coordinator

    def journalled(self, newest_first: Sequence[SwapRecord], *, limit: int) -> None:
        """Add the ranks that each model's last decisions name: an earlier coordinator may have let them serve.

        A catch-up names only the ranks that lagged behind, and a swap to the version that is already live leaves out
        ranks that serve it. So the ranks of all decisions about the live version count, back to the one that replaced
        another version: that one fenced, or waited for, the ranks that it left out. Further records may exist if there
        are `limit`.
        """
        newest: dict[str, tuple[int, str]] = {}  # by model
        read: set[str] = set()
        for record in newest_first:
            if record.model in read or not record.is_decided:
                continue
            identity = record.version, record.run
            if newest.setdefault(record.model, identity) != identity:
                read.add(record.model)
                continue
            report = record.written_report()
            if report is None:  # another version of refitd wrote it
                read.add(record.model)
                self.complete.discard(record.model)
                continue
            for m in report.members:
                self._ranks[_Absent(record.model, m.replica, m.rank, m.node, "")] = self._unknown_until
            if report.kind != "catch-up":
                self.complete.add(record.model)
        if len(newest_first) >= limit:
            self.complete &= read

    def lost(self, member: Member, until: float) -> None:
        """Note that a rank was lost with its node."""
        if member.added.role == "target":
            self._ranks[_absent(member, member.id)] = until

    def registered(self, member: Member) -> bool:
        """Note that a rank is reachable again: this coordinator now renews its permit. Return whether it was absent.

        A rank of the same name on another daemon is a different process. The unreachable process may serve.
        """
        same = [one for one in (_absent(member, member.id), _absent(member, "")) if one in self._ranks]
        for one in same:
            del self._ranks[one]
        return bool(same)

    @property
    def awaits_any(self) -> bool:
        """Whether a rank that an earlier coordinator knew has not registered with this one."""
        return any(not absent.member for absent in self._ranks)

    def until(self, model: str, now: float, *, may_be_unknown: bool = False) -> float:
        """Return when the last permit of a model's absent ranks ends; 0 if all have ended.

        With `may_be_unknown`, a rank that the journal does not name may have a permit, too.
        """
        for ended in [one for one, until in self._ranks.items() if until <= now]:
            del self._ranks[ended]
        unknown_until = self._unknown_until if may_be_unknown else 0.0
        return max(unknown_until, *(until for one, until in self._ranks.items() if one.model == model), 0.0)

    def by_replica(self, model: str, now: float) -> dict[str, float]:
        """Return when the last permit of absent ranks ends, by their replica, where one may serve still."""
        found: dict[str, float] = {}
        for one, until in self._ranks.items():
            if one.model == model and until > now:
                found[one.replica] = max(until, found.get(one.replica, 0.0))
        return found

    def describe(self, model: str) -> str:
        """Return a model's absent ranks as text for people."""
        found = [one for one in sorted(self._ranks) if one.model == model][:10]
        return ", ".join(f"{target_rank(one.replica, one.rank)} (node {one.node})" for one in found)


def _absent(member: Member, member_id: str) -> _Absent:
    return _Absent(member.added.model, member.added.replica, member.added.rank, member.node, member_id)


# --- swaps that an earlier coordinator decided ------------------------------------------------------------

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

    Each method yields records, for `close` to journal.
    """

    def __init__(self, newest_first: Iterable[SwapRecord], deadline: float) -> None:
        """Read the journal's records; a rank that has not committed by `deadline` has missed the swap."""
        self.open: dict[str, _DecidedSwap] = {}  # by model
        seen: set[str] = set()
        for record in newest_first:
            if not record.is_decided or record.model in seen:
                continue
            seen.add(record.model)  # earlier decisions are superseded
            if record.state == "decided" and (report := record.written_report()) is not None:
                self.open[record.model] = _DecidedSwap(record, report, deadline)

    def registered(self, member: Member) -> Iterator[SwapRecord]:
        """Note the version that a registering rank serves."""
        swap = self.open.get(member.added.model)
        if swap is None or member.added.staged is not None:
            return
        if (member.added.version, member.added.run) == (swap.record.version, swap.record.run):
            yield from self._found(swap, member, MemberState.COMMITTED)

    def committed(self, swap_id: str, member: Member, paused_s: float) -> Iterator[SwapRecord]:
        """Note that a rank has committed."""
        swap = self.open.get(member.added.model)
        if swap is not None and swap.record.swap == swap_id:
            yield from self._found(swap, member, MemberState.COMMITTED, paused_s=paused_s)

    def failed(self, swap_id: str, member: Member, reason: str) -> Iterator[SwapRecord]:
        """Note that a rank could not commit."""
        swap = self.open.get(member.added.model)
        if swap is not None and swap.record.swap == swap_id:
            yield from self._found(swap, member, MemberState.FAILED, reason=reason)

    def replaced(self, model: str) -> Iterator[SwapRecord]:
        """Close the record of a model in `open`, because its next swap begins."""
        yield self._end(self.open[model], "the next swap began")

    def tick(self, now: float) -> Iterator[SwapRecord]:
        """Close the records whose deadline has passed, naming the missing ranks."""
        for swap in [s for s in self.open.values() if now >= s.deadline]:
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
                host=member.place.host,
                pid=member.added.pid,
                state=state,
                version=version,
                paused_s=paused_s,
                reason=clipped(reason),
            )
        if swap.is_complete():
            yield self._end(swap, "")

    def _end(self, swap: _DecidedSwap, until: str) -> SwapRecord:
        del self.open[swap.record.model]
        members = tuple(
            swap.found.get((m.replica, m.rank))
            or msgspec.structs.replace(
                m, state=MemberState.LOST, reason=f"it had not said that it serves it when {until}"
            )
            for m in swap.report.members
        )
        short = [
            f"{target_rank(m.replica, m.rank)} (node {m.node}, host {m.host}, pid {m.pid})"
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
