"""Compare versions with digests before a swap uses them: sources, seeds, and previous versions of targets."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import xxhash

from refitd.addressing.copies import Addresses, region_addresses
from refitd.addressing.places import Int64, of_items, with_pitches
from refitd.buffers.layout import DIGEST_BYTES, block_steps
from refitd.commit.target_state import SpareStaged, step_of
from refitd.daemon.commits import Commits
from refitd.daemon.digest_work import (
    RUN_BYTES,
    RUN_NUMBERS,
    Batch,
    BlockWork,
    DigestQueue,
    Priority,
    QueuedWork,
    WorkOwner,
)
from refitd.daemon.effects import BaseOf, Effects, Proven, Replace, SeedOf
from refitd.daemon.members import LocalMember, Offered, Proof
from refitd.dtypes import TILE_ITEMS
from refitd.errors import IllegalTransition, RefusedError
from refitd.plan.table import RegionTable
from refitd.protocol import cluster, sidecar
from refitd.protocol.base import clipped
from refitd.text import called


class SeedProofs:
    """Compares seeds with their digests through the digest queue."""

    def __init__(
        self,
        members: dict[str, LocalMember],
        queue: DigestQueue,
        owner: WorkOwner[BlockWork],
    ) -> None:
        """`owner` receives the queue's results of work on seeds and forwards them here."""
        self._members, self._queue, self._owner = members, queue, owner
        # (member, tensors, purpose) of seeds whose first digests are in progress
        self._unproven: list[tuple[str, Collection[str] | None, SeedOf | BaseOf]] = []

    def prove(
        self, effects: Effects, member: LocalMember, tensors: Collection[str] | None, purpose: SeedOf | BaseOf
    ) -> None:
        """Compare these tensors (None: all) of a member's served version with its digests; add a `Proven` note later.

        A staging arena without digests passes, because only workers have ever written to it.
        """
        version = member.state.version
        if member.proofs.live is None:
            begun = self._queue.begun(member.id, "stored")
            for work in begun:
                work.priority = Priority.SWAP
            if begun:
                self._unproven.append((member.id, tensors, purpose))
            else:
                wrong = (
                    f"the digest of version {version} could not be taken when it went live"
                    * member.registration.is_proven_live
                )
                effects.notes.append(Proven(member.id, purpose, wrong))
            return
        blocks = self._queue.blocks_of(member)
        work = BlockWork(
            owner=self._owner,
            member=member.id,
            what="seed",
            version=member.proofs.live.version,
            blocks=blocks,
            places=member.decided_places(),
            chosen=range(len(blocks)) if tensors is None else blocks.of(tensors),
            purpose=purpose,
            priority=Priority.SWAP,
        )
        self._queue.add_blocks(effects, work)

    def read(self, effects: Effects, work: BlockWork, member: LocalMember) -> None:
        """Compare a seed's new digests with the known ones."""
        known = member.proofs.live
        if known is None or known.version != work.version:
            proven(effects, work, f"it serves version {work.version} no longer")
            return
        assert work.chosen is not None
        different = work.blocks.differing(work.digests, known.digests, work.chosen)
        if not different:
            proven(effects, work, "")
            return
        effects.log("differs", member=member.id, version=work.version, blocks=len(different))
        name = work.blocks.difference(different[0], None).parameter
        more = f" and {len(different) - 1} more blocks" if len(different) > 1 else ""
        proven(effects, work, f"{name}{more}: its memory has changed since version {work.version} went live")

    def taken(self, effects: Effects, member_id: str) -> None:
        """Continue with the seeds that waited for a member's digests, which now exist or have failed."""
        waited = [seed for seed in self._unproven if seed[0] == member_id]
        self._unproven = [seed for seed in self._unproven if seed[0] != member_id]
        for _, tensors, purpose in waited:  # seeds of members that left have been dropped
            self.prove(effects, self._members[member_id], tensors, purpose)

    def left(self, member: LocalMember) -> None:
        """Drop a seed whose member has left."""
        self._unproven = [seed for seed in self._unproven if seed[0] != member.id]


