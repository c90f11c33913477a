"""What the workers of a node digest or compare of its targets: a queue of batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from refitd.addressing.places import Places
from refitd.buffers.blocks import DIGEST_BYTES
from refitd.daemon.actions import Instruction, ToWorker
from refitd.daemon.blocks import Blocks
from refitd.protocol import sidecar

# how often work is retried after a worker died of it
ATTEMPTS = 4


@dataclass(slots=True, eq=False)
class DigestWork:
    """Blocks that workers digest, or (with `others`) compare, batch by batch."""

    member: str
    what: Literal["stored", "live", "compare", "seed", "spare"]
    version: int
    blocks: Blocks
    places: Places
    is_urgent: bool
    others: Places | None = None
    chosen: Sequence[int] | None = None  # the blocks; None: all of them
    then: Callable[[str], None] = lambda wrong: None  # seed: told what is wrong, "" if nothing is
    left: list[Sequence[int]] = field(default_factory=list)  # batches not given to a worker yet
    total: int = 0  # blocks
    home: int | None = None  # the worker of the GPU that holds them, if any
    is_due: bool = False  # a tick has passed since it was added
    results: dict[int, bytes | tuple[tuple[int, int, int], ...]] = field(default_factory=dict)  # by batch's first
    finished: int = 0  # blocks
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class _Run:
    """A batch that a worker has."""

    work: DigestWork
    batch: Sequence[int]
    worker: int


class DigestQueue:
    """Hands batches to idle workers. Work that ends leaves the queue, then `done(work)` or `failed(work, reason)`.

    Attributes:
        work: what is not done, the oldest first.
    """

    def __init__(
        self,
        node: str,
        workers: int,
        out: Callable[[Instruction], None],
        need: Callable[[int, set[int]], None],
        homes: Callable[[set[int]], dict[int, int]],
        is_swapping: Callable[[], bool],
        numbers: Callable[[], int],
        done: Callable[[DigestWork], None],
        failed: Callable[[DigestWork, str], None],
    ) -> None:
        self.work: list[DigestWork] = []
        self._node = node
        self._workers = workers
        self._out = out
        self._need = need
        self._homes = homes
        self._is_swapping = is_swapping
        self._next = numbers
        self._done = done
        self._failed = failed
        self._runs: dict[int, _Run] = {}

    def add(self, work: DigestWork) -> None:
        """Queue the digest of its blocks, or their comparison, one at a time."""
        blocks = range(len(work.blocks)) if work.chosen is None else work.chosen
        work.left = [(block,) for block in blocks] if work.others else list(work.blocks.batches(work.places, blocks))
        work.total = sum(len(batch) for batch in work.left)
        homes = self._homes(work.places.arenas() | (work.others.arenas() if work.others else set()))
        work.home = next(iter(homes.values()), None)
        if work.left:
            self.work.append(work)
        else:
            self._done(work)  # all its tensors are empty

    def drop(self, is_unwanted: Callable[[DigestWork], bool]) -> None:
        """Forget work; nobody is told."""
        self.work = [work for work in self.work if not is_unwanted(work)]

    def dispatch(self) -> None:
        """Give idle workers their next batch: urgent work first, the rest while no swap runs."""
        taken = {run.worker for run in self._runs.values()}
        for worker in (w for w in range(self._workers) if w not in taken) if self.work else ():
            mine = [w for w in self.work if w.left and w.home in (None, worker)]
            due = [w for w in mine if w.is_urgent]
            if not due and not self._is_swapping() and all(run.work.is_urgent for run in self._runs.values()):
                due = [w for w in mine if w.is_due]
            if due:
                self._send(due[0], worker)

    def _send(self, work: DigestWork, worker: int) -> None:
        batch, number = work.left.pop(0), self._next()
        self._runs[number] = _Run(work, batch, worker)
        spans = tuple(work.blocks.span(work.places, block) for block in batch)
        others = tuple(work.blocks.span(work.others, block) for block in batch) if work.others else ()
        self._need(worker, {span.arena for span in (*spans, *others)})
        message: sidecar.TakeDigests | sidecar.CompareSpans = sidecar.TakeDigests(run=number, spans=spans)
        if work.others:
            message = sidecar.CompareSpans(run=number, pairs=tuple(zip(spans, others, strict=True)))
        self._out(ToWorker(worker, message))

    def worker_said(self, message: sidecar.DigestsTaken | sidecar.SpansCompared) -> None:
        """Handle a worker's results."""
        run = self._runs.pop(message.run, None)
        if run is None or run.work not in self.work:
            return
        work = run.work
        taken = isinstance(message, sidecar.DigestsTaken)
        found = message.digests if isinstance(message, sidecar.DigestsTaken) else message.found
        if message.reason:
            self._fail(work, message.reason)
        elif len(found) != len(run.batch) * (DIGEST_BYTES if taken else 1):
            self._fail(work, f"worker {run.worker} answered for {len(found)}, asked for {len(run.batch)} blocks")
        else:
            work.results[run.batch[0]] = found
            work.finished += len(run.batch)
            if work.finished == work.total:
                self.work.remove(work)
                self._done(work)

    def worker_gone(self, worker: int, *, died: bool) -> None:
        """Requeue the batches of a worker that died or was replaced."""
        for number, run in list(self._runs.items()):
            if run.worker == worker:
                del self._runs[number]
                run.work.left.append(run.batch)
                run.work.attempts += died
                if died and run.work.attempts > ATTEMPTS and run.work in self.work:
                    self._fail(run.work, f"workers of node {self._node} died {ATTEMPTS} times meanwhile")

    def _fail(self, work: DigestWork, reason: str) -> None:
        self.work.remove(work)
        self._failed(work, reason)
