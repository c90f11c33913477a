"""Digests of regions of published versions. The coordinator compares them between source ranks before a swap."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from refitd.addressing.copies import Addresses, region_addresses
from refitd.addressing.places import PROCESS_MEMORY, Int64
from refitd.buffers.blocks import DIGEST_BYTES, block_steps
from refitd.daemon.actions import Instruction, ToCoordinator
from refitd.daemon.blocks import RUN_BYTES, RUN_NUMBERS
from refitd.daemon.digest_work import Batch, DigestQueue, Priority, QueuedWork
from refitd.daemon.members import LocalMember
from refitd.plan.regions import RegionTable
from refitd.protocol import cluster, sidecar
from refitd.protocol.base import clipped


class _Spans:
    """The blocks of one member's regions. Equal regions are cut alike. Columns, since there may be very many."""

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
        self.numbers = 2 * table.size.shape[1] + 6  # the most numbers in one block's span
        self._arena = np.where(at.arena == PROCESS_MEMORY, 0, at.arena)

    @property
    def arenas(self) -> Int64:
        """The arena of each block, 0 for process memory."""
        arenas: Int64 = self._arena[self.row]
        return arenas

    def __getitem__(self, number: int) -> sidecar.Span:
        row = int(self.row[number])
        element, arena = int(self._table.element_size[row]), int(self._arena[row])
        shape, strides = _flattened(self._table.size[row].tolist(), self._at.stride[row].tolist(), element)
        pid = 0 if arena else int(self._at.pid[row])
        first, count = int(self._first[number]), int(self._count[number])
        return sidecar.Span(arena, int(self._at.offset[row]), shape, strides, element, first, count, pid)


@dataclass(slots=True, eq=False, kw_only=True)
class _RegionWork(QueuedWork):
    """A request of the coordinator, until it is answered. The parts of its batches are members."""

    swap: str
    version: int
    deadline: float
    timeout_s: float
    members: list[LocalMember]
    spans: list[_Spans]  # of each member

    def request(self, run: int, batch: Batch) -> sidecar.TakeDigests:
        """See QueuedWork.request."""
        mine = self.spans[batch.part]
        return sidecar.TakeDigests(run=run, spans=tuple(mine[block] for block in batch.blocks))

    def row_digests(self) -> bytes:
        """Return the digest of each region, made of its blocks' digests: 8 bytes per row, member after member."""
        taken = self.digests
        counts = np.concatenate([np.zeros(1, np.int64), *(each.counts for each in self.spans)])
        ends = (DIGEST_BYTES * np.cumsum(counts)).tolist()
        rows = [xxhash.xxh3_64_intdigest(taken[a:b]) for a, b in itertools.pairwise(ends)]
        return np.array(rows, "<u8").tobytes()


