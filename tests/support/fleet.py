"""A trainer and replicas, and the step that most cluster tests take: publish a version, and swap to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import refitd
from refitd.testing import Engine
from tests.support import shards
from tests.support.names import policy

Tensors = dict[str, torch.Tensor]


def go_live(
    trainer: refitd.Client, source: refitd.Source, version: int, *targets: refitd.Target, model: str = ""
) -> refitd.SwapReport:
    """Publish a version, and swap to it while these targets are polled; raise if not all have committed it."""
    source.publish(version)
    with Engine(*targets):
        return trainer.swap(model or policy(), version, timeout=60.0)


class FilledFleet:
    """A source of one rank, and replicas; every element of version v is v. `close` closes the clients.

    Attributes:
        tensors: the source's tensors.
        lives: the tensors of each replica, in the order of `targets`.
    """

    def __init__(self, trainer: refitd.Client, tensors: Tensors, **options: Any) -> None:
        """Register the source of model "policy"; `options` are those of `register_source`."""
        self.trainer, self.tensors = trainer, tensors
        self.source = trainer.register_source(policy(), tensors, **options)
        self.targets: list[refitd.Target] = []
        self.lives: list[Tensors] = []
        self._clients = [trainer]

    def add(self, client: refitd.Client, live: Tensors, replica: str, **options: Any) -> refitd.Target:
        """Register a replica of one rank."""
        if client not in self._clients:
            self._clients.append(client)
        self.lives.append(live)
        self.targets.append(client.register_target(policy(), live, replica=replica, **options))
        return self.targets[-1]

    def fill(self, version: int) -> None:
        """Write a version into the source's tensors."""
        for tensor in self.tensors.values():
            tensor.fill_(version)

    def publish(self, version: int) -> None:
        self.fill(version)
        self.source.publish(version)

    def swap(self, version: int, *more: refitd.Target) -> refitd.SwapReport:
        """Publish a version, swap to it while all targets are polled, and check what the replicas hold."""
        self.fill(version)
        report = go_live(self.trainer, self.source, version, *self.targets, *more)
        assert self.holds(version)
        return report

    def holds(self, version: int) -> bool:
        """Whether all replicas hold a version in every element."""
        return all(bool((tensor == version).all()) for live in self.lives for tensor in live.values())

    def serves(self) -> set[int | None]:
        return {target.version for target in self.targets}

    def close(self) -> None:
        for client in self._clients:
            client.close()


class CutSource:
    """Ranks of a source that hold their cuts of a model; the clients have them in turn."""

    def __init__(self, clients: Sequence[refitd.Client], world: int, full: Tensors, **options: Any) -> None:
        """`full` are the whole tensors of `shards.MODEL`."""
        self.tensors = [shards.cut(full, rank, world) for rank in range(world)]
        self.sources = []
        for rank, mine in enumerate(self.tensors):
            options |= {"rank": rank, "world_size": world, "metadata": shards.describe(mine, rank, world)}
            self.sources.append(clients[rank % len(clients)].register_source(policy(), mine, **options))

    def publish(self, full: Tensors, version: int) -> None:
        for rank, (source, mine) in enumerate(zip(self.sources, self.tensors, strict=True)):
            for name, tensor in shards.cut(full, rank, len(self.sources)).items():
                mine[name].copy_(tensor)
            source.publish(version)


class CutReplica:
    """Ranks of a replica that hold their cuts of `shards.MODEL`; the clients have them in turn."""

    def __init__(self, clients: Sequence[refitd.Client], replica: str, world: int = 1, **options: Any) -> None:
        self.lives, self.targets = [], []
        for rank in range(world):
            mine = shards.zeros_like(shards.cut(shards.whole(0), rank, world))
            options |= {"rank": rank, "world_size": world, "metadata": shards.describe(mine, rank, world)}
            self.lives.append(mine)
            self.targets.append(
                clients[rank % len(clients)].register_target(policy(), mine, replica=replica, **options)
            )

    def holds(self, full: Tensors) -> bool:
        """Whether each rank holds its cuts of these whole tensors."""
        return all(shards.equal(live, shards.cut(full, rank, len(self.lives))) for rank, live in enumerate(self.lives))
