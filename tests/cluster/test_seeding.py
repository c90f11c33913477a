"""Replicas that join get the live version from those that serve it: no trainer is read, and none needs to be there."""

from __future__ import annotations

from collections.abc import Callable

import torch

import refitd
from refitd.testing import Daemon, Engine, eventually
from tests.support import shards

Nodes = tuple[Daemon, ...]
Live = dict[str, torch.Tensor]


class Replica:
    """The ranks of a replica, in one process."""

    def __init__(self, client: refitd.Client, name: str, world: int = 1, *, flips: bool = False) -> None:
        self.name, self.world = name, world
        self.live: list[Live] = []
        self.targets: list[refitd.Target] = []
        for rank in range(world):
            mine = shards.cut(shards.whole(0), rank, world)
            live = shards.zeros_like(mine)
            if flips:
                live = client.allocate({name: (t.shape, t.dtype) for name, t in mine.items()})
            described = shards.describe(mine, rank, world)
            target = client.register_target(
                "policy", live, replica=name, rank=rank, world_size=world, metadata=described
            )
            assert target.flips == flips
            self.live.append(live)
            self.targets.append(target)

    def serves(self, version: int) -> bool:
        """Whether every rank serves this version, to the last byte."""
        if any(target.version != version for target in self.targets):
            return False
        full = shards.whole(version)
        return all(shards.equal(live, shards.cut(full, rank, self.world)) for rank, live in enumerate(self.live))


def publish(source: refitd.Source, given: Live, version: int) -> None:
    for name, tensor in shards.whole(version).items():
        given[name].copy_(tensor)
    source.publish(version)


def last(client: refitd.Client) -> refitd.SwapReport:
    report = client.history("policy", 1).swaps[0].report
    assert report is not None
    return report


def seeds_of(report: refitd.SwapReport) -> set[str]:
    return {source.replica for source in report.sources}


def test_joining_replicas_are_given_what_others_serve(nodes: Callable[..., Nodes]) -> None:
    n0, n1 = nodes(2)
    with n0.connect() as c0, n1.connect() as c1, n0.connect("looks") as looks:
        given = shards.whole(0)
        source = c0.register_source("policy", given)
        a = Replica(c1, "a", 2)
        with Engine(*a.targets):
            publish(source, given, 1)
            c0.swap("policy", 1, timeout=60)
        b = Replica(c1, "b", 4)
        with Engine(*b.targets):
            eventually(lambda: b.serves(1), "b has been given what a serves")
        assert last(looks).kind == "catch-up"
        assert seeds_of(last(looks)) == {"a"}
        source.close()
        c = Replica(c0, "c", flips=True)
        with Engine(*c.targets):
            eventually(lambda: c.serves(1), "c has been given what a and b serve", 60)
        assert seeds_of(last(looks)) == {"a", "b"}
        assert looks.verify("policy").outcome == "proven"
