"""A source of one tensor, for tests around a swap."""

from __future__ import annotations

import torch

from refitd.testing import Daemon
from tests.support.names import policy

ANSWER_S = 60.0


class Trainer:
    """A source that publishes and swaps."""

    def __init__(self, daemon: Daemon) -> None:
        self.client = daemon.connect("trainer")
        self.weights = {"w": torch.zeros(64, 64)}
        self.source = self.client.register_source(policy(), self.weights)
        self.version = 0

    def publish(self) -> int:
        self.version += 1
        self.weights["w"].fill_(self.version)
        self.source.publish(self.version)
        return self.version

    def targets(self) -> list[str]:
        return [t.replica for model in self.client.status().models for t in model.targets]
