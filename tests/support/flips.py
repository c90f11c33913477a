"""Clusters whose engines commit by exchanging arenas, and helpers that kill their processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import torch

import refitd
from refitd.testing import Daemon, eventually
from tests.support.fleet import FilledFleet

SHAPES = {"w": ((300, 70), torch.float32), "n": ((77,), torch.bfloat16), "e": ((0, 4), torch.float32)}
Tensors = dict[str, torch.Tensor]


def version(number: int) -> Tensors:
    return {name: torch.full(shape, float(number), dtype=dtype) for name, (shape, dtype) in SHAPES.items()}


def holds(live: Tensors, number: int) -> bool:
    return all(torch.equal(live[name], value) for name, value in version(number).items())


class Fleet(FilledFleet):
    """A trainer, and an engine with its tensors in an arena."""

    def __init__(self, daemon: Daemon, **options: object) -> None:
        super().__init__(daemon.connect(), version(0))
        self.engine = daemon.connect()
        self.live = self.engine.allocate(SHAPES)
        self.addresses = {name: tensor.data_ptr() for name, tensor in self.live.items()}
        self.target = self.add(self.engine, self.live, "a", **options)


def values(live: dict[str, torch.Tensor]) -> set[float]:
    return {float(v) for t in live.values() if t.numel() for v in t.unique()}


def kill_workers(daemon: Daemon) -> None:
    """Kill all workers and wait until the daemon reports a successor for each; it notices a death with some delay."""
    node = daemon.status().nodes[0].node
    before = daemon.node_of(node).workers
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: {0, *before}.isdisjoint(daemon.node_of(node).workers), "new workers")


def quietly(call: Callable[[], object]) -> object:
    try:
        return call()
    except refitd.RefitdError as exc:
        return exc
