"""Proofs: digests of committed versions, and comparison of live tensors with them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import xxhash

from refitd.addressing.places import Places
from refitd.daemon.actions import Instruction, ToClient, ToCoordinator
from refitd.daemon.digest_work import BlockWork, DigestQueue, Priority
from refitd.daemon.members import LocalMember, Proof
from refitd.daemon.seed_proofs import SeedProofs
from refitd.daemon.target_state import Live, Step
from refitd.events import Log
from refitd.protocol import cluster, local
from refitd.protocol.base import clipped
from refitd.protocol.reports import Difference
from refitd.states import ProofState

# differences located and listed for each rank
MAX_DIFFERENCES = 16
# how often a check is restarted because another version was committed meanwhile
ATTEMPTS = 4
# limit on checks under way
MAX_ASKED = 64


@dataclass(slots=True)
class _RequestedCheck:
    """A check that the coordinator requested, or a registration, until it is answered."""

    deadline: float
    timeout_s: float
    left: set[str]
    tell: Callable[[cluster.MemberChecked], None]


@dataclass(slots=True)
class _MemberCheck:
    """The check of one member. Requests that arrive during it wait for a second check that follows."""

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

    The digests cover the staging arena, whose content was compared with the sources when it was staged. For a rank that
    flips or is written in place they cover the live tensors, directly after the commit. Workers compute them, and also
    read live tensors in arenas; a process's own tensors are read by its client. Instructions go to `out`.
    """

    def __init__(
        self,
        members: dict[str, LocalMember],
        queue: DigestQueue,
        out: Callable[[Instruction], None],
    ) -> None:
        self._members = members
        self._queue = queue
        self._out = out
        self._next = itertools.count(1).__next__
        self._checks: dict[str, _MemberCheck] = {}
        self._asked: list[_RequestedCheck] = []
        self._later: set[str] = set()  # members whose digests are due at the next tick
        self.seeds = SeedProofs(members, queue, self, self._log)

    # --- members commit and leave -------------------------------------------------------------------------

    def committed(self, member: LocalMember) -> None:
        """The member has committed its staging arena: schedule its digests, and restart a check under way."""
        if not member.flips or member.proof is None or member.proof.version != member.state.version:
            member.proof = None  # a version that goes live again by an exchange keeps its first digests
        self._queue.drop_blocks(member.id)
        if member.proof is not None:
            pass
        elif member.verifies and member.is_proven_live:
            # the engine may change tensors that were written in place: digest them at once
            self._take_stored(member, Priority.ASKED)
        elif member.verifies:
            self._later.add(member.id)  # for very many tensors this takes long, and must not delay the end of the swap
        check = self._checks.get(member.id)
        if check is not None and (member.is_read_by_workers or check.phase != "live"):
            self._again(check)  # for tensors that the client reads, the client itself reports changes

    def restored(self, member: LocalMember) -> None:
        """The member restored its predecessor's staging arena; digests taken of that version remain valid."""
        if member.proof is None:
            self.committed(member)

    def left(self, member: LocalMember, reason: str) -> None:
        """Drop the work of a member that has gone, and answer its checks."""
        self.seeds.left(member)
        check = self._checks.pop(member.id, None)
        if check is not None:
            for asked in [*check.asked, *check.later]:
                self._tell(
                    asked, cluster.MemberChecked(member=member.id, state=ProofState.UNKNOWN, reason=clipped(reason))
                )

    # --- requests -----------------------------------------------------------------------------------------

    def check(self, message: cluster.CheckMembers, now: float) -> None:
        """Start checks of members; each is answered as soon as it is done, the rest at the deadline."""

        def tell(report: cluster.MemberChecked) -> None:
            self._out(ToCoordinator(0, cluster.MembersChecked(check=message.check, members=(report,))))

        asked = _RequestedCheck(now + message.timeout_s, message.timeout_s, set(message.members), tell)
        if len(self._asked) >= MAX_ASKED:
            self._expire(asked, f"node {self._queue.node} has {MAX_ASKED} checks under way already")
            return
        self._asked.append(asked)
        for member_id in sorted(asked.left):
            member = self._members.get(member_id)
            if member is None or member.is_source:
                gone = f"it is not registered on node {self._queue.node} any more"
                self._tell(asked, cluster.MemberChecked(member=member_id, state=ProofState.UNKNOWN, reason=gone))
            elif (check := self._checks.get(member_id)) is not None:
                check.later.append(asked)
            else:
                self._begin(member, [asked])

    def check_retained(
        self, member: LocalMember, now: float, timeout_s: float, tell: Callable[[cluster.MemberChecked], None]
    ) -> None:
        """Compare the retained arena of a rank that returns with its digests; take these first if they are missing."""
        assert member.state.holds is not None
        asked = _RequestedCheck(now + timeout_s, timeout_s, {member.id}, tell)
        self._asked.append(asked)
        check = _MemberCheck(member.id, self._next(), member.state.holds, [asked], phase="live")
        self._checks[member.id] = check
        places = member.held_places()
        if member.content:
            places = places.at_offsets(member.content)
        self._read(member, "live", check.version, places)

    def is_checking(self, member: LocalMember) -> bool:
        """Whether a check of this member is under way."""
        return member.id in self._checks

    def can_judge(self, member: LocalMember) -> bool:
        """Whether a rank's tensors can be compared later: their digests are known, or being taken."""
        if not member.verifies or (member.proof is not None and member.proof.version == member.state.holds):
            return True
        if member.state.step is Step.RESTORING:
            return self.is_checking(member)  # until that has ended its process cannot write it
        return bool(self._queue.begun(member.id, "stored"))

    @property
    def next_deadline(self) -> float | None:
        """When `expire` is next needed; None while no check runs."""
        return min((asked.deadline for asked in self._asked), default=None)

    def expire(self, now: float) -> None:
        """Answer the checks past their deadline, naming what is late."""
        late = [asked for asked in self._asked if now >= asked.deadline]
        self._asked = [asked for asked in self._asked if now < asked.deadline]
        for asked in late:
            self._expire(asked)

    def tick(self) -> None:
        """Start the background work that waited for a tick."""
        for member_id in sorted(self._later):
            member = self._members.get(member_id)
            begun = self._queue.begun(member_id, "stored")
            if member is not None and not begun and member.proof is None and member.state.holds == member.state.version:
                self._take_stored(member, Priority.BACKGROUND)
        self._later.clear()

    def _expire(self, asked: _RequestedCheck, reason: str = "") -> None:
        for member_id in sorted(asked.left):
            check, member = self._checks.get(member_id), self._members.get(member_id)
            if check is not None:
                check.asked = [a for a in check.asked if a is not asked]
                check.later = [a for a in check.later if a is not asked]
            late = reason or self._late(check, member, asked.timeout_s)
            version = member.state.version if member is not None else None
            self._tell(
                asked, cluster.MemberChecked(member=member_id, state=ProofState.UNKNOWN, version=version, reason=late)
            )

    def _late(self, check: _MemberCheck | None, member: LocalMember | None, timeout_s: float) -> str:
        within = f"within {timeout_s:.1f} s"
        if check is not None and member is not None and check.phase != "stored" and not member.is_read_by_workers:
            return (
                f"its process (pid {member.pid} on node {self._queue.node}) has not read its tensors {within}: it is "
                "stopped, or too busy; look at it"
            )
        what = "its staging arena" if check is None or check.phase == "stored" else "its live tensors"
        who = f"the workers of node {self._queue.node}"
        return f"{who} have not read {what} {within}; they are stopped, or busy with a swap"

    def _begin(self, member: LocalMember, asked: list[_RequestedCheck]) -> None:
        check = _MemberCheck(member.id, self._next(), -1, asked)
        self._checks[member.id] = check
        self._start(check, member)

    def _start(self, check: _MemberCheck, member: LocalMember) -> None:
        if obstacle := self._obstacle(member):
            self._end(check, ProofState.UNKNOWN, obstacle)
            return
        assert member.state.version is not None
        check.version = member.state.version
        if member.proof is not None:
            self._read_live(check, member)
            return
        check.phase = "stored"
        begun = self._queue.begun(member.id, "stored")
        for work in begun:
            work.priority = max(work.priority, Priority.ASKED)
        if not begun and not member.is_proven_live:
            self._take_stored(member, Priority.ASKED)
        elif not begun:
            # its live tensors may have changed since; their digest would prove nothing
            reason = f"the digest of version {member.state.version} could not be taken after it was written; swap again"
            self._end(check, ProofState.UNKNOWN, reason)

    def _obstacle(self, member: LocalMember) -> str:
        """Return why a member cannot be checked, "" if it can."""
        if member.state.version is None:
            return "it serves nothing"
        if member.state.live.is_fenced:
            return f"it serves nothing at present: it is fenced ({member.state.reason})"
        if not member.verifies:
            model = member.registration.model
            return f"[models.{model}] verify is false in the coordinator's configuration: no digests are taken"
        if member.state.live is Live.WRITTEN:
            return f"swap {member.state.swap} is writing it in place"
        if member.proof is not None and member.proof.version == member.state.version:
            return ""
        if member.state.holds != member.state.version:
            return (
                f"the digest of version {member.state.version} was not taken: its staging arena was used again before, "
                "or it registered with that version; after the next swap there is one"
            )
        return ""

    def _again(self, check: _MemberCheck) -> None:
        """Restart a check: the tensors changed while it ran."""
        check.attempts += 1
        check.number = self._next()
        check.differing = []
        self._queue.drop_blocks(check.member, "live", "compare")
        member = self._members.get(check.member)
        if member is None or check.attempts > ATTEMPTS:
            reason = f"versions were staged or taken over {check.attempts - 1} times while it was read; ask again"
            self._end(check, ProofState.UNKNOWN, reason)
        else:
            self._start(check, member)

    # --- steps of a check ---------------------------------------------------------------------------------

    def _take_stored(self, member: LocalMember, priority: Priority) -> None:
        if member.state.holds is not None:
            self._read(member, "stored", member.state.holds, member.decided_places(), priority)

    def _read(
        self,
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
        self._queue.add_blocks(work)

    def _read_live(self, check: _MemberCheck, member: LocalMember) -> None:
        check.phase = "live"
        if member.is_read_by_workers:
            self._read(member, "live", check.version, member.live)
        elif member.session is not None:
            message = local.DigestLive(
                member=member.id, check=check.number, steps=tuple(self._queue.blocks_of(member).steps.tolist())
            )
            self._out(ToClient(member.session, 0, message))

    def _live_read(self, check: _MemberCheck, digests: bytes) -> None:
        member = self._members[check.member]
        state = member.state
        restores = state.step is Step.RESTORING
        if restores and member.proof is None:
            member.proof = Proof(check.version, digests)  # nobody can have written it since its process ended
        proof, holds = member.proof, state.holds if restores else state.version
        if proof is None or not proof.version == holds == check.version or state.live is Live.WRITTEN:
            self._again(check)
            return
        if len(digests) != len(proof.digests):
            self._end(check, ProofState.UNKNOWN, f"{len(digests)} bytes of digests came, expected {len(proof.digests)}")
            return
        blocks = self._queue.blocks_of(member)
        check.differing = blocks.differing(digests, proof.digests, range(len(blocks)))
        if not check.differing:
            self._end(check, ProofState.PROVEN)
        elif member.is_read_by_workers and member.state.step.is_decided:
            self._end(
                check, ProofState.UNKNOWN, "the workers may be writing another version into its tensors; ask again"
            )
        elif member.state.holds != check.version or member.is_proven_live:
            self._differs(check, [])
        else:
            self._locate(check, member)

    def _locate(self, check: _MemberCheck, member: LocalMember) -> None:
        check.phase = "compare"
        located = check.differing[:MAX_DIFFERENCES]
        if member.live:
            self._read(member, "compare", check.version, member.live, others=member.held_places(), chosen=located)
        elif member.session is not None:
            blocks = self._queue.blocks_of(member)
            columns = (column[located].tolist() for column in (blocks.tensor, blocks.first, blocks.count))
            wanted = tuple(zip(*columns, strict=True))
            message = local.CompareLive(member=member.id, check=check.number, blocks=wanted)
            self._out(ToClient(member.session, 0, message))

    def _located(self, check: _MemberCheck, found: list[tuple[int, int, int]]) -> None:
        member = self._members[check.member]
        # the staging arena locates the differences only if it still holds this version
        state = member.state
        valid = state.holds == check.version == state.version and not (member.live and state.step.is_decided)
        self._differs(check, found if valid else [])

    def _differs(self, check: _MemberCheck, found: list[tuple[int, int, int]]) -> None:
        blocks = self._queue.blocks_of(self._members[check.member])
        differences = tuple(
            blocks.difference(block, found[i] if i < len(found) else None)
            for i, block in enumerate(check.differing[:MAX_DIFFERENCES])
        )
        names = len(set(blocks.tensor[check.differing].tolist()))
        reason = f"{len(check.differing)} blocks of {names} tensors are not those of version {check.version}"
        self._log("differs", member=check.member, version=check.version, blocks=len(check.differing))
        self._end(check, ProofState.DIFFERS, reason, differences)

    def _end(
        self,
        check: _MemberCheck,
        state: ProofState,
        reason: str = "",
        differences: tuple[Difference, ...] = (),
    ) -> None:
        member = self._members.get(check.member)
        known = member is not None and member.proof is not None and state != ProofState.UNKNOWN
        serves = member.state.version if member is not None and not member.state.live.is_fenced else None
        report = cluster.MemberChecked(
            member=check.member,
            state=state,
            version=check.version if state != ProofState.UNKNOWN else serves,
            reason=clipped(reason),
            bytes=self._queue.blocks_of(member).nbytes if member is not None and known else 0,
            digest=xxhash.xxh3_128_hexdigest(member.proof.digests) if member and member.proof and known else "",
            form=member.form if member is not None else "",
            blocks=len(check.differing) if state == ProofState.DIFFERS else 0,
            differences=differences,
            run=member.state.run if member is not None else "",
        )
        self._checks.pop(check.member, None)
        for asked in check.asked if member is not None else [*check.asked, *check.later]:
            self._tell(asked, report)
        if check.later and member is not None:
            self._begin(member, check.later)

    def _tell(self, asked: _RequestedCheck, report: cluster.MemberChecked) -> None:
        asked.left.discard(report.member)
        if not asked.left:
            self._asked = [a for a in self._asked if a is not asked]
        asked.tell(report)

    # --- clients ------------------------------------------------------------------------------------------

    def client_said(self, member: LocalMember, message: local.LiveDigests | local.LiveCompared) -> None:
        """Handle a client's message about its live tensors."""
        check = self._checks.get(member.id)
        if check is None or check.number != message.check:
            return
        match message:
            case local.LiveDigests(_, _, _, _, True):
                self._again(check)
            case local.LiveDigests(_, _, _, reason) if reason and check.phase == "live":
                self._end(check, ProofState.UNKNOWN, reason)
            case local.LiveDigests(_, _, digests) if check.phase == "live":
                self._live_read(check, digests)
            case local.LiveCompared(_, _, found) if check.phase == "compare":
                self._located(check, list(found))
            case _:
                pass

    # --- what the queue asks and tells (WorkOwner) -------------------------------------------------------

    def is_wanted(self, work: BlockWork) -> bool:
        """Return whether the tensors to be read still hold this version."""
        member = self._members.get(work.member)
        return member is not None and (work.what == "live" or member.state.holds == work.version)

    def unwanted(self, work: BlockWork) -> None:
        """End or restart the check of a version that the staging arena no longer holds."""
        if work.what == "seed":
            work.then(f"it serves version {work.version} no longer")
        elif work.what == "stored":
            self.seeds.taken(work.member)
        check = self._check_of(work)
        if check is not None and work.what == "compare":
            self._differs(check, [])
        elif check is not None:
            self._again(check)

    def done(self, work: BlockWork) -> None:
        """Continue with the checks that waited for this result."""
        member, check = self._members[work.member], self._check_of(work)
        match work.what:
            case "seed":
                self.seeds.read(work, member)
            case "stored":
                member.proof = Proof(work.version, work.digests)
                self._log("digests", member=member.id, version=work.version, blocks=len(work.blocks))
                self.seeds.taken(member.id)
                if check is not None:
                    self._start(check, member)
            case "live" if check is not None:
                self._live_read(check, work.digests)
            case "compare" if check is not None:
                self._located(check, [found for each in work.found if isinstance(each, tuple) for found in each])

    def failed(self, work: BlockWork, reason: str) -> None:
        """Answer the checks that waited for this result with the reason why there is none."""
        self._log("digests-failed", member=work.member, what=work.what, reason=reason)
        if work.what == "seed":
            work.then(reason)
        elif work.what == "stored":
            self.seeds.taken(work.member)
        check = self._check_of(work)
        if check is not None and work.what == "compare":
            self._differs(check, [])
        elif check is not None:
            self._end(check, ProofState.UNKNOWN, reason)

    def _check_of(self, work: BlockWork) -> _MemberCheck | None:
        check = self._checks.get(work.member)
        return check if check is not None and check.phase == work.what else None

    # --- details ------------------------------------------------------------------------------------------

    def _log(self, event: str, **fields: object) -> None:
        self._out(Log(event, fields))
