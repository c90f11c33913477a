"""Nodes that need the same pass it on from one to the next: every cable carries it once, and all get every byte."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest
import torch

import refitd
from refitd import MXFP8Buffer
from refitd.testing import Daemon, Engine, eventually
from tests.support import shards

Nodes = tuple[Daemon, ...]
Tensors = dict[str, torch.Tensor]
MODEL: shards.Model = {"wide": ((700, 960), 0), "tall": ((960, 700), 0), "norm": ((960,), 0)}
ROWS = 2  # ranks of a replica, which share rows
CONFIG = "[deadlines]\nplan_s = 60.0\nstage_s = 20.0\ncommit_s = 10.0\n[transport]\nrelays = {}\n"


def made(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, (shape, _) in MODEL.items()}


def part(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    return tensor.chunk(ROWS)[rank].contiguous()


class Fleet:
    """A trainer of float32 on node n0, and on each other node a replica of two ranks that holds bfloat16."""

    def __init__(self, nodes: Callable[..., Nodes], count: int = 4, *, relays: bool = True) -> None:
        self.nodes = nodes(count, CONFIG.format(str(relays).lower()), (2,) * count)
        self._exits = ExitStack()
        self.clients = [self._exits.enter_context(node.connect()) for node in self.nodes]
        self.trainer = self.clients[0]
        self.held = made(0)
        self.source = self.trainer.register_source("policy", self.held)
        self.targets: list[refitd.Target] = []
        self.live: list[tuple[int, Tensors]] = []

    def add(self, node: int, replica: str, *, flips: bool = False, **options: object) -> None:
        """Register a replica on a node."""
        client = self.clients[node]
        for rank in range(ROWS):
            mine = {name: part(tensor, rank).to(torch.bfloat16) for name, tensor in self.held.items()}
            described = shards.describe(mine, rank, ROWS, MODEL)
            live = {name: torch.zeros_like(tensor) for name, tensor in mine.items()}
            if flips:
                live = client.allocate({name: (t.shape, t.dtype) for name, t in mine.items()})
            self.targets.append(
                client.register_target(
                    "policy",
                    live,
                    replica=replica,
                    rank=rank,
                    world_size=ROWS,
                    metadata=described,
                    cast="float32",
                    **options,  # type: ignore[arg-type]
                )
            )
            self.live.append((rank, live))

    def change(self, share: float, seed: int) -> None:
        random = np.random.default_rng(seed)
        for tensor in self.held.values():
            which = torch.from_numpy(random.random(tuple(tensor.shape)) < share)
            tensor[which] += 1.0

    def swap(self, version: int) -> refitd.SwapReport:
        self.source.publish(version)
        with Engine(*self.targets):
            return self.trainer.swap("policy", version, timeout=60)

    def check(self) -> None:
        for number, (rank, live) in enumerate(self.live):
            want = {name: part(tensor, rank).to(torch.bfloat16) for name, tensor in self.held.items()}
            assert shards.equal(live, want), number

    def close(self) -> None:
        self._exits.close()


def test_every_cable_carries_it_once(nodes: Callable[..., Nodes]) -> None:
    fleet = Fleet(nodes)
    fleet.add(1, "a")
    fleet.add(2, "b", flips=True)
    fleet.add(2, "beside", flips=True)
    fleet.add(3, "c")
    whole = sum(2 * tensor.numel() for tensor in fleet.held.values())
    report = fleet.swap(1)
    fleet.check()
    assert report.bytes == 4 * whole
    plan = fleet.trainer.plan("policy")
    assert [(path.source, path.nodes) for path in plan.relays.paths] == [("n0", ("n1", "n2", "n3"))]
    assert (plan.relays.bytes, plan.relays.direct_bytes) == (whole, 3 * whole)
    links = {(link.source, link.target): (link.bytes, link.needed_bytes) for link in plan.links}
    assert links == {
        ("n0", "n1"): (whole, whole),
        ("n0", "n2"): (0, 2 * whole),
        ("n0", "n3"): (0, whole),
        ("n1", "n2"): (whole, 0),
        ("n2", "n3"): (whole, 0),
    }
    fleet.change(0.01, 1)
    changes = fleet.swap(2)
    fleet.check()
    assert changes.crossing.delta_bytes == 3 * whole, "all came as deltas, from node to node"
    assert changes.crossing.crossed_bytes < 0.03 * changes.crossing.delta_bytes
    assert fleet.trainer.verify("policy").outcome == "proven"
    fleet.close()
