"""Bytes that several nodes or ranks need cross each cable once: nodes relay them, and every rank gets all of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest
import torch

import refitd
from refitd import MXFP8Buffer
from refitd.testing import Daemon, Engine, RunningSwap, eventually, stopped
from tests.support import shards
from tests.support.controls import controlled, nothing
from tests.support.fleet import go_live
from tests.support.names import policy

Nodes = tuple[Daemon, ...]
Tensors = dict[str, torch.Tensor]
MODEL: shards.Model = {"wide": ((700, 960), 0), "tall": ((960, 700), 0), "norm": ((960,), 0)}
ROWS = 2  # ranks of one replica, which have common rows
CONFIG = "[deadlines]\nplan_s = 60.0\nstage_s = 20.0\ncommit_s = 10.0\n[transport]\nrelays = {}\n"


def made(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, (shape, _) in MODEL.items()}


def part(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    return tensor.chunk(ROWS)[rank].contiguous()


class Fleet:
    """A float32 trainer on node n0, and on each other node a bfloat16 replica of two ranks."""

    def __init__(self, nodes: Callable[..., Nodes], count: int = 4, *, relays: bool = True) -> None:
        self.nodes = nodes(count, CONFIG.format(str(relays).lower()), (2,) * count)
        self._exits = ExitStack()
        self.clients = [self._exits.enter_context(node.connect()) for node in self.nodes]
        self.trainer = self.clients[0]
        self.held = made(0)
        self.source = self.trainer.register_source(policy(), self.held)
        self.targets: list[refitd.Target] = []
        self.live: list[tuple[int, Tensors]] = []

    def add(self, node: int, replica: str, *, flips: bool = False, in_place: bool = False) -> None:
        """Register a replica on a node."""
        client = self.clients[node]
        if in_place:
            client.control_replica(policy(), replica, pause=nothing, commit=nothing)
        for rank in range(ROWS):
            mine = {name: part(tensor, rank).to(torch.bfloat16) for name, tensor in self.held.items()}
            described = shards.describe(mine, rank, ROWS, MODEL)
            live = {name: torch.zeros_like(tensor) for name, tensor in mine.items()}
            if flips:
                live = client.allocate({name: (t.shape, t.dtype) for name, t in mine.items()})
            self.targets.append(
                client.register_target(
                    policy(),
                    live,
                    replica=replica,
                    rank=rank,
                    world_size=ROWS,
                    metadata=described,
                    cast="float32",
                    mode="in-place" if in_place else "shadow",
                )
            )
            self.live.append((rank, live))

    def change(self, share: float, seed: int) -> None:
        random = np.random.default_rng(seed)
        for tensor in self.held.values():
            which = torch.from_numpy(random.random(tuple(tensor.shape)) < share)
            tensor[which] += 1.0

    def swap(self, version: int) -> refitd.SwapReport:
        return go_live(self.trainer, self.source, version, *self.targets)

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
    plan = fleet.trainer.plan(policy())
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
    assert fleet.trainer.verify(policy()).outcome == "proven"
    fleet.close()


@pytest.mark.slow
def test_a_rank_that_gets_versions_whole_costs_only_its_own_cable(nodes: Callable[..., Nodes]) -> None:
    """A replica written in place has no base for a delta, so it is the last of the path."""
    fleet = Fleet(nodes)
    fleet.held = {name: tensor.to(torch.bfloat16) for name, tensor in fleet.held.items()}
    fleet.source = fleet.clients[0].register_source("plain", fleet.held)
    live = [fleet.clients[node].allocate({n: (t.shape, t.dtype) for n, t in fleet.held.items()}) for node in (1, 2, 3)]
    targets = [
        controlled(fleet.clients[1], "plain", live[0], replica="r1", mode="in-place"),
        *(fleet.clients[node].register_target("plain", live[node - 1], replica=f"r{node}") for node in (2, 3)),
    ]
    for version in (1, 2):
        fleet.change(0.01, version)
        fleet.source.publish(version)
        with Engine(*targets[1:]):
            crossing = fleet.trainer.swap("plain", version, timeout=60).crossing
        assert all(shards.equal(held, fleet.held) for held in live)
    assert crossing.delta_bytes * 3 == crossing.bytes * 2
    fleet.close()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2, 3])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_whoever_fails_on_the_path_is_named_and_the_next_swap_goes_on(
    nodes: Callable[..., Nodes], victim: int, how: signal.Signals
) -> None:
    fleet = Fleet(nodes)
    for node in (1, 2, 3):
        fleet.add(node, f"r{node}", flips=node == 2)
    fleet.swap(1)
    before = [(rank, {name: tensor.clone() for name, tensor in live.items()}) for rank, live in fleet.live]
    fleet.change(1.0, 1)
    fleet.source.publish(2)
    pids = [node.node_of(f"n{i}").workers[-1] for i, node in enumerate(fleet.nodes)]
    other = pids[victim - 1 if victim else 2]  # stopped, to keep the swap unfinished until the victim fails
    with Engine(*fleet.targets), stopped((other,)):
        swap = RunningSwap(fleet.nodes[0].connect(), policy(), 2, timeout=90)
        swap.wait_phase("stage")
        os.kill(pids[victim], how)
        if how == signal.SIGSTOP:
            os.kill(other, signal.SIGCONT)
        with pytest.raises(refitd.RefitFailed) as failed:
            swap.result(60)
    assert f"node n{victim}" in str(failed.value), failed.value
    for (_, was), (_, live) in zip(before, fleet.live, strict=True):
        assert shards.equal(was, live)
    fleet.swap(3)
    fleet.check()
    fleet.close()


@pytest.mark.slow
def test_a_node_that_leaves_or_sleeps_is_routed_around(nodes: Callable[..., Nodes]) -> None:
    fleet = Fleet(nodes)
    for node in (1, 2, 3):
        fleet.add(node, f"r{node}", flips=node == 1)
    fleet.swap(1)
    asleep, fleet.targets = fleet.targets[2:4], fleet.targets[:2] + fleet.targets[4:]
    live, fleet.live = fleet.live[2:4], fleet.live[:2] + fleet.live[4:]
    for target in asleep:
        target.suspend()
    fleet.change(0.1, 1)
    fleet.swap(2)
    fleet.check()
    for target in asleep:
        target.resume(kept=True)
    fleet.targets, fleet.live = fleet.targets + asleep, fleet.live + live
    fleet.change(0.1, 2)
    fleet.swap(3)
    fleet.check()
    fleet.nodes[2].kill()
    eventually(lambda: len(fleet.trainer.status().nodes) == 3, "n2 is away")
    fleet.targets, fleet.live = fleet.targets[:4], fleet.live[:4]
    fleet.change(0.1, 3)
    eventually(lambda: "n2" not in {m.node for m in fleet.trainer.status().models[0].targets}, "n2 is known to be away")
    fleet.swap(4)
    fleet.check()
    assert [path.nodes for path in fleet.trainer.plan(policy()).relays.paths] == [("n1", "n3")]
    fleet.close()


@pytest.mark.slow
def test_replicas_that_join_at_once_are_given_one_copy_over_each_cable(nodes: Callable[..., Nodes]) -> None:
    fleet = Fleet(nodes)
    fleet.add(0, "here")
    fleet.swap(1)
    fleet.source.close()
    for node in (1, 2, 3):
        fleet.add(node, f"r{node}", flips=node == 1)
    with Engine(*fleet.targets):
        eventually(lambda: all(target.version == 1 for target in fleet.targets), "all have joined")
    fleet.check()
    fleet.close()


@pytest.mark.slow
@pytest.mark.parametrize("relays", [True, False])
def test_all_ways_to_go_live_and_all_conversions_may_be_passed_on(nodes: Callable[..., Nodes], relays: bool) -> None:
    fleet = Fleet(nodes, relays=relays)
    fleet.add(1, "r1", flips=True, in_place=True)
    fleet.add(2, "r2", flips=True)
    fleet.add(3, "r3")
    buffers = []
    for node in (1, 2, 3):
        buffer = MXFP8Buffer.empty(MODEL["wide"][0])
        buffers.append(buffer)
        fleet.targets.append(
            fleet.clients[node].register_target(policy(), {"wide": buffer}, replica=f"q{node}", cast="float32")
        )
    for version in (1, 2, 3):
        fleet.change(0.02, version)
        fleet.swap(version)
        fleet.check()
        first, *others = ((b.data, b.scale) for b in buffers)
        for data, scale in others:
            assert torch.equal(data.view(torch.uint8), first[0].view(torch.uint8))
            assert torch.equal(scale.view(torch.uint8), first[1].view(torch.uint8))
    assert bool(fleet.trainer.plan(policy()).relays.paths) == relays
    assert fleet.trainer.verify(policy()).outcome == "proven"
    fleet.close()


@pytest.mark.slow
@pytest.mark.parametrize("flipping", [(1, 2, 3), (2, 3), (1, 3)])
def test_a_delta_altered_on_one_cable_costs_no_rank_of_the_path_its_deltas(
    nodes: Callable[..., Nodes], meddle: Callable[[str], None], flipping: tuple[int, ...]
) -> None:
    fleet = Fleet(nodes)
    for node in (1, 2, 3):
        fleet.add(node, f"r{node}", flips=node in flipping)
    for version in (1, 2):
        fleet.swap(version)
        fleet.change(0.01, version)
    assert fleet.trainer.plan(policy()).relays.paths
    meddle("delta n1")
    with pytest.raises(refitd.SwapFailed, match="differ from the bytes"):
        fleet.swap(3)
    meddle("")
    for node in flipping:
        eventually(lambda node=node: fleet.nodes[node].log().count("event=delta-wrong") >= ROWS, "bases are compared")  # type: ignore[misc]
    fleet.swap(4)  # a full version for copying replicas, and for the replicas behind them
    fleet.check()
    fleet.change(0.01, 4)
    crossing = fleet.swap(5).crossing
    fleet.check()
    assert crossing.delta_bytes == crossing.bytes and crossing.crossed_bytes < 0.03 * crossing.bytes
    assert not any("event=base-wrong" in node.log() for node in fleet.nodes)
    fleet.close()


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [1, 2])
def test_a_rank_whose_base_is_wrong_gets_full_versions_last_on_the_path(
    nodes: Callable[..., Nodes], wrong: int
) -> None:
    fleet = Fleet(nodes)
    for node in (1, 2, 3):
        fleet.add(node, f"r{node}", flips=True)
    for version in (1, 2):
        fleet.swap(version)
        fleet.change(0.01, version)
    log = fleet.nodes[wrong].log
    _, live = fleet.live[(wrong - 1) * ROWS]
    version = 2
    for times in (1, 2):
        version += 1
        eventually(lambda: fleet.trainer.verify(policy()).outcome == "proven", "the base has digests")
        live["norm"].view(torch.int16)[100] ^= 1
        with pytest.raises(refitd.SwapFailed, match="differ from the bytes"):
            fleet.swap(version)
        eventually(lambda times=times: log().count("event=base-wrong") == times, "the base is compared")  # type: ignore[misc]
        fleet.clients[wrong].status()  # the coordinator has handled this node's earlier messages
        for _ in range(times):  # the number of full versions doubles with each wrong base
            with Engine(*fleet.targets):
                crossing = fleet.trainer.swap(policy(), version, timeout=60).crossing
            fleet.check()
            assert 0.6 < crossing.delta_bytes / crossing.bytes < 0.9, "only those of one rank are full"
            fleet.change(0.01, version)
            version += 1
            fleet.source.publish(version)
        with Engine(*fleet.targets):
            crossing = fleet.trainer.swap(policy(), version, timeout=60).crossing
        fleet.check()
        assert crossing.delta_bytes == crossing.bytes
        fleet.change(0.01, version)
    fleet.close()


def test_replicas_of_one_node_get_what_crosses_once(nodes: Callable[..., Nodes]) -> None:
    n0, n1 = nodes(2, workers=(2, 2))
    with n0.connect() as c0, n1.connect() as c1:
        full = shards.whole(0)
        source = c0.register_source(policy(), full)
        targets, held = [], []
        for replica in ("a", "b", "c"):
            for rank in range(2):
                mine = shards.cut(shards.whole(0), rank, 2)
                described = shards.describe(mine, rank, 2)
                live = shards.zeros_like(mine)
                if replica == "b":  # this replica flips, so peers copy from an arena that is not live
                    live = c1.allocate({name: (t.shape, t.dtype) for name, t in mine.items()})
                target = c1.register_target(
                    policy(), live, replica=replica, rank=rank, world_size=2, metadata=described
                )
                assert target.flips == (replica == "b")
                targets.append(target)
                held.append((rank, live))
        narrow = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
        targets.append(c1.register_target(policy(), narrow, replica="whole"))
        with Engine(*targets):
            for version in (1, 2, 3):
                for name, tensor in shards.whole(version).items():
                    full[name].copy_(tensor)
                report = go_live(c0, source, version)
                whole = sum(t.numel() * t.element_size() for t in full.values())
                split = sum(t.numel() * t.element_size() for _, live in held[:2] for t in live.values())
                assert report.bytes == 3 * split + whole
                for rank, live in held:
                    assert shards.equal(live, shards.cut(full, rank, 2)), (version, rank)
                assert shards.equal(narrow, full), version
        (link,) = c0.status().links
        assert link.bytes == whole, "what replicas need, however they are cut, has crossed once"
        (planned,) = c0.plan(policy()).links
        assert (planned.source, planned.target, planned.bytes) == ("n0", "n1", link.bytes)
        assert planned.needed_bytes == 3 * split + whole
        assert c0.verify(policy()).outcome == "proven"


def test_ranks_of_one_node_that_hold_the_same_send_one_copy_between_them(nodes: Callable[..., Nodes]) -> None:
    """Two trainer ranks each have the full model; replicas of two other nodes, cut differently, need all of it."""
    model: shards.Model = {f"t{i}": ((512, 1024), 0) for i in range(4)}
    n0, n1, n2 = nodes(3)
    with n0.connect() as c0, n1.connect() as c1, n2.connect() as c2:
        held = [{name: torch.zeros(shape) for name, (shape, _) in model.items()} for _ in range(2)]
        sources = [c0.register_source(policy(), full, rank=rank, world_size=2) for rank, full in enumerate(held)]
        whole = shards.zeros_like(held[0])
        halves = [shards.zeros_like(shards.cut(held[0], rank, 2, model)) for rank in range(2)]
        targets = [c1.register_target(policy(), whole, replica="whole")]
        for rank, half in enumerate(halves):
            described = shards.describe(half, rank, 2, model)
            targets.append(
                c2.register_target(policy(), half, replica="halves", rank=rank, world_size=2, metadata=described)
            )
        with Engine(*targets):
            for version in (1, 2):
                for full, source in zip(held, sources, strict=True):
                    for number, tensor in enumerate(full.values()):
                        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + version * 7 + number)
                    source.publish(version)
                assert c0.swap(policy(), version, timeout=60).outcome == "committed"
                assert shards.equal(whole, held[0])
                assert all(shards.equal(half, shards.cut(held[0], rank, 2, model)) for rank, half in enumerate(halves))
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in whole.values())
        planned = {(link.source, link.target): link.bytes for link in c0.plan(policy()).links if link.bytes}
        assert planned in ({("n0", "n1"): nbytes, ("n1", "n2"): nbytes}, {("n0", "n2"): nbytes, ("n2", "n1"): nbytes})
        assert {pair.source for pair in c0.plan(policy()).pairs} == {"source rank 0", "source rank 1"}
