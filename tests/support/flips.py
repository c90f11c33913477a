"""Clusters whose engines commit by exchanging arenas, and helpers that kill their processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import torch

import refitd
from refitd.testing import Daemon, Engine, eventually

SHAPES = {"w": ((300, 70), torch.float32), "n": ((77,), torch.bfloat16), "e": ((0, 4), torch.float32)}
Tensors = dict[str, torch.Tensor]


def version(number: int) -> Tensors:
    return {name: torch.full(shape, float(number), dtype=dtype) for name, (shape, dtype) in SHAPES.items()}


def holds(live: Tensors, number: int) -> bool:
    return all(torch.equal(live[name], value) for name, value in version(number).items())


class Fleet:
    """A trainer, and an engine whose tensors lie in an arena."""

    def __init__(self, daemon: Daemon, **options: object) -> None:
        self.trainer, self.engine = daemon.connect(), daemon.connect()
        self.given = version(0)
        self.source = self.trainer.register_source("policy", self.given)
        self.live = self.engine.allocate(SHAPES)
        self.addresses = {name: tensor.data_ptr() for name, tensor in self.live.items()}
        self.target = self.engine.register_target("policy", self.live, replica="a", **options)  # type: ignore[arg-type]

    def publish(self, number: int) -> None:
        for name, value in version(number).items():
            self.given[name].copy_(value)
        self.source.publish(number)

    def swap(self, number: int, *more: refitd.Target) -> refitd.SwapReport:
        self.publish(number)
        with Engine(self.target, *more):
            return self.trainer.swap("policy", number, timeout=30)


def values(live: dict[str, torch.Tensor]) -> set[float]:
    return {float(v) for t in live.values() if t.numel() for v in t.unique()}


def kill_workers(daemon: Daemon) -> None:
    """Kill all workers and wait until the daemon names a successor for each: it hears of a death some time later."""
    node = daemon.status().nodes[0].node
    before = daemon.node_of(node).workers
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: {0, *before}.isdisjoint(daemon.node_of(node).workers), "new workers")


def kill_coordinator(daemon: Daemon, wait: bool = True) -> None:
    pids = [
        pid for pid, command in daemon.children().items() if "refitd.coordinator" in command or "coordinator" in command
    ]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    if wait:
        back(daemon)


def back(daemon: Daemon) -> None:
    def there() -> bool:
        try:
            with daemon.connect("looks") as client:
                return len(client.status().nodes) >= 1 and len(client.status().models) > 0
        except refitd.RefitdError:
            return False

    eventually(there, "the coordinator is back", 90)  # one that is killed again and again waits longer each time


def quietly(call: Callable[[], object]) -> object:
    try:
        return call()
    except refitd.RefitdError as exc:
        return exc
