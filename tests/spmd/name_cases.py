"""Test functions with trainers whose names differ from the engine's. Each is called on all ranks of a pool together."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import refitd
from refitd.names import Fused, Padded, Part
from tests.spmd.cases import TIMEOUT_S, World, refused

NAMES = {
    "layers.{layer}.fc1.weight": Fused((Part("model.{layer}.gate", 5), Part("model.{layer}.up", 5))),
    "embed.weight": Padded("tokens", 7),
    "norm.{rest}": "norm.{rest}",
}
WHOLE = {"layers.0.fc1.weight": (10, 3), "layers.1.fc1.weight": (10, 3), "embed.weight": (8, 3), "norm.weight": (3,)}


def holder(tensors: dict[str, torch.Tensor]) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        inner = module
        for part in path:
            if not hasattr(inner, part):
                inner.add_module(part, nn.Module())
            inner = getattr(inner, part)
        inner.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    return module


def a_source_under_other_names(world: World) -> None:
    """All ranks have rows of each tensor, as FSDP2 cuts them; the last one is also the engine."""
    torch.manual_seed(3)
    whole = {name: torch.randn(shape) for name, shape in WHOLE.items()}
    fc1 = [whole[f"layers.{layer}.fc1.weight"] for layer in range(2)]
    expected = {
        f"model.{layer}.{part}": half
        for layer in range(2)
        for part, half in zip(("gate", "up"), fc1[layer].split(5), strict=True)
    }
    expected |= {"tokens": whole["embed.weight"][:7], "norm.weight": whole["norm.weight"]}
    mesh = init_device_mesh("cpu", (world.size,))
    split = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    source = holder(split)
    live = {name: torch.zeros(tensor.shape).bfloat16() for name, tensor in expected.items()}
    target = holder(live) if world.rank == world.size - 1 else None
    casts = {"*": torch.bfloat16}
    refitd.swap_model_weights(source, target, "gloo", names=NAMES, casts=casts, timeout=TIMEOUT_S)
    plan = refitd.build_centralized_reshard_plan(source, target, names=NAMES, casts=casts, timeout=TIMEOUT_S)
    if target is not None:
        for name, tensor in expected.items():
            assert torch.equal(target.get_parameter(name), tensor.bfloat16()), name
            target.get_parameter(name).zero_()
    refitd.execute_reshard_plan(plan, source, target, refitd.get_or_create_service("gloo"), timeout=TIMEOUT_S)
    if target is not None:
        assert all(torch.equal(target.get_parameter(name), tensor.bfloat16()) for name, tensor in expected.items())


def names_that_say_nothing_of_a_tensor(world: World) -> str:
    source = holder({"norm.weight": torch.ones(3), "other": torch.ones(2)}) if world.rank == 0 else None
    target = holder({"norm.weight": torch.zeros(3)}) if world.rank == 1 else None
    return refused(lambda: refitd.swap_model_weights(source, target, "gloo", names=NAMES, timeout=TIMEOUT_S))


def a_vocabulary_padded_otherwise(world: World) -> str:
    """The target has fewer rows: the refusal suggests names= for the source; return the refusal of a larger target."""
    swap = partial(refitd.swap_model_weights, refit_method="gloo", timeout=TIMEOUT_S)
    words = "word_embeddings.weight"
    source = holder({words: torch.arange(24.0).view(12, 2)}) if world.rank == 0 else None
    target = holder({words: torch.zeros(10, 2)}) if world.rank == 1 else None
    said = refused(lambda: swap(source, target))
    assert "in this call, names= is for the source" in said and "Padded(name, rows=the target's rows)" in said
    swap(source, target, names={words: Padded(words, rows=10), "{rest}": "{rest}"})
    if target is not None:
        assert torch.equal(target.get_parameter(words), torch.arange(20.0).view(10, 2))
    larger = holder({words: torch.zeros(16, 2)}) if world.rank == 1 else None
    return refused(lambda: swap(source, larger))
