"""A job in parts for different services or paths, run one after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refitd.buffers.layout import WHOLE
from refitd.copy_services import Arriving, DigestMismatch, PreparedJob, RunResult


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """A job for some rows of a list; `rows` has their numbers if the job counts them from 0."""

    job: PreparedJob
    rows: npt.NDArray[np.int64] | None = None


class PartsJob(PreparedJob):
    """The parts of one job, and a number of copies without bytes."""

    def __init__(self, parts: list[Part], empty: int = 0) -> None:
        self._parts, self._empty = parts, empty
        self._arriving: Arriving | None = None
        self._unable: list[Part] = []  # they begin once everything is written

    def follow(self, arriving: Arriving | None) -> bool:
        """See PreparedJob.follow."""
        self._unable = [part for part in self._parts if not part.job.follow(arriving)]
        self._arriving = arriving
        return True

    def run(self, *, verify: bool, on_progress: Callable[[int], None], timeout: float | None = None) -> RunResult:
        """See PreparedJob.run; `timeout` applies to each part."""
        done: list[RunResult] = []

        def progress(bytes_done: int) -> None:
            on_progress(sum(result.bytes for result in done) + bytes_done)

        for part in sorted(self._parts, key=lambda part: part in self._unable):
            if self._arriving is not None and part in self._unable:
                self._arriving.await_all((arena, 0, WHOLE) for arena in sorted(self._arriving.arenas))
            try:
                done.append(part.job.run(verify=verify, on_progress=progress, timeout=timeout))
            except DigestMismatch as exc:
                if part.rows is None:
                    raise
                known = 0 <= exc.copy < len(part.rows)
                raise DigestMismatch(str(exc), int(part.rows[exc.copy]) if known else -1) from exc
        return RunResult(
            copies=self._empty + sum(result.copies for result in done),
            bytes=sum(result.bytes for result in done),
            seconds=sum(result.seconds for result in done),
            staging_bytes=max((result.staging_bytes for result in done), default=0),
            paths=tuple(sorted({name for result in done for name in result.paths})),
        )
