"""One process of the swap benchmark: a trainer or engine rank that does what it is told on stdin."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import refitd
from benchmarks.swap_model import Tensor, describe, pieces, shapes

MODEL = "bench"


class Member:
    """A rank of the gloo world and, through refitd, of the trainer or of the engine."""

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.side, self.rank, self.world = spec["side"], spec["rank"], spec["world"]
        self.sources = spec["sources"]
        self.layout = spec["layouts"]
        self.tensors = [Tensor(**t) for t in spec["tensors"]]
        kind = self.layout[self.side]
        self.shard = {
            name: torch.empty(shape, dtype=torch.bfloat16)
            for name, shape in shapes(self.tensors, kind, self.rank, self.world)
        }
        generator = torch.Generator().manual_seed(self.rank)
        noise = torch.randint(-30000, 30000, (1 << 20,), dtype=torch.int16, generator=generator)
        for tensor in self.shard.values():
            flat = tensor.view(-1).view(torch.int16)
            flat.copy_(noise.repeat(flat.numel() // noise.numel() + 1)[: flat.numel()])
        self.client = refitd.connect(spec["directory"], name=f"{self.side}{self.rank}")
        metadata = describe(self.tensors, kind, self.rank, self.world)
        options: dict[str, Any] = {"rank": self.rank, "world_size": self.world, "metadata": metadata, "timeout": 120.0}
        if self.side == "source":
            self.source = self.client.register_source(MODEL, self.shard, slots=spec["slots"], **options)
        else:
            self.target = self.client.register_target(MODEL, self.shard, replica="engine", **options)
        self.buffers: dict[int, torch.Tensor] = {}

    def publish(self, version: int) -> dict[str, Any]:
        started = time.perf_counter()
        self.source.publish(version, timeout=120)
        return {"seconds": time.perf_counter() - started}

    def wait(self, version: int) -> dict[str, Any]:
        self.target.wait(version, timeout=120)
        return {"paused_s": self.target.last_pause_s}

    def wait_until(self, version: int) -> dict[str, Any]:
        """Take over whatever comes until `version` has."""
        while (self.target.version or 0) < version:
            self.target.wait((self.target.version or 0) + 1, timeout=120)
        return {}

    def gloo(self, store: str, rank: int, size: int) -> dict[str, Any]:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        return {}

    def direct(self) -> dict[str, Any]:
        """Raw gloo: one preallocated buffer per pair of ranks, no packing, no unpacking."""
        pairs = pieces(self.tensors, self.layout, self.sources, self.world if self.side == "target" else None)
        mine = [(src, dst, n) for src, dst, n in pairs if (src if self.side == "source" else dst) == self.rank and n]
        for src, dst, n in mine:
            peer = self.sources + dst if self.side == "source" else src
            if peer not in self.buffers:
                self.buffers[peer] = torch.ones(n, dtype=torch.bfloat16)
        dist.barrier()
        started = time.perf_counter()
        move = dist.isend if self.side == "source" else dist.irecv
        works = [move(buffer, peer) for peer, buffer in sorted(self.buffers.items())]
        for work in works:
            if work is not None:
                work.wait()
        dist.barrier()
        return {"seconds": time.perf_counter() - started}

    def gather(self) -> dict[str, Any]:
        """Gather each tensor whole on rank 0, broadcast it to all, slice it there."""
        dist.barrier()
        started = time.perf_counter()
        for tensor in self.tensors:
            name, dim = tensor.name, tensor.dim
            whole = torch.empty(tensor.shape, dtype=torch.bfloat16)
            if self.side == "source" and self.rank == 0:
                parts = [self.shard[name]]
                if dim is not None:
                    for peer in range(1, self.sources):
                        part = torch.empty_like(parts[0])
                        dist.recv(part, peer)
                        parts.append(part)
                    torch.cat(parts, dim, out=whole)
                else:
                    whole.copy_(parts[0])
            elif self.side == "source" and dim is not None:
                dist.send(self.shard[name], 0)
            dist.broadcast(whole, 0)
            if self.side == "target" and name in self.shard:
                mine = self.shard[name]
                if dim is not None and self.layout["target"] == "tp":
                    whole = whole.chunk(self.world, dim)[self.rank]
                mine.copy_(whole)
        dist.barrier()
        return {"seconds": time.perf_counter() - started}


def main() -> None:
    """Serve commands: one JSON object a line in, one a line out."""
    member: Member | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if member is None:
                member = Member(command)
                answer: dict[str, Any] = {}
            else:
                answer = getattr(member, command.pop("do"))(**command)
        except Exception as exc:
            answer = {"error": repr(exc)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
