"""Measure the fixed time of a swap: a model of 1 MB, swapped repeatedly."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.swap_case import REFITD, Case, RunningCase
from benchmarks.swap_model import Layout, Tensor
from benchmarks.swap_processes import daemon

WARM_UP = 10


def measure(swaps: int) -> dict[str, Any]:
    """Swap `swaps` times; return milliseconds from the request to the last engine's answer."""
    model = tuple(Tensor(f"layers.{i}.weight", (128, 512), 0, i) for i in range(8))
    case = Case("1 MB", model, Layout("tp", 1), Layout("tp", 2), (REFITD,), swaps)
    running = RunningCase(case, [daemon()], slots=2)
    try:
        for process in running.targets:
            process.ask("wait_until", version=WARM_UP + swaps)
        took = [running.swap(is_awaited=True) for _ in range(WARM_UP + swaps)][WARM_UP:]
    finally:
        running.close()
    whole = sorted(phases["swap"] * 1e3 for phases in took)
    return {
        "swaps": swaps,
        "bytes": case.nbytes,
        "median_ms": statistics.median(whole),
        "p99_ms": whole[int(swaps * 0.99)],
        "max_ms": whole[-1],
        "stage_median_ms": statistics.median(phases["stage"] * 1e3 for phases in took),
        "commit_median_ms": statistics.median(phases["commit"] * 1e3 for phases in took),
    }
