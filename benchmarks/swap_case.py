"""Run a case of the swap benchmark: daemons, member processes, and one round of every method."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.swap_model import ELEMENT_BYTES, Layout, Tensor, held, traffic
from benchmarks.swap_processes import Memcpy, Process, anonymous_bytes, available_bytes
from refitd.testing import Daemon

REFITD = "refitd"
CHECKPOINT = "checkpoint"
PEERS = ("direct", "gather")  # methods of swap_member.Member
SLOW = ("gather", CHECKPOINT)
SLOW_ROUNDS = 3
PROCESS_BYTES = 300 << 20  # memory of torch in each member process


@dataclass(frozen=True)
class Case:
    """A model, its two layouts, and the service that moves it."""

    name: str
    model: tuple[Tensor, ...]
    source: Layout
    target: Layout
    ways: tuple[str, ...]
    rounds: int
    nodes: int = 1  # 2: sources on one, targets on the other
    verify: bool = True  # `verify` in the configuration of the model
    service: str = "gloo"  # between two nodes

    @property
    def nbytes(self) -> int:
        """The bytes that are written to the targets."""
        ranks = range(self.target.world)
        return sum(ELEMENT_BYTES * prod(s.shape) for rank in ranks for s in held(self.model, self.target, rank))

    @property
    def needed_bytes(self) -> int:
        """The memory that the case needs: trainers' tensors, snapshots, staging, engines' tensors, a checkpoint."""
        held_bytes = 4 * self.nbytes + (2 * self.nbytes if CHECKPOINT in self.ways else 0)
        return held_bytes + PROCESS_BYTES * (self.source.world + self.target.world)


class RunningCase:
    """The processes of one case; the baselines move equal bytes between these processes.

    Sources are clients of the first daemon, targets of the second; on one node both are the same daemon. `close`
    ends the daemons.
    """

    def __init__(self, case: Case, daemons: Sequence[Daemon], slots: int = 1) -> None:
        self.case = case
        self._daemons = list(dict.fromkeys(daemons))
        self._processes: list[Process] = []
        self._version = 0
        try:
            self._start(str(daemons[0].directory), str(daemons[-1].directory), slots)
            self._client = daemons[-1].connect()
        except BaseException:
            self.close()
            raise

    def _start(self, sources: str, targets: str, slots: int) -> None:
        case = self.case
        pairs = [(src, dst, n) for (src, dst), n in traffic(case.model, case.source, case.target).items()]
        spec: dict[str, Any] = {
            "tensors": [tensor.as_json() for tensor in case.model],
            "source": {"kind": case.source.kind, "world": case.source.world},
            "target": {"kind": case.target.kind, "world": case.target.world},
            "pairs": pairs,
            "slots": slots,
        }
        for side, layout, directory in (("source", case.source, sources), ("target", case.target, targets)):
            for rank in range(layout.world):
                self._processes.append(Process({**spec, "side": side, "rank": rank, "directory": directory}))
        for process in self._processes:
            process.answer()
        if set(case.ways) - {REFITD}:
            self._all("gloo", store=str(Path(sources) / "store"))

    @property
    def sources(self) -> list[Process]:
        """The trainer's ranks."""
        return self._processes[: self.case.source.world]

    @property
    def targets(self) -> list[Process]:
        """The engine's ranks."""
        return self._processes[self.case.source.world :]

    def round(self, number: int, unit: Memcpy, look: Callable[[], None]) -> dict[str, float]:
        """Perform every way once and return seconds by way; slow ways only in the first rounds.

        `look` is called where memory use is highest.
        """
        units = [unit.seconds(self.case.nbytes)]
        took = self.swap()
        look()
        if self.case.verify:
            took |= self.verify()  # this also keeps digests out of other measurements
        units.append(unit.seconds(self.case.nbytes))
        for way in self.case.ways:
            if way == REFITD or (way in SLOW and number >= SLOW_ROUNDS):
                continue
            if way == CHECKPOINT:
                with _shared_directory() as directory:
                    took[way] = self._all(way, directory=directory)
                    look()
            else:
                took[way] = self._all(way)
        units.append(unit.seconds(self.case.nbytes))
        return {"memcpy": sorted(units)[1], **took}

    def swap(self, *, is_awaited: bool = False) -> dict[str, float]:
        """Publish the next version and swap to it; return seconds by phase.

        With `is_awaited` the targets are waiting already, and are not asked how long they paused.
        """
        self._version += 1
        for process in self.sources:
            process.ask("publish", version=self._version)
        took = {"publish": max(process.answer()["seconds"] for process in self.sources)}
        for process in () if is_awaited else self.targets:
            process.ask("wait", version=self._version)
        started = time.perf_counter()
        report = self._client.swap("bench", self._version, timeout=120)
        took["swap"] = time.perf_counter() - started
        took |= {"stage" if self.case.verify else "bare": report.stage_s, "commit": report.commit_s}
        if not is_awaited:
            took["paused"] = max(process.answer()["paused_s"] for process in self.targets)
        return took

    def verify(self) -> dict[str, float]:
        """Verify the live version and return the seconds, without the wait for the version's digests.

        Raises:
            RuntimeError: the version is not proven.
        """
        report = self._client.verify("bench", timeout=120)
        started = time.perf_counter()
        report = self._client.verify("bench", timeout=120)
        if report.outcome != "proven":
            raise RuntimeError(f"verify says {report.outcome}: {[member.reason for member in report.members]}")
        return {"verify": time.perf_counter() - started}

    def worker_bytes(self) -> int:
        """Return the memory beyond arenas of the largest worker process."""
        return max(anonymous_bytes(pid) for node in self._client.status().nodes for pid in node.workers)

    def _all(self, do: str, **arguments: Any) -> float:
        """Have every process do one step; return the duration of the slowest."""
        for process in self._processes:
            process.ask(do, **arguments)
        return max(float(process.answer().get("seconds", 0.0)) for process in self._processes)

    def close(self) -> None:
        """End every process of the case."""
        if hasattr(self, "_client"):
            self._client.close()
        for process in self._processes:
            process.close()
        for daemon in self._daemons:
            daemon.stop()
            daemon.remove()


class Watermark:
    """The minimum of the available memory since the start, as the kernel estimates it."""

    def __init__(self) -> None:
        self._before = self._least = available_bytes()

    def look(self) -> None:
        """Record the available memory."""
        self._least = min(self._least, available_bytes())

    @property
    def used_bytes(self) -> int:
        """The peak memory use beyond the use at the start."""
        return self._before - self._least


@contextlib.contextmanager
def _shared_directory() -> Iterator[str]:
    """Yield a directory in shared memory; it is removed when the context ends."""
    directory = tempfile.mkdtemp(prefix="rfb", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
