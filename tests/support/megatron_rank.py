"""One rank of a Megatron-Core job, as source or target of a daemon: python -m tests.support.megatron_rank JOB RANK DIR.

It prints "ready" when it has published (or registered), and "done" when it has ended in order. DIR/logits.pt has the
model's logits for DIR/tokens.pt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig

import refitd
from refitd.names import megatron_to_hf
from tests.support.megatron_model import build, logits, start

WAIT_S = 120.0


def main() -> None:
    """Run the job's one action, then wait for a line before closing."""
    job, rank, folder = json.loads(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    start(job, rank, str(folder / "rendezvous"))
    hf = AutoConfig.for_model(**job["hf"])
    chunks = build(job, hf)
    names = megatron_to_hf(hf, fused_experts=job.get("fused_experts", False))
    client = refitd.connect(job["address"])
    place = {"rank": rank, "world_size": job["world_size"], "names": names}
    tokens = torch.load(folder / "tokens.pt")
    if job.get("is_target"):
        target = client.register_target("policy", chunks, replica="megatron", timeout=WAIT_S, **place)
        print("ready", flush=True)
        target.wait(1, timeout=WAIT_S)
        write(folder, logits(chunks, tokens))
        registered: refitd.Target | refitd.Source = target
    else:
        source = client.register_source("policy", chunks, timeout=WAIT_S, **place)
        source.publish(1, timeout=WAIT_S)
        write(folder, logits(chunks, tokens))
        print("ready", flush=True)
        registered = source
    sys.stdin.readline()
    registered.close()
    client.close()
    dist.barrier()
    dist.destroy_process_group()
    print("done", flush=True)


def write(folder: Path, found: torch.Tensor | None) -> None:
    """Write the logits, if this rank has them, from one rank only."""
    from megatron.core import parallel_state as groups

    if found is not None and groups.get_tensor_model_parallel_rank() == 0 and groups.get_data_parallel_rank() == 0:
        torch.save(found, folder / "logits.pt")


if __name__ == "__main__":
    main()
