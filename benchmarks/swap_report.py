"""The figures of the swap benchmark: medians and ratios of rounds, as Markdown and on the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

WAYS = {
    "memcpy": "memcpy, the unit",
    "publish": "refitd publish, by snapshot",
    "swap": "refitd swap, whole",
    "stage": "- staging, verified",
    "bare": "- staging, not verified",
    "commit": "- commit",
    "paused": "- engine paused, longest",
    "verify": "refitctl verify, all ranks",
    "direct": "raw gloo, buffer per pair",
    "checkpoint": "torch.distributed.checkpoint",
    "gather": "gather, broadcast, slice",
}
COLUMNS = ("way", "rounds", "median s", "GB/s", "memcpys", "least", "most")


def summary(rounds: Sequence[dict[str, float]], nbytes: int) -> dict[str, dict[str, float]]:
    """Return, by way, the median time and the time in memcpys of its round; a round may skip ways."""
    found = {}
    for way in [way for way in WAYS if any(way in took for took in rounds)]:
        seconds = [took[way] for took in rounds if way in took]
        units = [took[way] / took["memcpy"] for took in rounds if way in took]
        found[way] = {
            "rounds": len(seconds),
            "median_s": statistics.median(seconds),
            "gb_per_s": nbytes / statistics.median(seconds) / 1e9,
            "memcpys": statistics.median(units),
            "min_memcpys": min(units),
            "max_memcpys": max(units),
        }
    return found


def markdown(results: dict[str, Any]) -> str:
    """Return the file for benchmarks/results."""
    about = results["machine"]
    lines = [
        "# Swaps: from published to live in every replica, on one node",
        "",
        f"{about['cpu']}, {about['cores']} cores, {about['memory_bytes'] / 2**30:.0f} GiB, Linux {about['kernel']}, "
        f"Python {about['python']}, torch {about['packages'].get('torch')}.",
        "A memcpy is one thread's copy of the same bytes between prefaulted shared mappings, the median of three in",
        "the same round; ratios are medians over rounds. Staging compares every byte written with the source's, read",
        "again. Checkpoints go through a directory in shared memory. Worker memory is that of the largest worker",
        "process, beyond arenas. Written by `scripts/bench swap`.",
    ]
    for case in results["cases"]:
        lines += ["", f"## {_title(case)}", ""]
        if "left_out" in case:
            lines.append(f"Left out: {case['left_out']}.")
            continue
        lines += [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
        lines += [f"| {' | '.join(row)} |" for row in _rows(case)]
        lines += ["", f"{_memory(case)}; measured {case.get('at', 'earlier')}."]
    lines += ["", *(f"{line}." for line in _last(results))]
    return "\n".join(lines) + "\n"


def show(results: dict[str, Any]) -> None:
    """Print the figures."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for case in results["cases"]:
        if "left_out" in case:
            console.print(f"{_title(case)}: left out, {case['left_out']}")
            continue
        table = Table(title=_title(case), caption=_memory(case))
        for column in COLUMNS:
            is_name = column == "way"
            table.add_column(column, justify="left" if is_name else "right", no_wrap=is_name)
        for row in _rows(case):
            table.add_row(*row)
        console.print(table)
    for line in _last(results):
        console.print(line)


def _title(case: dict[str, Any]) -> str:
    return f"{case['name']}, {case['bytes'] / 1e9:.2f} GB of bf16 in {case['tensors']} tensors"


def _rows(case: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            WAYS[way],
            str(f["rounds"]),
            *(f"{f[key]:.3g}" for key in ("median_s", "gb_per_s", "memcpys", "min_memcpys", "max_memcpys")),
        )
        for way, f in case["ways"].items()
    ]


def _memory(case: dict[str, Any]) -> str:
    first = f"the first swap took {case['first_swap_s']:.2f} s; " if "first_swap_s" in case else ""
    return (
        f"{first}worker memory {case['worker_bytes'] / 2**20:.0f} MiB; "
        f"all of it together took {case['used_bytes'] / 2**30:.1f} GiB at its peak"
    )


def _last(results: dict[str, Any]) -> list[str]:
    lines = [f"{ratio['name']}: {ratio['ratio']:.2f} times as long" for ratio in results["ratios"]]
    if small := results.get("small"):
        lines.append(
            f"A {small['bytes'] / 1e6:.1f} MB model, {small['swaps']} swaps: median {small['median_ms']:.1f} ms "
            f"(staging {small['stage_median_ms']:.1f}, commit {small['commit_median_ms']:.1f}), "
            f"p99 {small['p99_ms']:.1f} ms, longest {small['max_ms']:.1f} ms; measured {small.get('at', 'earlier')}"
        )
    return lines
