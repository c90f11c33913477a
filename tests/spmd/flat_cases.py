"""Test functions with modules that FSDP1 or ZeRO-3 has flattened. Each is called on all ranks of a pool together."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import refitd
from refitd.adapters.fsdp1 import fsdp1_tensors, zero3_tensors
from refitd.describe.module import describe_module
from refitd.testing import oracle
from tests.spmd.cases import World, refused

CPU = torch.device("cpu")


class Model(nn.Module):
    """Odd sizes, a tied head, a buffer, a scalar."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 11), nn.GELU(), nn.Linear(11, 6)) for _ in range(2))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.randn(1))
        self.register_buffer("seen", torch.arange(5.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x) * self.scale
        return self.head(x)


def everybodys(world: World, held: tuple[dict[str, torch.Tensor], list[refitd.ParameterMetadata]]) -> dict[str, Any]:
    """Gather the whole tensors from all ranks; check that no element is missing and that copies agree."""
    tensors, metadata = held
    mine = [(world.rank, m, tensors[m.name].clone().numpy()) for m in metadata]
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, mine)
    shards = [shard for each in found for shard in each]
    shapes = {m.resolved_name: m.global_shape or m.shape for _, m, _ in shards}
    return oracle.gather(shapes, shards)


def fsdp1_is_what_it_was(world: World, strategy: str, use_orig: bool, nested: bool) -> list[str]:
    expected = {name: t.detach().clone() for name, t in Model(3).state_dict().items()}
    policy = ModuleWrapPolicy({nn.Sequential}) if nested else None
    model = FullyShardedDataParallel(
        Model(3),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=use_orig,
        auto_wrap_policy=policy,
        device_id=CPU,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = fsdp1_tensors(model, world.rank)
    whole = everybodys(world, held)
    assert whole.keys() == expected.keys() - {"head.weight"}
    for name, array in whole.items():
        assert np.array_equal(array, expected[name].numpy()), name
    tied = [m.aliases for m in held[1] if m.name == "embed.weight"]
    assert all(aliases == ("head.weight",) for aliases in tied)
    # the offered tensors must change with the optimizer's step
    model(torch.arange(13)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        now = {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in model.named_parameters()}
    again = everybodys(world, held)
    for name, array in again.items():
        if name in now:
            assert np.array_equal(array, now[name].numpy()), name
    assert not np.array_equal(again["embed.weight"], whole["embed.weight"])
    return sorted(whole)


def fsdp1_gathered_is_refused(world: World) -> str:
    model = FullyShardedDataParallel(Model(3), use_orig_params=True, device_id=CPU)
    with FullyShardedDataParallel.summon_full_params(model):
        return refused(lambda: fsdp1_tensors(model, world.rank))


def fsdp1_itself_is_refused(world: World) -> str:
    whole = FullyShardedDataParallel(
        Model(3), use_orig_params=True, device_id=CPU, sharding_strategy=ShardingStrategy.NO_SHARD
    )
    assert describe_module(whole, world.rank), "nothing is cut"
    cut = nn.ModuleDict({"net": FullyShardedDataParallel(Model(3), use_orig_params=True, device_id=CPU)})
    return refused(lambda: describe_module(cut, world.rank))


def zero3_is_what_it_was(world: World) -> None:
    """Stand-ins for the attributes that DeepSpeed sets; tests/cluster/test_zero3.py runs DeepSpeed."""
    model = Model(5)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    for param in model.parameters():
        size = -(-param.numel() // world.size)
        flat = torch.cat([param.detach().reshape(-1), torch.zeros(size * world.size - param.numel())])
        param.ds_shape, param.ds_process_group = param.shape, dist.group.WORLD
        param.ds_tensor = flat[world.rank * size : (world.rank + 1) * size].clone()
        param.data = torch.empty(0)
    whole = everybodys(world, zero3_tensors(model, world.rank))
    for name, tensor in expected.items():
        assert np.array_equal(whole[name], tensor.numpy()), name
    assert "scale: DeepSpeed ZeRO-3 has partitioned it" in refused(lambda: describe_module(model, world.rank))
    model.scale.ds_tensor = None
    assert "scale: DeepSpeed has not partitioned it" in refused(lambda: zero3_tensors(model, world.rank))
