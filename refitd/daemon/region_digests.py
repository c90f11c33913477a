"""Digests of regions of published versions. The coordinator compares them between source ranks before a swap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import xxhash

from refitd.addressing.copies import Addresses, region_addresses
from refitd.addressing.places import PROCESS_MEMORY, Int64
from refitd.buffers.blocks import DIGEST_BYTES, block_steps
from refitd.daemon.actions import Instruction, ToCoordinator, ToWorker
from refitd.daemon.blocks import RUN_BYTES, RUN_NUMBERS
from refitd.daemon.members import LocalMember
from refitd.plan.regions import RegionTable
from refitd.protocol import cluster, sidecar
from refitd.protocol.base import clipped

# how often a batch is retried after its worker died
ATTEMPTS = 4


class _Spans:
    """The blocks of one member's regions. Equal regions are cut alike. Columns, not objects, since they may be many."""

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


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Blocks begin:end of a member, digested together by one worker; `home` is that of their GPU, if any."""

    member: int
    begin: int
    end: int
    home: int | None


@dataclass(slots=True, eq=False)
class _Asked:
    """A request of the coordinator, until it is answered."""

    swap: str
    version: int
    deadline: float
    timeout_s: float
    members: list[LocalMember]
    spans: list[_Spans]  # of each member
    left: list[_Batch]
    unfinished: int  # batches
    digests: dict[tuple[int, int], bytes] = field(default_factory=dict)  # by (member, begin of the batch)
    attempts: dict[_Batch, int] = field(default_factory=dict)


class RegionDigests:
    """Has workers digest the regions named by `cluster.DigestRegions`.

    From then on the swap counts as a reader of these versions, until it ends. Instructions go to `out`.
    """

    def __init__(
        self,
        node: str,
        workers: int,
        members: dict[str, LocalMember],
        out: Callable[[Instruction], None],
        need: Callable[[int, set[int]], None],
        homes: Callable[[set[int]], dict[int, int]],
        numbers: Callable[[], int],
        replace: Callable[[int, str], None],
    ) -> None:
        self._node = node
        self._workers = workers
        self._members = members
        self._out = out
        self._need = need
        self._homes = homes
        self._numbers = numbers
        self._replace = replace
        self._asked: dict[str, _Asked] = {}  # by swap
        self._runs: dict[int, tuple[_Asked, _Batch, int]] = {}  # run -> (request, batch, worker)

    def begin(self, message: cluster.DigestRegions, now: float) -> None:
        """Start digesting; if something prevents that, answer with the reason."""
        members: list[LocalMember] = []
        for rank, name in zip(message.ranks, message.members, strict=False):
            member = self._members.get(name)
            if member is None or member.run != message.run or message.version not in member.held():
                reason = f"source rank {rank}: version {message.version} is no longer held on node {self._node}"
                self._out(ToCoordinator(0, cluster.RegionsDigested(swap=message.swap, reason=reason)))
                return
            members.append(member)
        try:
            table = RegionTable.from_wire(message.table)
            spans = []
            for holder, member in zip(message.holders, members, strict=True):
                mine = table.select(np.flatnonzero(table.holder == holder))
                spans.append(_Spans(mine, region_addresses(mine, member.source_places(message.version))))
        except (KeyError, ValueError) as exc:
            reason = f"node {self._node}: the regions do not fit the tensors registered here: {exc}"
            self._out(ToCoordinator(0, cluster.RegionsDigested(swap=message.swap, reason=clipped(reason))))
            return
        batches = [batch for number, each in enumerate(spans) for batch in self._batches(number, each)]
        for member in members:
            readers = member.readers_of(message.version)
            if readers is not None:
                readers.add(message.swap)
        limits = now + message.timeout_s, message.timeout_s
        asked = _Asked(message.swap, message.version, *limits, members, spans, batches, len(batches))
        self._asked[message.swap] = asked
        if not batches:
            self._finish(asked)

    def _batches(self, member: int, spans: _Spans) -> list[_Batch]:
        """Cut blocks into batches of about RUN_BYTES, each of one home."""
        arenas, number_of = np.unique(spans.arenas, return_inverse=True)
        homes = self._homes({arena for arena in arenas.tolist() if arena})
        home = np.array([homes.get(arena, -1) for arena in arenas.tolist()], np.int64)[number_of]
        moves = np.append(np.flatnonzero(np.diff(home)) + 1, len(home))
        nbytes = np.cumsum(spans.nbytes)
        most = RUN_NUMBERS // spans.numbers
        found, begin = [], 0
        while begin < len(home):
            before = int(nbytes[begin - 1]) if begin else 0
            end = int(np.searchsorted(nbytes, before + RUN_BYTES, side="right"))
            end = min(max(end, begin + 1), begin + most, int(moves[np.searchsorted(moves, begin, side="right")]))
            found.append(_Batch(member, begin, end, int(home[begin]) if home[begin] >= 0 else None))
            begin = end
        return found

    @property
    def next_deadline(self) -> float | None:
        """When `expire` is next needed; None while nothing is requested."""
        return min((asked.deadline for asked in self._asked.values()), default=None)

    def expire(self, now: float) -> None:
        """Fail requests past their deadline and replace the workers that still run them."""
        for asked in [asked for asked in self._asked.values() if now >= asked.deadline]:
            late = sorted({worker for of, _, worker in self._runs.values() if of is asked})
            who = f"; workers {late} are replaced" if late else ""
            reason = f"node {self._node} has not read its sources within {asked.timeout_s:.1f} s{who}"
            self._end(asked, reason=f"{reason} (allow more time, or set check_replicas = false)")
            for worker in late:
                self._replace(worker, f"it has not read sources for swap {asked.swap} in time")

    def dispatch(self) -> None:
        """Give each idle worker its next batch."""
        busy = {worker for _, _, worker in self._runs.values()}
        for worker in (w for w in range(self._workers) if w not in busy):
            for asked in self._asked.values():
                at = next((i for i, b in enumerate(asked.left) if b.home in (None, worker)), None)
                if at is not None:
                    self._send(asked, asked.left.pop(at), worker)
                    break

    def _send(self, asked: _Asked, batch: _Batch, worker: int) -> None:
        number, mine = self._numbers(), asked.spans[batch.member]
        spans = tuple(mine[at] for at in range(batch.begin, batch.end))
        self._runs[number] = asked, batch, worker
        self._need(worker, {span.arena for span in spans if not span.pid})
        self._out(ToWorker(worker, sidecar.TakeDigests(run=number, spans=spans)))

    def worker_said(self, message: sidecar.DigestsTaken) -> bool:
        """Handle a worker's digests; return False if they were not requested here."""
        found = self._runs.pop(message.run, None)
        if found is None:
            return False
        asked, batch, worker = found
        if self._asked.get(asked.swap) is not asked:
            return True
        count = batch.end - batch.begin
        if message.reason or len(message.digests) != DIGEST_BYTES * count:
            reason = message.reason or f"{len(message.digests)} bytes of digests for {count} spans"
            self._end(asked, reason=f"worker {worker} of node {self._node}: {reason}")
            return True
        asked.digests[batch.member, batch.begin] = message.digests
        asked.unfinished -= 1
        if not asked.unfinished:
            self._finish(asked)
        return True

    def worker_gone(self, worker: int, *, died: bool) -> None:
        """Requeue the batches of a worker that died or was replaced."""
        for number, (asked, batch, whose) in list(self._runs.items()):
            if whose != worker:
                continue
            del self._runs[number]
            if self._asked.get(asked.swap) is not asked:
                continue
            attempts = asked.attempts[batch] = asked.attempts.get(batch, 0) + died
            if attempts < ATTEMPTS:
                asked.left.append(batch)
            else:
                self._end(
                    asked, reason=f"workers of node {self._node} died {ATTEMPTS} times while they read its sources"
                )

    def forget(self, swap: str) -> None:
        """Forget the request of a swap that has ended."""
        self._asked.pop(swap, None)

    def stop(self) -> None:
        """Forget all requests: a new coordinator does not know them."""
        self._asked.clear()

    def _finish(self, asked: _Asked) -> None:
        for member in asked.members:
            if self._members.get(member.id) is not member or asked.version not in member.held():
                self._end(asked, reason=f"{member.id}: version {asked.version} was taken back while it was compared")
                return
        taken = b"".join(digests for _, digests in sorted(asked.digests.items()))
        ends = DIGEST_BYTES * np.cumsum(np.concatenate([np.zeros(1, np.int64), *(each.counts for each in asked.spans)]))
        rows = [
            xxhash.xxh3_64_intdigest(taken[a:b]) for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        ]
        self._end(asked, np.array(rows, "<u8").tobytes())

    def _end(self, asked: _Asked, digests: bytes = b"", reason: str = "") -> None:
        del self._asked[asked.swap]
        answer = cluster.RegionsDigested(swap=asked.swap, digests=digests, reason=clipped(reason))
        self._out(ToCoordinator(0, answer))


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
