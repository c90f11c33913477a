"""What a node's members are asked: to stand still, to take a version over, to serve nothing until more is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from refitd.daemon.actions import Instruction, Log, ToClient, ToCoordinator
from refitd.daemon.held import held_of
from refitd.daemon.jobs import JobTable, Share, dealt
from refitd.daemon.mapped import WorkerArenas
from refitd.daemon.members import Member
from refitd.dtypes import ELEMENT_SIZES
from refitd.execute.copies import whole_tensors
from refitd.protocol import cluster, local
from refitd.protocol.base import Message

# A commit copy that a dying worker left half done is done again; it is the same copy, so once more is harmless.
COMMIT_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Committing:
    """Why a run is performed: to make a staged version live in a member's arena."""

    swap: str
    member: str
    attempt: int


class Commits:
    """Has members take versions over. Instructions go to `out`."""

    def __init__(
        self,
        workers: int,
        members: dict[str, Member],
        jobs: JobTable,
        maps: WorkerArenas,
        out: Callable[[Instruction], None],
    ) -> None:
        self._workers = workers
        self._members = members
        self._jobs = jobs
        self._maps = maps
        self._out = out
        self._attempts: dict[str, Committing] = {}  # latest commit copy, by member

    # --- before the decision, and in doubt ----------------------------------------------------------------

    def pause(self, swap: str, version: int, members: Sequence[str]) -> None:
        """Ask members to stand still until they have committed or the swap is aborted."""
        self._log("swap", swap=swap, version=version, phase="pause", members=list(members))
        for member_id in members:
            member = self._members.get(member_id)
            if member is None or member.session is None:
                self._say(cluster.MemberCommitFailed(swap=swap, member=member_id, reason="it is not registered here"))
                continue
            member.paused = swap
            self._out(ToClient(member.session, 0, local.AskPause(swap=swap, member=member.id, version=version)))

    def paused(self, swap: str, member: Member) -> None:
        """The member stands still."""
        if member.paused == swap:
            self._say(cluster.MemberQuiet(swap=swap, member=member.id))

    def fence(self, reason: str) -> None:
        """Have members that hold a staged version of which nobody here knows whether it was decided serve nothing."""
        for member in self._members.values():
            if (member.staged is not None or member.writing is not None) and not member.fenced:
                self._fence(member, "doubt", reason)

    def fence_behind(self, member: Member, reason: str) -> None:
        """Have a member that holds another version than the live one serve nothing until it has caught up."""
        self._fence(member, "behind", reason)

    def _fence(self, member: Member, kind: str, reason: str) -> None:
        member.fenced = kind
        if member.session is not None:
            self._log("fenced" if reason else "unfenced", member=member.id, reason=reason)
            self._out(ToClient(member.session, 0, local.Fence(member=member.id, reason=reason)))

    def aborted(self, swap: str, reason: str) -> None:
        """Nothing is written for this swap any more: let its members go on with what they have."""
        for member in self._members.values():
            if member.staged == swap:
                member.staged = None
            if member.writing == swap:
                member.writing, member.version = None, None
                member.poisoned = f"swap {swap} ended while it was written in place: {reason}"
            if member.paused == swap:
                member.paused = None
                if member.session is not None:
                    is_poisoned = bool(member.poisoned)
                    resume = local.Resume(swap=swap, member=member.id, reason=reason, is_poisoned=is_poisoned)
                    self._out(ToClient(member.session, 0, resume))
            if member.fenced == "doubt" and member.staged is None:
                self._fence(member, "", "")

    # --- commit -------------------------------------------------------------------------------------------

    def begin(self, swap: str, version: int) -> None:
        """Tell every member that has this swap staged to take it over at its next commit point."""
        self._log("swap", swap=swap, version=version, phase="commit")
        for member in self._members.values():
            if member.staged != swap or member.session is None:
                continue
            member.staged_version, member.committing = version, swap
            prepare = local.PrepareCommit(
                swap=swap,
                member=member.id,
                version=version,
                by_worker=bool(member.live) and not member.in_place,
                in_place=member.in_place,
            )
            self._out(ToClient(member.session, 0, prepare))

    def quiet(self, swap: str, member: Member) -> None:
        """The member stands still: a worker may write its live tensors."""
        if member.staged == swap and member.live and not member.in_place:
            self._copy_live(swap, member, attempt=1)

    def _copy_live(self, swap: str, member: Member, attempt: int) -> None:
        def make() -> list[Share]:
            pairs = zip(member.held_places(), member.live, held_of(member.registration), strict=True)
            copies = whole_tensors([(src, dst, ELEMENT_SIZES[tensor.dtype]) for src, dst, tensor in pairs])
            return dealt(copies, self._workers, self._maps.homes(copies.arenas()))

        purpose = Committing(swap, member.id, attempt)
        self._attempts[member.id] = purpose
        if not self._jobs.start(("commit", member.id), make, purpose, verify=member.verifies):
            self.applied(purpose, "")

    def applied(self, purpose: Committing, reason: str) -> None:
        """A member's live tensors have been written, or (with a reason) could not be."""
        member = self._members.get(purpose.member)
        if member is not None and member.session is not None:
            applied = local.CommitApplied(swap=purpose.swap, member=purpose.member, reason=reason)
            self._out(ToClient(member.session, 0, applied))

    def committed(self, swap: str, member: Member, paused_s: float) -> bool:
        """The member has the version live; return whether that was what it had been told to do."""
        if member.staged != swap:
            return False
        self._log(
            "swap", swap=swap, version=member.staged_version, phase="committed", member=member.id, paused=paused_s
        )
        member.version = member.staged_version
        member.holds = member.staged_version
        member.writing, member.poisoned = None, ""
        member.fenced = ""  # the client knows: it has taken the version over
        member.staged = member.committing = member.paused = None
        self._say(cluster.MemberCommitted(swap=swap, member=member.id, paused_s=paused_s))
        return True

    def failed(self, swap: str, member: Member, reason: str) -> None:
        """The member could not take the version over, and serves none until a swap succeeds; or not stand still."""
        self._log("swap", swap=swap, phase="failed", member=member.id, reason=reason)
        if member.committing == swap:
            member.version = member.staged = member.committing = member.paused = member.writing = None
        elif member.paused != swap:
            return
        self._say(cluster.MemberCommitFailed(swap=swap, member=member.id, reason=reason))

    def member_left(self, member: Member) -> None:
        """A member is gone; its jobs are of no use."""
        self._attempts.pop(member.id, None)
        self._jobs.drop_keys(lambda key: key == ("commit", member.id))

    def run_done(self, purpose: Committing) -> None:
        """A share of a commit copy is done."""
        # a share of an attempt that was repeated says nothing; only the latest attempt counts
        latest = self._attempts.get(purpose.member) == purpose
        if latest and not self._jobs.busy_with(purpose):
            self.applied(purpose, "")

    def again(self, purpose: Committing, reason: str) -> None:
        """Repeat a commit copy from the start: the shares of other workers that still run write the same bytes."""
        member = self._members.get(purpose.member)
        if member is None:
            return
        if purpose.attempt < COMMIT_ATTEMPTS:
            self._copy_live(purpose.swap, member, purpose.attempt + 1)
        else:
            self.applied(purpose, f"{reason}; {COMMIT_ATTEMPTS} attempts failed")

    # --- output -------------------------------------------------------------------------------------------

    def _say(self, message: Message) -> None:
        self._out(ToCoordinator(0, message))

    def _log(self, event: str, **fields: object) -> None:
        self._out(Log(event, fields))
