"""A cluster in which versions 1 and 2 have been live, and an engine process that serves 2 and dies."""

from __future__ import annotations

import torch

import refitd
from refitd.testing import Daemon, Engine, eventually
from tests.support import shards
from tests.support.names import policy
from tests.support.programs import Program, python

Tensors = dict[str, torch.Tensor]


class Fleet:
    """One trainer rank that holds versions 1 and 2, one replica that serves 2; `full[v]` are the version's tensors."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.trainer, self.engine = daemon.connect("trainer"), daemon.connect("engine")
        self.tensors = shards.whole(1)
        self.source = self.trainer.register_source(policy(), self.tensors)
        self.live = shards.zeros_like(self.tensors)
        self.target = self.engine.register_target(policy(), self.live, replica="a")
        self.full: dict[int, Tensors] = {}
        for version in (1, 2):
            self.publish(version)
            with Engine(self.target):
                self.trainer.swap(policy(), version, timeout=60)

    def publish(self, version: int) -> None:
        for tensor in self.tensors.values():
            tensor.add_(version)
        self.full[version] = {name: tensor.clone() for name, tensor in self.tensors.items()}
        self.source.publish(version)

    def knows_model(self) -> bool:
        """Whether a coordinator answers, and all ranks have registered with it."""
        try:
            return any(model.sources and model.targets for model in self.trainer.status().models)
        except refitd.RefitdError:
            return False

    def close(self) -> None:
        self.trainer.close()
        self.engine.close()


ENGINE = """
from tests.support.names import policy
import sys, time, refitd, torch
from tests.support import shards
client = refitd.connect(sys.argv[1], name="crashes")
if sys.argv[2] == "arena":
    live = client.allocate({name: (t.shape, t.dtype) for name, t in shards.whole(1).items()})
else:
    live = shards.zeros_like(shards.whole(1))
target = client.register_target(policy(), live, replica="crashes")
target.wait(2, timeout=30)
print("serves", flush=True)
sys.stdin.readline()
client.close()
"""


def crash(fleet: Fleet, way: str = "private", *, orderly: bool = False) -> None:
    """A replica of another process serves version 2 and dies, or closes its client."""
    with Program(python(fleet.daemon, ENGINE, way)) as process:
        assert process.line() == "serves"

        def is_known() -> bool:
            states = {t.replica: t.state for t in fleet.trainer.status().models[0].targets}
            return states.get("crashes") == "serving"

        eventually(is_known, "the daemon knows what it serves")
        if orderly:
            process.tell()
            assert process.process.wait() == 0
    eventually(lambda: len(fleet.trainer.status().models[0].targets) == 1, "its end is known")
