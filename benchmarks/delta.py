"""Measure swaps between two nodes after a share of the elements changed at random: as deltas, and as full versions.

Two clusters take turns within each round, one with `transport.deltas` and one without. They swap over loopback, where a
slow delta costs more than it saves, and over a cable of limited rate between two network namespaces. The elements are
bfloat16, and a trainer publishes before each swap.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import refitd
from benchmarks import machine
from benchmarks.swap_processes import ANSWER_S, daemon
from refitd.testing import Daemon, Engine, eventually
from tests.support.network import TwoHosts, start_daemons, why_not

PORT, MBIT = 7436, 400
SHARES = (0.0, 0.001, 0.01, 0.05, 0.1, 1.0)
WAYS = {"deltas": "[transport]\ndeltas = true\n", "whole": "[transport]\ndeltas = false\n"}
_SERVING = "[deadlines]\nlease_s = 60.0\n"  # a busy machine must not end a measurement


class Cluster:
    """A trainer and an engine on two nodes."""

    def __init__(self, trainer: refitd.Client, engine: refitd.Client, shapes: dict[str, tuple[int, int]]) -> None:
        self._client = trainer
        self.tensors = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
        self._source = trainer.register_source("bench", self.tensors)
        self.held = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}
        self.target = engine.register_target("bench", self.held, replica="r")
        self._version, self._random = 0, np.random.default_rng(0)

    def change(self, share: float) -> None:
        """Change this share of the elements, at random."""
        for tensor in self.tensors.values():
            words = tensor.view(torch.int16).numpy().reshape(-1)
            for at in range(0, len(words), 1 << 20):
                part = words[at : at + (1 << 20)]
                part ^= self._random.random(len(part), np.float32) < share

    def round(self) -> dict[str, float]:
        """Publish and swap once."""
        self._version += 1
        started = time.perf_counter()
        self._source.publish(self._version)
        published = time.perf_counter()
        report = self._client.swap("bench", self._version, timeout=300)
        crossing = report.crossing
        return {
            "publish": published - started,
            "swap": time.perf_counter() - published,
            "stage": report.stage_s,
            "crossed": crossing.crossed_bytes / crossing.bytes,
            "changed": -1.0 if crossing.changed is None else crossing.changed,
        }


def run(json_output: bool, quick: bool = False, cases: machine.Cases = machine.EVERY) -> dict[str, Any]:
    """Run both cases and return the figures."""
    shapes = {f"layers.{i}.weight": (4096, 4096) for i in range(2 if quick else 6)}  # 32 MiB each
    results: dict[str, Any] = {"machine": machine.describe(), "cases": []}
    if "loopback" in cases:
        with _on_loopback(shapes) as clusters:
            results["cases"].append(_measure("loopback", clusters, SHARES, 3 if quick else 7))
    if "cable" not in cases:
        pass
    elif reason := why_not():
        results["cases"].append({"name": f"a cable of {MBIT} Mbit/s", "left_out": reason})
    else:
        with contextlib.ExitStack() as stack:
            clusters = {way: stack.enter_context(_on_two_hosts(way, shapes)) for way in WAYS}
            shares = (0.01, 0.1, 1.0)
            results["cases"].append(_measure(f"a cable of {MBIT} Mbit/s", clusters, shares, 2 if quick else 3))
    results["load"] = machine.load()
    machine.record("delta", results, markdown)
    if not json_output:
        print(markdown(results))
    return results


def _measure(name: str, clusters: dict[str, Cluster], shares: tuple[float, ...], rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    found = []
    with Engine(*(cluster.target for cluster in clusters.values())):
        for cluster in clusters.values():  # plans, connects and touches pages
            cluster.round()
            cluster.round()
        for share in shares:
            print(f"  {name}: {share:.1%} changed", file=sys.stderr, flush=True)
            took: dict[str, list[dict[str, float]]] = {way: [] for way in clusters}
            for _ in range(rounds):
                for way, cluster in clusters.items():
                    cluster.change(share)
                    took[way].append(cluster.round())
            ratios = [w["stage"] / d["stage"] for w, d in zip(took["whole"], took["deltas"], strict=True)]
            swaps = [w["swap"] / d["swap"] for w, d in zip(took["whole"], took["deltas"], strict=True)]
            found.append(
                {
                    "share": share,
                    **{way: {k: statistics.median(r[k] for r in all_) for k in all_[0]} for way, all_ in took.items()},
                    "staged_times_as_fast": statistics.median(ratios),
                    "times_as_fast": statistics.median(swaps),
                }
            )
        for cluster in clusters.values():
            assert all(torch.equal(cluster.held[name], tensor) for name, tensor in cluster.tensors.items())
    nbytes = sum(2 * tensor.numel() for tensor in clusters["whole"].tensors.values())
    return {"name": name, "bytes": nbytes, "rounds": rounds, "shares": found}


@contextlib.contextmanager
def _on_loopback(shapes: dict[str, tuple[int, int]]) -> Iterator[dict[str, Cluster]]:
    with contextlib.ExitStack() as stack:
        clusters = {}
        for way, config in WAYS.items():
            first = stack.enter_context(daemon(config + _SERVING))
            second = stack.enter_context(daemon(_SERVING, name="n1", joins=first.endpoint))
            trainer, engine = stack.enter_context(first.connect()), stack.enter_context(second.connect())
            eventually(lambda client=trainer: len(client.status().nodes) == 2, "the second daemon has joined", ANSWER_S)
            clusters[way] = Cluster(trainer, engine, shapes)
        yield clusters


@contextlib.contextmanager
def _on_two_hosts(way: str, shapes: dict[str, tuple[int, int]]) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        hosts = TwoHosts(way)
        stack.callback(hosts.close)
        hosts.limit(MBIT)
        keys = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rfb")))

        def start(config: str, **options: Any) -> Daemon:
            return stack.enter_context(daemon(config + WAYS[way] + _SERVING, **options))

        clients = [stack.enter_context(host.connect()) for host in start_daemons(hosts, PORT, keys, start)]
        yield Cluster(clients[0], clients[1], shapes)


def markdown(results: dict[str, Any]) -> str:
    """Return the file for benchmarks/results."""
    about = results["machine"]
    lines = [
        "# Swaps between nodes as deltas",
        "",
        f"{about['cpu']}, {about['cores']} cores, Linux {about['kernel']}, Python {about['python']}. Medians; the",
        "first two rounds are left out. Ratios are taken within a round. Written by `scripts/bench delta`.",
        f"{results['load']} Finding and applying a delta takes processor time, which a busy machine lacks.",
    ]
    columns = ("changed", "found", "crossed", "deltas: stage s", "swap s", "whole: stage s", "swap s", "staged x", "x")
    for case in results["cases"]:
        lines += ["", f"## {case['name']}", ""]
        if "left_out" in case:
            lines.append(f"Left out: {case['left_out']}.")
            continue
        lines += [f"{case['bytes'] / 1e6:.0f} MB of bfloat16, {case['rounds']} rounds.", ""]
        lines += [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
        for f in case["shares"]:
            deltas, whole = f["deltas"], f["whole"]
            cells = (
                f"{f['share']:.1%}",
                "whole" if deltas["changed"] < 0 else f"{deltas['changed']:.2%}",
                f"{deltas['crossed']:.2%}",
                f"{deltas['stage']:.3f}",
                f"{deltas['swap']:.3f}",
                f"{whole['stage']:.3f}",
                f"{whole['swap']:.3f}",
                f"{f['staged_times_as_fast']:.2f}",
                f"{f['times_as_fast']:.2f}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
