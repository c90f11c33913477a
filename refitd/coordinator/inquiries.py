"""Questions of operators to all nodes: verify the live weights, collect the trace of a swap.

Each question has a deadline. Its report names the nodes that did not answer in time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from refitd.commit.decision import FINAL, Phase, Swap
from refitd.coordinator.actions import Waiter
from refitd.coordinator.members import Member, Membership
from refitd.errors import RefusedError
from refitd.protocol.base import clipped
from refitd.protocol.cluster import CheckMembers, MemberChecked, MembersChecked
from refitd.protocol.reports import (
    GetTrace,
    MemberProof,
    NodeTrace,
    SwapReport,
    TraceReport,
    TraceSpan,
    VerifyReport,
)
from refitd.states import ProofState, SwapOutcome

# --- verification -----------------------------------------------------------------------------------------

# Limits: checks under way in the cluster, and differences listed in one report.
MAX_CHECKS = 32
MAX_DIFFERENCES = 1000
MAX_MIXED = 100

# Share of the timeout given to nodes: their own answer, which names who is late, must arrive first.
NODE_SHARE = 0.9


@dataclass(slots=True)
class _Check:
    model: str
    waiter: Waiter
    began: float
    deadline: float
    timeout_s: float
    members: dict[str, Member]
    found: dict[str, MemberChecked] = field(default_factory=dict)


@dataclass(slots=True)
class Checks:
    """The running checks, by id."""

    running: dict[str, _Check] = field(default_factory=dict)

    def begin(
        self, check: str, membership: Membership, waiter: Waiter, timeout_s: float, now: float
    ) -> list[tuple[str, CheckMembers]]:
        """Start a check of all target ranks of a model; return (node, message) for each node.

        Raises:
            RefusedError: the model has no target, or too many checks run.
        """
        members = {m.id: m for m in membership.targets.values()}
        if not members:
            raise RefusedError(f"model {membership.name!r} has no target; there is nothing to verify")
        if len(self.running) >= MAX_CHECKS:
            raise RefusedError(f"{MAX_CHECKS} checks are under way already; wait for some of them")
        self.running[check] = _Check(membership.name, waiter, now, now + timeout_s, timeout_s, members)
        return [
            (node, CheckMembers(check, tuple(sorted(m.id for m in members.values() if m.node == node)), share))
            for node in sorted({m.node for m in members.values()})
            if (share := NODE_SHARE * timeout_s)
        ]

    def answered(self, message: MembersChecked, now: float) -> Iterator[tuple[Waiter, VerifyReport]]:
        """Handle a node's answer; yield the report if it was the last one."""
        running = self.running.get(message.check)
        if running is None:
            return
        running.found |= {one.member: one for one in message.members if one.member in running.members}
        yield from self._ended(message.check, running, now)

    def lost(self, node: str, reason: str, now: float) -> Iterator[tuple[Waiter, VerifyReport]]:
        """Handle a lost node; yield the reports that waited only for it."""
        for check, running in list(self.running.items()):
            for member in running.members.values():
                if member.node == node:
                    gone = MemberChecked(member.id, ProofState.UNKNOWN, reason=f"node {node}: {reason}")
                    running.found.setdefault(member.id, gone)
            yield from self._ended(check, running, now)

    def tick(self, now: float) -> Iterator[tuple[Waiter, VerifyReport]]:
        """Yield the reports whose deadline has passed, naming the nodes that did not answer."""
        for check, running in list(self.running.items()):
            if now < running.deadline:
                continue
            for member in running.members.values():
                reason = f"its node {member.node} has not answered within {running.timeout_s:.1f} s"
                running.found.setdefault(member.id, MemberChecked(member.id, ProofState.UNKNOWN, reason=reason))
            yield from self._ended(check, running, now)

    def _ended(self, check: str, running: _Check, now: float) -> Iterator[tuple[Waiter, VerifyReport]]:
        if running.found.keys() == running.members.keys():
            del self.running[check]
            yield running.waiter, _report(running, now)


