"""Check that a target's tensors are unchanged since its version went live: others copied them, or a delta failed."""

from __future__ import annotations

from collections.abc import Callable, Collection

from refitd.daemon.digest_work import BlockWork, DigestQueue, Priority, WorkOwner
from refitd.daemon.members import LocalMember


class SeedProofs:
    """Compares seeds with their digests, as work of the digest queue."""

    def __init__(
        self,
        members: dict[str, LocalMember],
        queue: DigestQueue,
        owner: WorkOwner[BlockWork],
        log: Callable[..., None],
    ) -> None:
        """`owner` forwards the queue's results of work on seeds."""
        self._members, self._queue, self._owner, self._log = members, queue, owner, log
        # (member, tensors, whom to tell) of seeds whose first digests are being taken
        self._unproven: list[tuple[str, Collection[str] | None, Callable[[str], None]]] = []

    def prove(self, member: LocalMember, tensors: Collection[str] | None, then: Callable[[str], None]) -> None:
        """Digest these tensors (None: all) of a member's served version; tell `then` what is wrong with them.

        "" if nothing is: it has not changed since it went live. If digests have not been taken yet of a staging arena,
        nothing is known that it could be compared with; only workers have ever written there.
        """
        version = member.state.version
        if member.proof is None:
            begun = self._queue.begun(member.id, "stored")
            for work in begun:
                work.priority = Priority.SWAP
            if begun:
                self._unproven.append((member.id, tensors, then))
            else:
                then(f"the digest of version {version} could not be taken when it went live" * member.is_proven_live)
            return
        blocks = self._queue.blocks_of(member)
        work = BlockWork(
            owner=self._owner,
            member=member.id,
            what="seed",
            version=member.proof.version,
            blocks=blocks,
            places=member.decided_places(),
            chosen=range(len(blocks)) if tensors is None else blocks.of(tensors),
            then=then,
            priority=Priority.SWAP,
        )
        self._queue.add_blocks(work)

    def read(self, work: BlockWork, member: LocalMember) -> None:
        """Compare a seed's new digests with the known ones."""
        known = member.proof
        if known is None or known.version != work.version:
            work.then(f"it serves version {work.version} no longer")
            return
        assert work.chosen is not None
        different = work.blocks.differing(work.digests, known.digests, work.chosen)
        if not different:
            work.then("")
            return
        self._log("differs", member=member.id, version=work.version, blocks=len(different))
        name = work.blocks.difference(different[0], None).parameter
        more = f" and {len(different) - 1} more blocks" if len(different) > 1 else ""
        work.then(f"{name}{more}: its memory has changed since version {work.version} went live")

    def taken(self, member_id: str) -> None:
        """Continue with the seeds that waited for digests, which now exist or cannot be taken."""
        waited = [seed for seed in self._unproven if seed[0] == member_id]
        self._unproven = [seed for seed in self._unproven if seed[0] != member_id]
        for _, tensors, then in waited:  # of members that are here: others have been dropped
            self.prove(self._members[member_id], tensors, then)

    def left(self, member: LocalMember) -> None:
        """Forget a seed that has gone."""
        self._unproven = [seed for seed in self._unproven if seed[0] != member.id]