def proven(effects: Effects, work: BlockWork, wrong: str) -> None:
    """Add a note with the result of work on a seed."""
    if work.purpose is not None:
        effects.notes.append(Proven(work.member, work.purpose, wrong))


class Spares:
    """The previous versions in the targets' staging arenas. Engines must not write these arenas, but they can.

    Soon after a commit, each previous version is compared with its digests in the background. Rollbacks then need not
    read it; an earlier rollback waits for the comparison. A version that differs, or cannot be read, never goes live.
    After a rollback the version is compared again immediately, because it may have been written since the first
    comparison. A rank whose version then differs stops serving.
    """

    def __init__(
        self,
        members: dict[str, LocalMember],
        queue: DigestQueue,
        commits: Commits,
    ) -> None:
        self._members = members
        self._queue = queue
        self._commits = commits
        self._staging: dict[str, tuple[cluster.Stage, list[LocalMember]]] = {}  # by swap
        self._later: set[str] = set()  # members whose comparison starts at the next tick

    # --- a rollback ---------------------------------------------------------------------------------------

    def stage(self, effects: Effects, message: cluster.Stage) -> None:
        """Stage the members' previous version once its digests match on every member."""
        members = self._exchangeable(effects, message)
        if members is None:
            return
        self._staging[message.swap] = message, members
        for member in members:
            if member.proofs.verifies and member.proofs.spare_found is None:
                self._compare(effects, member, "spare", Priority.SWAP)
        self._go_on(effects)

    def abort(self, swap: str) -> None:
        """Stop staging for this swap."""
        self._staging.pop(swap, None)

    def staging(self) -> set[str]:
        """Return the swaps that wait for a comparison."""
        return set(self._staging)

    def _exchangeable(self, effects: Effects, message: cluster.Stage) -> list[LocalMember] | None:
        """Return the members if all can exchange their arenas for this version; else report a failure, return None."""
        event = SpareStaged(message.swap, message.version, message.run)
        members = [(member, self._members.get(member)) for member in message.members]
        try:
            for member_id, member in members:
                if member is None:
                    raise RefusedError(f"{called(member_id)} is no longer registered on node {self._queue.node}")
                step_of(member.state, event)  # check all members first: a refusal must not change any of them
        except (RefusedError, IllegalTransition) as exc:
            self._stage_failed(effects, message.swap, f"node {self._queue.node}", clipped(str(exc)))
            return None
        return [member for _, member in members if member is not None]

    def _go_on(self, effects: Effects) -> None:
        """Stage the swaps whose versions match on all members; fail each swap with a version that differs."""
        for swap, (message, members) in list(self._staging.items()):
            found = {member.id: member.proofs.spare_found if member.proofs.verifies else "" for member in members}
            wrong = next(((member, text) for member, text in found.items() if text), None)
            if wrong is not None:
                self._stage_failed(effects, swap, *wrong)
            elif None not in found.values():
                del self._staging[swap]
                self._staged(effects, message)

    def _staged(self, effects: Effects, message: cluster.Stage) -> None:
        members = self._exchangeable(effects, message)  # check again: a member may have left since
        if members is None:
            return
        effects.log("swap", swap=message.swap, version=message.version, phase="staged")
        for member in members:
            effects.move(member, SpareStaged(message.swap, message.version, message.run))
        effects.say(cluster.StageDone(swap=message.swap, copies=0, bytes=0, seconds=0.0))

    def _stage_failed(self, effects: Effects, swap: str, where: str, reason: str) -> None:
        self._staging.pop(swap, None)
        effects.log("stage-failed", swap=swap, where=where, reason=reason)
        effects.say(cluster.StageDone(swap=swap, where=where, reason=reason))

    # --- comparisons --------------------------------------------------------------------------------------

    def exchanged(self, effects: Effects, member: LocalMember) -> None:
        """Note that the member has exchanged its arenas. After a rollback its live version has a proof already."""
        self._queue.drop_blocks(member.id, "spare", "returned")
        if member.proofs.verifies and member.state.spare is not None:
            self._later.add(member.id)
        if member.proofs.live is not None:
            self._compare(effects, member, "returned", Priority.ASKED)

    def left(self, member: LocalMember) -> None:
        """Drop a member that has left."""
        self._later.discard(member.id)

    def tick(self, effects: Effects) -> None:
        """Start the comparisons that were scheduled before this tick."""
        for member in [self._members[name] for name in sorted(self._later) if name in self._members]:
            if member.state.spare is not None and member.proofs.spare_found is None:
                self._compare(effects, member, "spare", Priority.BACKGROUND)
        self._later.clear()

    def _compare(
        self, effects: Effects, member: LocalMember, what: Literal["spare", "returned"], priority: Priority
    ) -> None:
        begun = self._queue.begun(member.id, what)
        for work in begun:
            work.priority = max(work.priority, priority)
        if begun:
            return
        places, version = member.registration.live, member.state.version
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
        self._queue.add_blocks(effects, work)

    # --- called by the queue (WorkOwner) -----------------------------------------------------------------

    def is_wanted(self, work: BlockWork) -> bool:
        """Return whether the arena still contains this version."""
        state = self._members[work.member].state
        return (state.spare if work.what == "spare" else state.version) == work.version

    def unwanted(self, effects: Effects, work: BlockWork) -> None:
        """Ignore the end of this work: a rollback to that version has been refused already."""

    def done(self, effects: Effects, work: BlockWork) -> None:
        """Compare the digests with those taken while the version was live."""
        member, digests = self._members[work.member], work.digests
        known = member.proofs.spare if work.what == "spare" else member.proofs.live
        if work.what == "spare" and (known is None or known.version != work.version):
            # the version was replaced before its digests were taken: use the present ones as the reference
            known = Proof(work.version, digests)
            member.proofs = replace(member.proofs, spare=known)
        different = [] if known is None else work.blocks.differing(digests, known.digests, range(len(work.blocks)))
        wrong = ""
        if different:
            effects.log("differs", member=member.id, version=work.version, blocks=len(different))
            name = work.blocks.difference(different[0], None).parameter
            more = f" and {len(different) - 1} more blocks" if len(different) > 1 else ""
            wrong = f"{name}{more}: its memory has changed since version {work.version} went live"
        if work.what == "spare":
            self._found(effects, member, wrong)
        elif wrong:
            self._commits.fence_behind(effects, member, wrong)

    def failed(self, effects: Effects, work: BlockWork, reason: str) -> None:
        """Exclude the version from rollbacks, because it cannot be read."""
        effects.log("digests-failed", member=work.member, what=work.what, reason=reason)
        member = self._members.get(work.member)
        if member is not None and work.what == "spare":
            self._found(effects, member, f"what its other arena holds cannot be compared: {reason}")

    def _found(self, effects: Effects, member: LocalMember, wrong: str) -> None:
        member.proofs = replace(member.proofs, spare_found=wrong)
        effects.log("spare-compared", member=member.id, version=member.state.spare, reason=wrong)
        if wrong:
            effects.moved[member.id] = member
            effects.is_news = True  # the coordinator rolls back by a copy instead
        self._go_on(effects)


