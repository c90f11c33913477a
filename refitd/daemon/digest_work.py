"""Digests and comparisons by this node's workers: the blocks of tensors, and the queue of batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import prod
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from refitd.addressing.places import Places
from refitd.buffers.layout import DIGEST_BYTES, block_steps, row_major_strides, slice_text
from refitd.daemon.effects import BaseOf, Effects, SeedOf
from refitd.daemon.jobs import WorkerArenas
from refitd.daemon.members import LocalMember
from refitd.daemon.new_members import arriving_names, held_of
from refitd.dtypes import ELEMENT_SIZES
from refitd.protocol import sidecar
from refitd.protocol.reports import Difference

# Bytes in one batch. A starting swap waits for at most one batch per worker: some 10 ms.
RUN_BYTES = 64 << 20
# Maximum count of numbers in one batch's message, which must fit a datagram.
RUN_NUMBERS = 2048


class Blocks:
    """The blocks of one member, in columns instead of objects because tensors can be very many."""

    def __init__(self, member: LocalMember) -> None:
        self._held = held_of(member.registration.request)
        self._arriving = arriving_names(member.registration.request)
        places = member.registration.to_commit
        elements = np.array([prod(form.shape) for form in places.forms], np.int64)[places.form]
        self._element_size = np.array([ELEMENT_SIZES[t.dtype] for t in self._held], np.int64)
        self.steps = block_steps(elements, self._element_size)  # elements in each block of a tensor
        counts = -(-elements // self.steps)
        self.tensor = np.repeat(np.arange(len(elements)), counts)
        self.first = (np.arange(len(self.tensor)) - np.repeat(np.cumsum(counts) - counts, counts)) * np.repeat(
            self.steps, counts
        )
        self.count = np.minimum(self.steps[self.tensor], elements[self.tensor] - self.first)
        self.nbytes = int((elements * self._element_size).sum())

    def __len__(self) -> int:
        return len(self.tensor)

    def span(self, places: Places, block: int) -> sidecar.Span:
        """Return the location of a block, given the places of its tensors."""
        tensor, first, count = int(self.tensor[block]), int(self.first[block]), int(self.count[block])
        place, element = places[tensor], int(self._element_size[tensor])
        shape, strides = place.shape, place.strides
        if strides == row_major_strides(shape, element):
            shape, strides = (prod(shape),), (element,)  # merge to one dimension: a shorter message
        return sidecar.Span(place.arena, place.offset, shape, strides, element, first, count)

    def of(self, names: Collection[str]) -> list[int]:
        """Return the blocks of the tensors with these arriving names, in order."""
        chosen = np.array([name in names for name in self._arriving], bool)
        return np.flatnonzero(chosen[self.tensor]).tolist()

    def batches(self, places: Places, blocks: Sequence[int]) -> Iterator[Sequence[int]]:
        """Split these blocks (ascending) into batches of about RUN_BYTES."""
        at = np.asarray(blocks, np.int64)
        tensor = self.tensor[at]
        sizes = np.cumsum(self.count[at] * self._element_size[tensor])
        dims = np.array([max(1, len(form.shape)) for form in places.forms], np.int64)
        numbers = np.cumsum(2 * dims[places.form[tensor]] + 5)
        begin, end = 0, len(blocks)
        while begin < end:
            done = (int(sizes[begin - 1]), int(numbers[begin - 1])) if begin else (0, 0)
            limits = ((sizes, done[0] + RUN_BYTES), (numbers, done[1] + RUN_NUMBERS))
            stop = min(int(np.searchsorted(column, limit, side="right")) for column, limit in limits)
            yield blocks[begin : max(begin + 1, stop)]
            begin = max(begin + 1, stop)

    def difference(self, block: int, found: tuple[int, int, int] | None) -> Difference:
        """Describe a differing block for the report; `found` is (first, last, count) of its differing elements."""
        tensor = self._held[int(self.tensor[block])]
        first, last, number = found if found is not None else (0, 0, 0)
        if not number:
            first = int(self.first[block])
            last = first + int(self.count[block]) - 1
        text = slice_text(tensor.shape, first, last)
        return Difference(tensor.name, tensor.shape, first, last, text, number)

    def differing(self, taken: bytes, known: bytes, blocks: Sequence[int]) -> list[int]:
        """Return the blocks whose digests differ. `taken` has the digests of `blocks`, `known` of all blocks."""
        found, expected = (np.frombuffer(digests, "u8") for digests in (taken, known))
        at = np.asarray(blocks, np.int64)
        different: list[int] = at[found != expected[at]].tolist()
        return different


# work fails after this many deaths of workers that were reading it
ATTEMPTS = 4

Found = (
    bytes | tuple[tuple[int, int, int], ...]
)  # digests, or (first, last, count) of the differing elements in each pair


class Priority(IntEnum):
    """The priority of work: the highest first, then the oldest."""

    BACKGROUND = 0  # has no requester; starts after a tick, one batch at a time on the node, none during a swap
    ASKED = 1  # requested by a user or for a returning rank
    SWAP = 2  # a swap waits for it


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Blocks that one worker reads together; `home` is the worker of their GPU, None for main memory."""

    number: int  # within its work
    blocks: Sequence[int]
    home: int | None = None
    part: int = 0  # index of the member with these blocks, if the work reads several members


