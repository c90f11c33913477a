"""Faults of coordinators and etcd members in the middle of swaps, and the invariants that must hold."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from refitd.testing import Coordinator, eventually
from refitd.testing.daemon import free_port
from refitd.testing.processes import Process
from tests.faults import clock
from tests.support.etcd import Etcd
from tests.support.led import Fleet, Led
from tests.support.network import SwitchedHosts

COORDINATORS = 3
TAKE_OVER_S = 10.0
DAY_S = 86400
LIVE = 'live/["policy"]'  # the row that every decision about the model changes
JUDGE_S = 30.0  # limit for etcd to list its history
_PHASES = r"(?m)^t=(\S+) .* event=swap swap=(\w+) .*phase=(idle|commit)\b"  # begun, decided


@dataclass
class Outcome:
    """The outcome of one fault."""

    fault: str
    decided_s: float  # from the fault until a swap that began after it was decided; `seconds` if log times jump
    seconds: float  # from the fault until a version that was published after it was served everywhere
    took_over: bool


@dataclass
class Judged:
    """The verdict from etcd's whole history and all logs."""

    decisions: int
    twice: list[str] = field(default_factory=list)
    undecided_commits: list[str] = field(default_factory=list)
    decided_aborts: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    fenced: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        return [*self.twice, *self.undecided_commits, *self.decided_aborts, *self.torn, *self.fenced]