class _Spans:
    """The blocks of one member's regions, in columns because they can be very many.

    Equal regions are cut into equal blocks.
    """

    def __init__(self, table: RegionTable, at: Addresses) -> None:
        self._table, self._at = table, at
        elements = np.prod(table.size, axis=1, dtype=np.int64)
        element_size = table.element_size.astype(np.int64)
        steps = block_steps(elements, element_size)
        self.counts: Int64 = -(-elements // steps)  # [rows] blocks
        self.row = np.repeat(np.arange(len(table)), self.counts)
        before = np.cumsum(self.counts) - self.counts
        self._first = (np.arange(len(self.row)) - before[self.row]) * steps[self.row]
        self._count = np.minimum(steps[self.row], elements[self.row] - self._first)
        self.nbytes: Int64 = self._count * element_size[self.row]
        self.numbers = 2 * table.size.shape[1] + 6  # the maximum count of numbers in one block's span

    @property
    def arenas(self) -> Int64:
        """The arena of each block."""
        arenas: Int64 = self._at.arena[self.row]
        return arenas

    def __getitem__(self, number: int) -> sidecar.Span:
        row = int(self.row[number])
        element, arena = int(self._table.element_size[row]), int(self._at.arena[row])
        first, count = int(self._first[number]), int(self._count[number])
        size, stride = self._table.size[row].tolist(), self._at.stride[row].tolist()
        if element in TILE_ITEMS:  # read the rows of tiles
            (size, stride), ((rows, wide), (pitch, item)), _ = of_items(size, stride, element)
            size, stride, element = [*size, rows], [*stride, pitch], wide * item
            first, count = first * rows, count * rows
        shape, strides = _flattened(size, stride, element)
        return sidecar.Span(arena, int(self._at.offset[row]), shape, strides, element, first, count)


@dataclass(slots=True, eq=False, kw_only=True)
class _RegionWork(QueuedWork):
    """An unanswered request of the coordinator. `part` of each batch is an index into `members`."""

    swap: str
    version: int
    deadline: float
    timeout_s: float
    members: list[LocalMember]
    spans: list[_Spans]  # of each member

    def request(self, run: int, batch: Batch) -> sidecar.ReadSpans:
        """See QueuedWork.request."""
        mine = self.spans[batch.part]
        return sidecar.ReadSpans(run=run, spans=tuple(mine[block] for block in batch.blocks))

    def row_digests(self) -> bytes:
        """Return the digest of each region's block digests: 8 bytes per row, member after member."""
        taken = self.digests
        counts = np.concatenate([np.zeros(1, np.int64), *(each.counts for each in self.spans)])
        ends = (DIGEST_BYTES * np.cumsum(counts)).tolist()
        rows = [xxhash.xxh3_64_intdigest(taken[a:b]) for a, b in itertools.pairwise(ends)]
        return np.array(rows, "<u8").tobytes()


class RegionDigests:
    """Has workers digest the regions named by `cluster.DigestRegions`.

    The swap then counts as a reader of these versions until it ends.
    """

    def __init__(
        self,
        members: dict[str, LocalMember],
        queue: DigestQueue,
    ) -> None:
        self._members = members
        self._queue = queue
        self.asked: dict[str, _RegionWork] = {}  # by swap

    def begin(self, effects: Effects, message: cluster.DigestRegions) -> None:
        """Start digesting; if that is impossible, answer with the reason."""
        node = self._queue.node
        held: list[tuple[LocalMember, Offered]] = []
        for rank, name in zip(message.ranks, message.members, strict=False):
            member = self._members.get(name)
            offered = member.offered(message.version, message.run) if member is not None else None
            if member is None or offered is None or not member.registration.is_source:
                reason = f"source rank {rank}: version {message.version} is no longer held on node {node}"
                self._answer(effects, message.swap, reason=reason)
                return
            held.append((member, offered))
        try:
            table = RegionTable.from_wire(message.table)
            spans = []
            for holder, (member, offered) in zip(message.holders, held, strict=True):
                mine = with_pitches(table.select(np.flatnonzero(table.holder == holder)))
                spans.append(_Spans(mine, region_addresses(mine, member.source_places(offered))))
        except (KeyError, ValueError) as exc:
            self._answer(
                effects, message.swap, reason=f"node {node}: the regions do not fit the tensors registered here: {exc}"
            )
            return
        for _, offered in held:
            offered.readers.add(message.swap)
        work = _RegionWork(
            owner=self,
            swap=message.swap,
            version=message.version,
            deadline=effects.now + message.timeout_s,
            timeout_s=message.timeout_s,
            members=[member for member, _ in held],
            spans=spans,
            priority=Priority.SWAP,
        )
        batches = [(part, *batch) for part, each in enumerate(spans) for batch in self._batches(each)]
        work.begin([Batch(number, blocks, home, part) for number, (part, blocks, home) in enumerate(batches)])
        self.asked[message.swap] = work
        self._queue.add(effects, work)

    def _batches(self, spans: _Spans) -> Iterator[tuple[range, int | None]]:
        """Cut blocks into batches of about RUN_BYTES, each with one home."""
        arenas, number_of = np.unique(spans.arenas, return_inverse=True)
        homes = self._queue.maps.homes({arena for arena in arenas.tolist() if arena})
        home = np.array([homes.get(arena, -1) for arena in arenas.tolist()], np.int64)[number_of]
        moves = np.append(np.flatnonzero(np.diff(home)) + 1, len(home))
        nbytes = np.cumsum(spans.nbytes)
        most, begin = RUN_NUMBERS // spans.numbers, 0
        while begin < len(home):
            before = int(nbytes[begin - 1]) if begin else 0
            end = int(np.searchsorted(nbytes, before + RUN_BYTES, side="right"))
            end = min(max(end, begin + 1), begin + most, int(moves[np.searchsorted(moves, begin, side="right")]))
            yield range(begin, end), int(home[begin]) if home[begin] >= 0 else None
            begin = end

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline, at which to call `expire`; None without requests."""
        return min((asked.deadline for asked in self.asked.values()), default=None)

    def expire(self, effects: Effects) -> None:
        """Fail requests past their deadline; replace the workers that still read for them."""
        for asked in [asked for asked in self.asked.values() if effects.now >= asked.deadline]:
            late = self._queue.workers_of(asked)
            who = f"; workers {late} are replaced" if late else ""
            reason = f"node {self._queue.node} has not read its sources within {asked.timeout_s:.1f} s{who}"
            self._queue.drop(asked)
            self.failed(effects, asked, f"{reason} (allow more time, or set check_replicas = false)")
            for worker in late:
                effects.notes.append(Replace(worker, f"it has not read sources for swap {asked.swap} in time"))

    def forget(self, swap: str) -> None:
        """Drop the request of a swap that has ended."""
        asked = self.asked.pop(swap, None)
        if asked is not None:
            self._queue.drop(asked)

    def stop(self) -> None:
        """Drop all requests, because a new coordinator does not know them."""
        for swap in list(self.asked):
            self.forget(swap)

    # --- called by the queue (WorkOwner) ------------------------------------------------------------------

    def is_wanted(self, work: _RegionWork) -> bool:
        """Return whether all sources still have the digested version."""
        return not self._lost(work)

    def unwanted(self, effects: Effects, work: _RegionWork) -> None:
        """Answer with the source that no longer has the version."""
        lost = self._lost(work)
        self.failed(effects, work, f"{lost}: version {work.version} was taken back while it was compared")

    def done(self, effects: Effects, work: _RegionWork) -> None:
        """Answer with the digests."""
        del self.asked[work.swap]
        self._answer(effects, work.swap, work.row_digests())

    def failed(self, effects: Effects, work: _RegionWork, reason: str) -> None:
        """Answer with the reason."""
        del self.asked[work.swap]
        self._answer(effects, work.swap, reason=reason)

    def _lost(self, work: _RegionWork) -> str:
        held = (m.id for m in work.members if self._members.get(m.id) is not m or work.version not in m.held())
        return next(held, "")

    def _answer(self, effects: Effects, swap: str, digests: bytes = b"", reason: str = "") -> None:
        effects.say(cluster.RegionsDigested(swap=swap, digests=digests, reason=clipped(reason)))


def _flattened(sizes: list[int], strides: list[int], element: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Merge the dimensions of a box where possible, for shorter messages and fewer reads."""
    box: list[tuple[int, int]] = []
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if box and stride == box[-1][0] * box[-1][1]:
            box[-1] = size * box[-1][0], box[-1][1]
        elif size > 1:
            box.append((size, stride))
    box = box or [(1, element)]
    return tuple(size for size, _ in reversed(box)), tuple(stride for _, stride in reversed(box))
