"""Run one rank of an FSDP2 trainer of a Hugging Face model; it answers each line, a JSON command, with a line."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import refitd
from benchmarks.engines import native


def main(rank: int, world_size: int, store: str, checkpoint: str, directory: str) -> None:
    """Serve `step`, `publish`, `save`, `join` and `broadcast` until the input ends."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with refitd.connect(directory, name=f"trainer-{rank}") as client:
        source = client.register_source("policy", model, rank=rank, world_size=world_size, cast="bfloat16")
        _answer({"next_version": source.next_version, "names": [name for name, _ in model.named_parameters()]})
        joined = None
        for line in sys.stdin:
            command, *arguments = json.loads(line)
            started = time.perf_counter()
            if command == "step":
                _step(model, *arguments)
            elif command == "publish":
                source.publish(*arguments)
            elif command == "save":
                _save(model, rank, Path(*arguments))
            elif command == "join":
                joined = native.group(arguments[0], 0, arguments[1]) if rank == 0 else None
            elif command == "broadcast":
                _broadcast(model, joined)
            _answer({"seconds": time.perf_counter() - started})


def _step(model: torch.nn.Module, seed: int) -> None:
    """Change every weight by about an optimiser's step: the bytes of nearly all weights change."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local()
            local.add_(torch.randn(local.shape, generator=generator), alpha=0.02)


def _save(model: torch.nn.Module, rank: int, folder: Path) -> None:
    """Gather the model in bfloat16 and have rank 0 write it, as trainers without a weight transfer do."""
    whole = {name: p.full_tensor().to(torch.bfloat16) for name, p in model.named_parameters()}
    if rank == 0:
        save_file(whole, folder / "model.safetensors")
    dist.barrier()


def _broadcast(model: torch.nn.Module, joined: Any) -> None:
    """Gather each tensor in bfloat16 and have rank 0 send it to the engine's workers."""
    for parameter in model.parameters():
        whole = parameter.detach().to(torch.bfloat16).full_tensor()
        if joined is not None:
            native.broadcast(joined, whole)


def _answer(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
