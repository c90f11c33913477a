"""Copy jobs of this node: addressed once, split over the workers, run as often as needed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from refitd.addressing.between_nodes import TransferList
from refitd.addressing.conversions import ConversionList
from refitd.addressing.copies import CopyList
from refitd.daemon.actions import Instruction, ToWorker
from refitd.protocol import sidecar

# Jobs that a node caches: two slots times a few models, within the node and between nodes.
MAX_JOBS = 32


@dataclass(frozen=True, eq=False, slots=True)
class WorkerShare:
    """One worker's part of a job: copies within the node, transfers of an epoch, or conversions."""

    worker: int
    rows: CopyList | TransferList | ConversionList
    epoch: str | None = None


def shares_of(
    rows: CopyList | ConversionList, workers: int, homes: Mapping[int, int] | None = None
) -> list[WorkerShare]:
    """Return the workers' shares (see WorkList.shared_out); workers without work get none."""
    numbers = rows.shared_out(workers, homes)
    return [WorkerShare(worker, rows.select(mine)) for worker, mine in enumerate(numbers) if len(mine)]


@dataclass(slots=True)
class Job:
    """A job and its share for each worker."""

    number: int
    shares: dict[int, WorkerShare]  # by worker
    loaded: set[int] = field(default_factory=set)  # workers that have it
    running: set[int] = field(default_factory=set)  # runs


@dataclass(frozen=True, slots=True)
class Run:
    """One execution of a worker's share of a job."""

    number: int
    job: Job
    worker: int
    purpose: Hashable
    verify: bool

    @property
    def crosses(self) -> bool:
        """Whether the run exchanges data with workers of other nodes."""
        return self.job.shares[self.worker].epoch is not None

    @property
    def converts(self) -> bool:
        """Whether the run converts arrived tensors."""
        return isinstance(self.job.shares[self.worker].rows, ConversionList)


class JobTable:
    """Tracks which jobs are loaded where and which runs are active. Instructions go to `out`.

    `need(worker, arenas)` makes a worker map the arenas of a job before it is loaded.
    """

    def __init__(self, out: Callable[[Instruction], None], need: Callable[[int, set[int]], None]) -> None:
        self._out = out
        self._need = need
        self._jobs: dict[Hashable, Job] = {}  # in order of last use
        self._runs: dict[int, Run] = {}
        self._numbers = 0

    def start(
        self,
        key: Hashable,
        make: Callable[[], Sequence[WorkerShare]],
        purpose: Hashable,
        *,
        verify: bool,
        timeout_s: float = 0.0,
        bases: Sequence[sidecar.HeldBase] = (),
    ) -> list[Run]:
        """Run the job `key`, addressing and loading it first if needed; return its runs.

        `timeout_s` limits exchanges with workers of other nodes, which may use `bases`.
        """
        job = self._jobs.pop(key, None)
        if job is None:
            job = Job(self._next(), {share.worker: share for share in make()})
        self._jobs[key] = job
        self._evict()
        return [self._begin(job, worker, purpose, verify, timeout_s, bases) for worker in job.shares]

    def repeat(self, run: Run) -> Run:
        """Run a share within the node again, on the worker that replaced its first one."""
        return self._begin(run.job, run.worker, run.purpose, run.verify, 0.0, ())

    def _begin(
        self,
        job: Job,
        worker: int,
        purpose: Hashable,
        verify: bool,
        timeout_s: float,
        bases: Sequence[sidecar.HeldBase],
    ) -> Run:
        if worker not in job.loaded:
            share = job.shares[worker]
            self._need(worker, share.rows.arenas())
            block = share.rows.to_bytes()
            converts = isinstance(share.rows, ConversionList)
            load = sidecar.LoadJob(job=job.number, nbytes=len(block), epoch=share.epoch, converts=converts)
            self._out(ToWorker(worker, load, block=block))
            job.loaded.add(worker)
        run = Run(self._next(), job, worker, purpose, verify)
        self._runs[run.number] = run
        job.running.add(run.number)
        mine = job.shares[worker].rows.arenas() if bases else ()
        told = tuple(base for base in bases if base.arena in mine)
        message = sidecar.RunJob(job.number, run.number, verify, timeout_s, told)
        self._out(ToWorker(worker, message))
        return run

    @property
    def active(self) -> int:
        """How many runs are active."""
        return len(self._runs)

    def run(self, number: int) -> Run | None:
        """Return an active run, None if there is none with this number."""
        return self._runs.get(number)

    def end(self, number: int) -> Run | None:
        """Remove a run from the table and return it."""
        run = self._runs.pop(number, None)
        if run is not None:
            run.job.running.discard(number)
        return run

    def runs_of(self, job: int, worker: int) -> list[Run]:
        """Return a worker's runs of a job, by its number."""
        return [run for run in self._runs.values() if run.worker == worker and run.job.number == job]

    def unload(self, run: Run) -> None:
        """Unload the job of a failed run, so that the next run loads it again: the cause may have passed."""
        if run.worker in run.job.loaded:
            run.job.loaded.discard(run.worker)
            self._out(ToWorker(run.worker, sidecar.DropJob(job=run.job.number)))

    def ended_by(self, worker: int) -> list[Run]:
        """Remove and return all runs of a worker that is gone; its jobs must be loaded anew."""
        for job in self._jobs.values():
            job.loaded.discard(worker)
        return [run for number, run in list(self._runs.items()) if run.worker == worker and self.end(number)]

    def busy_with(self, purpose: Hashable) -> set[int]:
        """Return the workers that have runs for this purpose."""
        return {run.worker for run in self._runs.values() if run.purpose == purpose}

    def runs_for(self, purpose: Hashable) -> list[Run]:
        """Return the active runs for this purpose."""
        return [run for run in self._runs.values() if run.purpose == purpose]

    def drop_arenas(self, arenas: set[int]) -> None:
        """Forget every job that touches one of these arenas."""
        for key, job in list(self._jobs.items()):
            if any(share.rows.arenas() & arenas for share in job.shares.values()):
                self._drop(key)

    def drop_keys(self, matches: Callable[[Hashable], bool]) -> None:
        """Forget the jobs whose keys match."""
        for key in [k for k in self._jobs if matches(k)]:
            self._drop(key)

    def copy_origin(self, run: Run, copy: int | None) -> int | None:
        """Return the plan row that a run's copy was cut from."""
        rows = run.job.shares[run.worker].rows
        if copy is None or isinstance(rows, ConversionList) or not 0 <= copy < len(rows):
            return None
        return int(rows.origin[copy])

    def _evict(self) -> None:
        for key in list(self._jobs)[:-1]:
            if len(self._jobs) <= MAX_JOBS:
                return
            if not self._jobs[key].running:
                self._drop(key)

    def _drop(self, key: Hashable) -> None:
        job = self._jobs.pop(key)
        for worker in sorted(job.loaded):
            self._out(ToWorker(worker, sidecar.DropJob(job=job.number)))

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers
