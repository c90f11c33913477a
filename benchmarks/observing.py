"""Measure the cost of metrics and traces for a swap: daemons with and without them take turns, swap by swap.

Daemons always record traces; only this benchmark starts a daemon without (a `sitecustomize` removes the recording).
Metrics are scraped once a second, far more often than Prometheus does by default.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.swap_case import REFITD, Case, RunningCase
from benchmarks.swap_model import Layout, Tensor, llama_like
from benchmarks.swap_processes import daemon
from refitd.testing import Daemon
from refitd.testing.daemon import free_port

NOTHING, TRACES, ALL = "neither", "traces, the default", "traces and metrics"
WARM_UP = 10
SCRAPE_S = 1.0
_UNTRACED = """
from refitd.coordinator.inquiries import Traces
from refitd.daemon.timeline import Timeline

Timeline.watch = lambda *_: None
Traces.ended = lambda *_: None
"""


def run(json_output: bool, quick: bool = False, cases: machine.Cases = machine.EVERY) -> dict[str, Any]:
    """Measure a small and a large model; store the figures in benchmarks/results unless `quick`."""
    small = tuple(Tensor(f"layers.{i}.weight", (128, 512), 0, i) for i in range(8))
    large = tuple(llama_like(2, 1024, 3584) if quick else llama_like(9, 2048, 7168))
    models = (
        Case("small", small, Layout("tp", 1), Layout("tp", 2), (REFITD,), 20 if quick else 200),
        Case("large", large, Layout("tp", 1), Layout("tp", 2), (REFITD,), 4 if quick else 40),
    )
    at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    results: dict[str, Any] = {"machine": machine.describe(), "at": at, "cases": []}
    for case, ways in zip(models, ((NOTHING, TRACES, ALL), (NOTHING, ALL)), strict=True):
        if case.name in cases:
            results["cases"].append(_measured(case, ways))
    results["load"] = os.getloadavg()[1]
    machine.record("observing", results, markdown)
    if not json_output:
        print(markdown(results))
    return results


class _Way:
    """A running case with its daemon, and the durations of its swaps."""

    def __init__(self, case: Case, name: str, started: Daemon) -> None:
        self.name = name
        self.running = RunningCase(case, [started], slots=2)
        with started.connect() as client:
            status = client.status()
        (node,) = status.nodes
        self._pids = (node.pid, status.coordinator_pid)
        self.swap_s: list[float] = []
        self.cpu_s: list[float] = []

    def swap(self, *, counts: bool) -> None:
        """Publish and swap once."""
        before = self._cpu_s()
        took = self.running.swap(is_awaited=True)["swap"]
        if counts:
            self.swap_s.append(took)
            self.cpu_s.append(self._cpu_s() - before)

    def _cpu_s(self) -> float:
        """Return the CPU seconds so far of the loops of daemon and coordinator, for which swaps wait."""
        return sum(int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) for pid in self._pids) / 1e9


def _measured(case: Case, names: Sequence[str]) -> dict[str, Any]:
    print(f"  {case.name}: {case.nbytes / 1e6:.0f} MB, {case.rounds} rounds", file=sys.stderr, flush=True)
    with contextlib.ExitStack() as stack:
        ways = []
        for name in names:
            started, ports = _daemon(name, stack.enter_context(tempfile.TemporaryDirectory(prefix="rfb")))
            way = _Way(case, name, started)
            stack.callback(way.running.close)
            stack.enter_context(_scraped(ports))
            ways.append(way)
            for process in way.running.targets:
                process.ask("wait_until", version=WARM_UP + case.rounds)
        for number in range(-WARM_UP, case.rounds):
            first = number % len(ways)
            for way in ways[first:] + ways[:first]:
                way.swap(counts=number >= 0)
        bare = ways[0]
        return {
            "name": case.name,
            "bytes": case.nbytes,
            "rounds": case.rounds,
            "ways": [_figures(way, bare) for way in ways],
        }


def _figures(way: _Way, bare: _Way) -> dict[str, Any]:
    more = sorted(a - b for a, b in zip(way.swap_s, bare.swap_s, strict=True))
    # the median of n values is between these with a probability of 95 %
    off = 0.98 * len(more) ** 0.5
    low, high = more[max(0, int(len(more) / 2 - off))], more[min(len(more) - 1, int(len(more) / 2 + off))]
    return {
        "way": way.name,
        "median_ms": statistics.median(way.swap_s) * 1e3,
        "more_ms": statistics.median(more) * 1e3,
        "more_low_ms": low * 1e3,
        "more_high_ms": high * 1e3,
        "cpu_ms": statistics.median(way.cpu_s) * 1e3,
    }


def _daemon(name: str, folder: str) -> tuple[Daemon, tuple[int, ...]]:
    """Start a daemon with its coordinator, observed in the named way; return it and the ports of its metrics."""
    if name == ALL:
        port = free_port()  # and the next one, for the coordinator
        return daemon(f'[metrics]\nendpoint = "127.0.0.1:{port}"\n'), (port, port + 1)
    if name == NOTHING:
        (Path(folder) / "sitecustomize.py").write_text(_UNTRACED)
        return daemon(environment={"PYTHONPATH": folder}), ()
    return daemon(), ()


@contextlib.contextmanager
def _scraped(ports: Sequence[int]) -> Iterator[None]:
    ended = threading.Event()
    scraper = threading.Thread(target=_scrape, args=(ports, ended))
    scraper.start()
    try:
        yield
    finally:
        ended.set()
        scraper.join()


def _scrape(ports: Sequence[int], ended: threading.Event) -> None:
    while not ended.wait(SCRAPE_S):
        for port in ports:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
                page.read()


def markdown(results: dict[str, Any]) -> str:
    """Return the file for benchmarks/results."""
    about = results["machine"]
    lines = [
        "# What metrics and traces cost a swap",
        "",
        f"{about['cpu']}, {about['cores']} cores, Linux {about['kernel']}, Python {about['python']}. One node,",
        "one trainer rank, two engine ranks that wait. Each way has a daemon and a coordinator of its own, and they",
        "take turns, swap by swap. Traces are always recorded: for the first row that was taken out. Metrics are",
        f"scraped every {SCRAPE_S:.0f} s. More is the median of the differences to the first row's swap of the same",
        "round, with its 95 % interval. CPU is that of the loops of daemon and coordinator, per publish and swap: what",
        "a swap waits for, whatever else runs on the machine.",
        f"Written by `scripts/bench observing`, {results['at']}; the machine's load was {results['load']:.0f}.",
        "",
        "| model | swaps | recorded | median ms | more ms | of the swap | CPU ms of the loops |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in results["cases"]:
        for way in case["ways"]:
            more = f"{way['more_ms']:+.3f} ({way['more_low_ms']:+.3f} to {way['more_high_ms']:+.3f})"
            share = f"{100 * way['more_ms'] / case['ways'][0]['median_ms']:+.1f} %"
            is_first = way is case["ways"][0]
            lines.append(
                f"| {case['bytes'] / 1e6:.0f} MB | {case['rounds']} | {way['way']} | {way['median_ms']:.2f} | "
                f"{'' if is_first else more} | {'' if is_first else share} | {way['cpu_ms']:.2f} |"
            )
    return "\n".join(lines) + "\n"
