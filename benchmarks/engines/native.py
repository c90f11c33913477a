"""Run in vLLM's workers for its native methods: pass full tensors, sent over gloo or with a call, to its loader."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)

_joined: dict[str, Any] = {}  # this worker's group, for later calls

Described = list[tuple[str, tuple[int, ...]]]


def group(store: str, rank: int, size: int) -> Any:
    """Return a gloo group of the trainer's first rank and all workers; it returns when all have joined."""
    return dist.ProcessGroupGloo(dist.FileStore(store, size), rank, size, TIMEOUT)


def join(store: str, size: int, model: Any) -> None:
    """Join the trainer's group, in a worker; the trainer is rank 0."""
    _joined["group"] = group(store, 1 + dist.get_rank(), size)


def broadcast(made: Any, tensor: torch.Tensor) -> None:
    """Send a tensor from rank 0 of a group to the other ranks, or receive it there."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    made.broadcast([tensor], options).wait()


def receive(described: Described, model: Any) -> None:
    """Run vLLM's loader on bfloat16 tensors, each when it arrives from the trainer."""

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in described:
            tensor = torch.empty(shape, dtype=torch.bfloat16)
            broadcast(_joined["group"], tensor)
            yield name, tensor

    with torch.no_grad():
        model.load_weights(tensors())


def load(tensors: list[tuple[str, torch.Tensor]], model: Any) -> None:
    """Run vLLM's loader on tensors that were sent with the call."""
    model.load_weights(iter(tensors))
