"""Proofs: digests of committed versions, and comparison of live tensors with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import xxhash

from refitd.addressing.places import Places
from refitd.commit.target_state import Live, Step
from refitd.daemon.comparisons import SeedProofs, proven
from refitd.daemon.digest_work import BlockWork, DigestQueue, Priority
from refitd.daemon.effects import Effects, Introduced, RetainedCompared
from refitd.daemon.members import LocalMember, Proof
from refitd.protocol import cluster, local
from refitd.protocol.base import clipped
from refitd.protocol.reports import Difference
from refitd.states import ProofState

# limit on the differences that are located and listed for each rank
MAX_DIFFERENCES = 16
# limit on the attempts of a check: each commit during the check restarts it
ATTEMPTS = 4
# limit on checks under way
MAX_ASKED = 64


@dataclass(frozen=True, slots=True)
class ReturningRank:
    """A registration that waits for the comparison of its retained arena."""

    session: int
    request: int
    about: Introduced


@dataclass(slots=True)
class _RequestedCheck:
    """A check that the coordinator requested, or a registration, until it is answered."""

    deadline: float
    timeout_s: float
    left: set[str]
    asker: str | ReturningRank  # the coordinator's name of the check, or the registration


@dataclass(slots=True)
class _MemberCheck:
    """The check of one member. Requests that arrive during a check wait for the next check."""

    member: str
    number: int
    version: int
    asked: list[_RequestedCheck]
    later: list[_RequestedCheck] = field(default_factory=list)
    phase: Literal["stored", "live", "compare"] = "stored"
    differing: list[int] = field(default_factory=list)  # blocks
    attempts: int = 1


class Proofs:
    """Digests committed versions in the background, and checks live tensors on request.

    The digests are computed from the staging arena, which was compared with the sources during staging. For a rank
    that flips or is written in place, they are computed from the live tensors directly after the commit. Workers
    compute the digests and read live tensors in arenas; tensors in a process's own memory are read by its client.
    """

    def __init__(
        self,
        members: dict[str, LocalMember],
        queue: DigestQueue,
    ) -> None:
        self._members = members
        self._queue = queue
        self._numbers = 0
        self._checks: dict[str, _MemberCheck] = {}
        self.asked: list[_RequestedCheck] = []
        self._later: set[str] = set()  # members whose digests are due at the next tick
        self.seeds = SeedProofs(members, queue, self)

    # --- members commit and leave -------------------------------------------------------------------------

    def committed(self, effects: Effects, member: LocalMember) -> None:
        """Handle a member's commit: schedule its digests, and restart its check if one is under way."""
        proof = member.proofs.live
        if not member.registration.flips or proof is None or proof.version != member.state.version:
            # if an exchange makes a version live again, its first digests remain valid
            member.proofs = replace(member.proofs, live=None)
        if self._queue.work:
            self._queue.drop_blocks(member.id)
        if member.proofs.live is not None:
            pass
        elif member.proofs.verifies and member.registration.is_proven_live:
            # the engine may change these live tensors, so digest them first
            self._take_stored(effects, member, Priority.ASKED)
        elif member.proofs.verifies:
            self._later.add(member.id)  # slow for very many tensors; must not delay the end of the swap
        check = self._checks.get(member.id)
        if check is not None and (member.registration.is_read_by_workers or check.phase != "live"):
            self._again(effects, check)  # if the client reads the tensors, the client reports changes

    def restored(self, effects: Effects, member: LocalMember) -> None:
        """Handle a member that restored its predecessor's version; existing digests of that version remain valid."""
        if member.proofs.live is None:
            self.committed(effects, member)

    def left(self, effects: Effects, member: LocalMember, reason: str) -> None:
        """Drop the work of a member that has left, and answer its checks."""
        self.seeds.left(member)
        check = self._checks.pop(member.id, None)
        if check is not None:
            for asked in [*check.asked, *check.later]:
                self._tell(
                    effects,
                    asked,
                    cluster.MemberChecked(member=member.id, state=ProofState.UNKNOWN, reason=clipped(reason)),
                )

    # --- requests -----------------------------------------------------------------------------------------

    def check(self, effects: Effects, message: cluster.CheckMembers) -> None:
        """Start checks of members. Each is answered when it is done; late ones are answered at the deadline."""
        deadline = effects.now + message.timeout_s
        asked = _RequestedCheck(deadline, message.timeout_s, set(message.members), message.check)
        if len(self.asked) >= MAX_ASKED:
            self._expire(effects, asked, f"node {self._queue.node} has {MAX_ASKED} checks under way already")
            return
        self.asked.append(asked)
        for member_id in sorted(asked.left):
            member = self._members.get(member_id)
            if member is None or member.registration.is_source:
                gone = f"it is not registered on node {self._queue.node} any more"
                self._tell(
                    effects, asked, cluster.MemberChecked(member=member_id, state=ProofState.UNKNOWN, reason=gone)
                )
            elif (check := self._checks.get(member_id)) is not None:
                check.later.append(asked)
            else:
                self._begin(effects, member, [asked])

    def check_retained(self, effects: Effects, member: LocalMember, timeout_s: float, asker: ReturningRank) -> None:
        """Compare the retained arena of a returning rank with its digests.

        If the version has no digests yet, the result becomes its digests. A `RetainedCompared` note follows.
        """
        assert member.state.holds is not None
        asked = _RequestedCheck(effects.now + timeout_s, timeout_s, {member.id}, asker)
        self.asked.append(asked)
        check = _MemberCheck(member.id, self._next(), member.state.holds, [asked], phase="live")
        self._checks[member.id] = check
        places = member.held_places()
        if member.memory.content:
            places = places.at_offsets(member.memory.content)
        self._read(effects, member, "live", check.version, places)

    def is_checking(self, member: LocalMember) -> bool:
        """Whether a check of this member is under way."""
        return member.id in self._checks

    def can_judge(self, member: LocalMember) -> bool:
        """Whether a rank's tensors can be compared later: their digests are known or being computed."""
        known = member.proofs.live
        if not member.proofs.verifies or (known is not None and known.version == member.state.holds):
            return True
        if member.state.step is Step.RESTORING:
            return self.is_checking(member)  # the member's process cannot write the arena before this check ends
        return bool(self._queue.begun(member.id, "stored"))

    @property
    def next_deadline(self) -> float | None:
        """The time at which `expire` must next be called; None while no check runs."""
        return min((asked.deadline for asked in self.asked), default=None)

    def expire(self, effects: Effects) -> None:
        """Answer the checks past their deadline; the answer names the process that is late."""
        late = [asked for asked in self.asked if effects.now >= asked.deadline]
        self.asked = [asked for asked in self.asked if effects.now < asked.deadline]
        for asked in late:
            self._expire(effects, asked)

    def tick(self, effects: Effects) -> None:
        """Start the background work that waited for a tick."""
        for member_id in sorted(self._later):
            member = self._members.get(member_id)
            begun = self._queue.begun(member_id, "stored")
            if member is None or begun or member.proofs.live is not None:
                continue
            if member.state.holds == member.state.version:
                self._take_stored(effects, member, Priority.BACKGROUND)
        self._later.clear()

    def _expire(self, effects: Effects, asked: _RequestedCheck, reason: str = "") -> None:
        for member_id in sorted(asked.left):
            check, member = self._checks.get(member_id), self._members.get(member_id)
            if check is not None:
                check.asked = [a for a in check.asked if a is not asked]
                check.later = [a for a in check.later if a is not asked]
            late = reason or self._late(check, member, asked.timeout_s)
            version = member.state.version if member is not None else None
            self._tell(
                effects,
                asked,
                cluster.MemberChecked(member=member_id, state=ProofState.UNKNOWN, version=version, reason=late),
            )

    def _late(self, check: _MemberCheck | None, member: LocalMember | None, timeout_s: float) -> str:
        within = f"within {timeout_s:.1f} s"
        r = member.registration if member is not None else None
        if check is not None and r is not None and check.phase != "stored" and not r.is_read_by_workers:
            return (
                f"its process (pid {r.pid} on node {self._queue.node}) has not read its tensors {within}: it is "
                "stopped, or too busy; look at it"
            )
        what = "its staging arena" if check is None or check.phase == "stored" else "its live tensors"
        who = f"the workers of node {self._queue.node}"
        return f"{who} have not read {what} {within}; they are stopped, or busy with a swap"

    def _begin(self, effects: Effects, member: LocalMember, asked: list[_RequestedCheck]) -> None:
        check = _MemberCheck(member.id, self._next(), -1, asked)
        self._checks[member.id] = check
        self._start(effects, check, member)

    def _start(self, effects: Effects, check: _MemberCheck, member: LocalMember) -> None:
        if obstacle := self._obstacle(member):
            self._end(effects, check, ProofState.UNKNOWN, obstacle)
            return
        assert member.state.version is not None
        check.version = member.state.version
        if member.proofs.live is not None:
            self._read_live(effects, check, member)
            return
        check.phase = "stored"
        begun = self._queue.begun(member.id, "stored")
        for work in begun:
            work.priority = max(work.priority, Priority.ASKED)
        if not begun and not member.registration.is_proven_live:
            self._take_stored(effects, member, Priority.ASKED)
        elif not begun:
            # its live tensors may have changed since the commit, so a digest computed now is no proof
            reason = f"the digest of version {member.state.version} could not be taken after it was written; swap again"
            self._end(effects, check, ProofState.UNKNOWN, reason)

    def _obstacle(self, member: LocalMember) -> str:
        """Return why a member cannot be checked, "" if it can."""
        if member.state.version is None:
            return "it serves nothing"
        if member.state.live.is_fenced:
            return f"it serves nothing at present: it is fenced ({member.state.reason})"
        if not member.proofs.verifies:
            model = member.registration.request.model
            return f"[models.{model}] verify is false in the coordinator's configuration: no digests are taken"
        if member.state.live is Live.WRITTEN:
            return f"swap {member.state.swap} is writing it in place"
        if member.proofs.live is not None and member.proofs.live.version == member.state.version:
            return ""
        if member.state.holds != member.state.version:
            return (
                f"the digest of version {member.state.version} was not taken: its staging arena was used again before, "
                "or it registered with that version; after the next swap there is one"
            )
        return ""

    def _again(self, effects: Effects, check: _MemberCheck) -> None:
        """Restart a check: the tensors changed while it ran."""
        check.attempts += 1
        check.number = self._next()
        check.differing = []
        self._queue.drop_blocks(check.member, "live", "compare")
        member = self._members.get(check.member)
        if member is None or check.attempts > ATTEMPTS:
            reason = f"versions were staged or taken over {check.attempts - 1} times while it was read; ask again"
            self._end(effects, check, ProofState.UNKNOWN, reason)
        else:
            self._start(effects, check, member)

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers

    # --- steps of a check ---------------------------------------------------------------------------------

    def _take_stored(self, effects: Effects, member: LocalMember, priority: Priority) -> None:
        if member.state.holds is not None:
            self._read(effects, member, "stored", member.state.holds, member.decided_places(), priority)

    def _read(
        self,
        effects: Effects,
        member: LocalMember,
        what: Literal["stored", "live", "compare"],
        version: int,
        places: Places,
        priority: Priority = Priority.ASKED,
        *,
        others: Places | None = None,
        chosen: Sequence[int] | None = None,
    ) -> None:
        work = BlockWork(
            owner=self,
            member=member.id,
            what=what,
            version=version,
            blocks=self._queue.blocks_of(member),
            places=places,
            others=others,
            chosen=chosen,
            priority=priority,
        )
        self._queue.add_blocks(effects, work)

    def _read_live(self, effects: Effects, check: _MemberCheck, member: LocalMember) -> None:
        check.phase = "live"
        if member.registration.is_read_by_workers:
            self._read(effects, member, "live", check.version, member.registration.live)
        elif member.session is not None:
            message = local.CheckLive(
                member=member.id, check=check.number, steps=tuple(self._queue.blocks_of(member).steps.tolist())
            )
            effects.tell(member.session, 0, message)

    def _live_read(self, effects: Effects, check: _MemberCheck, digests: bytes) -> None:
        member = self._members[check.member]
        state = member.state
        restores = state.step is Step.RESTORING
        if restores and member.proofs.live is None:  # unchanged since its process ended
            member.proofs = replace(member.proofs, live=Proof(check.version, digests))
        proof, holds = member.proofs.live, state.holds if restores else state.version
        if proof is None or not proof.version == holds == check.version or state.live is Live.WRITTEN:
            self._again(effects, check)
            return
        if len(digests) != len(proof.digests):
            self._end(
                effects,
                check,
                ProofState.UNKNOWN,
                f"{len(digests)} bytes of digests came, expected {len(proof.digests)}",
            )
            return
        blocks = self._queue.blocks_of(member)
        check.differing = blocks.differing(digests, proof.digests, range(len(blocks)))
        if not check.differing:
            self._end(effects, check, ProofState.PROVEN)
        elif member.registration.is_read_by_workers and member.state.step is Step.COMMITTING:
            self._end(
                effects,
                check,
                ProofState.UNKNOWN,
                "its commit may be writing another version into its tensors; ask again",
            )
        elif member.state.holds != check.version or member.registration.is_proven_live:
            self._differs(effects, check, [])
        else:
            self._locate(effects, check, member)

    def _locate(self, effects: Effects, check: _MemberCheck, member: LocalMember) -> None:
        check.phase = "compare"
        located = check.differing[:MAX_DIFFERENCES]
        if live := member.registration.live:
            self._read(effects, member, "compare", check.version, live, others=member.held_places(), chosen=located)
        elif member.session is not None:
            blocks = self._queue.blocks_of(member)
            columns = (column[located].tolist() for column in (blocks.tensor, blocks.first, blocks.count))
            wanted = tuple(zip(*columns, strict=True))
            message = local.CheckLive(member=member.id, check=check.number, blocks=wanted)
            effects.tell(member.session, 0, message)

    def _located(self, effects: Effects, check: _MemberCheck, found: list[tuple[int, int, int]]) -> None:
        member = self._members[check.member]
        # the staging arena can locate differences only while it still holds this version
        state = member.state
        valid = state.holds == check.version == state.version and not (
            member.registration.live and state.step is Step.COMMITTING
        )
        self._differs(effects, check, found if valid else [])

    def _differs(self, effects: Effects, check: _MemberCheck, found: list[tuple[int, int, int]]) -> None:
        blocks = self._queue.blocks_of(self._members[check.member])
        differences = tuple(
            blocks.difference(block, found[i] if i < len(found) else None)
            for i, block in enumerate(check.differing[:MAX_DIFFERENCES])
        )
        names = len(set(blocks.tensor[check.differing].tolist()))
        reason = f"{len(check.differing)} blocks of {names} tensors are not those of version {check.version}"
        effects.log("differs", member=check.member, version=check.version, blocks=len(check.differing))
        self._end(effects, check, ProofState.DIFFERS, reason, differences)

    def _end(
        self,
        effects: Effects,
        check: _MemberCheck,
        state: ProofState,
        reason: str = "",
        differences: tuple[Difference, ...] = (),
    ) -> None:
        member = self._members.get(check.member)
        known = member.proofs.live if member is not None and state != ProofState.UNKNOWN else None
        serves = member.state.version if member is not None and not member.state.live.is_fenced else None
        report = cluster.MemberChecked(
            member=check.member,
            state=state,
            version=check.version if state != ProofState.UNKNOWN else serves,
            reason=clipped(reason),
            bytes=self._queue.blocks_of(member).nbytes if member is not None and known is not None else 0,
            digest=xxhash.xxh3_128_hexdigest(known.digests) if known is not None else "",
            form=member.registration.form if member is not None else "",
            blocks=len(check.differing) if state == ProofState.DIFFERS else 0,
            differences=differences,
            run=member.state.run if member is not None else "",
        )
        self._checks.pop(check.member, None)
        for asked in check.asked if member is not None else [*check.asked, *check.later]:
            self._tell(effects, asked, report)
        if check.later and member is not None:
            self._begin(effects, member, check.later)

    def _tell(self, effects: Effects, asked: _RequestedCheck, report: cluster.MemberChecked) -> None:
        asked.left.discard(report.member)
        if not asked.left:
            self.asked = [a for a in self.asked if a is not asked]
        if isinstance(asked.asker, str):
            effects.say(cluster.MembersChecked(check=asked.asker, members=(report,)))
        else:
            returns = asked.asker
            effects.notes.append(RetainedCompared(returns.session, returns.request, returns.about, report))

    # --- clients ------------------------------------------------------------------------------------------

    def client_said(self, effects: Effects, member: LocalMember, message: local.LiveChecked) -> None:
        """Handle a client's message about its live tensors."""
        check = self._checks.get(member.id)
        if check is None or check.number != message.check:
            return
        match message:
            case local.LiveChecked(again=True) if check.phase == "live":
                self._again(effects, check)
            case local.LiveChecked(reason=reason) if reason and check.phase == "live":
                self._end(effects, check, ProofState.UNKNOWN, reason)
            case local.LiveChecked(digests=digests) if check.phase == "live":
                self._live_read(effects, check, digests)
            case local.LiveChecked(found=found) if check.phase == "compare":
                self._located(effects, check, list(found))
            case _:
                pass

    # --- callbacks of the digest queue (WorkOwner) -------------------------------------------------------

    def is_wanted(self, work: BlockWork) -> bool:
        """Return whether the tensors to read still hold this version."""
        member = self._members.get(work.member)
        return member is not None and (work.what == "live" or member.state.holds == work.version)

    def unwanted(self, effects: Effects, work: BlockWork) -> None:
        """End or restart the check of a version that the staging arena no longer holds."""
        if work.what == "seed":
            proven(effects, work, f"it serves version {work.version} no longer")
        elif work.what == "stored":
            self.seeds.taken(effects, work.member)
        check = self._check_of(work)
        if check is not None and work.what == "compare":
            self._differs(effects, check, [])
        elif check is not None:
            self._again(effects, check)

    def done(self, effects: Effects, work: BlockWork) -> None:
        """Continue with the checks that waited for this result."""
        member, check = self._members[work.member], self._check_of(work)
        match work.what:
            case "seed":
                self.seeds.read(effects, work, member)
            case "stored":
                member.proofs = replace(member.proofs, live=Proof(work.version, work.digests))
                effects.log("digests", member=member.id, version=work.version, blocks=len(work.blocks))
                self.seeds.taken(effects, member.id)
                if check is not None:
                    self._start(effects, check, member)
            case "live" if check is not None:
                self._live_read(effects, check, work.digests)
            case "compare" if check is not None:
                self._located(
                    effects, check, [found for each in work.found if isinstance(each, tuple) for found in each]
                )

    def failed(self, effects: Effects, work: BlockWork, reason: str) -> None:
        """Answer the checks that waited for this result with the failure."""
        effects.log("digests-failed", member=work.member, what=work.what, reason=reason)
        if work.what == "seed":
            proven(effects, work, reason)
        elif work.what == "stored":
            self.seeds.taken(effects, work.member)
        check = self._check_of(work)
        if check is not None and work.what == "compare":
            self._differs(effects, check, [])
        elif check is not None:
            self._end(effects, check, ProofState.UNKNOWN, reason)

    def _check_of(self, work: BlockWork) -> _MemberCheck | None:
        check = self._checks.get(work.member)
        return check if check is not None and check.phase == work.what else None
