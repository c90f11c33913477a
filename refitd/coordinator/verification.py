"""Verification of live weights across the cluster: asks nodes, collects answers, compares replicas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from refitd.coordinator.members import Member
from refitd.coordinator.membership import Membership
from refitd.coordinator.models import Waiter
from refitd.errors import RefusedError
from refitd.protocol.cluster import CheckMembers, MemberChecked, MembersChecked
from refitd.protocol.reports import MemberProof, VerifyReport
from refitd.states import ProofState

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

    _running: dict[str, _Check] = field(default_factory=dict)

    def begin(
        self, check: str, membership: Membership, waiter: Waiter, timeout_s: float, now: float
    ) -> list[tuple[str, CheckMembers]]:
        """Start a check of all target ranks of a model; return (node, message) for each node.

        Raises:
            RefusedError: there is nothing to check, or too many checks run.
        """
        members = {m.id: m for m in membership.targets.values()}
        if not members:
            raise RefusedError(f"model {membership.name!r} has no target; there is nothing to verify")
        if len(self._running) >= MAX_CHECKS:
            raise RefusedError(f"{MAX_CHECKS} checks are under way already; wait for some of them")
        self._running[check] = _Check(membership.name, waiter, now, now + timeout_s, timeout_s, members)
        return [
            (node, CheckMembers(check, tuple(sorted(m.id for m in members.values() if m.node == node)), share))
            for node in sorted({m.node for m in members.values()})
            if (share := NODE_SHARE * timeout_s)
        ]

    def answered(self, message: MembersChecked, now: float) -> Iterator[tuple[Waiter, VerifyReport]]:
        """Handle a node's answer; yield the report if it was the last one."""
        running = self._running.get(message.check)
        if running is None:
            return
        running.found |= {one.member: one for one in message.members if one.member in running.members}
        yield from self._ended(message.check, running, now)

    def lost(self, node: str, reason: str, now: float) -> Iterator[tuple[Waiter, VerifyReport]]:
        """Handle a lost node; yield the reports that waited only for it."""
        for check, running in list(self._running.items()):
            for member in running.members.values():
                if member.node == node:
                    gone = MemberChecked(member.id, ProofState.UNKNOWN, reason=f"node {node}: {reason}")
                    running.found.setdefault(member.id, gone)
            yield from self._ended(check, running, now)

    def next_deadline(self) -> float | None:
        """Return when `tick` is next needed, None if no check runs."""
        return min((running.deadline for running in self._running.values()), default=None)

    def tick(self, now: float) -> Iterator[tuple[Waiter, VerifyReport]]:
        """Yield the reports whose deadline has passed, naming the nodes that did not answer."""
        for check, running in list(self._running.items()):
            if now < running.deadline:
                continue
            for member in running.members.values():
                reason = f"its node {member.node} has not answered within {running.timeout_s:.1f} s"
                running.found.setdefault(member.id, MemberChecked(member.id, ProofState.UNKNOWN, reason=reason))
            yield from self._ended(check, running, now)

    def _ended(self, check: str, running: _Check, now: float) -> Iterator[tuple[Waiter, VerifyReport]]:
        if running.found.keys() == running.members.keys():
            del self._running[check]
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
                host=member.host,
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
