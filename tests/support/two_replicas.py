"""One trainer rank and two replicas, for tests of failures around a swap."""

from __future__ import annotations

import torch

from refitd.testing import Daemon, Engine
from tests.support import shards
from tests.support.fleet import go_live
from tests.support.names import policy

Tensors = dict[str, torch.Tensor]


class Fleet:
    """One trainer rank, and two replicas that each have the whole model and serve version 1."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.trainer, self.client = daemon.connect("trainer"), daemon.connect("engines")
        self.full = shards.whole(1)
        self.source = self.trainer.register_source(policy(), self.full)
        self.live: list[Tensors] = [shards.zeros_like(self.full) for _ in range(2)]
        self.targets = [
            self.client.register_target(policy(), live, replica=f"engine-{i}") for i, live in enumerate(self.live)
        ]
        go_live(self.trainer, self.source, 1, *self.targets)
        self.first = {name: t.clone() for name, t in self.full.items()}
        for tensor in self.full.values():
            tensor.add_(1)
        self.source.publish(2)

    def serves_first(self) -> bool:
        return all(shards.equal(live, self.first) for live in self.live)

    def swap_succeeds(self, version: int = 2) -> bool:
        with Engine(*self.targets):
            return self.trainer.swap(policy(), version, timeout=60).outcome == "committed"

    def serves_second(self) -> bool:
        return all(shards.equal(live, self.full) for live in self.live)

    def close(self) -> None:
        self.trainer.close()
        self.client.close()
