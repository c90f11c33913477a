"""Two daemons with `service = "nccl"`, "nvshmem" or "nixl": versions travel from GPU to GPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import refitd
from refitd.testing import Daemon, Engine, RunningSwap, eventually, stopped
from tests.support import fake_cuda, shards
from tests.support.gpu_tensors import DEADLINES, Tensors, allocated, copy_into, private


class Fleet:
    """Four source ranks on n0, the last in main memory; on n1 target ranks on two GPUs, and one in main memory.

    The rows of the last source rank cross in the lanes, all others between GPUs. A third replica holds one tensor in
    MXFP8 on a GPU.
    """

    quantized = "layers.0.fc2.weight"

    def __init__(self, n0: Daemon, n1: Daemon) -> None:
        self.n0, self.n1 = n0, n1
        self.trainer, self.engine = n0.connect("trainer"), n1.connect("engine")
        self.sources, self.targets = [], []
        for rank in range(4):
            mine = shards.zeros_like(shards.cut(shards.whole(0), rank, 4))
            mine = private(mine, rank % 2) if rank < 3 else mine
            described = shards.describe(mine, rank, 4)
            source = self.trainer.register_source("policy", mine, rank=rank, world_size=4, metadata=described)
            self.sources.append((source, mine))
        for replica, world, on_gpu in (("gpu", 2, True), ("host", 1, False)):
            for rank in range(world):
                mine = shards.zeros_like(shards.cut(shards.whole(0), rank, world))
                mine = allocated(self.engine, mine, f"cuda:{1 - rank}") if on_gpu else mine
                target = self.engine.register_target(
                    "policy",
                    mine,
                    replica=replica,
                    rank=rank,
                    world_size=world,
                    metadata=shards.describe(mine, rank, world),
                )
                self.targets.append((target, mine, rank, world))
        room = shards.zeros_like(shards.whole(0))
        made = refitd.MXFP8Buffer.empty(tuple(room.pop(self.quantized).shape))
        self.mxfp8 = allocated(self.engine, {**room, "data": made.data, "scale": made.scale}, "cuda:1")
        held = {name: self.mxfp8[name] for name in room}
        held[self.quantized] = refitd.MXFP8Buffer(self.mxfp8["data"], self.mxfp8["scale"])
        self.mxfp8_target = self.engine.register_target("policy", held, replica="mxfp8")

    def publish(self, version: int) -> None:
        for rank, (source, mine) in enumerate(self.sources):
            copy_into(mine, shards.cut(shards.whole(version), rank, 4))
            source.publish(version)

    def holds(self, version: int) -> bool:
        full = shards.whole(version)
        wanted: list[tuple[Tensors, Tensors]] = [
            (mine, shards.cut(full, rank, world) if world > 1 else full) for _, mine, rank, world in self.targets
        ]
        made = refitd.MXFP8Buffer.empty(tuple(full[self.quantized].shape))
        made.quantize(full[self.quantized])
        mxfp8 = {**full, "data": made.data, "scale": made.scale}
        del mxfp8[self.quantized]
        return all(shards.equal(*pair) for pair in [*wanted, (self.mxfp8, mxfp8)])

    def swap(self, version: int) -> None:
        self.publish(version)
        with Engine(self.mxfp8_target, *(target for target, *_ in self.targets)):
            report = self.trainer.swap("policy", version, timeout=120)
        assert report.outcome == "committed" and report.digests == report.copies > 0 and report.converted_bytes
        assert self.holds(version)

    def close(self) -> None:
        self.sources.clear()
        self.targets.clear()
        self.mxfp8.clear()
        del self.mxfp8_target
        self.trainer.close()
        self.engine.close()


@pytest.mark.parametrize("service", ["nccl", "nvshmem", "nixl"])
def test_weights_cross_between_gpus_and_from_main_memory_in_the_lanes(
    service: str,
    gpus: fake_cuda.FakeGpus,
    start_daemon: Callable[..., Daemon],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("FAKE_CUDA_LATE", "1")
    monkeypatch.setenv("FAKE_NIXL_LOG", str(tmp_path / "reads"))
    in_lanes = "nixl" if service == "nixl" else "gloo"
    config = DEADLINES + f'[transport]\nservice = "{service}"\n'
    n0 = start_daemon(config)
    n1 = start_daemon(config, name="n1", joins=n0.endpoint)
    eventually(lambda: n0.node_of("n1").pid > 0, "the other node has joined")
    assert len(n0.node_of("n1").workers) == 2, "a worker for each GPU"
    fleet = Fleet(n0, n1)
    fleet.swap(1)
    with n0.connect() as operator:
        (link,) = operator.status().links
        assert (link.service, link.state) == (service, "up")
        assert operator.verify("policy", timeout=60).outcome == "proven"
        (model,) = operator.status().models
        assert model.last_swap is not None and operator.plan("policy").paths == model.last_swap.paths
        ways = {(way.source, way.target): way.path for way in model.last_swap.paths}
        assert ways["GPU", "GPU of another node"] == service
        assert ways["main memory", "GPU of another node"] == f"{in_lanes} through main memory"
    fleet.swap(2)
    if service == "nixl":
        reads = (tmp_path / "reads").read_text().split()
        assert {"DRAM", "VRAM"} <= {*reads}, "GPU memory reaches the other node's GPU without main memory"

    victim = n1.node_of("n1").workers[1]
    fleet.publish(3)
    with stopped((victim,)):
        swap = RunningSwap(n0.connect(), "policy", 3, timeout=120)
        swap.wait_phase("stage")
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(Exception, match=r"was killed by SIGKILL|lost its connection"):  # whoever is first
            swap.result()
    assert fleet.holds(2), "the old version still serves"
    try:
        fleet.swap(4)
    except refitd.SwapFailed as exc:  # NVSHMEM cannot be finalized after a death: its process ends in the next swap
        assert service == "nvshmem" and "exited with status 1" in str(exc)
        fleet.swap(5)
    fleet.close()
