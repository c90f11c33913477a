"""Digests of regions of published versions, which the coordinator compares between source ranks before a swap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from refitd.addressing.copies import Addresses, region_addresses
from refitd.addressing.places import PROCESS_MEMORY
from refitd.buffers.blocks import DIGEST_BYTES, block_steps, blocks_of
from refitd.daemon.actions import Instruction, ToCoordinator, ToWorker
from refitd.daemon.blocks import RUN_BYTES, RUN_NUMBERS
from refitd.daemon.members import LocalMember
from refitd.plan.regions import RegionTable
from refitd.protocol import cluster, sidecar
from refitd.protocol.base import clipped

# how often a batch is begun again after a worker has died of something
ATTEMPTS = 4


@dataclass(slots=True, eq=False)
class _Batch:
    """Spans that one worker digests at once: of its GPU, where they lie on one."""

    first: int  # number of its first span
    spans: tuple[sidecar.Span, ...]
    home: int | None
    attempts: int = 0


@dataclass(slots=True, eq=False)
class _Asked:
    """What the coordinator has asked for, until it is answered."""

    swap: str
    version: int
    deadline: float
    timeout_s: float
    members: tuple[LocalMember, ...]
    spans_of: np.ndarray[tuple[int], np.dtype[np.int64]]  # [rows] spans of each
    left: list[_Batch]
    unfinished: int
    digests: dict[int, bytes] = field(default_factory=dict)  # by the number of a batch's first span


class RegionDigests:
    """Has workers read what `cluster.DigestRegions` names. Instructions go to `out`; `let_go` ends a swap's reading."""

    def __init__(
        self,
        node: str,
        workers: int,
        members: dict[str, LocalMember],
        out: Callable[[Instruction], None],
        need: Callable[[int, set[int]], None],
        homes: Callable[[set[int]], dict[int, int]],
        numbers: Callable[[], int],
        let_go: Callable[[str], None],
    ) -> None:
        self._node = node
        self._workers = workers
        self._members = members
        self._out = out
        self._need = need
        self._homes = homes
        self._numbers = numbers
        self._let_go = let_go
        self._asked: dict[str, _Asked] = {}  # by swap
        self._runs: dict[int, tuple[_Asked, _Batch, int]] = {}  # with the worker

    def begin(self, message: cluster.DigestRegions, now: float) -> None:
        """Begin to read; whatever stands in the way is the answer."""
        held = [self._members.get(member) for member in message.members]
        for rank, member in zip(message.ranks, held, strict=False):
            if member is None or member.run != message.run or message.version not in member.held():
                reason = f"source rank {rank}: version {message.version} is no longer held on node {self._node}"
                self._out(ToCoordinator(0, cluster.RegionsDigested(swap=message.swap, reason=reason)))
                return
        members = tuple(member for member in held if member is not None)
        places = {
            rank: member.source_places(message.version) for rank, member in zip(message.ranks, members, strict=True)
        }
        try:
            table = RegionTable.from_wire(message.table)
            rows = list(_spans(table, region_addresses(table, places)))
        except (KeyError, ValueError) as exc:
            reason = f"node {self._node}: the regions do not fit the tensors registered here: {exc}"
            self._out(ToCoordinator(0, cluster.RegionsDigested(swap=message.swap, reason=clipped(reason))))
            return
        spans = [span for row in rows for span in row]
        homes = self._homes({span.arena for span in spans if not span.pid})
        batches = list(_batches(spans, homes))
        for member in members:
            readers = member.readers_of(message.version)
            if readers is not None:
                readers.add(message.swap)
        self._asked[message.swap] = _Asked(
            message.swap,
            message.version,
            now + message.timeout_s,
            message.timeout_s,
            members,
            np.array([len(row) for row in rows], np.int64),
            batches,
            len(batches),
        )

    @property
    def next_deadline(self) -> float | None:
        """When `expire` is needed next, None while nothing is asked."""
        return min((asked.deadline for asked in self._asked.values()), default=None)

    def expire(self, now: float) -> None:
        """Answer what has waited long enough."""
        for asked in [asked for asked in self._asked.values() if now >= asked.deadline]:
            reason = f"the workers of node {self._node} have not read its sources within {asked.timeout_s:.1f} s"
            self._end(asked, reason=reason)

    def dispatch(self) -> None:
        """Give each worker that has none of it the next batch."""
        busy = {worker for _, _, worker in self._runs.values()}
        for worker in (w for w in range(self._workers) if w not in busy):
            for asked in self._asked.values():
                batch = next((b for b in asked.left if b.home in (None, worker)), None)
                if batch is not None:
                    asked.left.remove(batch)
                    self._send(asked, batch, worker)
                    break

    def _send(self, asked: _Asked, batch: _Batch, worker: int) -> None:
        number = self._numbers()
        self._runs[number] = asked, batch, worker
        self._need(worker, {span.arena for span in batch.spans if not span.pid})
        self._out(ToWorker(worker, sidecar.TakeDigests(run=number, spans=batch.spans)))

    def worker_said(self, message: sidecar.DigestsTaken) -> bool:
        """Take a worker's results; return whether they were asked for here."""
        found = self._runs.pop(message.run, None)
        if found is None:
            return False
        asked, batch, worker = found
        if self._asked.get(asked.swap) is not asked:
            return True
        if message.reason or len(message.digests) != DIGEST_BYTES * len(batch.spans):
            reason = message.reason or f"{len(message.digests)} bytes of digests for {len(batch.spans)} spans"
            self._end(asked, reason=f"worker {worker} of node {self._node}: {reason}")
            return True
        asked.digests[batch.first] = message.digests
        asked.unfinished -= 1
        if not asked.unfinished:
            self._finish(asked)
        return True

    def worker_gone(self, worker: int) -> None:
        """A worker has died or was replaced: others, or the next one, read what it had."""
        for number, (asked, batch, whose) in list(self._runs.items()):
            if whose != worker:
                continue
            del self._runs[number]
            batch.attempts += 1
            if self._asked.get(asked.swap) is not asked:
                continue
            if batch.attempts < ATTEMPTS:
                asked.left.append(batch)
            else:
                self._end(
                    asked, reason=f"workers of node {self._node} died {ATTEMPTS} times while they read its sources"
                )

    def forget(self, swap: str) -> None:
        """The swap has ended: nobody waits for its digests any more."""
        if self._asked.pop(swap, None) is not None:
            self._let_go(swap)

    def stop(self) -> None:
        """Another coordinator has taken over: nobody waits for any of these digests."""
        for swap in list(self._asked):
            self.forget(swap)

    def _finish(self, asked: _Asked) -> None:
        for member in asked.members:
            if self._members.get(member.id) is not member or asked.version not in member.held():
                self._end(asked, reason=f"{member.id}: version {asked.version} was taken back while it was compared")
                return
        taken = b"".join(digests for _, digests in sorted(asked.digests.items()))
        ends = DIGEST_BYTES * np.cumsum(asked.spans_of)
        starts = ends - DIGEST_BYTES * asked.spans_of
        rows = [xxhash.xxh3_64_intdigest(taken[a:b]) or 1 for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        self._end(asked, np.array(rows, "<u8").tobytes())

    def _end(self, asked: _Asked, digests: bytes = b"", reason: str = "") -> None:
        del self._asked[asked.swap]
        self._let_go(asked.swap)
        answer = cluster.RegionsDigested(swap=asked.swap, digests=digests, reason=clipped(reason))
        self._out(ToCoordinator(0, answer))


def _spans(table: RegionTable, at: Addresses) -> Iterator[list[sidecar.Span]]:
    """Yield the spans of each row: equal boxes of equal elements are cut alike, wherever they lie."""
    elements = np.prod(table.size, axis=1, dtype=np.int64)
    steps = block_steps(elements, table.element_size.astype(np.int64))
    for row in range(len(table)):
        element, arena, pid = int(table.element_size[row]), int(at.arena[row]), 0
        if arena == PROCESS_MEMORY:
            arena, pid = 0, int(at.pid[row])
        shape, strides = _flattened(table.size[row].tolist(), at.stride[row].tolist(), element)
        where = arena, int(at.offset[row]), shape, strides, element
        yield [
            sidecar.Span(*where, first, count, pid) for first, count in blocks_of(int(elements[row]), int(steps[row]))
        ]


def _flattened(sizes: list[int], strides: list[int], element: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a box with as few dimensions as say the same: messages and reads have fewer numbers."""
    box: list[tuple[int, int]] = []
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if box and stride == box[-1][0] * box[-1][1]:
            box[-1] = size * box[-1][0], box[-1][1]
        elif size > 1:
            box.append((size, stride))
    box = box or [(1, element)]
    return tuple(size for size, _ in reversed(box)), tuple(stride for _, stride in reversed(box))


def _batches(spans: Sequence[sidecar.Span], homes: dict[int, int]) -> Iterator[_Batch]:
    """Cut spans into runs of about RUN_BYTES, each of one home."""
    first, nbytes, numbers = 0, 0, 0
    batch: list[sidecar.Span] = []
    home: int | None = None
    for span in spans:
        lies = None if span.pid else homes.get(span.arena)
        size, length = span.count * span.element_size, 2 * len(span.shape) + 6
        if batch and (nbytes + size > RUN_BYTES or numbers + length > RUN_NUMBERS or lies != home):
            yield _Batch(first, tuple(batch), home)
            first, nbytes, numbers, batch = first + len(batch), 0, 0, []
        home = lies
        batch.append(span)
        nbytes, numbers = nbytes + size, numbers + length
    if batch:
        yield _Batch(first, tuple(batch), home)
