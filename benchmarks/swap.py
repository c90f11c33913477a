"""How fast a swap is: real daemon, real client processes, peers interleaved in the same rounds.

Every way moves the same bytes from two tensor-parallel ranks into the target's ranks, in turn, round by round:
memcpy (one thread, between prefaulted shared mappings: the unit), refitd (publish, stage with digests, commit),
raw gloo (one preallocated buffer per pair of ranks, neither packed nor unpacked), and gather + broadcast + slice.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import refitd
from benchmarks import machine
from benchmarks.swap_model import Tensor, llama_like
from refitd.buffers import arena as memory

RESULTS = Path(__file__).parent / "results"
ANSWER_S = 180.0
SMALL_SWAPS = 300


class Process:
    """A member process; `ask` sends a command, `answer` returns what it said."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.swap_member"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        self._send(spec)

    def _send(self, command: dict[str, Any]) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps(command).encode() + b"\n")
        self._popen.stdin.flush()

    def ask(self, do: str, **arguments: Any) -> None:
        self._send({"do": do, **arguments})

    def answer(self) -> dict[str, Any]:
        assert self._popen.stdout is not None
        if not select.select([self._popen.stdout], [], [], ANSWER_S)[0]:
            raise TimeoutError(f"a benchmark process did not answer within {ANSWER_S:.0f} s")
        answer: dict[str, Any] = json.loads(self._popen.stdout.readline() or '{"error": "it has died"}')
        if "error" in answer:
            raise RuntimeError(f"a benchmark process failed: {answer['error']}")
        return answer

    def close(self) -> None:
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                pipe.close()


class Daemon:
    """`refitd serve --standalone` in a directory of its own."""

    def __init__(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="rfb")
        ready_r, ready_w = os.pipe()
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "refitd_cli.daemon", "serve", "--standalone", "--ready-fd", str(ready_w)],
            env={**os.environ, "REFITD_NODE__RUNTIME_DIR": self.directory, "REFITD_LOG__LEVEL": "warning"},
            pass_fds=(ready_w,),
        )
        os.close(ready_w)
        if os.read(ready_r, 16) != b"ready\n":
            raise RuntimeError("the daemon did not start; its output above says why")
        os.close(ready_r)

    def close(self) -> None:
        self._popen.terminate()
        self._popen.wait(20)
        shutil.rmtree(self.directory, ignore_errors=True)


def run(json_output: bool) -> dict[str, Any]:
    """Run everything and return the figures."""
    model = llama_like(9, 2048, 7168)
    results: dict[str, Any] = {"unit": "one memcpy of the same bytes, one thread, same round"}
    cases = {"TP2 -> TP4": ("tp", 4), "TP2 -> PP2": ("pp", 2)}
    for name, (kind, targets) in cases.items():
        _note(f"{name}: starting {2 + targets} processes, about 1 GB")
        results[name] = _large(model, kind, targets, rounds=5)
    _note(f"1 MB model: {SMALL_SWAPS} swaps")
    results["1 MB model"] = _small()
    results["machine"] = machine.describe()
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "swap.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "swap.md").write_text(_markdown(results, list(cases)))
    if not json_output:
        _print(results, list(cases))
    return results


def _large(model: list[Tensor], kind: str, targets: int, rounds: int) -> dict[str, Any]:
    daemon = Daemon()
    processes: list[Process] = []
    try:
        layouts = {"source": "tp", "target": kind, "targets": str(targets)}
        processes += _members(daemon, model, "source", 2, layouts, slots=1)
        processes += _members(daemon, model, "target", targets, layouts, slots=1)
        for process in processes:
            process.answer()
        nbytes = sum(2 * int(np.prod(t.shape)) * (targets if t.dim is None and kind == "tp" else 1) for t in model)
        store = Path(daemon.directory) / "store"
        for rank, process in enumerate(processes):
            process.ask("gloo", store=str(store), rank=rank, size=len(processes))
        for process in processes:
            process.answer()
        copy = _Memcpy(nbytes)
        figures: dict[str, list[float]] = {}
        with refitd.connect(daemon.directory) as client:
            for version in range(1, rounds + 2):
                took = _round(client, processes, version, copy)
                _note(f"  round {version - 1}/{rounds}" + (" (warm-up)" if version == 1 else ""))
                if version > 1:
                    for key, value in took.items():
                        figures.setdefault(key, []).append(value)
        return _summary(figures, nbytes)
    finally:
        for process in processes:
            process.close()
        daemon.close()


def _members(
    daemon: Daemon, model: list[Tensor], side: str, world: int, layouts: dict[str, str], slots: int
) -> list[Process]:
    spec = {
        "side": side,
        "world": world,
        "sources": 2 if side == "target" or world > 1 else 1,
        "layouts": layouts,
        "tensors": [t.as_json() for t in model],
        "directory": daemon.directory,
        "slots": slots,
    }
    return [Process({**spec, "rank": rank}) for rank in range(world)]


class _Memcpy:
    """Two prefaulted shared mappings and one thread."""

    def __init__(self, nbytes: int) -> None:
        fds = [memory.create(nbytes, "bench") for _ in range(2)]
        self._a, self._b = (memory.MappedArena(fd, nbytes, write=True) for fd in fds)
        for fd in fds:
            os.close(fd)
        self._a.bytes[:] = 1

    def seconds(self) -> float:
        started = time.perf_counter()
        np.copyto(self._b.bytes, self._a.bytes)
        return time.perf_counter() - started


