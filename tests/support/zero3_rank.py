"""One rank of a trainer under DeepSpeed's own ZeRO stage 3; it trains and publishes at each line of its input.

python -m tests.support.zero3_rank RANK WORLD_SIZE FOLDER DIRECTORY SETTINGS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from torch import nn

import refitd
from refitd.adapters.fsdp1 import zero3_tensors


class Model(nn.Module):
    """Odd sizes, a tied weight, a frozen one, one element, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 13)
        self.up = nn.Linear(13, 29)
        self.down = nn.Linear(29, 13, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.randn(5, 3), requires_grad=False)
        self.head = nn.Linear(13, 37, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(5.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.head(self.scale * self.down(torch.relu(self.up(self.embed(tokens)))))


def main(rank: int, world_size: int, folder: Path, directory: str, settings: str) -> None:
    """For each line, train a step, publish, and save the whole model, gathered by DeepSpeed."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    store = f"file://{folder / 'store'}"
    deepspeed.init_distributed("gloo", init_method=store, rank=rank, world_size=world_size, auto_mpi_discovery=False)
    torch.manual_seed(0)
    model = Model()
    given = json.loads(settings)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.05, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, **given.pop("zero", {})},
        **given,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    tensors, metadata = zero3_tensors(model, rank)
    with refitd.connect(directory, name=f"trainer-{rank}") as client:
        source = client.register_source("policy", tensors, metadata=metadata, rank=rank, world_size=world_size)
        print("ready", flush=True)
        for line in sys.stdin:
            engine.backward(engine(torch.arange(14).reshape(2, 7) + rank).float().pow(2).mean())
            engine.step()
            source.publish(int(line))
            with deepspeed.zero.GatheredParameters([*model.parameters()]):
                if rank == 0:
                    whole = {name: value.clone() for name, value in model.state_dict().items()}
                    torch.save(whole, folder / f"{int(line)}.pt")
            torch.distributed.barrier()
            print("published", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
