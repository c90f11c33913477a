"""Teach a Hugging Face model a rule with FSDP2, and send each version to vLLM servers that follow."""

# Any number of ranks works, and any number of servers. `scripts/demo --vllm` runs this beside a server that answers.
#
#     refitd serve --standalone &
#     vllm serve FOLDER --weight-transfer-config '{"backend": "refitd"}' --no-enable-prefix-caching \
#         --additional-config '{"refitd": {"replica": "a", "follow": true}}' &
#     torchrun --standalone --nproc-per-node 2 examples/vllm_trainer.py FOLDER

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import refitd

BATCH, LENGTH = 32, 16


def following(start: int, length: int) -> list[int]:
    """Return the rule's sequence: each token is five times the one before and three, modulo 61."""
    found = [start]
    while len(found) < length:
        found.append((5 * found[-1] + 3) % 61)
    return found


def main() -> None:
    """Train, publish, swap; rank 0 prints each version and its loss. Everything runs on the CPU here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="the checkpoint that the servers were started with; 64 tokens or more")
    parser.add_argument("--versions", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(rank)

    with refitd.connect(name=f"trainer-{rank}") as client:
        # float32 weights are offered in the servers' type
        source = client.register_source("policy", model, rank=rank, world_size=world_size, cast="bfloat16")
        first = source.next_version
        for version in range(first, first + options.versions):
            start = torch.randint(1, 60, (BATCH,), generator=generator).tolist()
            tokens = torch.tensor([following(one, LENGTH) for one in start])
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.reshard()  # an evaluation without a backward pass would leave the root module gathered
            source.publish(version)
            dist.barrier()
            if rank == 0:
                client.swap("policy", version, wait=300, timeout=60)  # waits for the servers to register, too
                print(version, f"{loss.item():.3f}", flush=True)
        dist.barrier()  # closing a source withdraws its versions: not before the last swap has ended
        source.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