class RegionDigests:
    """Has workers digest the regions named by `cluster.DigestRegions`.

    From then on the swap counts as a reader of these versions, until it ends. Instructions go to `out`.
    """

    def __init__(
        self,
        members: dict[str, LocalMember],
        queue: DigestQueue,
        out: Callable[[Instruction], None],
        replace: Callable[[int, str], None],
    ) -> None:
        """`replace(worker, reason)` kills a worker and starts a new one."""
        self._members = members
        self._queue = queue
        self._out = out
        self._replace = replace
        self._asked: dict[str, _RegionWork] = {}  # by swap

    def begin(self, message: cluster.DigestRegions, now: float) -> None:
        """Start digesting; if something prevents that, answer with the reason."""
        node = self._queue.node
        members: list[LocalMember] = []
        for rank, name in zip(message.ranks, message.members, strict=False):
            member = self._members.get(name)
            if member is None or member.run != message.run or message.version not in member.held():
                reason = f"source rank {rank}: version {message.version} is no longer held on node {node}"
                self._answer(message.swap, reason=reason)
                return
            members.append(member)
        try:
            table = RegionTable.from_wire(message.table)
            spans = []
            for holder, member in zip(message.holders, members, strict=True):
                mine = table.select(np.flatnonzero(table.holder == holder))
                spans.append(_Spans(mine, region_addresses(mine, member.source_places(message.version))))
        except (KeyError, ValueError) as exc:
            self._answer(message.swap, reason=f"node {node}: the regions do not fit the tensors registered here: {exc}")
            return
        for member in members:
            readers = member.readers_of(message.version)
            if readers is not None:
                readers.add(message.swap)
        work = _RegionWork(
            owner=self,
            swap=message.swap,
            version=message.version,
            deadline=now + message.timeout_s,
            timeout_s=message.timeout_s,
            members=members,
            spans=spans,
            priority=Priority.SWAP,
        )
        batches = [(part, *batch) for part, each in enumerate(spans) for batch in self._batches(each)]
        work.begin([Batch(number, blocks, home, part) for number, (part, blocks, home) in enumerate(batches)])
        self._asked[message.swap] = work
        self._queue.add(work)

    def _batches(self, spans: _Spans) -> Iterator[tuple[range, int | None]]:
        """Cut blocks into batches of about RUN_BYTES, each of one home."""
        arenas, number_of = np.unique(spans.arenas, return_inverse=True)
        homes = self._queue.homes({arena for arena in arenas.tolist() if arena})
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
        """When `expire` is next needed; None while nothing is requested."""
        return min((asked.deadline for asked in self._asked.values()), default=None)

    def expire(self, now: float) -> None:
        """Fail requests past their deadline and replace the workers that still run them."""
        for asked in [asked for asked in self._asked.values() if now >= asked.deadline]:
            late = self._queue.workers_of(asked)
            who = f"; workers {late} are replaced" if late else ""
            reason = f"node {self._queue.node} has not read its sources within {asked.timeout_s:.1f} s{who}"
            self._queue.drop(asked)
            self.failed(asked, f"{reason} (allow more time, or set check_replicas = false)")
            for worker in late:
                self._replace(worker, f"it has not read sources for swap {asked.swap} in time")

    def forget(self, swap: str) -> None:
        """Forget the request of a swap that has ended."""
        asked = self._asked.pop(swap, None)
        if asked is not None:
            self._queue.drop(asked)

    def stop(self) -> None:
        """Forget all requests: a new coordinator does not know them."""
        for swap in list(self._asked):
            self.forget(swap)

    # --- what the queue asks and tells (WorkOwner) --------------------------------------------------------

    def is_wanted(self, work: _RegionWork) -> bool:
        """Return whether all sources still hold the compared version."""
        return not self._lost(work)

    def unwanted(self, work: _RegionWork) -> None:
        """Answer with the source that no longer holds the version."""
        lost = self._lost(work)
        self.failed(work, f"{lost}: version {work.version} was taken back while it was compared")

    def done(self, work: _RegionWork) -> None:
        """Answer with the digests."""
        del self._asked[work.swap]
        self._answer(work.swap, work.row_digests())

    def failed(self, work: _RegionWork, reason: str) -> None:
        """Answer with the reason."""
        del self._asked[work.swap]
        self._answer(work.swap, reason=reason)

    def _lost(self, work: _RegionWork) -> str:
        held = (m.id for m in work.members if self._members.get(m.id) is not m or work.version not in m.held())
        return next(held, "")

    def _answer(self, swap: str, digests: bytes = b"", reason: str = "") -> None:
        self._out(ToCoordinator(0, cluster.RegionsDigested(swap=swap, digests=digests, reason=clipped(reason))))


def _flattened(sizes: list[int], strides: list[int], element: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Merge the dimensions of a box where possible: shorter messages and fewer reads."""
    box: list[tuple[int, int]] = []
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if box and stride == box[-1][0] * box[-1][1]:
            box[-1] = size * box[-1][0], box[-1][1]
        elif size > 1:
            box.append((size, stride))
    box = box or [(1, element)]
    return tuple(size for size, _ in reversed(box)), tuple(stride for _, stride in reversed(box))
