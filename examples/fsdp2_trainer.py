"""Train with FSDP2 and send every step's weights to the engines."""

# Any number of ranks works:
#
#     refitd serve --standalone --config configs/laptop.toml &
#     python examples/engine.py &
#     torchrun --standalone --nproc-per-node 2 examples/fsdp2_trainer.py

import argparse
import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import refitd


def build() -> torch.nn.Sequential:
    """Return the model, with equal names and shapes on both sides. 33 rows need not divide by two ranks."""
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 33))


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of whole tensors, to see that both sides hold the same bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].detach().numpy().tobytes())
    return digest.hexdigest()[:16]


def main() -> None:
    """Train, publish, swap. Everything runs on the CPU here."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    model = build()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    with refitd.connect(name=f"trainer-{rank}") as client:
        source = client.register_source("policy", model, rank=rank, world_size=world_size)
        first = source.next_version  # the coordinator's choice, above the live version
        for version in range(first, first + steps):
            data = torch.randn(16, 32)
            loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            source.publish(version)  # copies this rank's shards; the model may change after it returns
            dist.barrier()  # a version is complete when every rank has published it
            whole = {name: p.full_tensor() for name, p in model.named_parameters()}  # only to print the digest
            if rank == 0:
                client.swap("policy", version, timeout=60)  # returns when every engine rank serves it
                print(f"trainer: version {version} weights {fingerprint(whole)}", flush=True)
        dist.barrier()  # closing a source withdraws its versions, so wait for the last swap
        source.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
