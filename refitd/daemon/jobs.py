"""Copy jobs of this node: addressed once, dealt to the workers, run as often as needed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np

from refitd.daemon.actions import Instruction, ToWorker
from refitd.execute.copies import CopyList, deal
from refitd.protocol import sidecar

# Prepared jobs a node keeps: two snapshot slots times a few models.
MAX_JOBS = 16


@dataclass(slots=True)
class Job:
    """Copies loaded into the workers."""

    number: int
    copies: CopyList
    dealt: list[np.ndarray[tuple[int], np.dtype[np.int64]]]  # rows of `copies`, by worker
    loaded: set[int] = field(default_factory=set)  # workers that have it
    running: set[int] = field(default_factory=set)  # runs


@dataclass(frozen=True, slots=True)
class Run:
    """One worker's share of one performance of a job."""

    number: int
    job: Job
    worker: int
    purpose: Hashable


class JobTable:
    """Which jobs are loaded where and which runs are under way. Instructions go to `out`."""

    def __init__(self, workers: int, out: Callable[[Instruction], None]) -> None:
        self._workers = workers
        self._out = out
        self._jobs: dict[Hashable, Job] = {}  # in order of last use
        self._runs: dict[int, Run] = {}
        self._numbers = 0

    def start(self, key: Hashable, make: Callable[[], CopyList], purpose: Hashable, *, verify: bool) -> list[Run]:
        """Run the job `key`, addressing and loading it first where that has not been done; return its runs."""
        job = self._jobs.pop(key, None)
        if job is None:
            copies = make()
            job = Job(self._next(), copies, deal(copies, self._workers))
        self._jobs[key] = job
        self._evict()
        runs: list[Run] = []
        for worker, rows in enumerate(job.dealt):
            if not len(rows):
                continue
            if worker not in job.loaded:
                block = job.copies.select(rows).to_bytes()
                self._out(ToWorker(worker, sidecar.LoadJob(job=job.number, nbytes=len(block)), block=block))
                job.loaded.add(worker)
            run = Run(self._next(), job, worker, purpose)
            self._runs[run.number] = run
            runs.append(run)
            job.running.add(run.number)
            self._out(ToWorker(worker, sidecar.RunJob(job=job.number, run=run.number, verify=verify)))
        return runs

    def run(self, number: int) -> Run | None:
        """Return a run under way."""
        return self._runs.get(number)

    def end(self, number: int) -> Run | None:
        """Take a run off the books."""
        run = self._runs.pop(number, None)
        if run is not None:
            run.job.running.discard(number)
        return run

    def ended_by(self, worker: int) -> list[Run]:
        """Take all runs of a dead worker off the books; its jobs must be loaded anew."""
        for job in self._jobs.values():
            job.loaded.discard(worker)
        return [run for number, run in list(self._runs.items()) if run.worker == worker and self.end(number)]

    def busy_with(self, purpose: Hashable) -> set[int]:
        """Return the workers that are performing something for this purpose."""
        return {run.worker for run in self._runs.values() if run.purpose == purpose}

    def drop_arenas(self, arenas: set[int]) -> None:
        """Forget every job that touches one of these arenas."""
        for key, job in list(self._jobs.items()):
            if job.copies.arenas() & arenas:
                self._drop(key)

    def drop_keys(self, matches: Callable[[Hashable], bool]) -> None:
        """Forget jobs by key."""
        for key in [k for k in self._jobs if matches(k)]:
            self._drop(key)

    def copy_origin(self, run: Run, copy: int | None) -> int | None:
        """Return the plan row that a run's copy was cut from."""
        rows = run.job.dealt[run.worker]
        if copy is None or not 0 <= copy < len(rows):
            return None
        return int(run.job.copies.origin[rows[copy]])

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
