"""Send a version from a trainer's node to the replicas of 1, 2, 4 and 7 nodes over rate-limited cables, and to joiners.

Each node is a network namespace with a cable to one switch; the cable carries MBIT in each direction. Swaps run
with relays and, for comparison, without (`transport.relays = false`). The bytes on the trainer's cable are read from
its interface.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import refitd
from benchmarks import machine
from benchmarks.swap_processes import daemon
from refitd.testing import Daemon, Engine, eventually
from tests.support.network import SwitchedHosts, start_daemons, why_not

PORT, MBIT = 7437, 400
SLOW_MBIT = 100  # as fast as two cores can carry all cables together
NODES = (1, 2, 4, 7)  # with a replica each
JOINING = (1, 4)
SETTLE_S = 5.0  # after this time, the work after a daemon's start or after a swap is over
_CONFIG = "[deadlines]\nlease_s = 60.0\nconnect_s = 60.0\n[transport]\ndeltas = false\nrelays = {}\n"


class Cluster:
    """Nodes of trainer ranks with equal tensors, and other nodes."""

    def __init__(
        self, hosts: SwitchedHosts, clients: list[refitd.Client], shapes: dict[str, tuple[int, int]], trainers: int = 1
    ) -> None:
        self.hosts, self.clients = hosts, clients
        self.tensors = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
        self.nbytes = sum(2 * tensor.numel() for tensor in self.tensors.values())
        self.sources = [
            client.register_source("bench", self.tensors, rank=rank, world_size=trainers)
            for rank, client in enumerate(clients[:trainers])
        ]
        self.targets: dict[int, refitd.Target] = {}
        self.held: dict[int, dict[str, torch.Tensor]] = {}
        self._version = 0

    def add(self, node: int) -> None:
        """Register a replica on a node."""
        self.held[node] = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}
        self.targets[node] = self.clients[node].register_target("bench", self.held[node], replica=f"r{node}")

    def swap(self) -> dict[str, float]:
        """Publish and swap once."""
        self._version += 1
        for tensor in self.tensors.values():
            tensor.view(torch.int16).add_(1)
        for source in self.sources:
            source.publish(self._version)
        before = self.hosts.sent(0)
        with Engine(*self.targets.values()):
            report = self.clients[0].swap("bench", self._version, timeout=300)
        self.check()
        return {"stage": report.stage_s, "copies": (self.hosts.sent(0) - before) / self.nbytes}

    def check(self) -> None:
        for held in self.held.values():
            assert all(torch.equal(held[name], tensor) for name, tensor in self.tensors.items())

    def leave(self, nodes: list[int]) -> None:
        """Close the replicas of these nodes."""
        for node in nodes:
            self.targets.pop(node).close()
            del self.held[node]

    def join(self, nodes: list[int]) -> dict[str, float]:
        """Register replicas on these nodes in parallel; return the seconds until they serve the live version."""
        before, started = self.hosts.sent(0), time.perf_counter()
        with ThreadPoolExecutor(len(nodes)) as pool:
            list(pool.map(self.add, nodes))
        registered = time.perf_counter() - started
        with Engine(*(self.targets[node] for node in nodes)):
            eventually(lambda: all(self.targets[node].version == self._version for node in nodes), "joined", 300)
        took = time.perf_counter() - started
        self.check()
        return {"seconds": took, "registered": registered, "copies": (self.hosts.sent(0) - before) / self.nbytes}


def run(json_output: bool, quick: bool = False, cases: machine.Cases = machine.EVERY) -> dict[str, Any]:
    """Run all cases and return the figures."""
    results: dict[str, Any] = {"machine": machine.describe(), "mbit": MBIT, "cases": [], "slow": [], "joins": []}
    path = machine.RESULTS / "fanout.json"
    kept = json.loads(path.read_text()) if path.exists() else {"machine": None}
    if kept["machine"] == results["machine"]:
        results["uneven"] = kept.get("uneven", {})
    if reason := why_not():
        print(f"left out: {reason}", file=sys.stderr)
        return {**results, "left_out": reason}
    shapes = {f"layers.{i}.weight": (4096, 4096) for i in range(1 if quick else 4)}  # 32 MiB each
    chosen = (1, 2) if quick else NODES
    for nodes in (nodes for nodes in chosen if f"{nodes} nodes" in cases):
        results["cases"].append(_fanned_out(nodes, True, shapes, 1 if quick else 3))
    if "direct" in cases:
        results["cases"].append(_fanned_out(chosen[-1], False, shapes, 1))  # takes that many times longer
    for nodes in (chosen[0], chosen[-1]) if "slow" in cases else ():
        results["slow"].append(_fanned_out(nodes, True, dict(list(shapes.items())[:2]), 1, SLOW_MBIT))
    for joining in () if "joins" not in cases else JOINING[:1] if quick else JOINING:
        results["joins"] += _joined(joining, shapes)
    results["load"] = machine.load()
    machine.record("fanout", results, markdown)
    if not json_output:
        print(markdown(results))
    return results


def _fanned_out(
    nodes: int, relays: bool, shapes: dict[str, tuple[int, int]], rounds: int, mbit: int = MBIT
) -> dict[str, Any]:
    print(f"  {nodes} nodes, {'relays' if relays else 'direct'}, {mbit} Mbit/s", file=sys.stderr, flush=True)
    with cluster_of(nodes + 1, relays, shapes, mbit) as cluster:
        for node in range(1, nodes + 1):
            cluster.add(node)
        cluster.swap()  # plans, connects and touches pages
        took = [cluster.swap() for _ in range(rounds)]
        found = {key: statistics.median(one[key] for one in took) for key in took[0]}
        return {"nodes": nodes, "relays": relays, "mbit": mbit, "bytes": cluster.nbytes, "rounds": rounds, **found}


def _joined(joining: int, shapes: dict[str, tuple[int, int]]) -> list[dict[str, Any]]:
    """Return the figures of joining: for the first time, and when the replicas return to a later version."""
    print(f"  {joining} joining", file=sys.stderr, flush=True)
    nodes, found = list(range(2, joining + 2)), []
    with cluster_of(joining + 2, True, shapes) as cluster:
        cluster.add(1)
        for is_first in (True, False):
            cluster.swap()
            time.sleep(SETTLE_S)
            case = {"joining": joining, "bytes": cluster.nbytes, "first": is_first}
            found.append(case | cluster.join(nodes))
            cluster.leave(nodes)
    return found


@contextlib.contextmanager
def cluster_of(
    count: int, relays: bool, shapes: dict[str, tuple[int, int]], mbit: int = MBIT, more: str = "", trainers: int = 1
) -> Iterator[Cluster]:
    """Start a daemon on each of `count` nodes; `more` is for their [transport]."""
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        hosts = SwitchedHosts(count, mbit)
        stack.callback(hosts.close)
        keys = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rfb")))

        def start(config: str, **options: Any) -> Daemon:
            return stack.enter_context(daemon(config + _CONFIG.format(str(relays).lower()) + more, **options))

        daemons = start_daemons(hosts, PORT, keys, start)
        yield Cluster(hosts, [stack.enter_context(one.connect()) for one in daemons], shapes, trainers)


def markdown(results: dict[str, Any]) -> str:
    """Return the file for benchmarks/results."""
    about = results["machine"]
    head = ("Mbit/s", "MB", "nodes with a replica", "relays", "staging s", "times that of one node")
    lines = [
        "# Many nodes from one trainer's node",
        "",
        f"{about['cpu']}, {about['cores']} cores, Linux {about['kernel']}, Python {about['python']}. All nodes",
        "are network namespaces of this machine, with a cable each that carries its rate in each direction. Medians.",
        "bfloat16, whole, every byte compared. Written by `scripts/bench fanout`.",
        "",
        f"{results['load']} Where the cores are busy otherwise, times of many nodes grow with all cables together.",
        "",
        f"| {' | '.join(head)} | copies over the trainer's cable |",
        f"|{' --- |' * (len(head) + 1)}",
    ]
    for cases in (results["cases"], results["slow"]):
        for case in cases:
            first = (case.get("mbit", results["mbit"]), f"{case['bytes'] / 1e6:.0f}", case["nodes"])
            ratio = case["stage"] / cases[0]["stage"]
            more = ("yes" if case["relays"] else "no", f"{case['stage']:.2f}", f"{ratio:.2f}", f"{case['copies']:.2f}")
            lines.append(f"| {' | '.join(map(str, first + more))} |")
    lines += [
        "",
        f"At {results['mbit']} Mbit/s, given by the one replica that serves. A catch-up begins 1 s after the last",
    ]
    lines += [
        "replica has joined, since more may follow. Daemons have run for some seconds when replicas join for the first",
        "time. Replicas that come back do so to a later version.",
        "",
    ]
    head = (
        "replicas that join at once",
        "",
        "s",
        "of it registering",
        "times that of one",
        "copies over the trainer's cable",
    )
    lines += [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for join in results["joins"]:
        (one,) = (j["seconds"] for j in results["joins"] if j["joining"] == 1 and j["first"] == join["first"])
        figures = (f"{join['seconds']:.2f}", f"{join['registered']:.2f}", f"{join['seconds'] / one:.2f}")
        when = "for the first time" if join["first"] else "come back"
        lines.append(f"| {join['joining']} | {when} | {' | '.join(figures)} | {join['copies']:.2f} |")
    return "\n".join(lines) + "\n" + "".join(f"\n{line}" for line in uneven_lines(results.get("uneven", {})))


def uneven_lines(results: dict[str, Any]) -> list[str]:
    """Return the section on cables of different speed (benchmarks/cables.py)."""
    if not results:
        return []
    head = ("case", "staging s, cables taken for equal", "with their speeds", "predicted", "measured / predicted")
    lines = [
        "## Cables of different speed",
        "",
        f"All cables {results['mbit']} Mbit/s but one of {results['slow']}, {results['bytes'] / 1e6:.0f} MB, medians.",
        "A cluster file states the speeds. Written by `scripts/bench cables`.",
        "",
        f"| {' | '.join(head)} | paths |",
        f"|{' --- |' * (len(head) + 1)}",
    ]
    for case in results["cases"]:
        ratio = case["after"] / case["predicted"]
        paths = "; ".join(case["paths"]) or "direct"
        figures = (f"{case['before']:.2f}", f"{case['after']:.2f}", f"{case['predicted']:.2f}", f"{ratio:.2f}", paths)
        lines.append(f"| {' | '.join((case['name'], *figures))} |")
    return [*lines, ""]
