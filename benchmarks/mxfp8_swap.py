"""Measure full swaps of a bfloat16 model into engines that hold bfloat16, or MXFP8 converted on either side.

They run on one node, and over a link of limited rate between two network namespaces, where senders that convert send
half as many bytes. Ways take turns within each round.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import refitd
from benchmarks import machine
from benchmarks.swap_processes import Memcpy, daemon
from refitd import MXFP8Buffer, MXFP8Offer
from refitd.testing import Daemon, Engine
from tests.support.network import TwoHosts, start_daemons, why_not

BFLOAT16, RECEIVER, SWIZZLED, SENDER = "bfloat16", "receivers convert", "the same, swizzled", "senders convert"
WAYS = (BFLOAT16, RECEIVER, SWIZZLED, SENDER)
PORT, MBIT = 7434, 1000


class Pair:
    """A trainer and an engine of one way, each with its own model name."""

    def __init__(
        self, way: str, trainer: refitd.Client, engine: refitd.Client, shapes: dict[str, tuple[int, int]]
    ) -> None:
        self.way, self._client = way, trainer
        self._tensors = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
        offer = MXFP8Offer(("*",), instead=True) if way == SENDER else None
        self._source = trainer.register_source(way, self._tensors, mxfp8=offer, slots=1)
        self.held: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in self._tensors.items()}
        if way != BFLOAT16:
            swizzled = way == SWIZZLED
            self.held = {name: MXFP8Buffer.empty(shape, is_swizzled=swizzled) for name, shape in shapes.items()}
        self.target = engine.register_target(way, self.held, replica="r", convert_on_send=way == SENDER)
        self._version = 0

    def round(self) -> dict[str, float]:
        """Publish and swap once."""
        self._version += 1
        started = time.perf_counter()
        self._source.publish(self._version)
        published = time.perf_counter()
        report = self._client.swap(self.way, self._version, timeout=300)
        ended = time.perf_counter()
        return {
            "publish": published - started,
            "swap": ended - published,
            "both": ended - started,
            "stage": report.stage_s,
            "paused": max(member.paused_s for member in report.members),
            "bytes": report.bytes,
        }

    def check(self) -> None:
        """Compare the engine's tensors with the trainer's tensors converted once."""
        for name, tensor in self._tensors.items():
            held = self.held[name]
            if isinstance(held, torch.Tensor):
                assert torch.equal(held, tensor), name
                continue
            once = MXFP8Buffer.empty(tuple(tensor.shape), is_swizzled=held.is_swizzled)
            once.quantize(tensor)
            assert torch.equal(once.data, held.data) and torch.equal(once.scale, held.scale), name


def run(json_output: bool, quick: bool = False, cases: machine.Cases = machine.EVERY) -> dict[str, Any]:
    """Run both cases and return the figures."""
    results: dict[str, Any] = {"unit": "one memcpy of the bfloat16 bytes, one thread, same round", "cases": []}
    shapes = _model(4 if quick else 8)
    if "one node" in cases:
        with _one_node() as (trainer, engine):
            results["cases"].append(_measure("one node", trainer, engine, shapes, 3 if quick else 9, WAYS))
    if "link" not in cases:
        pass
    elif reason := why_not():
        results["cases"].append({"name": f"a link of {MBIT} Mbit/s", "left_out": reason})
    else:
        with _two_hosts(MBIT) as (trainer, engine):
            name, shapes = f"a link of {MBIT} Mbit/s", _model(1 if quick else 3)
            ways = (BFLOAT16, RECEIVER, SENDER)
            results["cases"].append(_measure(name, trainer, engine, shapes, 2 if quick else 5, ways))
    results["machine"] = machine.describe()
    machine.record("mxfp8_swap", results, markdown)
    if not json_output:
        print(markdown(results))
    return results


def _model(layers: int) -> dict[str, tuple[int, int]]:
    """Return shapes: 32 MiB of bfloat16 each."""
    return {f"layers.{i}.weight": (4096, 4096) for i in range(layers)}


def _measure(
    name: str,
    trainer: refitd.Client,
    engine: refitd.Client,
    shapes: dict[str, tuple[int, int]],
    rounds: int,
    ways: Sequence[str],
) -> dict[str, Any]:
    torch.set_num_threads(1)
    nbytes = sum(2 * rows * columns for rows, columns in shapes.values())
    memcpy = Memcpy(min(nbytes, 1 << 30))
    pairs = [Pair(way, trainer, engine, shapes) for way in ways]
    took: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    units: list[float] = []
    with Engine(*(pair.target for pair in pairs)):
        for number in range(rounds + 1):
            print(f"  {name}: round {number} of {rounds}", file=sys.stderr, flush=True)
            units.append(statistics.median(memcpy.seconds(nbytes) for _ in range(3)))
            for pair in pairs:
                took[pair.way].append(pair.round())
        for pair in pairs:
            pair.check()
    # the first round plans, connects and touches pages
    base = [one["swap"] for one in took[BFLOAT16][1:]]
    found = {}
    for way, each in took.items():
        kept = each[1:]
        found[way] = {
            "bytes_moved": int(kept[-1]["bytes"]),
            **{
                f"{key}_s": statistics.median(one[key] for one in kept)
                for key in ("publish", "swap", "stage", "paused")
            },
            "swap_memcpys": statistics.median(one["swap"] / unit for one, unit in zip(kept, units[1:], strict=True)),
            "times_as_fast_as_bfloat16": statistics.median(b / one["swap"] for b, one in zip(base, kept, strict=True)),
            "with_publish": statistics.median(
                b["both"] / one["both"] for b, one in zip(took[BFLOAT16][1:], kept, strict=True)
            ),
        }
    return {"name": name, "bfloat16_bytes": nbytes, "rounds": rounds, "ways": found}


@contextlib.contextmanager
def _one_node() -> Iterator[tuple[refitd.Client, refitd.Client]]:
    with daemon() as found, found.connect() as trainer, found.connect() as engine:
        yield trainer, engine


@contextlib.contextmanager
def _two_hosts(mbit: int) -> Iterator[tuple[refitd.Client, refitd.Client]]:
    """Start a daemon with a coordinator on host a and one on host b, which know each other by keys."""
    with contextlib.ExitStack() as stack:
        hosts = TwoHosts()
        stack.callback(hosts.close)
        hosts.limit(mbit)
        keys = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rfb")))

        def start(config: str, **options: Any) -> Daemon:
            return stack.enter_context(daemon(config, **options))

        clients = [stack.enter_context(host.connect()) for host in start_daemons(hosts, PORT, keys, start)]
        yield clients[0], clients[1]


def markdown(results: dict[str, Any]) -> str:
    """Return the file for benchmarks/results."""
    about = results["machine"]
    lines = [
        "# Swaps of a bfloat16 model into MXFP8",
        "",
        f"{about['cpu']}, {about['cores']} cores, Linux {about['kernel']}, Python {about['python']}. Medians;",
        "the first round is left out. Ratios are taken within a round. Written by `scripts/bench mxfp8-swap`.",
    ]
    columns = ("way", "moved", "publish s", "swap s", "memcpys", "staged s", "paused ms", "x bfloat16", "with publish")
    for case in results["cases"]:
        lines += ["", f"## {case['name']}", ""]
        if "left_out" in case:
            lines.append(f"Left out: {case['left_out']}.")
            continue
        lines += [f"{case['bfloat16_bytes'] / 1e6:.0f} MB of bfloat16, {case['rounds']} rounds.", ""]
        lines += [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
        for way, f in case["ways"].items():
            cells = (
                way,
                f"{f['bytes_moved'] / 1e6:.0f} MB",
                f"{f['publish_s']:.3f}",
                f"{f['swap_s']:.3f}",
                f"{f['swap_memcpys']:.1f}",
                f"{f['stage_s']:.3f}",
                f"{f['paused_s'] * 1e3:.1f}",
                f"{f['times_as_fast_as_bfloat16']:.2f}",
                f"{f['with_publish']:.2f}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
