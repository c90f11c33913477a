"""A job in parts for different services or paths, run one after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refitd.copy_services import DigestMismatch, PreparedJob, RunResult


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """A job for some rows of a list."""

    rows: npt.NDArray[np.int64]
    job: PreparedJob


class PartsJob(PreparedJob):
    """The parts of one job."""

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts

    def run(self, *, verify: bool, on_progress: Callable[[int], None], timeout: float | None = None) -> RunResult:
        """See PreparedJob.run; `timeout` applies to each part."""
        done: list[RunResult] = []

        def progress(bytes_done: int) -> None:
            on_progress(sum(result.bytes for result in done) + bytes_done)

        for part in self._parts:
            try:
                done.append(part.job.run(verify=verify, on_progress=progress, timeout=timeout))
            except DigestMismatch as exc:
                known = 0 <= exc.copy < len(part.rows)
                raise DigestMismatch(str(exc), int(part.rows[exc.copy]) if known else -1) from exc
        return RunResult(
            copies=sum(result.copies for result in done),
            bytes=sum(result.bytes for result in done),
            seconds=sum(result.seconds for result in done),
            staging_bytes=max(result.staging_bytes for result in done),
        )
