"""The cluster that cases break: a coordinator, three daemons, a trainer, four replicas, their versions and journal."""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from collections.abc import Sequence

import refitd
from refitd.testing import RunningSwap, processes
from tests.faults import clock
from tests.support.breakable import BreakableCluster
from tests.support.breakable_member import MODEL
from tests.support.network import TwoHosts

PORT = 7455
PLAN_S, STAGE_S, PAUSE_S, COMMIT_S = 8.0, 3.0, 3.0, 3.0
NODES = ("n0", "n1", "n2")
REPLICAS = {
    "near": ("n0", "asked"),
    "far": ("n1", "polls"),
    "still": ("n1", "in-place"),
    "flips": ("n2", "flips"),
}


class Cluster(BreakableCluster):
    """Coordinator, n0, n1 and n2. Beside n0 are the trainer and the replica `near`, which pauses when asked.

    Beside n1 are the replicas `far`, which polls, and `still`, which is written in place. n1 relays to n2. Beside n2 is
    `flips`, which polls and exchanges arenas.
    """

    def __init__(self, hosts: TwoHosts | None = None) -> None:
        """`hosts`, if they can be made, have n0 and the coordinator on one side, n1 and n2 on the other."""
        deadlines = {"plan_s": PLAN_S, "stage_s": STAGE_S, "pause_s": PAUSE_S, "commit_s": COMMIT_S}
        endpoint = "" if hosts is None else f"tcp://{hosts.coordinator}:{PORT}"
        super().__init__(NODES, REPLICAS, deadlines=deadlines, endpoint=endpoint)
        self.hosts = hosts
        self.clocks: dict[str, clock.Clock] = {}
        self._copy = b""  # of the journal
        self._lost: dict[str, tuple[int, str, float]] = {}  # last row of each swap in removed journals
        self._library = None if clock.why_not() else clock.build()
        self._sync = None if clock.why_not() else clock.build(clock.SOURCE.with_name("sync.c"))
        self.syncs(fail=False)
        self.start()

    # --- what is started ----------------------------------------------------------------------------------

    def environment(self, name: str) -> dict[str, str]:
        found = super().environment(name)
        if self.hosts is not None and name in NODES:
            found["REFITD_NODE__ADDRESS"] = self.hosts.addresses[name != "n0"]
        if self._library is not None and name in ("coordinator", *NODES, *REPLICAS, "trainer"):
            self.clocks[name] = clock.Clock(self._library, self.folder / f"{name}.clock")
            found |= self.clocks[name].environment
            if name == "coordinator":
                found["LD_PRELOAD"] += f":{self._sync}"
                found["FAULTS_SYNC"] = str(self.folder / "fails")
        return found

    def prefix(self, name: str) -> Sequence[str]:
        return () if self.hosts is None else ["ip", "netns", "exec", self.hosts.names[name in NODES[1:]]]

    def syncs(self, *, fail: bool) -> None:
        """Let the coordinator's writes reach its disk, or fail to."""
        (self.folder / "fails").write_text("1" if fail else "0")

    def pid(self, name: str) -> int:
        """Return the pid of a process."""
        return next(process for process in self.processes if process.name == name).pid

    # --- what is asked ------------------------------------------------------------------------------------

    def swap(self, version: int, timeout: float) -> RunningSwap:
        """Ask n0 for a swap, on a thread."""
        return RunningSwap(self.daemons["n0"].connect("swap", 5), MODEL, version, timeout)

    def status(self) -> refitd.protocol.reports.StatusReport | None:  # type: ignore[name-defined]
        """Return the status by n0, None if it does not answer."""
        try:
            with self.daemons["n0"].connect("status", 5) as client:
                return client.status()
        except refitd.RefitdError:
            return None

    def journalled(self) -> list[tuple[int, str, float]]:
        """Return version, state and time of the swaps in the journal, the one written last first; then of lost ones."""
        return list(self._swaps().values())

    def _swaps(self) -> dict[str, tuple[int, str, float]]:
        rows: list[tuple[str, int, str, float]] = []
        try:
            with contextlib.closing(self._open_journal()) as journal:
                rows = journal.execute("SELECT swap, version, state, at FROM swaps ORDER BY rowid DESC").fetchall()
        except sqlite3.OperationalError:
            if not self._lost:
                raise
        found = {swap: (version, state, at) for swap, version, state, at in rows}
        return found | {swap: row for swap, row in self._lost.items() if swap not in found}

    def _open_journal(self) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{self.journal}?mode=ro", uri=True, timeout=5)

    def live(self) -> int | None:
        """Return the last decided version: no case goes back to an earlier one."""
        return max((version for version, state, _ in self.journalled() if state != "aborted"), default=None)

    def copy_journal(self) -> None:
        """Keep a copy of the journal as it is."""
        with contextlib.closing(self._open_journal()) as journal:
            self._copy = journal.serialize()

    def take_journal(self, *, put_copy: bool) -> None:
        """Remove the journal, after reading its swaps; then put the copy in its place, or leave it removed."""
        self._lost = self._swaps()
        for path in self.journal.parent.glob(f"{self.journal.name}*"):
            path.unlink()
        if put_copy:
            self.journal.write_bytes(self._copy)

    # --- what is logged -----------------------------------------------------------------------------------

    def logged(self) -> dict[str, int]:
        """Return the length of each log of daemons and coordinator, in bytes."""
        return {process.name: process.log_path.stat().st_size for process in self.parts()}

    def loud(self, since: dict[str, int]) -> list[str]:
        """Return the warnings and errors since then, and lines of daemons that have another coordinator."""
        found = []
        for process in self.parts():
            new = process.log_path.read_bytes()[since[process.name] :].decode(errors="replace")
            loud = (" level=warning ", " level=error ", " event=coordinator-changed ")
            found += [line for line in new.splitlines() if any(word in line for word in loud)]
        return found

    # --- what is held -------------------------------------------------------------------------------------

    def held(self) -> dict[str, int]:
        """Return the resources of the whole cluster: descriptors by kind, processes, files."""
        found: Counter[str] = Counter()
        for process in self.processes:
            for kind, count in processes.descriptors(process.pid).items():
                found[f"{kind} descriptors of {process.name}"] = count
        for node, daemon in self.daemons.items():
            for pid in daemon.workers():
                for kind, count in processes.descriptors(pid).items():
                    found[f"{kind} descriptors of {node}'s workers"] += count
        for command in self.strangers().values():
            kind = "workers" if "refitd.worker" in command else f"of {command}"
            found[f"processes, {kind}"] += 1
        found.update(processes.files(self.folders()))
        return dict(found)
