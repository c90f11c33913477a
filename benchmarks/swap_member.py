"""Run one process of the swap benchmark: a trainer or engine rank driven over stdin."""

from __future__ import annotations

import json
import sys
import time
from math import prod
from typing import Any

import torch
import torch.distributed as dist

import refitd
from benchmarks.swap_model import Layout, Tensor, describe, held
from benchmarks.swap_peers import Peers

MODEL = "bench"
ALIGNMENT = 64  # elements


class Member:
    """A rank of the trainer or of an engine in refitd, and a rank of the gloo world of the baselines."""

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self._tensors = [Tensor.from_json(values) for values in spec["tensors"]]
        self._source, self._target = (Layout(**spec[side]) for side in ("source", "target"))
        self._pairs = [tuple(pair) for pair in spec["pairs"]]
        is_source, rank = spec["side"] == "source", spec["rank"]
        layout = self._source if is_source else self._target
        self._rank = rank if is_source else self._source.world + rank
        self._flat, self._shard = _shard(self._tensors, layout, rank)
        self._client = refitd.connect(spec["directory"], name=f"{spec['side']}{rank}")
        options: dict[str, Any] = {
            "rank": rank,
            "world_size": layout.world,
            "metadata": describe(self._tensors, layout, rank),
            "timeout": 120.0,
        }
        if is_source:
            self._trainer = self._client.register_source(MODEL, self._shard, slots=spec["slots"], **options)
        else:
            self._engine = self._client.register_target(MODEL, self._shard, replica="engine", **options)

    def publish(self, version: int) -> dict[str, Any]:
        """Publish the shard; return how long the trainer waited."""
        started = time.perf_counter()
        self._trainer.publish(version, timeout=120)
        return {"seconds": time.perf_counter() - started}

    def wait(self, version: int) -> dict[str, Any]:
        """Commit a version; return how long the engine paused."""
        self._engine.wait(version, timeout=120)
        return {"paused_s": self._engine.last_pause_s}

    def wait_until(self, version: int) -> dict[str, Any]:
        """Commit every version up to `version`."""
        while (self._engine.version or 0) < version:
            self._engine.wait((self._engine.version or 0) + 1, timeout=120)
        return {}

    def gloo(self, store: str) -> dict[str, Any]:
        """Join the gloo world of the baselines."""
        size = self._source.world + self._target.world
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=self._rank, world_size=size)
        self._peers = Peers(self._tensors, self._source, self._target, self._rank, self._shard)
        return {}

    def direct(self) -> dict[str, Any]:
        """See Peers.direct."""
        return {"seconds": self._peers.direct(self._flat, self._pairs)}

    def gather(self) -> dict[str, Any]:
        """See Peers.gather."""
        return {"seconds": self._peers.gather()}

    def checkpoint(self, directory: str) -> dict[str, Any]:
        """See Peers.checkpoint."""
        return {"seconds": self._peers.checkpoint(directory)}


def _shard(tensors: list[Tensor], layout: Layout, rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return a rank's shard full of noise, and its tensors, which are views of it.

    The noise differs between ranks, except in replicated tensors: all ranks hold them, and their replicas must be
    equal.
    """
    shards = held(tensors, layout, rank)
    sizes = [-(-prod(shard.shape) // ALIGNMENT) * ALIGNMENT for shard in shards]
    flat = torch.empty(sum(sizes), dtype=torch.bfloat16)
    own, common = _noise(rank), _noise(layout.world)
    found = {}
    for shard, part in zip(shards, flat.split(sizes), strict=True):
        noise = common if shard.shape == shard.tensor.shape else own
        for piece in part.view(torch.int16).split(len(noise)):
            piece.copy_(noise[: len(piece)])
        found[shard.tensor.name] = part[: prod(shard.shape)].view(shard.shape)
    return flat, found


def _noise(seed: int) -> torch.Tensor:
    """Return 2**20 random values, as bits of bf16."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-30000, 30000, (1 << 20,), dtype=torch.int16, generator=generator)


def main() -> None:
    """Serve commands: read one JSON object per line, and answer with one per line."""
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
