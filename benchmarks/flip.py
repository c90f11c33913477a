"""Measure an engine's pause for a commit: by exchange, by exchange at fixed addresses, and by copying.

One trainer lends its tensors from an arena. One engine in a separate process polls continuously. The unit is one
thread's memcpy of as many bytes, measured in that round. Rollbacks exchange the arenas again; no data moves. A
rollback begins once the daemon has compared the other arena with its digests, about a second after the commit.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.synchronize import Event
from typing import Any

import torch

import refitd
from benchmarks import machine
from benchmarks.swap_processes import Memcpy, available_bytes
from refitd.testing import Daemon, eventually

TENSORS = 64
MIB = 1 << 20
UNIT = 256 * MIB  # bytes that the unit copies in one step
CALLS = 100_000  # of poll, and reads of version
MOST_BACK = 20  # rounds that also roll back; each rollback waits about a second
# model bytes, ways, rounds
WAYS = "flip", "kept", "copy"
CASES = ((MIB, WAYS, 200), (1 << 30, WAYS, 15), (2 << 30, WAYS, 11))
# flip-cast: to need less memory, the trainer holds bfloat16 and the engine gets float32
LARGE = ((4 << 30, ("flip",), 9), (6 << 30, ("flip",), 7), (8 << 30, ("flip-cast",), 9))


def run(
    json_output: bool, quick: bool = False, gib: Sequence[int] = (), cases: machine.Cases = machine.EVERY
) -> dict[str, Any]:
    """Measure every case and return the figures.

    With `gib`, measure only models of these sizes, and do not store figures. If memory for a full trainer is
    lacking, the trainer holds bfloat16 and the engine gets float32.
    """
    measured = tuple((nbytes, ways, 3) for nbytes, ways, _ in CASES[:2]) if quick else CASES + LARGE
    if gib:
        measured = tuple((size << 30, ("flip" if _fits(size << 30, "flip") else "flip-cast",), 9) for size in gib)
        for nbytes, (way,), _ in measured:
            needs, left = _needed(nbytes, way) / 2**30, available_bytes() / 2**30
            print(f"{nbytes >> 30} GiB, {way}: needs {needs:.1f} GiB, {left:.1f} are available", flush=True)
    results: dict[str, Any] = {"machine": machine.describe(), "cases": [], **_idle_us()}
    for nbytes, ways, rounds in measured:
        for way in (way for way in ways if f"{nbytes >> 20} MiB, {way}" in cases):
            results["cases"].append(_measure(nbytes, way, rounds))
            if not json_output:
                print(_row(results["cases"][-1]), flush=True)
    machine.record("flip", results, _markdown)
    return results


def _shapes(nbytes: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
    rows = nbytes // TENSORS // dtype.itemsize // 1024
    return {f"layers.{i}.weight": ((rows, 1024), dtype) for i in range(TENSORS)}


def _needed(nbytes: int, way: str) -> int:
    """Return the bytes of a case: the trainer's, two for the engine, one more to be adopted, two for the unit."""
    others = {"flip-cast": 2.5, "kept": 4.0}.get(way, 3.0)
    return int(others * nbytes) + 2 * min(nbytes, UNIT)


def _fits(nbytes: int, way: str) -> bool:
    return _needed(nbytes, way) <= available_bytes()


def _compared(daemon: Daemon) -> list[str]:
    return [line for line in daemon.log().splitlines() if "event=spare-compared" in line]


def _is_compared(daemon: Daemon, version: int, before: int) -> bool:
    return any(f"version={version}" in line.split() for line in _compared(daemon)[before:])


