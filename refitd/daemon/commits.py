"""Asks this node's members to stand still, to commit a version, or to stop serving while a decision is in doubt."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from refitd.addressing.copies import whole_tensors
from refitd.daemon.actions import Instruction, ToClient, ToCoordinator
from refitd.daemon.finishing import held_of
from refitd.daemon.jobs import JobTable, WorkerShare, shares_of
from refitd.daemon.lockstep import LocalSteps
from refitd.daemon.members import LocalMember
from refitd.daemon.target_state import (
    Aborted,
    AskedToHalt,
    Committed,
    CommittedByCopy,
    Decided,
    Failed,
    FellBehind,
    Live,
    Step,
    StoodAside,
    StoodStill,
)
from refitd.daemon.worker_arenas import WorkerArenas
from refitd.dtypes import ELEMENT_SIZES
from refitd.errors import IllegalTransition
from refitd.events import Log
from refitd.protocol import cluster, local
from refitd.protocol.base import Message, clipped

# A dying worker can leave a commit copy half done. Repeating it is harmless: it writes the same bytes.
COMMIT_ATTEMPTS = 3

# Steps in which a rank has been asked to stand still and must be told when the swap is over.
_ASKED = (Step.HALTING, Step.HALTED, Step.PAUSING, Step.PAUSED)


@dataclass(frozen=True, slots=True)
class Committing:
    """Purpose of a run: to make a staged version live in a member's arena."""

    swap: str
    member: str
    attempt: int


