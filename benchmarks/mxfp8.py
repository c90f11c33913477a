"""Measure MXFP8 conversion on one core, and its cost in a refit between two processes over gloo.

Methods take turns within each round, because the machine's load varies; ratios are computed per round.
To add a section, add an entry to SECTIONS: a function of `quick` that returns rows of (way, figures).
"""

from __future__ import annotations

import multiprocessing
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from benchmarks import machine

AIM_GB_PER_S, AIM_TORCHAO = 1.5, 5.0
LIMIT_S = 300.0
Rounds = list[dict[str, float]]


def run(json_output: bool, quick: bool = False, cases: machine.Cases = machine.EVERY) -> dict[str, Any]:
    """Run every section and return the figures."""
    started = time.perf_counter()
    results: dict[str, Any] = {"benchmark": "mxfp8", "machine": machine.describe(), "sections": []}
    for section in SECTIONS:
        if section.__name__.strip("_") not in cases:
            continue
        found = section(quick)
        _say(f"  {found['name']}")
        results["sections"].append(found)
    results["seconds"] = time.perf_counter() - started
    machine.record("mxfp8", results, markdown)
    if not json_output:
        print(markdown(results))
    return results


def summary(rounds: Rounds, nbytes: int, unit: str, others: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return a row for each way: medians, in GB/s of bfloat16 and in units measured in that round."""
    rows = []
    for way in rounds[0]:
        row: dict[str, Any] = {
            "way": way,
            "median_s": statistics.median(took[way] for took in rounds),
            "units": statistics.median(took[way] / took[unit] for took in rounds),
        }
        row["gb_per_s"] = nbytes / row["median_s"] / 1e9
        for other in others:
            if other in rounds[0]:
                row[f"times {other}"] = statistics.median(took[other] / took[way] for took in rounds)
        rows.append(row)
    return rows


def in_turns(ways: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float]) -> Rounds:
    """Run every way once to warm up, then all in turn; return the time of each in each round."""
    found: Rounds = []
    for number in range(-1, rounds):
        took = {}
        for way, step in ways.items():
            started = clock()
            step()
            took[way] = clock() - started
        if number >= 0:
            found.append(took)
    return found


def conversion(quick: bool) -> dict[str, Any]:
    """Convert weights with one thread; their shapes are about those of a large model's layer."""
    import numpy as np
    import torch

    from refitd.mxfp8 import format as fmt
    from refitd.mxfp8.format import BLOCK, Rounding, swizzled_bytes

    torch.set_num_threads(1)
    rows, columns = (1024, 2048) if quick else (4096, 8192)
    generator = torch.Generator().manual_seed(1)
    values = (torch.randn(rows, columns, generator=generator) * 0.02).to(torch.bfloat16)
    words = values.view(torch.int16).numpy().view(np.uint16)
    copy, data = np.zeros_like(words), np.zeros(words.shape, np.uint8)
    scales = np.zeros((rows, columns // BLOCK), np.uint8)
    tiles, scratch = np.zeros(swizzled_bytes(*scales.shape), np.uint8), fmt.Scratch.of(np.uint16)

    def swizzled(rounding: Rounding) -> None:
        fmt.quantize(words, data, scales, rounding, scratch)
        fmt.swizzle(scales, tiles)

    ways: dict[str, Callable[[], object]] = {"memcpy": lambda: np.copyto(copy, words)}
    for each in Rounding:
        ways[f"{each}, row-major"] = lambda each=each: fmt.quantize(words, data, scales, each, scratch)
        ways[f"{each}, swizzled"] = lambda each=each: swizzled(each)
    theirs = _torchao(values)
    ways |= theirs
    found = in_turns(ways, 3 if quick else 15, time.thread_time)
    return {
        "name": f"conversion of {words.nbytes / 2**20:.0f} MiB of bfloat16 weights, one thread, CPU time",
        "unit": "memcpy",
        "aim": f"{AIM_GB_PER_S} GB/s and {AIM_TORCHAO:.0f} times torchao",
        "left_out": "" if theirs else "torchao is not installed (pip install .[dev])",
        "rounds": len(found),
        "rows": summary(found, words.nbytes, "memcpy", list(theirs)),
    }


def _torchao(values: Any) -> dict[str, Callable[[], object]]:
    try:
        import torch
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
    except ImportError:
        return {}
    return {"torchao eager, rceil": lambda: to_mx(values, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)}


WAYS = ("bfloat16", "receivers convert", "receivers convert, swizzled", "senders convert", "senders convert, swizzled")


def refit(quick: bool) -> dict[str, Any]:
    """Refit the weights of one process into another, as bfloat16 and in both MXFP8 modes."""
    layers, width, rounds = (2, 512, 2) if quick else (6, 2048, 9)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory(prefix="refitd-bench") as folder:
        ranks = [context.Process(target=_rank, args=(i, folder, layers, width, rounds, answers)) for i in (0, 1)]
        for rank in ranks:
            rank.start()
        try:
            nbytes, found = _answer(answers, ranks)
            for rank in ranks:
                rank.join(LIMIT_S)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
    return {
        "name": f"verified refit of {nbytes / 2**20:.0f} MiB of bfloat16 weights between two processes over gloo",
        "unit": "bfloat16",
        "aim": "",
        "left_out": "",
        "rounds": rounds,
        "rows": summary(found, nbytes, "bfloat16"),
    }


def _answer(answers: Any, ranks: Sequence[Any]) -> tuple[int, Rounds]:
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        try:
            found: tuple[int, Rounds] = answers.get(timeout=1)
            return found
        except queue.Empty:
            if bad := [rank.exitcode for rank in ranks if rank.exitcode]:
                raise RuntimeError(f"a rank of the refit ended with exit status {bad[0]}; see above") from None
    raise RuntimeError(f"the ranks of the refit were not done within {LIMIT_S:.0f} s")


def _rank(rank: int, folder: str, layers: int, width: int, rounds: int, answers: Any) -> None:
    """Be the trainer (0) or the engine (1); the engine's clock counts, from a barrier to the end."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import refitd

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT_S))
    model = nn.Module()
    for layer in range(layers):
        for name, shape in (("qkv", (3 * width, width)), ("fc1", (4 * width, width)), ("fc2", (width, 4 * width))):
            values = (torch.randn(shape) * 0.02 if rank == 0 else torch.zeros(shape)).to(torch.bfloat16)
            model.register_parameter(f"{name}_{layer}", nn.Parameter(values, requires_grad=False))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    nbytes = sum(2 * torch.Size(shape).numel() for shape in shapes.values())
    service = refitd.get_or_create_service("gloo")

    def way(name: str) -> Callable[[], object]:
        transform: refitd.ReshardTransform | None = None
        if name != "bfloat16":
            held = {}
            if rank == 1:
                held = {
                    key: refitd.MXFP8Buffer.empty(shape, is_swizzled="swizzled" in name)
                    for key, shape in shapes.items()
                }
            transform = refitd.MXFP8ReshardTransform(set(shapes), held, "", "senders" in name)

        def step() -> None:
            ends = (model, None) if rank == 0 else (None, model)
            dist.barrier()
            refitd.reshard_model_weights(*ends, service, transform=transform, timeout=LIMIT_S)

        return step

    found = in_turns({name: way(name) for name in WAYS}, rounds, time.perf_counter)
    if rank == 1:
        answers.put((nbytes, found))
    dist.barrier()
    dist.destroy_process_group()


SECTIONS: tuple[Callable[[bool], dict[str, Any]], ...] = (conversion, refit)


def markdown(results: dict[str, Any]) -> str:
    """Return the text for benchmarks/results and the terminal."""
    about = results["machine"]
    lines = [
        "# MXFP8: conversion, and refits with it",
        "",
        f"{about['cpu']}, {about['cores']} cores, {about['memory_bytes'] / 2**30:.0f} GiB, Linux {about['kernel']}, "
        f"Python {about['python']}, numpy {about['packages'].get('numpy')}, torch {about['packages'].get('torch')}.",
        "GB/s are of bfloat16, by the median; ratios are medians over rounds. Written by `scripts/bench mxfp8`.",
    ]
    for section in results["sections"]:
        others = [key for key in section["rows"][0] if key.startswith("times ")]
        columns = ["way", "median s", "GB/s", f"{section['unit']}s", *others]
        lines += ["", f"## {section['name'][0].upper()}{section['name'][1:]}", "", f"{section['rounds']} rounds."]
        lines += [f"Aim: {section['aim']}."] if section["aim"] else []
        lines += [f"Left out: {section['left_out']}."] if section["left_out"] else []
        lines += ["", f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
        for row in section["rows"]:
            figures = [f"{row[key]:.3g}" for key in ("median_s", "gb_per_s", "units", *others)]
            lines.append(f"| {' | '.join([row['way'], *figures])} |")
    return "\n".join(lines) + "\n"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
