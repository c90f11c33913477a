"""Bytes that several ranks of a node need from another node cross once, and every rank gets them whole."""

from __future__ import annotations

from collections.abc import Callable

import torch

from refitd.testing import Daemon, Engine
from tests.support import shards

Nodes = tuple[Daemon, ...]


def test_replicas_of_one_node_get_what_crosses_once(nodes: Callable[..., Nodes]) -> None:
    n0, n1 = nodes(2, workers=(2, 2))
    with n0.connect() as c0, n1.connect() as c1:
        full = shards.whole(0)
        source = c0.register_source("policy", full)
        targets, held = [], []
        for replica in ("a", "b", "c"):
            for rank in range(2):
                mine = shards.cut(shards.whole(0), rank, 2)
                described = shards.describe(mine, rank, 2)
                live = shards.zeros_like(mine)
                if replica == "b":  # one that flips: it is copied from where nothing is live
                    live = c1.allocate({name: (t.shape, t.dtype) for name, t in mine.items()})
                target = c1.register_target(
                    "policy", live, replica=replica, rank=rank, world_size=2, metadata=described
                )
                assert target.flips == (replica == "b")
                targets.append(target)
                held.append((rank, live))
        narrow = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
        targets.append(c1.register_target("policy", narrow, replica="whole"))
        with Engine(*targets):
            for version in (1, 2, 3):
                for name, tensor in shards.whole(version).items():
                    full[name].copy_(tensor)
                source.publish(version)
                report = c0.swap("policy", version, timeout=60)
                whole = sum(t.numel() * t.element_size() for t in full.values())
                split = sum(t.numel() * t.element_size() for _, live in held[:2] for t in live.values())
                assert report.bytes == 3 * split + whole
                for rank, live in held:
                    assert shards.equal(live, shards.cut(full, rank, 2)), (version, rank)
                assert shards.equal(narrow, full), version
        (link,) = c0.status().links
        assert link.bytes == whole, "what replicas need, however they are cut, has crossed once"
        (planned,) = c0.plan("policy").links
        assert (planned.source, planned.target, planned.bytes) == ("n0", "n1", link.bytes)
        assert planned.needed_bytes == 3 * split + whole
        assert c0.verify("policy").outcome == "proven"


def test_ranks_of_one_node_that_hold_the_same_send_one_copy_between_them(nodes: Callable[..., Nodes]) -> None:
    """Two trainer ranks hold everything; replicas of two other nodes, cut differently, need all of it."""
    model: shards.Model = {f"t{i}": ((512, 1024), 0) for i in range(4)}
    n0, n1, n2 = nodes(3)
    with n0.connect() as c0, n1.connect() as c1, n2.connect() as c2:
        held = [{name: torch.zeros(shape) for name, (shape, _) in model.items()} for _ in range(2)]
        sources = [c0.register_source("policy", full, rank=rank, world_size=2) for rank, full in enumerate(held)]
        whole = shards.zeros_like(held[0])
        halves = [shards.zeros_like(shards.cut(held[0], rank, 2, model)) for rank in range(2)]
        targets = [c1.register_target("policy", whole, replica="whole")]
        for rank, half in enumerate(halves):
            described = shards.describe(half, rank, 2, model)
            targets.append(
                c2.register_target("policy", half, replica="halves", rank=rank, world_size=2, metadata=described)
            )
        with Engine(*targets):
            for version in (1, 2):
                for full, source in zip(held, sources, strict=True):
                    for number, tensor in enumerate(full.values()):
                        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + version * 7 + number)
                    source.publish(version)
                assert c0.swap("policy", version, timeout=60).outcome == "committed"
                assert shards.equal(whole, held[0])
                assert all(shards.equal(half, shards.cut(held[0], rank, 2, model)) for rank, half in enumerate(halves))
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in whole.values())
        planned = {(link.source, link.target): link.bytes for link in c0.plan("policy").links if link.bytes}
        assert planned in ({("n0", "n1"): nbytes, ("n1", "n2"): nbytes}, {("n0", "n2"): nbytes, ("n2", "n1"): nbytes})
        assert {pair.source for pair in c0.plan("policy").pairs} == {"source rank 0", "source rank 1"}