class Commits:
    """Runs the commits of this node's members. Instructions go to `out`."""

    def __init__(
        self,
        workers: int,
        members: dict[str, LocalMember],
        jobs: JobTable,
        maps: WorkerArenas,
        out: Callable[[Instruction], None],
        end_runs: Callable[[int, str], None],
        exchange: Callable[[int, int], None],
    ) -> None:
        """`end_runs(worker, reason)` replaces a worker and accounts for all its runs.

        `exchange(arena, other)` exchanges what two arenas hold.
        """
        self._exchange = exchange
        self._end_runs = end_runs
        self._workers = workers
        self._members = members
        self._jobs = jobs
        self._maps = maps
        self._out = out
        self._attempts: dict[str, Committing] = {}  # latest commit copy, by member
        self._steps = LocalSteps(members, self._tell, self._say_step)

    # --- before the decision, and in doubt ----------------------------------------------------------------

    def pause(self, swap: str, version: int, members: Sequence[str]) -> None:
        """Ask members to stand still until they have committed or the swap is aborted."""
        self._log("swap", swap=swap, version=version, phase="pause", members=list(members))
        for member_id in members:
            member = self._members.get(member_id)
            if member is None or member.session is None:
                self._say(cluster.MemberCommitFailed(swap=swap, member=member_id, reason="it is not registered here"))
                continue
            try:
                member.move(AskedToHalt(swap))
            except IllegalTransition as exc:
                self._illegal(exc)
                self._say(cluster.MemberCommitFailed(swap=swap, member=member_id, reason=clipped(str(exc))))
                continue
            self._out(ToClient(member.session, 0, local.AskPause(swap=swap, member=member.id, version=version)))

    def paused(self, swap: str, member: LocalMember) -> None:
        """The member stands still; ignored if the swap is over."""
        if member.state.swap == swap and member.state.step in (Step.HALTING, Step.PAUSING):
            member.move(StoodStill(swap))
            self._say(cluster.MemberQuiet(swap=swap, member=member.id))

    def fence_behind(self, member: LocalMember, reason: str) -> None:
        """Fence a member until it has caught up: it does not hold the live version."""
        is_news = member.state.live is not Live.BEHIND  # one that is left out is fenced again at each decision
        member.move(FellBehind(reason))
        if member.session is not None:
            if is_news:
                self._log("fenced", member=member.id, reason=reason)
            self._out(ToClient(member.session, 0, local.Fence(member=member.id, reason=reason)))

    def aborted(self, swap: str, reason: str) -> None:
        """Resume the members of an aborted swap; nothing is written for it any more."""
        for member in self._members.values():
            if member.state.swap != swap:
                continue
            before = member.state
            try:
                member.move(Aborted(swap, reason))
            except IllegalTransition as exc:
                self._illegal(exc)  # a coordinator that aborts a decided swap has lost its memory; do not undo it
                continue
            if member.session is None:
                continue
            if before.step in _ASKED or member.in_place:
                is_poisoned = member.state.live is Live.POISONED
                resume = local.Resume(swap=swap, member=member.id, reason=reason, is_poisoned=is_poisoned)
                self._out(ToClient(member.session, 0, resume))

    # --- commit -------------------------------------------------------------------------------------------

    def begin(self, swap: str, version: int, controlled: Collection[str] = ()) -> None:
        """Tell every member that has this swap staged to take it over at its next commit point.

        A controller calls `controlled` members to their commit points, once each has answered with its step.
        """
        self._log("swap", swap=swap, version=version, phase="commit")
        for member in self._members.values():
            if member.state.staged != swap or member.session is None:
                continue
            try:
                member.move(Decided(swap, version))
            except IllegalTransition as exc:
                self._illegal(exc)
                self._say(cluster.MemberCommitFailed(swap=swap, member=member.id, reason=clipped(str(exc))))
                continue
            if member.state.step is Step.APPLYING:
                continue  # it was told earlier; its live tensors are being written
            member.controlled = swap if member.id in controlled else ""
            prepare = local.PrepareCommit(
                swap=swap,
                member=member.id,
                version=version,
                run=member.state.next_run,
                by_worker=bool(member.live) and not (member.in_place or member.flips),
                flips=member.flips,
                in_place=member.in_place,
                lockstep=member.id not in controlled
                and isinstance(member.registration, local.RegisterTarget)
                and member.registration.lockstep,
                controlled=member.id in controlled,
            )
            self._out(ToClient(member.session, 0, prepare))

    def step_reached(self, member: LocalMember, said: local.StepReached) -> None:
        """A member says how far it has polled: what its replica's ranks, or its controller, wait for."""
        if member.state.swap != said.swap or not member.state.step.is_decided:
            return
        if member.controlled == said.swap:
            self._say_step(member, said)
        else:
            self._steps.reached(member, said)

    def _say_step(self, member: LocalMember, said: local.StepReached) -> None:
        self._say(cluster.MemberStep(said.swap, member.id, said.step, said.origin, said.stands, said.thread))

    def in_step(self, member_id: str, message: local.FlipAt | local.PassPoll) -> None:
        """Tell a member in which poll to commit, or to skip the current one."""
        member = self._members.get(member_id)
        if member is not None and member.state.swap == message.swap:
            self._tell(member, message)

    def _tell(self, member: LocalMember, message: Message) -> None:
        if member.session is not None:
            self._out(ToClient(member.session, 0, message))

    def tick(self) -> None:
        """Hand over to the coordinator the replicas whose ranks have not agreed on a poll here."""
        self._steps.tick()

    def quiet(self, swap: str, member: LocalMember) -> None:
        """The member stands still; workers may write its live tensors."""
        if (
            member.state.swap == swap
            and member.state.step is Step.COMMITTING
            and member.live
            and not (member.in_place or member.flips)
        ):
            member.move(StoodAside(swap))
            self._copy_live(swap, member, attempt=1)

    def _copy_live(self, swap: str, member: LocalMember, attempt: int) -> None:
        def make() -> list[WorkerShare]:
            sizes = np.array([ELEMENT_SIZES[tensor.dtype] for tensor in held_of(member.registration)], np.int64)
            copies = whole_tensors(member.held_places(), member.live, sizes)
            return shares_of(copies, self._workers, self._maps.homes(copies.arenas()))

        purpose = Committing(swap, member.id, attempt)
        self._attempts[member.id] = purpose
        if not self._jobs.start(("commit", member.id), make, purpose, verify=member.verifies):
            self.applied(purpose, "")

    def applied(self, purpose: Committing, reason: str) -> None:
        """Tell a member that its live tensors are written, or why they could not be."""
        member = self._members.get(purpose.member)
        if member is not None and member.session is not None:
            applied = local.CommitApplied(swap=purpose.swap, member=purpose.member, reason=reason)
            self._out(ToClient(member.session, 0, applied))

    def committed(self, swap: str, member: LocalMember, paused_s: float, *, exchanged: bool = False) -> bool:
        """Record that the member committed; return False if it was not asked to."""
        if member.state.swap != swap or not member.state.step.is_decided:
            return False
        member.move(Committed(swap) if exchanged or not member.flips else CommittedByCopy(swap))
        if exchanged and member.flips:
            self._exchange(member.live_arena, member.staging)
            member.exchanged = swap
            member.proof, member.spare_proof = member.spare_proof, member.proof
            member.spare_found = None
        version = member.state.version
        self._log("swap", swap=swap, version=version, phase="committed", member=member.id, paused=paused_s)
        spare, run = member.state.spare, member.state.spare_run
        self._say(cluster.MemberCommitted(swap, member.id, paused_s, spare, run, seeds=member.seeds))
        return True

    def failed(self, swap: str, member: LocalMember, reason: str, *, exchanged: bool = False) -> None:
        """Record and report that the member could not commit (it then serves nothing) or could not stand still."""
        if member.state.swap != swap:
            return
        self._log("swap", swap=swap, phase="failed", member=member.id, reason=reason)
        if member.state.step.is_decided:
            self._stop_copying(member)
            member.move(Failed(swap))
            if member.flips:
                member.proof = member.spare_proof = None
            if exchanged and member.flips:  # it failed afterwards, in a hook of its engine
                self._exchange(member.live_arena, member.staging)
                member.exchanged = swap
        elif member.state.step not in _ASKED:
            return
        self._say(cluster.MemberCommitFailed(swap=swap, member=member.id, reason=reason))

    def _stop_copying(self, member: LocalMember) -> None:
        """Stop workers that write a member's live tensors: the owner no longer waits for them."""
        purpose = self._attempts.pop(member.id, None)
        for worker in sorted(self._jobs.busy_with(purpose)) if purpose is not None else ():
            self._end_runs(worker, f"it still wrote the live tensors of {member.id}")

    def member_left(self, member: LocalMember) -> None:
        """Drop the jobs of a member that left and stop writing its tensors, which belong to its owner again."""
        self._stop_copying(member)
        self._jobs.drop_keys(lambda key: key == ("commit", member.id))

    def run_done(self, purpose: Committing) -> None:
        """A share of a commit copy is done; shares of superseded attempts do not count."""
        latest = self._attempts.get(purpose.member) == purpose
        if latest and not self._jobs.busy_with(purpose):
            self.applied(purpose, "")

    def again(self, purpose: Committing, reason: str) -> None:
        """Repeat a commit copy from the start; shares that still run on other workers write the same bytes."""
        member = self._members.get(purpose.member)
        if member is None or self._attempts.get(member.id) != purpose:
            return
        if purpose.attempt < COMMIT_ATTEMPTS:
            self._copy_live(purpose.swap, member, purpose.attempt + 1)
        else:
            self.applied(purpose, f"{reason}; {COMMIT_ATTEMPTS} attempts failed")

    # --- output -------------------------------------------------------------------------------------------

    def _illegal(self, exc: IllegalTransition) -> None:
        self._log("illegal", reason=str(exc))

    def _say(self, message: Message) -> None:
        self._out(ToCoordinator(0, message))

    def _log(self, event: str, **fields: object) -> None:
        self._out(Log(event, fields))