class Trial:
    """Three hosts with an etcd member and a coordinator each, two with a daemon; a trainer that swaps all the time.

    With `hosts` each is a network namespace; else all are on loopback, and no cable can be pulled.
    """

    def __init__(self, hosts: SwitchedHosts | None) -> None:
        self.hosts = hosts
        addresses = hosts.addresses if hosts is not None else ("127.0.0.1",) * 5
        prefixes = [("ip", "netns", "exec", name) for name in hosts.names] if hosts is not None else [()] * 5
        three = slice(COORDINATORS)
        self.etcd = Etcd(COORDINATORS, addresses=addresses[three], prefixes=prefixes[three], asks_from=prefixes[3])
        named: Mapping[str, tuple[str, ...]] = {
            **{"coordinator": prefixes[0], "standby1": prefixes[1], "standby2": prefixes[2]},
            **{"n0": prefixes[3], "n1": prefixes[4]},
        }
        endpoints = [f"tcp://{address}:{free_port()}" for address in addresses[:COORDINATORS]]
        folder = self._clocks = Path(tempfile.mkdtemp(prefix="rfc"))
        library = None if clock.why_not() else clock.build()
        self.clocks = {
            name: clock.Clock(library, folder / f"{name}.clock")
            for name in ("coordinator", "standby1", "standby2")
            if library is not None
        }
        self.led = Led(self.etcd.url(), endpoints=endpoints, prefixes=named, clocks=self.clocks)
        self._before: list[tuple[int, list[Any]]] = []  # revisions and values of decisions that etcd has compacted
        self._since = 1
        self.torn: list[str] = []
        self.fenced: list[str] = []  # replicas that served no version for a while: no fault here outlasts their permits
        self._swapped = 0
        self._stop = threading.Event()
        self._failure: BaseException | None = None

    @contextmanager
    def running(self) -> Iterator[Trial]:
        """Start everything; swap on a thread during the block."""
        with self.etcd, self.led:
            self.fleet = Fleet(self.led.daemons)
            try:
                with self.fleet.polling():
                    self.fleet.insist()
                    thread = threading.Thread(target=self._swap, daemon=True)
                    thread.start()
                    threading.Thread(target=self._watch, daemon=True).start()
                    try:
                        yield self
                    finally:
                        self._stop.set()
                        thread.join(90)
            finally:
                self.fleet.close()
                shutil.rmtree(self._clocks, ignore_errors=True)
            if self._failure is not None:
                raise self._failure

    def _swap(self) -> None:
        try:
            while not self._stop.is_set():
                self.fleet.insist()
                eventually(self._is_served, f"version {self.fleet.version} is served everywhere")
                self.torn += [f"replica r{i} at version {self.fleet.version}" for i in self.fleet.torn()]
                self._swapped += 1
        except BaseException as exc:
            self._failure = exc

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            for i, target in enumerate(self.fleet.targets):
                if (reason := target.fenced) and not any(reason[:20] in one for one in self.fenced):
                    self.fenced.append(f"replica r{i} served nothing: {reason}")

    def _is_served(self) -> bool:
        return set(self.fleet.held()) == {self.fleet.version}

    def next_swap(self, within_s: float = 60.0) -> float:
        """Wait until a version that was published after this call is served everywhere; return how long that took."""
        began, before = time.monotonic(), self._swapped
        eventually(lambda: self._swapped > before + 1 or self._failure is not None, "a swap goes through", within_s)
        if self._failure is not None:
            raise self._failure
        return time.monotonic() - began

    def leader(self) -> Coordinator:
        """Return the leading coordinator by etcd."""
        found: list[Coordinator] = []

        def leads() -> bool:
            with suppress(AssertionError):
                said = self.etcd.ctl("get", f"{self.etcd.place().prefix}/leader", "--print-value-only")
                pid = json.loads(said or "{}").get("pid")
                found[:] = [one for one in self.led.coordinators if one.is_running and one.pid == pid]
            return bool(found)

        eventually(leads, "a coordinator leads")
        return found[0]

    # --- faults: each is a block during which something is broken ------------------------------------------

    def faults(self) -> dict[str, Callable[[], Iterator[None]]]:
        """The faults that can run here, by name."""
        found: dict[str, Callable[[], Iterator[None]]] = {
            "coordinator killed": lambda: self._killed(self.leader()),
            "coordinator frozen": lambda: self._frozen(self.leader()),
            "coordinator stopped (SIGTERM)": lambda: self._killed(self.leader(), signal.SIGTERM),
            "etcd's leader killed": lambda: self._killed(self.etcd.members[self.etcd.leader()]),
            "etcd's leader frozen": lambda: self._frozen(self.etcd.members[self.etcd.leader()]),
            "another member of etcd killed": lambda: self._killed(self.etcd.members[self._follower()]),
            "another member of etcd frozen": lambda: self._frozen(self.etcd.members[self._follower()]),
            "coordinator and etcd's leader killed": self._both_killed,
        }
        found["etcd compacted"] = self._compacted
        if self.clocks:
            found["coordinator killed, the others' clocks jump"] = self._killed_as_clocks_jump
        if self.hosts is not None:
            found["coordinator's host cut off"] = lambda: self._unplugged(self._host_of(self.leader()))
            found["etcd's leader's host cut off"] = lambda: self._unplugged(self.etcd.leader())
            found["coordinator cut off from etcd, not from daemons"] = self._cut_from_etcd
        return found

    def suffer(self, name: str) -> Outcome:
        """Break something in the middle of a swap, wait for the next swap, repair it, and wait for one more."""
        before = self.leader()
        with contextmanager(self.faults()[name])():
            at = datetime.now(UTC)
            seconds = self.next_swap()
            decided_s = seconds if "clocks" in name else (self._decided(at) - at).total_seconds()
            took_over = self.leader() is not before
        eventually(lambda: all(c.is_running for c in self.led.coordinators), "all coordinators are back")
        self.next_swap()
        return Outcome(name, decided_s, seconds, took_over)

    def _decided(self, since: datetime) -> datetime:
        """Return when the first swap that began after that time was decided, by the coordinators' logs."""
        found = []
        for coordinator in self.led.coordinators:
            begun = set()
            for at, swap, phase in re.findall(
                r"(?m)^t=(\S+) .* event=swap swap=(\w+) .*phase=(idle|commit)\b", coordinator.log()
            ):
                if (when := datetime.fromisoformat(at)) >= since:
                    begun |= {swap} if phase == "idle" else set()
                    found += [when] if phase == "commit" and swap in begun else []
        return min(found)

    def _host_of(self, coordinator: Coordinator) -> int:
        return self.led.coordinators.index(coordinator)

    def _follower(self) -> int:
        return (self.etcd.leader() + 1) % COORDINATORS

    def _killed(self, process: Process, number: int = signal.SIGKILL) -> Iterator[None]:
        os.kill(process.pid, number)
        assert process.popen is not None
        process.popen.wait(20)
        yield
        self._restart(process)

    def _both_killed(self) -> Iterator[None]:
        victims = [self.leader(), self.etcd.members[self.etcd.leader()]]
        for victim in victims:
            victim.kill()
        yield
        for victim in victims:
            self._restart(victim)

    def _killed_as_clocks_jump(self) -> Iterator[None]:
        leader = self.leader()
        for i, one in enumerate(self.clocks.values()):
            one.move((1, -2)[i % 2] * DAY_S)
        leader.kill()
        yield
        for one in self.clocks.values():
            one.move(0)
        self._restart(leader)

    def _compacted(self) -> Iterator[None]:
        """Remove etcd's history while swaps go on; first copy its decisions for `judge`."""
        revision = self._last(LIVE)
        self._before = [(at, row) for at, row in self._changes(LIVE) if at <= revision]
        self._since = revision + 1
        self.etcd.ctl("compact", str(revision))
        self.etcd.ctl("defrag")
        yield

    def _restart(self, process: Process) -> None:
        """Start it again; wait until a coordinator logs whether it leads."""
        past = len(process.log())
        Process.start(process)
        if isinstance(process, Coordinator):
            eventually(lambda: bool(re.search(r"event=(standby|ready)", process.log()[past:])), "it stands by")

    def _frozen(self, process: Process) -> Iterator[None]:
        os.kill(process.pid, signal.SIGSTOP)
        yield
        os.kill(process.pid, signal.SIGCONT)

    def _unplugged(self, host: int) -> Iterator[None]:
        assert self.hosts is not None
        self.hosts.cable(host, up=False)
        yield
        self.hosts.cable(host, up=True)

    def _cut_from_etcd(self) -> Iterator[None]:
        assert self.hosts is not None
        host = self._host_of(self.leader())
        others = [i for i in range(COORDINATORS) if i != host]
        for other in others:
            self.hosts.lose_way(host, other, lost=True)
        yield
        for other in others:
            self.hosts.lose_way(host, other, lost=False)

    # --- the judgement -------------------------------------------------------------------------------------

    def judge(self) -> Judged:
        """Compare every decision in etcd's history with the actions of the processes; call it before the block ends."""
        # read the logs first: every commit in them was decided earlier
        logs = "\n".join(part.log() for part in [*self.led.coordinators, *self.led.daemons.values()])
        decided = [(row[3], row[4]) for _, row in self._changes(LIVE)]  # sequence, swap
        found = Judged(len(decided), torn=self.torn, fenced=self.fenced)
        for (other, earlier), (sequence, swap) in pairwise(decided):
            if sequence != other + 1 or swap == earlier:
                found.twice.append(f"decision {sequence} ({swap}) after {other} ({earlier})")
        swaps = [swap for _, swap in decided]
        found.twice += [
            f"swap {swap} was decided {swaps.count(swap)} times" for swap in set(swaps) if swaps.count(swap) > 1
        ]
        committed = set(re.findall(r"event=swap swap=(\w+) [^\n]*phase=committed", logs))
        found.undecided_commits = [f"swap {swap} was committed undecided" for swap in committed - set(swaps)]
        aborted = set(re.findall(r"event=swap swap=(\w+) [^\n]*phase=aborted", logs))
        found.decided_aborts = [f"swap {swap} was decided and aborted" for swap in aborted & set(swaps)]
        return found

    def _last(self, name: str) -> int:
        """Return the revision of the last value of a row."""
        found = json.loads(self.etcd.ctl("get", f"{self.etcd.place().prefix}/{name}", "-w", "json"))
        return int(found["kvs"][0]["mod_revision"])

    def _changes(self, name: str) -> list[tuple[int, list[Any]]]:
        """Return all values of a row, the oldest first, with the revision of each."""
        key = f"{self.etcd.place().prefix}/{name}"
        last = self._last(name)
        if last < self._since:
            return self._before
        until = time.monotonic() + JUDGE_S
        while True:
            shown = [json.loads(line) for line in self.etcd.watched(key, f'"mod_revision":{last}', self._since)]
            if not shown[-1].get("Canceled"):
                break
            assert time.monotonic() < until, f"etcd ends every watch: {shown[-1]}"
            time.sleep(0.5)  # the asked member has no leader yet
        events = [event for one in shown for event in one["Events"]]
        return self._before + [
            (int(event["kv"]["mod_revision"]), json.loads(base64.b64decode(event["kv"]["value"]))) for event in events
        ]
