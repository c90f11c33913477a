"""Whole models cut into shards, independently of the planner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from refitd import ParameterMetadata

Model = Mapping[str, tuple[tuple[int, ...], int | None]]  # name -> (shape, dimension that is split, or None)
MODEL: Model = {
    "embedding.weight": ((64, 48), 0),
    "layers.0.fc1.weight": ((96, 48), 0),
    "layers.0.fc2.weight": ((48, 96), 1),
    "layers.0.norm.weight": ((48,), None),
}


def whole(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, (shape, _) in MODEL.items()}


def cut(tensors: Mapping[str, torch.Tensor], rank: int, world: int, model: Model = MODEL) -> dict[str, torch.Tensor]:
    return {
        name: tensor.clone() if (dim := model[name][1]) is None else tensor.chunk(world, dim)[rank].contiguous()
        for name, tensor in tensors.items()
    }


def meta(name: str, tensor: torch.Tensor, rank: int = 0, **fields: Any) -> ParameterMetadata:
    """Describe a tensor: a whole one, unless `fields` say otherwise."""
    size = tensor.element_size()
    return ParameterMetadata(name, tuple(tensor.shape), tensor.dtype, size, owner_rank=rank, **fields)


def describe(shard: Mapping[str, torch.Tensor], rank: int, world: int, model: Model = MODEL) -> list[ParameterMetadata]:
    found = []
    for name, tensor in shard.items():
        dim, group = model[name][1], list(range(world))
        split = {
            "is_tp": dim is not None and world > 1,
            "partition_dim": dim or 0,
            "tensor_parallel_group_ranks": group,
        }
        found.append(meta(name, tensor, rank, resolved_name=name, **split))
    return found


def zeros_like(shard: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in shard.items()}


def equal(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)) for name in a)
