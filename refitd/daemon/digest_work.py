"""The queue of digests and comparisons that a node's workers perform, batch by batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain, count
from typing import Any, Literal, Protocol, TypeVar

from refitd.addressing.places import Places
from refitd.buffers.blocks import DIGEST_BYTES
from refitd.daemon.actions import Instruction, ToWorker
from refitd.daemon.blocks import Blocks
from refitd.daemon.members import LocalMember
from refitd.protocol import sidecar

# how often work is retried after a worker died of it
ATTEMPTS = 4

Found = bytes | tuple[tuple[int, int, int], ...]  # digests, or what differs in each pair


class Priority(IntEnum):
    """The priority of work: the highest goes first, then the oldest."""

    BACKGROUND = 0  # nobody; it waits for a tick, runs one batch at a time on the node, and none while a swap runs
    ASKED = 1  # a person, or a rank that returns
    SWAP = 2


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Blocks that one worker reads together; `home` is the worker of their GPU, if they are on one."""

    number: int  # of this work
    blocks: Sequence[int]
    home: int | None = None
    part: int = 0  # what the blocks belong to, of work that reads several things


_Work_contra = TypeVar("_Work_contra", contravariant=True)


class WorkOwner(Protocol[_Work_contra]):
    """The owner of work. One of `unwanted`, `done` and `failed` is called when the work has left the queue."""

    def is_wanted(self, work: _Work_contra, /) -> bool:
        """Return whether the data to be read is still the data for which the work was added."""

    def unwanted(self, work: _Work_contra, /) -> None:
        """Handle the end of work whose data has changed."""

    def done(self, work: _Work_contra, /) -> None:
        """Handle the results of all batches."""

    def failed(self, work: _Work_contra, reason: str, /) -> None:
        """Handle a batch that cannot be read."""


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedWork(ABC):
    """One piece of work in the queue, cut into batches."""

    owner: WorkOwner[Any]
    priority: Priority
    left: list[Batch] = field(default_factory=list)  # not given to a worker yet
    unfinished: int = 0  # batches
    is_due: bool = False  # a tick has passed since it was added
    attempts: int = 1
    results: dict[int, Found] = field(default_factory=dict)  # by number of the batch

    def begin(self, batches: list[Batch]) -> None:
        """Set the batches to perform, in order."""
        self.left, self.unfinished = batches, len(batches)

    @property
    def found(self) -> Iterator[Found]:
        """The results in the order of batches."""
        return (found for _, found in sorted(self.results.items()))

    @property
    def digests(self) -> bytes:
        """All digests that were taken, in order."""
        return b"".join(found for found in self.found if isinstance(found, bytes))

    @abstractmethod
    def request(self, run: int, batch: Batch) -> sidecar.TakeDigests | sidecar.CompareSpans:
        """Return the message that makes a worker read a batch."""


@dataclass(slots=True, eq=False, kw_only=True)
class BlockWork(QueuedWork):
    """Blocks of one target to digest, or (with `others`) to compare."""

    member: str
    what: Literal["stored", "live", "compare", "seed", "spare", "returned"]
    version: int
    blocks: Blocks
    places: Places
    others: Places | None = None
    chosen: Sequence[int] | None = None  # the blocks; None: all of them
    then: Callable[[str], None] = lambda wrong: None  # seed: told what is wrong, "" if nothing is

    def request(self, run: int, batch: Batch) -> sidecar.TakeDigests | sidecar.CompareSpans:
        """See QueuedWork.request."""
        spans = tuple(self.blocks.span(self.places, block) for block in batch.blocks)
        if self.others is None:
            return sidecar.TakeDigests(run=run, spans=spans)
        others = tuple(self.blocks.span(self.others, block) for block in batch.blocks)
        return sidecar.CompareSpans(run=run, pairs=tuple(zip(spans, others, strict=True)))


@dataclass(frozen=True, slots=True)
class _Run:
    """A batch that a worker has."""

    work: QueuedWork
    batch: Batch
    worker: int


