"""One rank of an FSDP2 trainer that teaches a small Llama a rule, and gives every few steps' weights to the engines."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import refitd
from benchmarks.engines.learn import LENGTH, following

STEPS_A_VERSION = 4
BATCH = 32


def main(rank: int, world_size: int, store: str, checkpoint: str, directory: str, versions: int) -> None:
    """Train, publish, swap; rank 0 prints one line a version."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(rank)
    with refitd.connect(directory, name=f"learner-{rank}") as client:
        source = client.register_source("policy", model, rank=rank, world_size=world_size)
        first = source.next_version
        for version in range(first, first + versions):
            for _ in range(STEPS_A_VERSION):
                start = torch.randint(1, 60, (BATCH,), generator=generator).tolist()
                tokens = torch.tensor([following(one, LENGTH) for one in start])
                loss = model(tokens, labels=tokens).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            model.reshard()
            source.publish(version)
            dist.barrier()
            if rank == 0:
                client.swap("policy", version, wait=300, timeout=60)
                print(version, f"{loss.item():.3f}", flush=True)
        dist.barrier()
        source.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6], int(sys.argv[6]))
