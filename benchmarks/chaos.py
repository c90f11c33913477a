"""Random faults for the long run: kill or stop one process at a time, or take away its journal."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from refitd.testing import Process
from tests.support.breakable import BreakableCluster, Member

MENDED_S = 30.0
DIES_S = 10.0  # limit on the wait for the exchange that is to kill an engine


class Chaos:
    """Injects one fault at a time, at random moments, and repairs faults that do not repair themselves."""

    def __init__(
        self, cluster: BreakableCluster, seed: int, flipping: Sequence[str], keep_journal: Callable[[], None]
    ) -> None:
        """`flipping` names replicas that exchange arenas; `keep_journal` stores the journal's rows before a loss."""
        self._cluster = cluster
        self._flipping = flipping
        self._keep_journal = keep_journal
        self._copy: dict[str, bytes] = {}  # an earlier journal's files
        self._random = random.Random(seed)
        self._stop = threading.Event()
        self.faults: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self.last = 0.0  # when the last fault was over
        self.commits = 0  # set by the driver
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Chaos:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._random.uniform(0.3, 4.0)):
                what, do = self._random.choice(self._choices())
                do()
                self.faults[what] += 1
                self.last = time.monotonic()
                # most faults hit a working cluster; some hit a cluster that has not yet recovered from the last fault
                if self._random.random() < 0.75:
                    self._wait_for_commits(self.commits + 1)
        except BaseException as exc:  # the driver reports it
            self.failure = exc

    def _wait_for_commits(self, wanted: int) -> None:
        until = time.monotonic() + MENDED_S
        while self.commits < wanted and time.monotonic() < until and not self._stop.wait(0.02):
            pass

    def _choices(self) -> list[tuple[str, Callable[[], None]]]:
        cluster, rng = self._cluster, self._random
        node = rng.choice(sorted(cluster.daemons))
        daemon = cluster.daemons[node]
        engine = cluster.engines[rng.choice(sorted(cluster.engines))]
        workers = daemon.workers()
        found: list[tuple[str, Callable[[], None]]] = []
        for process, role in (
            (cluster.coordinator, "coordinator"),
            (daemon, "daemon"),
            (engine, "engine"),
            (cluster.trainer, "trainer"),
            *((member, f"{name} family") for name, member in sorted(cluster.families.items())),
        ):
            found.append((f"{role}, kill -9", lambda p=process: self._kill(p)))
            found.append((f"{role}, stopped for a while", lambda p=process: self._pause(p.pid)))
        if workers:
            pid = rng.choice(workers)
            found.append(("worker, kill -9", lambda: _signal(pid, signal.SIGKILL)))
            found.append(("worker, stopped for a while", lambda: self._pause(pid)))
        found.append(("engine, killed and back at once", lambda: self._kill(engine, back_in_s=0.0)))
        flips = cluster.engines[rng.choice(self._flipping)]
        found.append(("engine, killed half way in an exchange", lambda: self._kill_at(flips, "half")))
        found.append(
            ("engine, killed after an exchange that nobody was told of", lambda: self._kill_at(flips, "exchanged"))
        )
        found.append(("journal lost", self._lose_journal))
        found.append(("journal exchanged for an earlier one", self._exchange_journal))
        return found

    def _lose_journal(self) -> None:
        self._without_coordinator({})

    def _exchange_journal(self) -> None:
        copy, self._copy = self._copy, {}
        self._without_coordinator(copy)

    def _without_coordinator(self, files: dict[str, bytes]) -> None:
        """Kill the coordinator, replace its journal's files with the given files, restart it."""
        coordinator, journal = self._cluster.coordinator, self._cluster.journal
        coordinator.kill()
        self._keep_journal()
        present = sorted(journal.parent.glob(f"{journal.name}*"))
        self._copy = self._copy or {path.name: path.read_bytes() for path in present if not path.name.endswith("-shm")}
        for path in present:
            path.unlink()
        for name, data in files.items():
            (journal.parent / name).write_bytes(data)
        coordinator.start()

    def _kill(self, process: Process, back_in_s: float | None = None) -> None:
        process.kill()
        self._stop.wait(self._random.uniform(0.0, 1.5) if back_in_s is None else back_in_s)
        process.start()

    def _kill_at(self, engine: Member, point: str) -> None:
        """Have an engine kill itself in its next exchange; kill it if no exchange comes."""
        engine.tell(dies_at=point)
        until = time.monotonic() + DIES_S
        while engine.is_running and time.monotonic() < until and not self._stop.wait(0.01):
            pass
        if engine.is_running:
            self.faults["of these: there was no exchange"] += 1
        self._kill(engine)

    def _pause(self, pid: int) -> None:
        # the longest exceed the time that its peers wait for a message
        seconds = self._random.choice((0.2, 1.0, 3.0, 12.0, 20.0))
        if _signal(pid, signal.SIGSTOP):
            try:
                self._stop.wait(seconds)
            finally:
                _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
