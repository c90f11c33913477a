"""Nodes over NIXL. Needs the package: `pip install 'refitd[nixl]'`; the conformance suite then tries it, too."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine, eventually
from tests.support import shards
from tests.support.fleet import go_live

pytest.importorskip("nixl")

Nodes = tuple[Daemon, ...]
CONFIG = '[transport]\nservice = "nixl"\n[deadlines]\nplan_s = 60.0\nstage_s = 10.0\ncommit_s = 10.0\n'


def test_bytes_cross_over_nixl_and_again_after_a_worker_died(nodes: Callable[..., Nodes]) -> None:
    n0, n1 = nodes(2, config=CONFIG, workers=(2, 2))
    with n0.connect() as c0, n1.connect() as c1:
        full, mine = shards.whole(0), shards.zeros_like(shards.whole(0))
        source = c0.register_source("policy", full)
        target = c1.register_target("policy", mine, replica="far")
        with Engine(target):
            for version in (1, 2, 3):
                for name, tensor in shards.whole(version).items():
                    full[name].copy_(tensor)
                go_live(c0, source, version, model="policy")
                assert shards.equal(mine, full)
                if version == 2:
                    os.kill(victim := n1.workers()[0], signal.SIGKILL)
                    eventually(lambda: victim not in n1.workers() and len(n1.workers()) == 2, "another worker is there")
        assert {link.service for link in c0.status().links} == {"nixl"}
        assert c0.verify("policy").outcome == "proven"


def test_whole_tensors_go_from_arena_to_arena_that_flip(nodes: Callable[..., Nodes]) -> None:
    n0, n1 = nodes(2, config=CONFIG)
    with n0.connect() as c0, n1.connect() as c1:
        given, live = (client.allocate({"w": ((24 << 20,), torch.uint8)}) for client in (c0, c1))
        source = c0.register_source("policy", given)
        with Engine(c1.register_target("policy", live, replica="far", mode="flip")):
            for version in (1, 2, 3):
                given["w"].fill_(version)
                with source.lend(version):
                    c0.swap("policy", version, timeout=60)
                assert int(live["w"].min()) == int(live["w"].max()) == version
        assert c0.verify("policy").outcome == "proven"
        del given, live


class Fleet:
    """A trainer on node n0, and a replica on each node."""

    def __init__(self, nodes: Callable[..., Nodes], count: int) -> None:
        self.clients = [node.connect() for node in nodes(count, config=CONFIG)]
        self.held = {"wide": torch.randn(700, 960).bfloat16(), "norm": torch.randn(961).bfloat16()}
        self.source = self.clients[0].register_source("policy", self.held)
        self.live = [{name: torch.zeros_like(tensor) for name, tensor in self.held.items()} for _ in self.clients]
        self.targets = [
            client.register_target("policy", live, replica=f"r{number}")
            for number, (client, live) in enumerate(zip(self.clients, self.live, strict=True))
        ]

    def swap(self, version: int) -> refitd.SwapReport:
        """Change one element in a hundred, publish the version, and swap to it."""
        for tensor in self.held.values():
            tensor.view(-1)[version::100] += 1.0
        self.source.publish(version)
        with Engine(*self.targets):
            report = self.clients[0].swap("policy", version, timeout=60)
        assert all(shards.equal(live, self.held) for live in self.live)
        return report

    def close(self) -> None:
        for client in self.clients:
            client.close()


def test_relays_pass_on_what_has_changed(nodes: Callable[..., Nodes]) -> None:
    fleet = Fleet(nodes, 4)
    whole = sum(tensor.nbytes for tensor in fleet.held.values())
    first, second = (fleet.swap(version) for version in (1, 2))
    assert (first.crossing.bytes, first.crossing.delta_bytes) == (3 * whole, 0)
    assert second.crossing.delta_bytes == 3 * whole
    assert second.crossing.crossed_bytes < 0.03 * 3 * whole
    plan = fleet.clients[0].plan("policy")
    assert [(path.source, path.nodes) for path in plan.relays.paths] == [("n0", ("n1", "n2", "n3"))]
    assert fleet.clients[0].verify("policy").outcome == "proven"
    fleet.close()


def test_a_base_that_was_changed_goes_live_nowhere(nodes: Callable[..., Nodes]) -> None:
    """The last node of a path has written to its live version."""
    fleet = Fleet(nodes, 3)
    for target in fleet.targets[1:]:
        target.close()
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in fleet.held.items()}
    for number in (1, 2):
        fleet.live[number] = fleet.clients[number].allocate(shapes)
        fleet.targets[number] = fleet.clients[number].register_target(
            "policy", fleet.live[number], replica=f"r{number}", mode="flip"
        )
    for version in (1, 2):
        fleet.swap(version)
    fleet.live[2]["norm"].view(torch.int16)[900] ^= 1
    with pytest.raises(refitd.SwapFailed, match="differ from the bytes"):
        fleet.swap(3)
    assert [target.version for target in fleet.targets] == [2, 2, 2]
    assert fleet.swap(4).version == 4
    fleet.close()
