"""Measure a swap with a real daemon and real client processes, beside other methods in the same rounds.

Every method moves equal bytes from the source's ranks to the target's. The methods take turns within each round: memcpy
(one thread, between prefaulted shared mappings: the unit), refitd (publish, stage with every byte compared, commit),
raw gloo, torch.distributed.checkpoint, and gather + broadcast + slice.
"""

from __future__ import annotations

import fnmatch
import json
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from benchmarks import machine, swap_report, swap_small
from benchmarks.swap_case import CHECKPOINT, PEERS, REFITD, Case, RunningCase, Watermark
from benchmarks.swap_model import Layout, Tensor, experts, llama_like
from benchmarks.swap_processes import BLOCK_BYTES, Memcpy, available_bytes, daemons
from refitd.copy_services.registry import installed
from refitd.errors import ConfigError

SMALL, SMALL_SWAPS = "1 MB model", 500
BETWEEN_NODES = "TP2 -> TP2, between two daemons, "  # and the service
TP2, TP4 = Layout("tp", 2), Layout("tp", 4)


def groups_of(quick: bool = False) -> list[list[Case]]:
    """Return the cases to measure; the rounds of cases in one list are interleaved."""
    model = tuple(llama_like(2, 1024, 3584) if quick else llama_like(9, 2048, 7168))
    large = tuple(llama_like(2, 1024, 3584) if quick else llama_like(9, 4096, 14336))
    count = 200 if quick else 1000
    many, few = (tuple(experts(count, 256, 1024, stacked)) for stacked in (1, count // 10))
    everything = (REFITD, *PEERS, CHECKPOINT)
    names = 2_000 if quick else 100_000
    tiny = tuple(Tensor(f"layers.{i // 100}.block.{i % 100}.weight", (32,), None, i // 100) for i in range(names))
    cheap = (REFITD, PEERS[0])
    rounds = 2 if quick else 9
    return [
        [Case("TP2 -> TP4", model, TP2, TP4, everything, rounds)],
        [
            Case("Verified or not, TP2 -> TP4, verified", model, TP2, TP4, (REFITD,), 3 * rounds),
            Case("Verified or not, TP2 -> TP4, not verified", model, TP2, TP4, (REFITD,), 3 * rounds, verify=False),
        ],
        [Case("TP2 -> PP2", model, TP2, Layout("pp", 2), everything, rounds)],
        [Case("TP4 -> TP1", model, TP4, Layout("tp", 1), (REFITD, *PEERS), rounds)],
        [Case("FSDP3, uneven -> TP2", model, Layout("fsdp", 3), TP2, (REFITD, *PEERS), rounds)],
        [
            Case("Experts, many small tensors, TP2 -> TP4", many, TP2, TP4, cheap, rounds),
            Case("Experts, few large tensors, TP2 -> TP4", few, TP2, TP4, cheap, rounds),
        ],
        [Case(f"{names:,} tiny tensors, TP1 -> TP1", tiny, Layout("tp", 1), Layout("tp", 1), (REFITD,), rounds)],
        [
            Case(BETWEEN_NODES + service, model, TP2, TP2, (REFITD, PEERS[0]), rounds, nodes=2, service=service)
            for service in ("gloo", "nixl")
        ],
        [Case("TP2 -> TP4, large", large, TP2, TP4, cheap, 2 if quick else 4)],
    ]


def run(json_output: bool, quick: bool = False, cases: machine.Cases = machine.EVERY) -> dict[str, Any]:
    """Measure these cases and return the figures.

    With --record the figures are stored in benchmarks/results, where figures of skipped cases stay unchanged.

    Raises:
        NotComparable: no case matches, or the stored figures are from another machine.
    """
    groups, only = groups_of(quick), cases.only
    names = [*(case.name for group in groups for case in group), SMALL]
    if not fnmatch.filter(names, only):
        raise machine.NotComparable(f"no case matches {only!r}; there are: {'; '.join(names)}")
    kept = _kept() if machine.is_recording() and only != "*" else {}
    cases_kept = {case["name"]: case for case in kept.get("cases", [])}
    ratios_kept = {ratio["name"]: ratio for ratio in kept.get("ratios", [])}
    results: dict[str, Any] = {"unit": "one memcpy of the same bytes, one thread, same round", "cases": []}
    ratios: dict[str, dict[str, Any]] = {}
    for group in groups:
        if not fnmatch.filter([case.name for case in group], only):  # cases of one group are measured together
            results["cases"] += [cases_kept[case.name] for case in group if case.name in cases_kept]
            continue
        measured = _measure(group)
        results["cases"] += measured
        between = [_between_nodes(case, m) for case, m in zip(group, measured, strict=True) if case.nodes == 2]
        found = [ratio for ratio in between if ratio is not None]
        if len(group) == 2 and not between and "rounds" in measured[0]:
            found.append((_ratio if group[1].verify else _verification)(*measured))
        ratios |= {ratio["name"]: ratio for ratio in found}
    results["ratios"] = list((ratios_kept | ratios).values())
    for case in results["cases"]:
        case.pop("rounds", None)
    if fnmatch.fnmatch(SMALL, only):
        _note(f"{SMALL}: {SMALL_SWAPS} swaps")
        results["small"] = swap_small.measure(SMALL_SWAPS // 10 if quick else SMALL_SWAPS) | {"at": _now()}
    elif "small" in kept:
        results["small"] = kept["small"]
    results["machine"] = machine.describe()
    machine.record("swap", results, swap_report.markdown)
    if not json_output:
        swap_report.show(results)
    return results


def _kept() -> dict[str, Any]:
    """Return the figures of earlier runs on this machine."""
    path = machine.RESULTS / "swap.json"
    if not path.exists():
        return {}
    kept: dict[str, Any] = json.loads(path.read_text())
    machine.check_same(kept["machine"], path.name)
    return kept


def _measure(group: Sequence[Case]) -> list[dict[str, Any]]:
    """Return the figures of each case with its rounds, or the reason why it was skipped."""
    figures: list[dict[str, Any]] = [
        {"name": case.name, "bytes": case.nbytes, "tensors": len(case.model)} for case in group
    ]
    for case, found in zip(group, figures, strict=True):
        if missing := _missing(case):
            found["left_out"] = missing
    turns = [(case, found) for case, found in zip(group, figures, strict=True) if "left_out" not in found]
    needed = sum(case.needed_bytes for case, _ in turns) + 2 * BLOCK_BYTES
    available = available_bytes()
    if needed > available:
        reason = f"it takes {needed / 2**30:.0f} GiB, {available / 2**30:.0f} GiB are available"
        for _, found in turns:
            found["left_out"] = reason
        return figures
    used = Watermark()
    cases: list[RunningCase] = []
    try:
        for case, _ in turns:
            _note(
                f"{case.name}: starting {case.source.world + case.target.world} processes, {case.nbytes / 1e9:.1f} GB"
            )
            cases.append(RunningCase(case, daemons(case.nodes, verify=case.verify, service=case.service)))
        _rounds(cases, [found for _, found in turns], used)
    finally:
        for running in cases:
            running.close()
    for case, found in turns:
        found["at"] = _now()
        found["ways"] = swap_report.summary(found["rounds"], case.nbytes)
        found["used_bytes"] = used.used_bytes
    return figures


def _missing(case: Case) -> str:
    """Return the missing dependency of the case's service, or ""."""
    if case.nodes == 1:
        return ""
    try:
        installed().find(case.service)
    except ConfigError as exc:
        return str(exc)
    return ""


def _rounds(cases: Sequence[RunningCase], figures: Sequence[dict[str, Any]], used: Watermark) -> None:
    unit = Memcpy()
    for number in range(-1, max(running.case.rounds for running in cases)):
        turns = list(zip(cases, figures, strict=True))
        for running, found in turns if number % 2 else reversed(turns):
            took = running.round(max(number, 0), unit, used.look)
            if number >= 0:
                found.setdefault("rounds", []).append(took)
            else:  # the first swap warms up: it plans, addresses and loads
                found["first_swap_s"] = took["swap"]
        _note(f"  round {number + 1}/{cases[0].case.rounds}" + (" (warm-up)" if number < 0 else ""))
    for running, found in zip(cases, figures, strict=True):
        found["worker_bytes"] = running.worker_bytes()


def _ratio(many: dict[str, Any], few: dict[str, Any]) -> dict[str, Any]:
    """Return the ratio of swap times of the first case to the second, per round."""
    pairs = zip(many["rounds"], few["rounds"], strict=True)
    return {
        "name": f"A swap of {many['tensors']} tensors takes, against {few['tensors']} tensors of the same bytes",
        "ratio": statistics.median((a["swap"] / a["memcpy"]) / (b["swap"] / b["memcpy"]) for a, b in pairs),
    }


def _verification(checked: dict[str, Any], bare: dict[str, Any]) -> dict[str, Any]:
    """Return the ratio of swap times with verification (every staged byte is compared) to without, per round."""
    pairs = zip(checked["rounds"], bare["rounds"], strict=True)
    return {
        "name": "A verified swap takes, against one that is not",
        # divided by each other, not by memcpy: the two were measured one right after the other
        "ratio": statistics.median(a["swap"] / b["swap"] for a, b in pairs),
    }


def _between_nodes(case: Case, found: dict[str, Any]) -> dict[str, Any] | None:
    """Return the ratio of times of verified staging between daemons to raw gloo, per round."""
    if "rounds" not in found:
        return None
    return {
        "name": f"Verified staging between two daemons by {case.service} takes, against raw gloo for the same bytes",
        "ratio": statistics.median(took["stage"] / took["direct"] for took in found["rounds"]),
    }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
