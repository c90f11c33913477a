"""Test the predictions of `refitctl simulate`: against swaps over a rate-limited cable, and against published results.

No parameter is fitted. Measured swaps are predicted from the rate of the cable and from the machine's own times, which
are measured over the cable before its rate is limited. Published results are predicted from data sheets.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks import machine
from refitd.clusters import ClusterSpeeds, load_cluster
from refitd.offline.files import load_model, read
from refitd.offline.layouts import ModelSpec
from refitd.offline.rosters import rosters_of
from refitd.plan.build import plan_copies
from refitd.protocol.reports import SwapReport
from refitd.simulate import FanOut, Simulation

CONFIGS = Path(__file__).parent.parent / "configs"
PORT = 7441

# The cable of the measured swaps. Nearly all bytes that tbf counts of a frame from veth are payload.
RATES_MBIT = (200, 400, 1000)
ROWS = 25_000  # of 1,000 bfloat16: 50 MB
ROUNDS = 5


@dataclass(frozen=True)
class Published:
    """A refit that was measured and published elsewhere.

    Attributes:
        seconds: the published results.
        assumed: our assumptions for figures that are not published.
        fp8: every tensor crosses with one byte per element.
        collocated: both sides are on the same GPUs.
    """

    who: str
    model: str
    source: dict[str, int]
    target: dict[str, int]
    cluster: str
    seconds: str
    assumed: str
    engine_model: str = ""  # the model of the engines' tensors; by default `model`
    fp8: bool = False
    collocated: bool = False


PUBLISHED = (
    Published(
        "NeMo-RL, pull request 2808",
        "qwen3-235b-a22b-megatron",
        {"tp": 4, "pp": 8, "ep": 16, "dp": 4},
        {"tp": 8, "etp": 8, "dp": 16},
        "dgx-h100",
        "4.56 to 4.85",
        "DGX H100; the time includes packing and vLLM's own loading",
        engine_model="qwen3-235b-a22b-vllm",
    ),
    Published(
        "NeMo-RL, pull request 2808",
        "deepseek-v3-megatron",
        {"pp": 16, "ep": 16, "dp": 16},
        {"tp": 32, "etp": 32, "dp": 8},
        "dgx-h100",
        "7.65 to 9.94",
        "DGX H100; the time includes packing and vLLM's own loading",
    ),
    Published(
        "NeMo-RL on H100s (no public source found)",
        "deepseek-v3-megatron",
        {"pp": 16, "ep": 16, "dp": 16},
        {"tp": 32, "etp": 32, "dp": 8},
        "dgx-h100",
        "2.4 to 2.8",
        "the layouts of pull request 2808: those of this run are not known here",
    ),
    Published(
        "vLLM's blog, sharded_rdt (2026-08)",
        "kimi-k2-megatron",
        {"tp": 8, "pp": 8, "ep": 32, "dp": 4},
        {"tp": 32, "ep": 32, "dp": 4},
        "dgx-h100",
        "7.53",
        "bfloat16; 32 nodes to 4 engines on 16; one pipeline stage after the other: they reckon 5 s at best for that",
    ),
    Published(
        "Perplexity, weight transfer in under 2 seconds (2025-09)",
        "kimi-k2-megatron",
        {"ep": 64, "dp": 256},
        {"tp": 16, "ep": 16, "dp": 8},
        "dgx-h100",
        "1.3",
        "256 ranks with 4 copies, EP64, to 8 engines of 16 (the layouts are not published); FP8 is made before sending",
        fp8=True,
    ),
    Published(
        "checkpoint-engine's README, broadcast",
        "deepseek-v3-megatron",
        {"ep": 64, "dp": 256},
        {"tp": 16, "etp": 16, "dp": 16},
        "hgx-h20",
        "11.33",
        "4 copies, EP64 (in truth 1/256 a GPU); copies from main memory and vLLM's loading are not predicted",
        fp8=True,
        collocated=True,
    ),
    Published(
        "checkpoint-engine's README, broadcast",
        "kimi-k2-megatron",
        {"ep": 64, "dp": 256},
        {"tp": 16, "etp": 16, "dp": 16},
        "hgx-h20",
        "16.04",
        "as above",
        fp8=True,
        collocated=True,
    ),
)


def run(json_output: bool, quick: bool = False, cases: machine.Cases = machine.EVERY) -> dict[str, Any]:
    """Predict the published refits and measure swaps here; store the figures unless `quick`."""
    results: dict[str, Any] = {"machine": machine.describe(), "published": [], "measured": []}
    for case in (case for case in PUBLISHED if case.who in cases):
        results["published"].append(_published(case))
        if not json_output:
            print(_published_row(results["published"][-1]), flush=True)
    for mbit in (rate for rate in (RATES_MBIT[1:2] if quick else RATES_MBIT) if f"{rate} Mbit/s" in cases):
        results["measured"].append(_measured(mbit, 2 if quick else ROUNDS))
        if not json_output:
            print(_measured_row(results["measured"][-1]), flush=True)
    results["load"] = machine.load()
    machine.record("simulate", results, _markdown)
    return results


def _published(case: Published) -> dict[str, Any]:
    models = [_model(name, case.fp8) for name in (case.model, case.engine_model or case.model)]
    source, target = (
        read({"kind": "layout", "name": name, **sizes}, name, model)
        for name, sizes, model in zip(("from", "to"), (case.source, case.target), models, strict=True)
    )
    rosters = rosters_of(source, [target], collocated=case.collocated)  # type: ignore[arg-type, list-item]
    simulation = Simulation(plan_copies(rosters), rosters, load_cluster(CONFIGS / "clusters" / f"{case.cluster}.toml"))
    direct, relayed = simulation.run(FanOut.DIRECT), simulation.run(FanOut.RELAYED)
    return {
        "who": case.who,
        "model": models[0].name,
        "layouts": f"{_text(case.source)} to {_text(case.target)}",
        "published_s": case.seconds,
        "direct_s": direct.seconds,
        "relayed_s": relayed.seconds,
        "limited_by": direct.cables[0].name,
        "assumed": case.assumed,
    }


def _model(name: str, fp8: bool) -> ModelSpec:
    model = load_model(CONFIGS / "layouts" / "models" / f"{name}.toml")
    if not fp8:
        return model
    tensors = tuple(replace(tensor, dtype="float8_e4m3fn") for tensor in model.tensors)
    return replace(model, dtype="float8_e4m3fn", tensors=tensors)


def _text(sizes: dict[str, int]) -> str:
    return " ".join(f"{name.upper()}{size}" for name, size in sizes.items())


def _measured(mbit: int, rounds: int) -> dict[str, Any]:
    """Swap between two hosts (network namespaces) whose cable has this rate; the first swap is not counted."""
    from tests.support.network import why_not

    found: dict[str, Any] = {"mbit": mbit, "bytes": ROWS * 2000}
    if reason := why_not():
        return found | {"left_out": reason}
    with _fleet() as (hosts, publish, swap):
        publish(1), swap(1)
        own = [swap(version) for version in range(2, 2 + rounds) if publish(version) is None]
        hosts.limit(mbit)
        reports = [swap(version) for version in range(2 + rounds, 2 + 2 * rounds) if publish(version) is None]
    model = {"kind": "model", "name": "m", "tensors": [{"name": "w", "shape": [ROWS, 1000], "stage": "first"}]}
    one = {"kind": "layout", "name": "one", "model": model, "ranks_per_node": 1}
    rosters = rosters_of(read(one, "from"), [read(one, "to")])  # type: ignore[arg-type, list-item]
    stage_s, commit_s = (statistics.median(getattr(r, name) for r in own) for name in ("stage_s", "commit_s"))
    machine_speeds = ClusterSpeeds(
        name="cable",
        nic_gb_s=mbit / 8000,
        digest_gb_s=ROWS * 2000 / 1e9 / stage_s,
        control_s=statistics.median(r.total_s - r.stage_s - r.commit_s for r in own),
        commit_s=commit_s,
    )
    plan = plan_copies(rosters)
    predicted = Simulation(plan, rosters, machine_speeds).run(FanOut.DIRECT).seconds
    cable_alone = Simulation(plan, rosters, ClusterSpeeds(name="cable", nic_gb_s=mbit / 8000)).run(FanOut.DIRECT)
    taken = [r.total_s for r in reports]
    median = statistics.median(taken)
    return found | {
        "swap_s": median,
        "most_s": max(taken),
        "stage_s": statistics.median(r.stage_s for r in reports),
        "unlimited_s": statistics.median(r.total_s for r in own),
        "unlimited_stage_s": stage_s,
        "unlimited_commit_s": commit_s,
        "cable_alone_s": cable_alone.seconds,
        "predicted_s": predicted,
        "ratio": median / predicted,
    }


@contextmanager
def _fleet() -> Iterator[tuple[Any, Any, Any]]:
    """A trainer on one host and an engine on the other: yield (hosts, publish(version), swap(version) -> report)."""
    import torch

    from refitd.testing import Daemon, Engine
    from tests.support.network import TwoHosts, start_daemons

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = TwoHosts()
        stack.callback(hosts.close)

        def start(config: str, **how: Any) -> Daemon:
            return stack.enter_context(Daemon(config=config, **how))

        daemons = start_daemons(hosts, PORT, folder, start, "[deadlines]\nstage_s = 60.0\n")
        trainer, engine = (stack.enter_context(daemon.connect()) for daemon in daemons)
        full = {"w": torch.zeros(ROWS, 1000, dtype=torch.bfloat16)}
        source = trainer.register_source("bench", full)
        target = engine.register_target("bench", {"w": torch.zeros_like(full["w"])}, replica="far")
        stack.enter_context(Engine(target))

        def publish(version: int) -> None:
            full["w"].random_(-100, 100)  # deltas would be as long as full versions
            source.publish(version)

        def swap(version: int) -> SwapReport:
            return trainer.swap("bench", version, timeout=120)

        yield hosts, publish, swap


def _published_row(row: dict[str, Any]) -> str:
    return (
        f"| {row['model']} | {row['layouts']} | {row['who']} | {row['published_s']} s | {row['direct_s']:.2f} s | "
        f"{row['relayed_s']:.2f} s | {row['limited_by']} | {row['assumed']} |"
    )


def _measured_row(row: dict[str, Any]) -> str:
    if "left_out" in row:
        return f"| {row['mbit']} Mbit/s | left out: {row['left_out']} | | | | | |"
    return (
        f"| {row['mbit']} Mbit/s | {row['bytes'] / 1e6:.0f} MB | {row['unlimited_s']:.3f} s, of it staging "
        f"{row['unlimited_stage_s']:.3f}, commit {row['unlimited_commit_s']:.3f} | "
        f"{row['swap_s']:.3f} s (most {row['most_s']:.3f}) | {row['cable_alone_s']:.3f} s | "
        f"{row['predicted_s']:.3f} s | {row['ratio']:.2f} |"
    )


def _markdown(results: dict[str, Any]) -> str:
    lines = [
        "# How well `refitctl simulate` predicts",
        "",
        "By `scripts/bench simulate`. No parameter is fitted.",
        "",
        "## Swaps measured here, over a cable of limited rate between two network namespaces",
        "",
        f"{ROUNDS} swaps of random values each, after one that is not counted; medians. Before them, as many over the",
        "same cable while nothing limits it: what processors, memory, messages, polls take here. Their staging makes",
        "`digest_gb_s`, the rest `control_s` and `commit_s` of the cluster that is simulated; the rate is the cable's.",
        "",
        "| cable | model | unlimited | swap | from the rate alone | predicted | measured / predicted |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *map(_measured_row, results["measured"]),
        "",
        "## What others have published",
        "",
        "Predicted from data sheets, with nothing subtracted for protocols, packing or the engine's own loading: what",
        "the hardware allows. The published times include what these systems do besides.",
        "",
        "| model | layouts | who | published | predicted, direct | relayed | limited by | assumed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *map(_published_row, results["published"]),
        "",
        "Machine: {cpu}, {cores} cores, Linux {kernel}.".format_map(results["machine"]),
        results["load"],
    ]
    return "\n".join(lines) + "\n"