def _report(check: _Check, now: float) -> VerifyReport:
    mixed = tuple(_mixed(check))
    room = MAX_DIFFERENCES
    members = []
    for member_id, member in sorted(check.members.items(), key=lambda at: (at[1].added.replica, at[1].added.rank)):
        found = check.found[member_id]
        differences = found.differences[:room]
        room -= len(differences)
        members.append(
            MemberProof(
                replica=member.added.replica,
                rank=member.added.rank,
                node=member.node,
                host=member.place.host,
                pid=member.added.pid,
                state=found.state,
                version=found.version,
                reason=found.reason,
                bytes=found.bytes,
                digest=found.digest,
                blocks=found.blocks,
                differences=differences,
                run=found.run,
            )
        )
    serving = [one for one in members if one.version is not None]
    is_proven = serving and all(one.state == ProofState.PROVEN for one in serving)
    outcome = ProofState.PROVEN if is_proven else ProofState.UNKNOWN
    if mixed or any(one.state == ProofState.DIFFERS for one in members):
        outcome = ProofState.DIFFERS
    return VerifyReport(
        model=check.model, outcome=outcome, members=tuple(members), mixed=mixed, seconds=max(0.0, now - check.began)
    )


def _mixed(check: _Check) -> Iterator[str]:
    """Name the ranks that should hold the same bytes of a version but were given different ones."""
    groups: dict[tuple[str, str, int | None, str], dict[str, list[str]]] = {}
    for member_id, found in check.found.items():
        member = check.members[member_id]
        if found.digest:
            same = groups.setdefault((member.added.digest, found.form, found.version, found.run), {})
            same.setdefault(found.digest, []).append(member.describe())
    told = 0
    for (_, _, version, _), digests in sorted(groups.items(), key=repr):
        if len(digests) > 1 and told < MAX_MIXED:
            told += 1
            sides = "; ".join(f"{', '.join(sorted(who)[:8])}: {digest}" for digest, who in sorted(digests.items())[:8])
            yield f"version {version} was given to them with different bytes: {sides}"


# --- traces -----------------------------------------------------------------------------------------------

# Swaps of all models that are kept; daemons keep as many.
MAX_SWAPS = 16

# Limit on traces that are collected at a time, and on the wait for nodes, in seconds.
MAX_COLLECTIONS = 16
COLLECT_S = 5.0

_NAMES = {
    Phase.IDLE: "plan",
    Phase.PLANNED: "send plan",
    Phase.HALTING: "halt",
    Phase.STAGING: "stage",
    Phase.PAUSING: "pause",
    Phase.STAGED: "decide",
    Phase.DECIDING: "journal",
    Phase.COMMITTING: "commit",
}


@dataclass(slots=True)
class _Ended:
    swap: Swap
    kind: str
    outcome: SwapOutcome
    at: float


@dataclass(slots=True)
class _Collection:
    waiter: Waiter
    report: TraceReport
    nodes: frozenset[str]  # of the swap
    awaited: set[str]
    deadline: float
    found: dict[str, NodeTrace] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def finished(self) -> TraceReport:
        nodes = tuple(found for _, found in sorted(self.found.items()))
        return replace(self.report, nodes=nodes, missing=tuple(self.missing))


