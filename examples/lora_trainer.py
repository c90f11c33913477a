"""Train LoRA adapters with PEFT and FSDP2; send engines the adapters alone, and the merged weights."""

# It needs PEFT (pip install "refitd[peft]"). Any number of ranks works:
#
#     refitd serve --standalone --config configs/laptop.toml &
#     python examples/lora_trainer.py --engine &
#     torchrun --standalone --nproc-per-node 2 examples/lora_trainer.py

import argparse
import hashlib
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import refitd
from refitd.adapters.peft import adapter_tensors, merged

LLAMA = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=128,
    tie_word_embeddings=False,
)
LORA = LoraConfig(r=6, lora_alpha=12, target_modules=["q_proj", "v_proj"])


def base() -> PreTrainedModel:
    """Return the base model; its weights replace a checkpoint that trainer and engines share."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LLAMA)


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of whole tensors, to see that both sides hold the same bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].detach().numpy().tobytes())
    return digest.hexdigest()[:16]


def train(steps: int) -> None:
    """Train, publish, swap. Everything runs on the CPU here."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    model: PeftModel = get_peft_model(base(), LORA)
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)

    with refitd.connect(name=f"trainer-{rank}") as client:
        # the adapters alone: each rank offers its shards
        adapters = client.register_source("policy-lora", adapter_tensors(model), rank=rank, world_size=world_size)
        # merged: all ranks gather, the first one publishes; weights that LoRA does not change are not sent
        weights = merged(model, only_trained=True)
        policy = None
        if rank == 0:
            policy = client.declare_source("policy", weights.shapes, metadata=weights.metadata, partial=True)
        for version in range(adapters.next_version, adapters.next_version + steps):
            tokens = torch.randint(0, 128, (4, 16))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            adapters.publish(version)
            each = iter(weights)
            try:
                if policy is not None:
                    policy.publish_from(version, each)
            finally:
                for _ in each:  # the other ranks wait in their gathers for this one
                    pass
            dist.barrier()  # a version is complete when every rank has published it
            if rank == 0:
                for name in ("policy-lora", "policy"):
                    client.swap(name, version, timeout=60)
                print(f"trainer: version {version} weights {fingerprint(dict(weights_of(model)))}", flush=True)
            else:
                list(weights_of(model))
        dist.barrier()  # closing a source withdraws its versions, so wait for the last swap
    dist.destroy_process_group()


def weights_of(model: PeftModel) -> list[tuple[str, torch.Tensor]]:
    """Return the whole merged model, only to print its digest; on every rank, since it gathers."""
    return [(name, tensor.clone()) for name, tensor in merged(model)]


def serve(versions: int) -> None:
    """Serve twice: with a slot for the adapters beside the base weights, and with merged weights."""
    slot: PeftModel = get_peft_model(base(), LORA).requires_grad_(False)
    plain = base().requires_grad_(False)
    with refitd.connect(name="engine") as client:
        lora = client.register_target("policy-lora", adapter_tensors(slot), replica="slot", timeout=120)
        print("engine: registered", flush=True)
        policy = client.register_target("policy", plain, replica="plain", keeps=True, timeout=120)
        print(f"engine: keeps {len(policy.kept)} tensors", flush=True)
        taken = {"slot": 0, "plain": 0}
        while min(taken.values()) < versions:
            for target, weights in ((lora, lambda: dict(merged(slot))), (policy, plain.state_dict)):
                if (version := target.poll()) is not None:  # a commit point, between two steps
                    taken[target.replica] += 1
                    print(f"{target.replica}: version {version} weights {fingerprint(weights())}", flush=True)
            time.sleep(0.005)  # a step's work


def main() -> None:
    """Train, or serve until `--steps` versions are committed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--engine", action="store_true")
    options = parser.parse_args()
    (serve if options.engine else train)(options.steps)


if __name__ == "__main__":
    main()
