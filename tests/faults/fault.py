"""Break a victim, hold the swap during the fault, and end both."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
from collections.abc import Callable

from refitd.testing import Process
from tests.faults.cases import FLIP_PHASES, Case
from tests.faults.cluster import Cluster

DAY_S = 86400
# the engine that holds the swap in each phase; in other phases the victim is `far`
ENGINES = {"halting": "still", "paused": "near", "decided": "far", **dict.fromkeys(FLIP_PHASES, "flips")}


def victim_engine(case: Case) -> str:
    """Return the name of the engine that a case breaks, "" if it breaks another process."""
    return {"engine": ENGINES.get(case.phase, "far"), "flips": "flips"}.get(case.victim, "")


def names_of(case: Case, pid: int) -> tuple[str, ...]:
    """Return the names under which a log may name a case's victim; `pid` is the pid of the broken process."""
    match case.victim:
        case "worker":
            return ("worker", ENGINES[case.phase]) if case.phase == "decided" else ("worker",)
        case "daemon":
            return ("n1", "n2")  # n2 is behind the cable of n1
        case "source-daemon":  # decided, as for a trainer
            return ("n0", ENGINES[case.phase]) if case.phase == "decided" else ("n0",)
        case "coordinator":
            return ("coordinator", "journal")
        case "trainer" if case.phase == "decided":  # the swap does not need the trainer: the log names the late engine
            return (f"pid={pid}", f"pid {pid}", "source", ENGINES[case.phase])
    return (f"pid={pid}", f"pid {pid}", victim_engine(case) or "source")


class Fault:
    """One case's fault, and the processes that are held until it has begun."""

    def __init__(self, cluster: Cluster, case: Case) -> None:
        self._cluster, self._case = cluster, case
        self.names = names_of(case, self._process().pid)
        self._held: set[int] = set()
        self._stopped: set[int] = set()
        self._undo: Callable[[], None] = lambda: None
        self.has_lost_versions = (case.victim, case.fault) in (("trainer", "kill"), ("source-daemon", "kill"))

    def hold(self, pids: tuple[int, ...]) -> None:
        """Stop these until `release`."""
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
            self._held.add(pid)

    def release(self) -> None:
        """Continue the held processes, except those that the fault itself has stopped."""
        for pid in self._held - self._stopped:
            _signal(pid, signal.SIGCONT)
        self._held &= self._stopped

    def begin(self) -> None:
        """Inject the fault."""
        cluster, case, hosts = self._cluster, self._case, self._cluster.hosts
        match case.fault, case.victim:
            case "kill", "worker":
                _signal(cluster.daemons["n1"].workers()[0], signal.SIGKILL)
            case (("kill" | "lose" | "exchange"), _):
                process = self._process()
                process.kill()
                if case.fault != "kill":
                    cluster.take_journal(put_copy=case.fault == "exchange")
                self._undo = lambda: _ignore(process.start())
            case (("remove" | "replace"), _):
                cluster.take_journal(put_copy=case.fault == "replace")
                self._undo = lambda: _ignore((cluster.coordinator.kill(), cluster.coordinator.start()))
            case "close", _:
                self._process().tell(leave=True)
            case (("stop" | "stutter"), _):
                pids = (
                    cluster.daemons["n1"].workers() if case.victim == "worker" else [cluster.pid(self._process().name)]
                )
                self._stopped |= set(pids)
                self._undo = lambda: self._continue(pids)
                if case.fault == "stop":
                    for pid in pids:
                        os.kill(pid, signal.SIGSTOP)
                else:
                    self._undo = _stuttering(pids)
            case "cut", _:
                assert hosts is not None
                if case.victim == "daemon":
                    hosts.cable(up=False)
                    self._undo = lambda: hosts.cable(up=True)
                else:
                    lost = hosts.addresses[0] if case.victim == "worker" else hosts.coordinator
                    hosts.lose_way(lost, lost=True)
                    self._undo = lambda: hosts.lose_way(lost, lost=False)
            case (("slow" | "crawl"), _):
                assert hosts is not None
                hosts.limit(48 if case.fault == "slow" else 2)
                self._undo = lambda: hosts.limit(10_000)
            case "full", _:
                pid = cluster.pid("coordinator")
                was = resource.prlimit(pid, resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
                self._undo = lambda: _ignore(resource.prlimit(pid, resource.RLIMIT_FSIZE, was))
            case "unsynced", _:
                cluster.syncs(fail=True)
                again = (cluster.coordinator.kill, lambda: cluster.syncs(fail=False), cluster.coordinator.start)
                self._undo = lambda: _ignore([step() for step in again])
            case "clock", _:
                clock = cluster.clocks[self._process().name]
                clock.move(DAY_S)
                self._undo = lambda: clock.move(-DAY_S)

    def end(self) -> None:
        """Repair the effects that do not repair themselves."""
        self._undo()
        self._undo = lambda: None

    def _continue(self, pids: list[int]) -> None:
        for pid in pids:
            _signal(pid, signal.SIGCONT)
        self._stopped.clear()

    def _process(self) -> Process:
        cluster = self._cluster
        match self._case.victim:
            case "trainer":
                return cluster.trainer
            case "engine" | "flips":
                return cluster.engines[victim_engine(self._case)]
            case "daemon":
                return cluster.daemons["n1"]
            case "source-daemon":
                return cluster.daemons["n0"]
        return cluster.coordinator


def _stuttering(pids: list[int]) -> Callable[[], None]:
    over = threading.Event()

    def stutter() -> None:
        while not over.is_set():
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in pids:
                    _signal(pid, number)
                over.wait(0.05)

    thread = threading.Thread(target=stutter, daemon=True)
    thread.start()

    def end() -> None:
        over.set()
        thread.join(5)
        for pid in pids:
            _signal(pid, signal.SIGCONT)

    return end


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _ignore(_: object) -> None:
    return None
