"""Trainers and ranks for tests of replica controllers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

import refitd
from refitd.testing import Daemon
from tests.support.names import policy

SHAPE = (64, 32)


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full(SHAPE, float(version)), "n": torch.full((7,), float(version))}


@contextmanager
def trainer(daemon: Daemon) -> Iterator[tuple[refitd.Client, refitd.Source, dict[str, torch.Tensor]]]:
    tensors = weights(1)
    with daemon.connect() as client:
        source = client.register_source(policy(), tensors)
        source.publish(1)
        yield client, source, tensors


def publish(source: refitd.Source, tensors: dict[str, torch.Tensor], version: int) -> None:
    for name, value in weights(version).items():
        tensors[name].copy_(value)
    source.publish(version)


class Ranks:
    def __init__(self, daemon: Daemon, world: int, *, flips: bool = False) -> None:
        self.client = daemon.connect()
        self.live = [
            self.client.allocate({n: (tuple(t.shape), t.dtype) for n, t in weights(0).items()}) if flips else weights(0)
            for _ in range(world)
        ]
        self.targets = [
            self.client.register_target(policy(), live, replica="a", rank=r, world_size=world, controlled=True)
            for r, live in enumerate(self.live)
        ]

    def values(self) -> set[float]:
        return {float(v) for live in self.live for t in live.values() for v in t.unique()}

    @property
    def versions(self) -> list[int | None]:
        return [t.version for t in self.targets]