def _round(client: refitd.Client, processes: list[Process], version: int, copy: _Memcpy) -> dict[str, float]:
    took = {"memcpy": copy.seconds()}
    sources, targets = processes[:2], processes[2:]
    for process in sources:
        process.ask("publish", version=version)
    took["publish"] = max(process.answer()["seconds"] for process in sources)
    for process in targets:
        process.ask("wait", version=version)
    started = time.perf_counter()
    report = client.swap("bench", version, timeout=120)
    took["swap"] = time.perf_counter() - started
    took["stage"], took["commit"] = report.stage_s, report.commit_s
    took["paused"] = max(process.answer()["paused_s"] for process in targets)
    took["memcpy again"] = copy.seconds()
    for way in ("direct", "gather"):
        for process in processes:
            process.ask(way)
        took[way] = max(process.answer()["seconds"] for process in processes)
    return took


def _summary(figures: dict[str, list[float]], nbytes: int) -> dict[str, Any]:
    again = figures.pop("memcpy again")
    units = [(a + b) / 2 for a, b in zip(figures["memcpy"], again, strict=True)]
    summary: dict[str, Any] = {"bytes": nbytes, "rounds": len(units)}
    for way, values in figures.items():
        summary[way] = {
            "median_s": statistics.median(values),
            "gb_per_s": nbytes / statistics.median(values) / 1e9,
            "memcpys": statistics.median(v / unit for v, unit in zip(values, units, strict=True)),
            "min_memcpys": min(v / unit for v, unit in zip(values, units, strict=True)),
            "max_memcpys": max(v / unit for v, unit in zip(values, units, strict=True)),
        }
    return summary


def _small() -> dict[str, Any]:
    model = [Tensor(f"layers.{i}.weight", (128, 512), 0, i) for i in range(8)]
    daemon = Daemon()
    processes: list[Process] = []
    try:
        layouts = {"source": "tp", "target": "tp", "targets": "2"}
        processes += _members(daemon, model, "source", 1, layouts, slots=2)
        processes += _members(daemon, model, "target", 2, layouts, slots=2)
        for process in processes:
            process.answer()
        for process in processes[1:]:
            process.ask("wait_until", version=SMALL_SWAPS + 10)
        took, staged = [], []
        with refitd.connect(daemon.directory) as client:
            for version in range(1, SMALL_SWAPS + 11):
                processes[0].ask("publish", version=version)
                processes[0].answer()
                started = time.perf_counter()
                report = client.swap("bench", version, timeout=60)
                if version > 10:
                    took.append((time.perf_counter() - started) * 1e3)
                    staged.append(report.stage_s * 1e3)
        took.sort()
        return {
            "swaps": len(took),
            "bytes": sum(2 * int(np.prod(t.shape)) for t in model),
            "median_ms": statistics.median(took),
            "p99_ms": took[int(len(took) * 0.99)],
            "stage_median_ms": statistics.median(staged),
        }
    finally:
        for process in processes:
            process.close()
        daemon.close()


def _markdown(results: dict[str, Any], cases: list[str]) -> str:
    about, small = results["machine"], results["1 MB model"]
    lines = [
        "# Swaps: from published to live in every replica, on one node",
        "",
        f"{about['cpu']}, {about['cores']} cores, {about['memory_bytes'] / 2**30:.0f} GiB, Linux {about['kernel']}, "
        f"Python {about['python']}, torch {about['packages'].get('torch')}.",
        "A memcpy is one thread's copy of the same bytes between prefaulted shared mappings, before and after each",
        "swap of the same round; ratios are medians over rounds. Staging compares a digest of every byte read with",
        "one of every byte written. Written by `scripts/bench swap`.",
    ]
    for name in cases:
        case = results[name]
        lines += ["", f"## {name}, {case['bytes'] / 1e9:.2f} GB of bf16, {case['rounds']} rounds", ""]
        lines += ["| way | median s | GB/s | memcpys | least | most |", "| --- | --- | --- | --- | --- | --- |"]
        for way, f in case.items():
            if isinstance(f, dict):
                figures = (f["median_s"], f["gb_per_s"], f["memcpys"], f["min_memcpys"], f["max_memcpys"])
                lines.append(f"| {_WAYS[way].strip()} | " + " | ".join(f"{value:.3g}" for value in figures) + " |")
    lines += [
        "",
        f"## A {small['bytes'] / 1e6:.1f} MB model, {small['swaps']} swaps",
        "",
        f"median {small['median_ms']:.1f} ms, p99 {small['p99_ms']:.1f} ms; staging {small['stage_median_ms']:.1f} ms",
    ]
    return "\n".join(lines) + "\n"


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print(results: dict[str, Any], cases: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    for name in cases:
        case = results[name]
        table = Table(title=f"{name}, {case['bytes'] / 1e9:.2f} GB of bf16, {case['rounds']} rounds")
        for column in ("way", "median s", "GB/s", "memcpys", "least", "most"):
            table.add_column(column, justify="left" if column == "way" else "right")
        for way, f in case.items():
            if isinstance(f, dict):
                table.add_row(
                    _WAYS[way],
                    f"{f['median_s']:.3f}",
                    f"{f['gb_per_s']:.2f}",
                    f"{f['memcpys']:.2f}",
                    f"{f['min_memcpys']:.2f}",
                    f"{f['max_memcpys']:.2f}",
                )
        Console().print(table)
    small = results["1 MB model"]
    print(f"1 MB model, {small['swaps']} swaps: median {small['median_ms']:.1f} ms, p99 {small['p99_ms']:.1f} ms")


_WAYS = {
    "memcpy": "memcpy, one thread (the unit)",
    "publish": "refitd publish (snapshot, trainer waits)",
    "swap": "refitd swap, whole",
    "stage": "  of it staging, verified",
    "commit": "  of it commit",
    "paused": "  engine paused, longest rank",
    "direct": "raw gloo, one buffer per pair",
    "gather": "gather + broadcast + slice",
}