class DigestQueue:
    """Hands batches to idle workers, one at a time each. Instructions go to `out`."""

    def __init__(
        self,
        node: str,
        workers: int,
        out: Callable[[Instruction], None],
        need: Callable[[int, set[int]], None],
        homes: Callable[[set[int]], dict[int, int]],
        is_swapping: Callable[[], bool],
    ) -> None:
        """`need(worker, arenas)` maps arenas in a worker; `homes(arenas)` returns the workers of those on GPUs."""
        self.node = node
        self._workers = workers
        self._out = out
        self._need = need
        self.homes = homes
        self._is_swapping = is_swapping
        self._numbers = count(1)
        self._work: list[QueuedWork] = []  # what is not done, the oldest first
        self._runs: dict[int, _Run] = {}
        # by member; they never change, and take long to build for very many tensors
        self._blocks: dict[str, Blocks] = {}

    def blocks_of(self, member: LocalMember) -> Blocks:
        """Return the blocks of a target."""
        blocks = self._blocks.get(member.id)
        if blocks is None:
            blocks = self._blocks[member.id] = Blocks(member)
        return blocks

    def begun(self, member: str, what: str) -> list[BlockWork]:
        """Return the unfinished work of this kind on a target."""
        return [w for w in self._work if isinstance(w, BlockWork) and (w.member, w.what) == (member, what)]

    def add_blocks(self, work: BlockWork) -> None:
        """Queue the digest of a target's blocks, or their comparison, one at a time."""
        blocks = range(len(work.blocks)) if work.chosen is None else work.chosen
        homes = self.homes(work.places.arenas() | (work.others.arenas() if work.others else set()))
        home = next(iter(homes.values()), None)
        batches = [(block,) for block in blocks] if work.others else work.blocks.batches(work.places, blocks)
        work.begin([Batch(number, batch, home) for number, batch in enumerate(batches)])
        self.add(work)

    def add(self, work: QueuedWork) -> None:
        """Queue work; it is done at once if it has no batch."""
        if work.left:
            self._work.append(work)
        else:
            work.owner.done(work)

    def drop(self, work: QueuedWork) -> None:
        """Forget work without telling its owner."""
        if work in self._work:
            self._work.remove(work)

    def drop_blocks(self, member: str, *what: str) -> None:
        """Forget the work on a target, of these kinds or of all, without telling its owner."""
        for work in [w for w in self._work if isinstance(w, BlockWork) and w.member == member]:
            if not what or work.what in what:
                self._work.remove(work)

    def left(self, member: LocalMember) -> None:
        """Forget a target that has gone."""
        self.drop_blocks(member.id)
        self._blocks.pop(member.id, None)

    def tick(self) -> None:
        """Allow background work to begin."""
        for work in self._work:
            work.is_due = True

    def dispatch(self) -> None:
        """Drop unwanted work, and give idle workers their next batch."""
        for work in [work for work in self._work if not work.owner.is_wanted(work)]:
            self.drop(work)
            work.owner.unwanted(work)
        taken = {run.worker for run in self._runs.values()}
        for worker in (w for w in range(self._workers) if w not in taken) if self._work else ():
            mine = [work for work in self._work if any(batch.home in (None, worker) for batch in work.left)]
            if not any(work.priority for work in mine):
                is_calm = not self._is_swapping() and all(run.work.priority for run in self._runs.values())
                mine = [work for work in mine if work.is_due and is_calm]
            if mine:
                self._send(max(mine, key=lambda work: work.priority), worker)  # the first of several

    def _send(self, work: QueuedWork, worker: int) -> None:
        at = next(i for i, batch in enumerate(work.left) if batch.home in (None, worker))
        batch, number = work.left.pop(at), next(self._numbers)
        self._runs[number] = _Run(work, batch, worker)
        message = work.request(number, batch)
        spans = message.spans if isinstance(message, sidecar.TakeDigests) else chain.from_iterable(message.pairs)
        self._need(worker, {span.arena for span in spans if not span.pid})
        self._out(ToWorker(worker, message))

    def worker_said(self, message: sidecar.DigestsTaken | sidecar.SpansCompared) -> None:
        """Handle a worker's results."""
        run = self._runs.pop(message.run, None)
        if run is None or run.work not in self._work:
            return
        work, who, asked = run.work, f"worker {run.worker} of node {self.node}", len(run.batch.blocks)
        is_digests = isinstance(message, sidecar.DigestsTaken)
        found: Found = message.digests if isinstance(message, sidecar.DigestsTaken) else message.found
        if message.reason:
            self._fail(work, f"{who}: {message.reason}")
        elif len(found) != asked * (DIGEST_BYTES if is_digests else 1):
            self._fail(work, f"{who} answered for {len(found)}, asked for {asked} blocks")
        else:
            work.results[run.batch.number] = found
            work.unfinished -= 1
            if not work.unfinished:
                self._work.remove(work)
                (work.owner.done if work.owner.is_wanted(work) else work.owner.unwanted)(work)

    def workers_of(self, work: QueuedWork) -> list[int]:
        """Return the workers that read a batch of this work now."""
        return sorted({run.worker for run in self._runs.values() if run.work is work})

    def worker_gone(self, worker: int, *, died: bool) -> None:
        """Requeue the batch of a worker that died or was replaced."""
        for number, run in list(self._runs.items()):
            if run.worker == worker:
                del self._runs[number]
                run.work.left.append(run.batch)
                run.work.attempts += died
                if died and run.work.attempts > ATTEMPTS and run.work in self._work:
                    self._fail(run.work, f"workers of node {self.node} died {ATTEMPTS} times while they read this")

    def _fail(self, work: QueuedWork, reason: str) -> None:
        self._work.remove(work)
        work.owner.failed(work, reason)