def _kept(client: refitd.Client, nbytes: int) -> torch.nn.Module:
    """Return a model in torch's own memory, adopted at its addresses."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(TENSORS))
    for name, (shape, dtype) in _shapes(nbytes).items():
        model.get_submodule(name.rpartition(".")[0]).weight = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
    client.adopt(model, keep_addresses=True, timeout=300)
    return model


def _engine(directory: str, nbytes: int, way: str, ready: Event, stop: Event) -> None:
    mode: Any = "copy" if way == "copy" else "flip"
    dtype, cast = (torch.float32, "bfloat16") if way == "flip-cast" else (torch.bfloat16, False)
    with refitd.connect(directory) as client:
        live: Any = _kept(client, nbytes) if way == "kept" else client.allocate(_shapes(nbytes, dtype), timeout=300)
        target = client.register_target("bench", live, replica="engine", mode=mode, cast=cast, timeout=300)
        assert target.flips == (mode == "flip")
        ready.set()
        while not stop.is_set():
            target.poll()
            time.sleep(20e-6)


def _measure(nbytes: int, way: str, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {"bytes": nbytes, "way": way, "rounds": rounds}
    if not _fits(nbytes, way):
        return found | {"left_out": f"it takes {_needed(nbytes, way) / 2**30:.1f} GiB"}
    spawn = multiprocessing.get_context("spawn")
    ready, stop = spawn.Event(), spawn.Event()
    taken: dict[str, list[float]] = {name: [] for name in ("memcpy", "swap", "stage", "commit", "pause", "rollback")}
    with Daemon(config="[node]\nworkers = 2\n") as daemon, daemon.connect() as client:
        engine = spawn.Process(target=_engine, args=(str(daemon.directory), nbytes, way, ready, stop))
        engine.start()
        try:
            given = client.allocate(_shapes(nbytes // 2 if way == "flip-cast" else nbytes), timeout=300)
            for tensor in given.values():
                tensor.fill_(1)
            source = client.register_source("bench", given, timeout=300)
            if not ready.wait(300):
                raise TimeoutError("the engine has not registered")
            unit, version = Memcpy(min(nbytes, UNIT)), 0
            for number in range(rounds + 2):
                memcpy_s, version = unit.seconds(nbytes), version + 1
                before = len(_compared(daemon))
                with source.lend(version):
                    report = client.swap("bench", version, timeout=300)
                back = None
                if way != "copy" and version > 1 and version <= MOST_BACK:
                    is_compared = partial(_is_compared, daemon, version - 1, before)
                    eventually(is_compared, "the other arena is compared", 60)
                    back = client.rollback("bench", timeout=300)
                    assert back.bytes == 0
                    client.rollback("bench", version, timeout=300)
                if number < 2:
                    continue
                for name, value in (
                    ("memcpy", memcpy_s),
                    ("swap", report.total_s),
                    ("stage", report.stage_s),
                    ("commit", report.commit_s),
                    ("pause", report.members[0].paused_s),
                ):
                    taken[name].append(value)
                if back is not None:
                    taken["rollback"].append(back.total_s)
        finally:
            stop.set()
            engine.join(30)
            engine.kill()
    return found | {
        name: {"median_s": statistics.median(all_), "most_s": max(all_)} for name, all_ in taken.items() if all_
    }


def _idle_us() -> dict[str, float]:
    """Return the microseconds of an idle poll and of reading the live version: the minimum of five runs."""
    poll_us = version_us = float("inf")
    with Daemon() as daemon, daemon.connect() as client:
        target = client.register_target("bench", {"w": torch.zeros(4)}, replica="engine")
        client.register_source("bench", {"w": torch.ones(4)}).publish(1)
        with ThreadPoolExecutor(1) as other:
            swapped = other.submit(client.swap, "bench")
            target.wait(1)
            swapped.result()
        for first in range(0, 5 * CALLS, CALLS):
            started = time.perf_counter()
            for step in range(first, first + CALLS):
                target.poll(step=step)
            polled = time.perf_counter()
            for _ in range(CALLS):
                assert target.version == 1
            ended = time.perf_counter()
            poll_us = min(poll_us, (polled - started) / CALLS * 1e6)
            version_us = min(version_us, (ended - polled) / CALLS * 1e6)
    return {"poll_us": poll_us, "version_us": version_us}


def _row(case: dict[str, Any]) -> str:
    size = f"{case['bytes'] / 2**30:.0f} GiB" if case["bytes"] >= 1 << 30 else f"{case['bytes'] / MIB:.0f} MiB"
    if "left_out" in case:
        return f"| {size} | {case['way']} | left out: {case['left_out']} |  |  |  |  |  |"
    unit = case["memcpy"]["median_s"]

    def shown(name: str) -> str:
        if name not in case:
            return ""
        one = case[name]
        return f"{one['median_s'] * 1e3:.2f} (most {one['most_s'] * 1e3:.2f})"

    swap = case["swap"]["median_s"]
    ratio = f"{swap / unit:.2f}" if case["bytes"] > MIB else ""
    columns = (size, case["way"], shown("pause"), shown("stage"), shown("swap"), ratio, shown("rollback"))
    return f"| {' | '.join(columns)} |"


def _markdown(results: dict[str, Any]) -> str:
    m = results["machine"]
    lines = [
        "# Going live: arenas exchanged, or bytes copied",
        "",
        f"{m['cpu']}, {m['cores']} cores, {m['memory_bytes'] / 2**30:.0f} GiB, Linux {m['kernel']}, "
        f"Python {m['python']}, torch {m['packages'].get('torch')}.",
        "One trainer that lends from an arena, one engine that polls, every byte compared when staged. Milliseconds,",
        f"medians over the rounds. kept: {TENSORS} tensors in torch's memory, adopted with keep_addresses. flip-cast:",
        "the trainer holds bfloat16, the engine float32. Written by `scripts/bench flip`.",
        "",
        "| model | way | engine paused | staged | whole swap | in memcpys | rollback |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *map(_row, results["cases"]),
        "",
        f"A poll with nothing pending takes {results['poll_us']:.2f} us, and reading `version` of a rank that serves",
        f"{results['version_us']:.2f} us (the least of five times {CALLS:,}).",
        "",
    ]
    return "\n".join(lines)
