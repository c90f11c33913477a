"""Trainers and engines whose tensors live on a GPU: staged through host arenas, CUDA graphs stay valid."""

from __future__ import annotations

import pytest
import torch

from refitd.testing import Daemon, Engine
from tests.support import shards

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


def test_a_graph_captured_before_a_swap_replays_with_the_new_weights(daemon: Daemon) -> None:
    torch.manual_seed(0)
    trainer_model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
    engine_model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
    trainer_model.to("cuda", torch.bfloat16).requires_grad_(False)
    engine_model.to("cuda", torch.bfloat16).requires_grad_(False)
    x = torch.randn(8, 256, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            engine_model(x)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = engine_model(x)
    pointers = [p.data_ptr() for p in engine_model.parameters()]
    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine:
        source = trainer.register_source("policy", trainer_model)
        target = engine.register_target("policy", engine_model, replica="gpu")
        for version in range(1, 4):
            for p in trainer_model.parameters():
                p.add_(0.01 * version)
            source.publish(version)
            with Engine(target):
                assert trainer.swap("policy", version, timeout=30).outcome == "committed"
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(y, trainer_model(x))
            assert pointers == [p.data_ptr() for p in engine_model.parameters()]


def test_sharded_cuda_tensors_arrive_bit_for_bit(daemon: Daemon) -> None:
    full = shards.whole(3)
    with daemon.connect() as trainer, daemon.connect() as engine:
        for rank in range(2):
            mine = {name: t.cuda() for name, t in shards.cut(full, rank, 2).items()}
            metadata = shards.describe(mine, rank, 2)
            trainer.register_source("policy", mine, rank=rank, world_size=2, metadata=metadata).publish(1)
        live = {name: torch.zeros_like(t, device="cuda") for name, t in full.items()}
        target = engine.register_target("policy", live, replica="whole")
        with Engine(target):
            trainer.swap("policy", timeout=30)
        assert shards.equal({name: t.cpu() for name, t in live.items()}, full)