class Traces:
    """The last swaps that have ended, and collections under way."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._ended: OrderedDict[str, _Ended] = OrderedDict()
        self.running: dict[str, _Collection] = {}

    def ended(self, swap: Swap, report: SwapReport, at: float) -> None:
        """Remember a swap; it ended `at` (seconds since the epoch)."""
        brief = replace(swap, names={}, members={}, progress={}, paused={}, failed={})  # leave out thousands of entries
        self._ended[swap.swap] = _Ended(brief, report.kind, report.outcome, at - report.total_s)
        while len(self._ended) > MAX_SWAPS:
            self._ended.popitem(last=False)

    def begin(
        self,
        number: str,
        asked: GetTrace,
        waiter: Waiter,
        nodes: Collection[str],
        running: tuple[Swap, str] | None,
        now: float,
        wall: float,
    ) -> GetTrace:
        """Begin to collect a trace; return the message for every one of `nodes`.

        Args:
            number: identifies this collection.
            asked: names the model, and the swap or "" for the last one.
            waiter: gets the report.
            nodes: the connected nodes.
            running: (swap, kind) of the model's running swap.
            now: the time, of the clock of swaps.
            wall: the time, in seconds since the epoch.

        Raises:
            RefusedError: the swap is not kept, or too many traces are being collected.
        """
        if len(self.running) >= MAX_COLLECTIONS:
            raise RefusedError(f"{MAX_COLLECTIONS} traces are being collected already; wait for some of them")
        swap, kind, outcome, at = self._swap_of(asked, running, now, wall)
        entered = sorted(swap.entered.items(), key=lambda entry: entry[1])
        ends = [began for _, began in entered[1:]] + [now]
        phases = tuple(
            TraceSpan("coordinator", _NAMES[phase], began, ended, is_open=phase is swap.phase)
            for (phase, began), ended in zip(entered, ends, strict=True)
            if phase not in FINAL
        )
        report = TraceReport(
            swap.swap,
            swap.model,
            swap.version,
            kind,
            phases,
            swap.started,
            at,
            self._host,
            (),
            outcome,
            clipped(swap.reason),
        )
        found = _Collection(waiter, report, swap.nodes, set(nodes), now + COLLECT_S)
        found.missing = [f"node {name} is not here any more" for name in sorted(swap.nodes - set(nodes))]
        self.running[number] = found
        return GetTrace(swap.model, swap.swap, number)

    def _swap_of(
        self, asked: GetTrace, running: tuple[Swap, str] | None, now: float, wall: float
    ) -> tuple[Swap, str, SwapOutcome | None, float]:
        if running is not None and asked.swap in ("", running[0].swap):
            return *running, None, wall - (now - running[0].started)
        ended = [one for one in self._ended.values() if one.swap.model == asked.model]
        found = next((one for one in reversed(ended) if asked.swap in ("", one.swap.swap)), None)
        if found is None:
            kept = ", ".join(one.swap.swap for one in ended) or "none"
            what = f"swap {asked.swap!r}" if asked.swap else "a swap"
            raise RefusedError(
                f"model {asked.model!r}: no trace of {what}; the coordinator keeps those of the last {MAX_SWAPS} swaps "
                f"since it started, of this model: {kept} (`refitctl history` lists swaps)"
            )
        return found.swap, found.kind, found.outcome, found.at

    def answered(self, node: str, trace: NodeTrace) -> Iterator[tuple[Waiter, TraceReport]]:
        """Handle a node's part; yield the report if it was the last one."""
        collection = self.running.get(trace.asked)
        if collection is not None and node in collection.awaited:
            collection.awaited.discard(node)
            if trace.spans:
                collection.found[node] = replace(trace, node=node)  # by its connection, not by its own claim
            elif node in collection.nodes:
                collection.missing.append(f"node {node} has kept nothing of it")
            yield from self._finish(trace.asked, collection)

    def lost(self, node: str) -> Iterator[tuple[Waiter, TraceReport]]:
        """Handle a lost node; yield the reports that waited only for it."""
        for number, collection in list(self.running.items()):
            if node in collection.awaited:
                collection.awaited.discard(node)
                collection.missing.append(f"node {node} is lost")
                yield from self._finish(number, collection)

    def tick(self, now: float) -> Iterator[tuple[Waiter, TraceReport]]:
        """Yield the reports whose deadline has passed."""
        for number, collection in list(self.running.items()):
            if now >= collection.deadline:
                late = sorted(collection.awaited)
                collection.missing += [f"node {node} has not answered within {COLLECT_S:.0f} s" for node in late]
                collection.awaited.clear()
                yield from self._finish(number, collection)

    def _finish(self, number: str, collection: _Collection) -> Iterator[tuple[Waiter, TraceReport]]:
        if not collection.awaited:
            del self.running[number]
            yield collection.waiter, collection.finished()
