"""Test functions with folders of torch.distributed.checkpoint. Each is called on all ranks of a pool together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.spmd.cases import World


class Model(nn.Module):
    """Sizes that no number of ranks divides, fewer rows than ranks, a buffer, a scalar."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6, dtype=torch.bfloat16) for _ in range(2))
        self.head = nn.Linear(6, 3, bias=False)
        self.scale = nn.Parameter(torch.randn(1))
        self.register_buffer("seen", torch.arange(5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x.bfloat16()).float() * self.scale
        return self.head(x)


def sharded(seed: int, ranks: int) -> Any:
    model: Any = Model(seed)
    for block in model.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (ranks,)))
    return fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))


def save_fsdp2(world: World, path: str) -> dict[str, list[Any]]:
    """Save a model and its optimizer after a step; return the model's whole tensors."""
    model = sharded(3, world.size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(13)).pow(2).mean().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optimizer_state, "step": 1}, checkpoint_id=path)
    return whole(model)


def load_fsdp2(world: World, path: str) -> dict[str, list[Any]]:
    """Load a folder into another model; return the model's whole tensors."""
    model = sharded(4, world.size)
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=path)
    return whole(model)


def whole(model: nn.Module) -> dict[str, list[Any]]:
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).float().tolist()
        for name, t in get_model_state_dict(model).items()
    }