_Work_contra = TypeVar("_Work_contra", contravariant=True)


class WorkOwner(Protocol[_Work_contra]):
    """The owner of work. When work leaves the queue, `unwanted`, `done` or `failed` is called."""

    def is_wanted(self, work: _Work_contra, /) -> bool:
        """Return whether the data has not changed since the work was added."""

    def unwanted(self, effects: Effects, work: _Work_contra, /) -> None:
        """Handle the end of work whose data has changed."""

    def done(self, effects: Effects, work: _Work_contra, /) -> None:
        """Handle the results of all batches."""

    def failed(self, effects: Effects, work: _Work_contra, reason: str, /) -> None:
        """Handle a batch that cannot be read."""


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedWork(ABC):
    """One piece of work in the queue, cut into batches."""

    owner: WorkOwner[Any]
    priority: Priority
    left: list[Batch] = field(default_factory=list)  # not sent to a worker yet
    unfinished: int = 0  # batches without a result
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
        """The digests of all batches, in order."""
        return b"".join(found for found in self.found if isinstance(found, bytes))

    @property
    def compares(self) -> bool:
        """Whether spans are compared with others; if not, they are digested."""
        return False

    @abstractmethod
    def request(self, run: int, batch: Batch) -> sidecar.ReadSpans:
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
    purpose: SeedOf | BaseOf | None = None  # of work on a seed

    @property
    def compares(self) -> bool:
        """See QueuedWork.compares."""
        return self.others is not None

    def request(self, run: int, batch: Batch) -> sidecar.ReadSpans:
        """See QueuedWork.request."""
        spans = tuple(self.blocks.span(self.places, block) for block in batch.blocks)
        if self.others is None:
            return sidecar.ReadSpans(run=run, spans=spans)
        others = tuple(self.blocks.span(self.others, block) for block in batch.blocks)
        return sidecar.ReadSpans(run=run, spans=spans, others=others)


@dataclass(frozen=True, slots=True)
class _Run:
    """A batch that a worker is reading."""

    work: QueuedWork
    batch: Batch
    worker: int


