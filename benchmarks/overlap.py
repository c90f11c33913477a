"""Measure the time from the begin of a publication to the committed swap, with and without overlap of both.

The model swaps automatically. Without overlap the client reports no bytes while it publishes. Ways take turns within
each round; ratios are computed per round.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.swap_processes import ANSWER_S, daemon
from refitd.client import slot_source
from refitd.testing import Engine, eventually

RESULTS = Path(__file__).parent / "results"
SHAPE = (4096, 4096)  # 32 MiB of bfloat16
CONFIG = "[models.bench]\nauto_swap = true\n[deadlines]\nlease_s = 60.0\n"
TOLD = {"in turn": 1 << 62, "overlapped": slot_source.TOLD_BYTES}
GATHERED = 1e9  # bytes a second


def run(json_output: bool, quick: bool = False, cases: machine.Cases = machine.EVERY) -> dict[str, Any]:
    """Measure and return the figures."""
    tensors, rounds = (8, 2) if quick else (32, 7)
    found = [
        _measure(nodes, paced, tensors, rounds)
        for nodes in (1, 2)
        for paced in (False, True)
        if f"{nodes} nodes, {'paced' if paced else 'free'}" in cases
    ]
    results = {"benchmark": "overlap", "machine": machine.describe(), "cases": found, "load": machine.load()}
    machine.record("overlap", results, markdown)
    if not json_output:
        print(markdown(results))
    return results


def _measure(nodes: int, paced: bool, tensors: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    shapes = {f"layers.{i}.weight": (SHAPE, torch.bfloat16) for i in range(tensors)}
    given = [torch.randn(SHAPE).bfloat16() for _ in range(4)]
    nbytes, seconds = tensors * given[0].nbytes, {way: list[float]() for way in TOLD}

    def weights(version: int) -> Iterator[tuple[str, torch.Tensor]]:
        for i, name in enumerate(shapes):
            if paced:
                time.sleep(given[0].nbytes / GATHERED)  # as a gather over GPUs, which needs no processor here
            yield name, given[(i + version) % len(given)]

    with contextlib.ExitStack() as stack:
        first = last = stack.enter_context(daemon(CONFIG))
        if nodes == 2:
            last = stack.enter_context(daemon(CONFIG, name="n1", joins=first.endpoint))
        trainer, engine = stack.enter_context(first.connect()), stack.enter_context(last.connect())
        eventually(lambda: len(trainer.status().nodes) == nodes, "the second daemon has joined", ANSWER_S)
        source = trainer.declare_source("bench", shapes)
        held = engine.allocate(shapes)
        target = engine.register_target("bench", held, replica="r")
        stack.enter_context(Engine(target))
        for version in range(1, 2 * rounds + 5):
            way = [*TOLD][version % 2]
            slot_source.TOLD_BYTES, slot_source.TOLD_PART = TOLD[way], 64 if way == "overlapped" else 1 << 62
            began = time.perf_counter()
            source.publish_from(version, weights(version))
            while target.version != version:
                time.sleep(0.001)
            if version > 4:  # the first ones plan, connect and touch pages
                seconds[way].append(time.perf_counter() - began)
        for i, name in enumerate(shapes):
            assert torch.equal(held[name], given[(i + version) % len(given)])
    ratios = [one / other for one, other in zip(seconds["in turn"], seconds["overlapped"], strict=True)]
    medians = {way: statistics.median(took) for way, took in seconds.items()}
    spread = {way: [min(took), max(took)] for way, took in seconds.items()}
    return {
        **{"nodes": nodes, "paced": paced, "bytes": nbytes, "rounds": rounds},
        **{"seconds": medians, "spread": spread, "times_as_fast": statistics.median(ratios), "ratios": ratios},
    }


def markdown(results: dict[str, Any]) -> str:
    """Return the file for benchmarks/results."""
    about, case = results["machine"], results["cases"][0]
    lines = [
        f"# A version staged while it is published: {case['bytes'] / 1e9:.1f} GB of bfloat16",
        "",
        f"{about['cpu']}, {about['cores']} cores, Linux {about['kernel']}, Python {about['python']}. Seconds from the",
        "begin of `publish_from` to the committed swap (`auto_swap`), and the range. Ratios are taken within a round.",
        f"Medians of {case['rounds']} rounds, `scripts/bench overlap`. {results['load']}",
        "",
        "| nodes | tensors come | in turn | overlapped | times as fast |",
        "| --- | --- | --- | --- | --- |",
    ]
    for case in results["cases"]:
        come = f"gathered at {GATHERED / 1e9:.0f} GB/s" if case["paced"] else "from memory"
        cells = [
            f"{case['seconds'][way]:.2f} ({case['spread'][way][0]:.2f} to {case['spread'][way][1]:.2f})" for way in TOLD
        ]
        ratios = case["ratios"]
        fast = f"{case['times_as_fast']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"| {case['nodes']} | {come} | {' | '.join(cells)} | {fast} |")
    lines += [
        "",
        "From memory, publishing and staging share processors and memory. A gather leaves both free for staging.",
    ]
    return "\n".join(lines) + "\n"
