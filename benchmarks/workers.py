"""Measure a fleet of real daemons and workers with a tiny model, and kill one daemon in each phase of a swap.

Half of the nodes train, each rank with one tensor; node i of the other half needs the tensors of trainer node i. A pair
of nodes has therefore connections of its own, and the death of a daemon may cost only its pair's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import refitd
from benchmarks import machine
from refitd.testing import Cluster, Engine, RunningSwap, eventually
from tests.cluster.test_connections import connections

NODES, LANES = 16, 8
WAIT_S = 240.0
MODEL = "policy"
CONFIG = "[deadlines]\nplan_s = 120.0\n"
TICKS = os.sysconf("SC_CLK_TCK")
PHASES = ("publish", "stage", "staged", "commit")


class Fleet:
    """The cluster, with a trainer or an engine of `lanes` ranks on each node, all in this process."""

    def __init__(self, cluster: Cluster, lanes: int) -> None:
        self.cluster, self._version = cluster, 0
        self.names = list(cluster.daemons)
        half, self._clients = len(self.names) // 2, [d.connect(reconnect=True) for d in cluster.daemons.values()]
        world = half * lanes
        self._weights = [torch.zeros(64, 64) for _ in range(world)]
        self._sources = [
            self._clients[rank // lanes].register_source(
                MODEL, {f"w{rank}": self._weights[rank]}, rank=rank, world_size=world
            )
            for rank in range(world)
        ]
        self._live = [torch.zeros(64, 64) for _ in range(world)]
        self.targets = [
            self._clients[half + rank // lanes].register_target(
                MODEL, {f"w{rank}": self._live[rank]}, replica=f"engine-{rank:03}"
            )
            for rank in range(world)
        ]
        self.victim = self.names[half]  # the node of the first engines

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def publish(self, ranks: slice = slice(None)) -> int:
        """Publish the next version from some ranks; the first of them begins it."""
        self._version += ranks.start in (None, 0)
        for source, weights in list(zip(self._sources, self._weights, strict=True))[ranks]:
            weights.fill_(self._version)
            source.publish(self._version)
        return self._version

    def swap(self) -> RunningSwap:
        """Begin a swap to the newest version."""
        daemon = self.cluster.daemons[self.names[0]]
        return RunningSwap(daemon.connect("swap", WAIT_S), MODEL, self._version, WAIT_S)

    def settle(self) -> None:
        """Have all engines serve a new version, with the right values."""
        eventually(lambda: self._registered() == len(self.targets), "all engines are registered", WAIT_S)
        self.publish()
        report = self.swap().result(WAIT_S)
        assert report.outcome == "committed" and len(report.members) == len(self.targets), report
        assert all(bool((live == self._version).all()) for live in self._live)

    def _registered(self) -> int:
        with contextlib.suppress(refitd.RefitdError):
            return sum(len(model.targets) for model in self._clients[0].status().models)
        return 0

    def pairs(self) -> dict[frozenset[str], set[int]]:
        """Return the connections of each pair of nodes."""
        return connections(self.cluster.daemons[self.names[0]])

    def cpu_s(self) -> float:
        """Return the CPU seconds of all processes of the cluster."""
        spent = 0
        for pid in self.cluster.running():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                spent += int(fields[11]) + int(fields[12])
        return spent / TICKS

    def signal_workers(self, node: str, signum: int) -> None:
        for pid in self.cluster.daemons[node].workers():
            os.kill(pid, signum)

    def reaches(self, phase: str) -> None:
        """Wait until the victim's daemon has logged a phase of the newest version's swap."""
        said = f"version={self._version} phase={phase} "
        eventually(lambda: said in self.cluster.daemons[self.victim].log().replace("\n", " "), said, WAIT_S)


def _killed_in(fleet: Fleet, phase: str) -> dict[str, Any]:
    """Kill the victim's daemon in a phase; return the swap's end, and the pairs that connected again."""
    victim, other = fleet.cluster.daemons[fleet.victim], fleet.names[-1]
    before = fleet.pairs()
    lanes = len(fleet.targets) // (len(fleet.names) // 2)
    polled = fleet.targets if phase != "commit" else fleet.targets[lanes:]
    with Engine(*polled):
        if phase == "publish":
            fleet.publish(slice(0, lanes))
            victim.kill()
            fleet.publish(slice(lanes, None))
            swap = fleet.swap()
        else:
            held = {"stage": fleet.victim, "staged": other, "commit": ""}[phase]
            fleet.publish()
            if held:
                fleet.signal_workers(held, signal.SIGSTOP)
            swap = fleet.swap()
            fleet.reaches(phase)
            victim.kill()
            if held == other:
                fleet.signal_workers(held, signal.SIGCONT)
        try:
            report = swap.result(WAIT_S)
            said = f"{report.outcome} in {len(report.members)} of {len(fleet.targets)} engines"
        except refitd.SwapFailed as error:
            said = f"{error.report.outcome}: {error.report.reason}"
    victim.start(WAIT_S)
    with Engine(*fleet.targets):
        fleet.settle()
    after = fleet.pairs()
    again = [pair for pair, ends in after.items() if before.get(pair) != ends]
    return {
        "phase": phase,
        "end": said,
        "again": sorted("-".join(sorted(pair)) for pair in again),
        "kept": len(after) - len(again),
        "holds": all(fleet.victim in pair for pair in again) and (fleet.victim in said or "aborted" not in said),
    }


@contextlib.contextmanager
def fleet(nodes: int, lanes: int) -> Iterator[Fleet]:
    """Start a fleet."""
    names = [f"n{number:02}" for number in range(nodes)]
    with Cluster(names, CONFIG, workers=lanes) as cluster:
        found = Fleet(cluster, lanes)
        try:
            yield found
        finally:
            found.close()


def run(json_output: bool, *, quick: bool = False) -> dict[str, Any]:
    """Measure 16 daemons of 8 workers; `quick`: 4 of 2."""
    nodes, lanes = (4, 2) if quick else (NODES, LANES)
    results: dict[str, Any] = {"machine": machine.describe(), "nodes": nodes, "lanes": lanes}
    began = time.monotonic()
    with fleet(nodes, lanes) as found:
        results["start_s"], results["start_cpu_s"] = time.monotonic() - began, found.cpu_s()
        for name in ("first", "next"):
            cpu, began = found.cpu_s(), time.monotonic()
            with Engine(*found.targets):
                found.settle()
            results[f"{name}_s"], results[f"{name}_cpu_s"] = time.monotonic() - began, found.cpu_s() - cpu
            print(f"{name} swap: {results[f'{name}_s']:.2f} s, {results[f'{name}_cpu_s']:.2f} CPU s", flush=True)
        results["killed"] = []
        for phase in PHASES:
            results["killed"].append(_killed_in(found, phase))
            print(results["killed"][-1], flush=True)
    results["load"] = machine.load()
    if not quick:
        machine.record("workers", results, _markdown)
    return results


def _markdown(results: dict[str, Any]) -> str:
    rows = [
        f"| {row['phase']} | {row['end']} | {', '.join(row['again']) or 'none'} | {row['kept']} | "
        f"{'yes' if row['holds'] else '**no**'} |"
        for row in results["killed"]
    ]
    lines = [
        "# Many real workers",
        "",
        "By `scripts/bench workers`: {nodes} daemons of {lanes} workers each and a coordinator on one machine, over "
        "loopback with keys; a tiny model, one engine a rank, one pair of nodes after the other.",
        "Start: {start_s:.0f} s, {start_cpu_s:.0f} CPU s. First swap with its publication: {first_s:.2f} s, "
        "{first_cpu_s:.1f} CPU s. Next one: {next_s:.2f} s, {next_cpu_s:.1f} CPU s.",
        "",
        "One daemon is killed in each phase:",
        "",
        "| phase | the swap | pairs of nodes that connected again | kept | only its own pair |",
        "| --- | --- | --- | --- | --- |",
        *rows,
        "",
        "{load}",
    ]
    return "\n".join(lines).format_map(results) + "\n"