class DigestQueue:
    """Sends batches to idle workers, one at a time to each."""

    def __init__(
        self,
        node: str,
        workers: int,
        maps: WorkerArenas,
    ) -> None:
        self.node = node
        self._workers = workers
        self.maps = maps
        self._numbers = 0
        self.work: list[QueuedWork] = []  # unfinished, oldest first
        self._runs: dict[int, _Run] = {}
        # by member; cached, because they never change and building them is slow for very many tensors
        self._blocks: dict[str, Blocks] = {}

    def blocks_of(self, member: LocalMember) -> Blocks:
        """Return the blocks of a target."""
        blocks = self._blocks.get(member.id)
        if blocks is None:
            blocks = self._blocks[member.id] = Blocks(member)
        return blocks

    def begun(self, member: str, what: str) -> list[BlockWork]:
        """Return the unfinished work of this kind on a target."""
        return [w for w in self.work if isinstance(w, BlockWork) and (w.member, w.what) == (member, what)]

    def add_blocks(self, effects: Effects, work: BlockWork) -> None:
        """Queue the digest of a target's blocks, or their comparison with one block per batch."""
        blocks = range(len(work.blocks)) if work.chosen is None else work.chosen
        homes = self.maps.homes(work.places.arenas() | (work.others.arenas() if work.others else set()))
        home = next(iter(homes.values()), None)
        batches = [(block,) for block in blocks] if work.others else work.blocks.batches(work.places, blocks)
        work.begin([Batch(number, batch, home) for number, batch in enumerate(batches)])
        self.add(effects, work)

    def add(self, effects: Effects, work: QueuedWork) -> None:
        """Queue work; if it has no batch, it is done immediately."""
        if work.left:
            self.work.append(work)
        else:
            work.owner.done(effects, work)

    def drop(self, work: QueuedWork) -> None:
        """Drop work without a call to its owner."""
        if work in self.work:
            self.work.remove(work)

    def drop_blocks(self, member: str, *what: str) -> None:
        """Drop the work on a target without a call to its owner: these kinds, or all kinds if none is given."""
        for work in [w for w in self.work if isinstance(w, BlockWork) and w.member == member]:
            if not what or work.what in what:
                self.work.remove(work)

    def left(self, member: LocalMember) -> None:
        """Drop the work and the cached blocks of a target that has left."""
        self.drop_blocks(member.id)
        self._blocks.pop(member.id, None)

    def tick(self) -> None:
        """Allow background work to begin."""
        for work in self.work:
            work.is_due = True

    def dispatch(self, effects: Effects, *, is_swapping: bool) -> None:
        """Drop unwanted work, then send idle workers their next batch.

        `is_swapping`: a swap needs the workers, and background work waits.
        """
        for work in [work for work in self.work if not work.owner.is_wanted(work)]:
            self.drop(work)
            work.owner.unwanted(effects, work)
        taken = {run.worker for run in self._runs.values()}
        for worker in (w for w in range(self._workers) if w not in taken) if self.work else ():
            mine = [work for work in self.work if any(batch.home in (None, worker) for batch in work.left)]
            if not any(work.priority for work in mine):
                is_calm = not is_swapping and all(run.work.priority for run in self._runs.values())
                mine = [work for work in mine if work.is_due and is_calm]
            if mine:
                self._send(
                    effects, max(mine, key=lambda work: work.priority), worker
                )  # `max` returns the oldest of equals

    def _send(self, effects: Effects, work: QueuedWork, worker: int) -> None:
        at = next(i for i, batch in enumerate(work.left) if batch.home in (None, worker))
        batch, number = work.left.pop(at), self._next()
        self._runs[number] = _Run(work, batch, worker)
        message = work.request(number, batch)
        spans = (*message.spans, *message.others)
        self.maps.need(effects, worker, {span.arena for span in spans})
        effects.order(worker, message)

    def worker_said(self, effects: Effects, message: sidecar.SpansRead) -> None:
        """Handle a worker's results."""
        run = self._runs.pop(message.run, None)
        if run is None or run.work not in self.work:
            return
        work, who, asked = run.work, f"worker {run.worker} of node {self.node}", len(run.batch.blocks)
        is_digests = not work.compares
        found: Found = message.digests if is_digests else message.found
        if message.reason:
            self._fail(effects, work, f"{who}: {message.reason}")
        elif len(found) != asked * (DIGEST_BYTES if is_digests else 1):
            self._fail(effects, work, f"{who} answered for {len(found)}, asked for {asked} blocks")
        else:
            work.results[run.batch.number] = found
            work.unfinished -= 1
            if not work.unfinished:
                self.work.remove(work)
                (work.owner.done if work.owner.is_wanted(work) else work.owner.unwanted)(effects, work)

    def workers_of(self, work: QueuedWork) -> list[int]:
        """Return the workers that are reading a batch of this work."""
        return sorted({run.worker for run in self._runs.values() if run.work is work})

    def worker_gone(self, effects: Effects, worker: int, *, died: bool) -> None:
        """Requeue the batch of a worker that died or was replaced."""
        for number, run in list(self._runs.items()):
            if run.worker == worker:
                del self._runs[number]
                run.work.left.append(run.batch)
                run.work.attempts += died
                if died and run.work.attempts > ATTEMPTS and run.work in self.work:
                    self._fail(
                        effects, run.work, f"workers of node {self.node} died {ATTEMPTS} times while they read this"
                    )

    def _fail(self, effects: Effects, work: QueuedWork, reason: str) -> None:
        self.work.remove(work)
        work.owner.failed(effects, work, reason)

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers
