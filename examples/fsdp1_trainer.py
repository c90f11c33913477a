"""Train with FSDP1 (FullyShardedDataParallel) and send every step's weights to the engines without a gather."""

# Any number of ranks works:
#
#     refitd serve --standalone --config configs/laptop.toml &
#     python examples/engine.py &
#     torchrun --standalone --nproc-per-node 2 examples/fsdp1_trainer.py

import argparse

import torch
import torch.distributed as dist
from fsdp2_trainer import build, fingerprint
from torch.distributed.fsdp import FullyShardedDataParallel

import refitd
from refitd.adapters.fsdp1 import fsdp1_tensors


def main() -> None:
    """Train, publish, swap. Everything runs on the CPU here."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = FullyShardedDataParallel(build(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    with refitd.connect(name=f"trainer-{rank}") as client:
        tensors, metadata = fsdp1_tensors(model, rank)  # views of this rank's shards, which follow every step
        source = client.register_source("policy", tensors, metadata=metadata, rank=rank, world_size=world_size)
        first = source.next_version
        for version in range(first, first + steps):
            data = torch.randn(16, 32)
            loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            source.publish(version)
            dist.barrier()  # a version is complete when every rank has published it
            with FullyShardedDataParallel.summon_full_params(model):  # only to print the digest
                weights = fingerprint({name: p.clone() for name, p in model.module.named_parameters()})
            if rank == 0:
                client.swap("policy", version, timeout=60)  # returns when every engine rank serves it
                print(f"trainer: version {version} weights {weights}", flush=True)
        dist.barrier()  # closing a source withdraws its versions, so wait for the last swap
        source.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
