"""Rollbacks by exchange: stage the previous version that flipping targets still hold, once its digests match."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from refitd.daemon.actions import Instruction, ToCoordinator
from refitd.daemon.digest_work import BlockWork, DigestQueue, Priority
from refitd.daemon.members import LocalMember, Proof
from refitd.daemon.target_state import SpareStaged, step_of
from refitd.errors import IllegalTransition, RefusedError
from refitd.events import Log
from refitd.protocol import cluster
from refitd.protocol.base import clipped


class Spares:
    """The previous versions in the targets' staging arenas. Engines can write these arenas, though they never should.

    Each is compared with its digests in the background, soon after the commit that left it there, so that a rollback
    need not read it; an earlier rollback waits for that comparison. A version that differs, or cannot be read, never
    goes live. A version that went live again is compared once more at once, because it may have been written in
    between; a rank that differs then stops serving. Instructions go to `out`.
    """

    def __init__(
        self,
        members: dict[str, LocalMember],
        queue: DigestQueue,
        out: Callable[[Instruction], None],
        fence: Callable[[LocalMember, str], None],
        update: Callable[[], None],
    ) -> None:
        """`fence(member, reason)` stops a rank from serving its version.

        `update()` tells the coordinator about changed members, so that it rolls back by a copy instead.
        """
        self._members = members
        self._queue = queue
        self._out = out
        self._fence = fence
        self._update = update
        self._staging: dict[str, tuple[cluster.StageSpare, list[LocalMember]]] = {}  # by swap
        self._later: set[str] = set()  # members whose other arena is to be read from the next tick on

    # --- a rollback ---------------------------------------------------------------------------------------

    def stage(self, message: cluster.StageSpare) -> None:
        """Take the members' previous version as staged, once it is proven on each."""
        members = self._exchangeable(message)
        if members is None:
            return
        self._staging[message.swap] = message, members
        for member in members:
            if member.verifies and member.spare_found is None:
                self._compare(member, "spare", Priority.SWAP)
        self._go_on()

    def abort(self, swap: str) -> None:
        """Stop staging for this swap."""
        self._staging.pop(swap, None)

    def staging(self) -> set[str]:
        """Return the swaps that wait for a comparison."""
        return set(self._staging)

    def _exchangeable(self, message: cluster.StageSpare) -> list[LocalMember] | None:
        """Return the members if all can exchange their arenas for this version; else report a failure, return None."""
        event = SpareStaged(message.swap, message.version, message.run)
        members = [(member, self._members.get(member)) for member in message.members]
        try:
            for member_id, member in members:
                if member is None:
                    raise RefusedError(f"{member_id} is no longer registered on node {self._queue.node}")
                step_of(member.state, event)  # all of them first: a refusal changes nothing
        except (RefusedError, IllegalTransition) as exc:
            self._stage_failed(message.swap, f"node {self._queue.node}", clipped(str(exc)))
            return None
        return [member for _, member in members if member is not None]

    def _go_on(self) -> None:
        """Stage the swaps whose versions are all proven; fail those with a version that differs."""
        for swap, (message, members) in list(self._staging.items()):
            found = {member.id: member.spare_found if member.verifies else "" for member in members}
            wrong = next(((member, text) for member, text in found.items() if text), None)
            if wrong is not None:
                self._stage_failed(swap, *wrong)
            elif None not in found.values():
                del self._staging[swap]
                self._staged(message)

    def _staged(self, message: cluster.StageSpare) -> None:
        members = self._exchangeable(message)  # check again: a member may have left since
        if members is None:
            return
        self._log("swap", swap=message.swap, version=message.version, phase="staged")
        for member in members:
            member.move(SpareStaged(message.swap, message.version, message.run))
        self._out(ToCoordinator(0, cluster.StageDone(swap=message.swap, copies=0, bytes=0, seconds=0.0)))

    def _stage_failed(self, swap: str, where: str, reason: str) -> None:
        self._staging.pop(swap, None)
        self._log("stage-failed", swap=swap, where=where, reason=reason)
        self._out(ToCoordinator(0, cluster.StageFailed(swap=swap, where=where, reason=reason)))

    # --- comparisons --------------------------------------------------------------------------------------

    def exchanged(self, member: LocalMember) -> None:
        """Note that the member has exchanged its arenas. It has a `proof` already if the exchange was a rollback."""
        self._queue.drop_blocks(member.id, "spare", "returned")
        if member.verifies and member.state.spare is not None:
            self._later.add(member.id)
        if member.proof is not None:
            self._compare(member, "returned", Priority.ASKED)

    def left(self, member: LocalMember) -> None:
        """Forget a member that has gone."""
        self._later.discard(member.id)

    def tick(self) -> None:
        """Start the comparisons that were scheduled before this tick."""
        for member in [self._members[name] for name in sorted(self._later) if name in self._members]:
            if member.state.spare is not None and member.spare_found is None:
                self._compare(member, "spare", Priority.BACKGROUND)
        self._later.clear()

    def _compare(self, member: LocalMember, what: Literal["spare", "returned"], priority: Priority) -> None:
        begun = self._queue.begun(member.id, what)
        for work in begun:
            work.priority = max(work.priority, priority)
        if begun:
            return
        places, version = member.live, member.state.version
        if what == "spare":
            places, version = member.held_places(), member.state.spare
        assert version is not None
        blocks = self._queue.blocks_of(member)
        work = BlockWork(
            owner=self,
            member=member.id,
            what=what,
            version=version,
            blocks=blocks,
            places=places,
            priority=priority,
        )
        self._queue.add_blocks(work)

    # --- what the queue asks and tells (WorkOwner) -------------------------------------------------------

    def is_wanted(self, work: BlockWork) -> bool:
        """Return whether the arena still holds this version."""
        state = self._members[work.member].state
        return (state.spare if work.what == "spare" else state.version) == work.version

    def unwanted(self, work: BlockWork) -> None:
        """Do nothing: a rollback to that version has been refused already."""

    def done(self, work: BlockWork) -> None:
        """Compare the digests with those taken while the version was live."""
        member, digests = self._members[work.member], work.digests
        known = member.spare_proof if work.what == "spare" else member.proof
        if work.what == "spare" and (known is None or known.version != work.version):
            # replaced before its digests were taken: the present ones become the reference
            known = member.spare_proof = Proof(work.version, digests)
        different = [] if known is None else work.blocks.differing(digests, known.digests, range(len(work.blocks)))
        wrong = ""
        if different:
            self._log("differs", member=member.id, version=work.version, blocks=len(different))
            name = work.blocks.difference(different[0], None).parameter
            more = f" and {len(different) - 1} more blocks" if len(different) > 1 else ""
            wrong = f"{name}{more}: its memory has changed since version {work.version} went live"
        if work.what == "spare":
            self._found(member, wrong)
        elif wrong:
            self._fence(member, wrong)

    def failed(self, work: BlockWork, reason: str) -> None:
        """Exclude the version from rollbacks: it cannot be read."""
        self._log("digests-failed", member=work.member, what=work.what, reason=reason)
        member = self._members.get(work.member)
        if member is not None and work.what == "spare":
            self._found(member, f"what its other arena holds cannot be compared: {reason}")

    def _found(self, member: LocalMember, wrong: str) -> None:
        member.spare_found = wrong
        self._log("spare-compared", member=member.id, version=member.state.spare, reason=wrong)
        if wrong:
            member.is_told = False
            self._update()
        self._go_on()

    def _log(self, event: str, **fields: object) -> None:
        self._out(Log(event, fields))
