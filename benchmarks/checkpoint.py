"""Measure reading a torch.distributed.checkpoint folder as a version, and writing a version as one, beside torch.

Ways take turns within each round; ratios are computed per round. Files are in the page cache.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import machine

LAYER = {"attention.qkv": (3072, 2048), "attention.out": (2048, 2048), "mlp.up": (8192, 2048), "mlp.down": (2048, 8192)}


def run(json_output: bool, quick: bool = False) -> dict[str, Any]:
    """Measure and return the figures."""
    layers, rounds = (2, 2) if quick else (11, 7)
    results = {"benchmark": "checkpoint", "machine": machine.describe(), **_measure(layers, rounds)}
    machine.record("checkpoint", results, markdown)
    if not json_output:
        print(markdown(results))
    return results


def _measure(layers: int, rounds: int) -> dict[str, Any]:
    import torch
    import torch.distributed.checkpoint as dcp

    import refitd
    from refitd import testing

    warnings.filterwarnings("ignore", message="torch.distributed is disabled|Detected an existing checkpoint")
    model = {f"layers.{i}.{n}": torch.randn(s).bfloat16() for i in range(layers) for n, s in LAYER.items()}
    nbytes = sum(tensor.nbytes for tensor in model.values())
    seconds: dict[str, list[float]] = {}
    private = [0]

    def timed(way: str, action: Callable[[], object]) -> None:
        began = time.perf_counter()
        action()
        seconds.setdefault(way, []).append(time.perf_counter() - began)

    with tempfile.TemporaryDirectory() as place, testing.Daemon() as daemon, daemon.connect() as client:
        given = Path(place) / "given"
        writer = dcp.FileSystemWriter(given, sync_files=True)
        dcp.save({"model": model, "step": 1}, storage_writer=writer, no_dist=True)
        loaded = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
        live = client.allocate({name: (tensor.shape, tensor.dtype) for name, tensor in model.items()})

        def publish() -> None:
            before = _private_bytes()
            refitd.publish_checkpoint(
                publisher,
                "policy",
                given,
                prefix="model.",
                on_progress=lambda *_: private.append(_private_bytes() - before),
            )

        target = client.register_target("policy", live, replica="a")
        with testing.Engine(target):
            for _ in range(rounds):
                timed("dcp.load", lambda: dcp.load({"model": loaded}, checkpoint_id=given, no_dist=True))
                with daemon.connect() as publisher:
                    timed("publish", publish)
                timed("swap", lambda: client.swap("policy"))
                for format in ("safetensors", "dcp"):
                    timed(
                        f"save --format {format}",
                        lambda out=Path(place) / format, format=format: refitd.save_checkpoint(
                            client, "policy", out, format=format
                        ),
                    )
                again = dcp.FileSystemWriter(Path(place) / "again", sync_files=True, overwrite=True)
                timed("dcp.save", lambda writer=again: dcp.save({"model": model}, storage_writer=writer, no_dist=True))
        for name, tensor in model.items():
            if not (torch.equal(live[name], tensor) and torch.equal(loaded[name], tensor)):
                raise AssertionError(f"{name}: it is not what was saved")
    return {"bytes": nbytes, "tensors": len(model), "rounds": rounds, "private_bytes": max(private), "seconds": seconds}


def _private_bytes() -> int:
    """Return this process's anonymous memory."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def markdown(results: dict[str, Any]) -> str:
    """Return the text for benchmarks/results and the terminal."""
    about, seconds = results["machine"], results["seconds"]
    rows = [
        f"# Checkpoints: {results['tensors']} tensors, {results['bytes'] / 1e9:.2f} GB of bfloat16",
        "",
        f"{about['cpu']}, {about['cores']} cores, {about['memory_bytes'] / 2**30:.0f} GiB; torch "
        f"{about['packages']['torch']}. Medians of {results['rounds']} rounds, `scripts/bench checkpoint`. Folders are "
        "of one rank, and in the page cache when they are read; what is written is "
        "synced. The machine was busy with other work: take the ratios.",
        "",
        "| | seconds | beside torch's, round by round |",
        "| --- | --- | --- |",
    ]
    for way, found in seconds.items():
        other = {"publish": "dcp.load", "save --format dcp": "dcp.save", "save --format safetensors": "dcp.save"}.get(
            way
        )
        ratio = other and statistics.median(a / b for a, b in zip(found, seconds[other], strict=True))
        rows.append(f"| {way} | {statistics.median(found):.2f} | {f'{ratio:.2f} x {other}' if ratio else ''} |")
    rows += [
        "",
        "`publish` makes the folder a version in the daemon's memory, which is allocated anew each time; `dcp.load` "
        "writes into tensors that are there. Publishing takes at most "
        f"{results['private_bytes'] / 1e6:.1f} MB of the client's private memory. `swap` compares every byte.",
        "",
    ]
    return "\n".join(rows)
