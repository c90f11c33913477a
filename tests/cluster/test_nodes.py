"""Several daemons and one coordinator: bytes cross between nodes, and deaths on the way are named."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import refitd
from refitd.testing import Daemon, Engine, ProcessFailed, RunningSwap, eventually, stopped
from tests.support import shards
from tests.support.fleet import CutReplica, CutSource, FilledFleet, go_live
from tests.support.names import policy
from tests.support.programs import Program, python

Nodes = tuple[Daemon, ...]
DEADLINES = "[deadlines]\nplan_s = 60.0\nstage_s = 20.0\ncommit_s = 10.0\n"


def big(seed: int) -> dict[str, torch.Tensor]:
    """Return tensors of more than one message for each lane, and some small ones."""
    generator = torch.Generator().manual_seed(seed)
    large = torch.randn(3000, 4001, generator=generator).to(torch.bfloat16)
    return {"large": large, "odd": torch.randn(7, 13, generator=generator), "one": torch.tensor([seed])}


@pytest.mark.slow
def test_a_checkpoint_that_two_nodes_publish_is_saved_on_one(nodes: Callable[..., Nodes], tmp_path: Path) -> None:
    n0, n1 = nodes(2)
    given = tmp_path / "given"
    given.mkdir()
    save_file(big(1), given / "model.safetensors", metadata={"format": "pt"})

    def part(rank: int) -> int:
        with (n0, n1)[rank].connect() as client:
            return refitd.publish_checkpoint(client, policy(), given, rank=rank, world_size=2).version

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(part, range(2))) == [1, 1]
    with n0.connect() as c0, n1.connect() as c1:
        with Engine(c1.register_target(policy(), {n: torch.zeros_like(t) for n, t in big(1).items()}, replica="a")):
            c0.swap(policy(), 1, timeout=90)
        assert refitd.save_checkpoint(c0, policy(), tmp_path / "out").version == 1  # half of the bytes come from n1
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (given / "model.safetensors").read_bytes()


def test_two_replicas_on_two_nodes_get_what_one_trainer_has_on_both(nodes: Callable[..., Nodes]) -> None:
    """Rows within a node and between nodes in one plan; ranks of one replica on different nodes."""
    n0, n1 = nodes(2, workers=(2, 2))
    with n0.connect() as c0, n1.connect() as c1:
        sources = CutSource([c0, c1], 2, shards.whole(0))
        replicas = [CutReplica([c0, c1], "fine", 4), CutReplica([c0, c1], "whole")]
        with Engine(*(target for replica in replicas for target in replica.targets)):
            for version in range(1, 4):
                sources.publish(full := shards.whole(version), version)
                report = c0.swap(policy(), version, timeout=90)
                assert report.digests == report.copies > 0
                assert all(replica.holds(full) for replica in replicas)
        links = {(link.source, link.target): link for link in c0.status().links}
        assert set(links) == {("n0", "n1"), ("n1", "n0")}
        assert all(link.service == "gloo" and link.state == "up" and link.lanes == 2 for link in links.values())
        assert all(link.bytes > 0 and link.seconds > 0 for link in links.values())


SLOW = pytest.mark.slow


@pytest.mark.parametrize("way", [pytest.param("snapshot", marks=SLOW), pytest.param("arena", marks=SLOW), "private"])
def test_a_source_sends_from_where_its_tensors_live(nodes: Callable[..., Nodes], way: str) -> None:
    n0, n1 = nodes(2, workers=(2, 1))
    with n0.connect() as trainer, n1.connect() as engine:
        full = big(1)
        live = full
        if way == "arena":
            live = trainer.allocate({name: (tuple(t.shape), t.dtype) for name, t in full.items()})
            for name, tensor in live.items():
                tensor.copy_(full[name])
        source = trainer.register_source(policy(), live)
        mine = {name: torch.zeros_like(t) for name, t in full.items()}
        mine["large"] = torch.zeros(4001, 3000, dtype=torch.bfloat16).t()
        target = engine.register_target(policy(), mine, replica="far")
        with Engine(target):
            if way == "snapshot":
                report = go_live(trainer, source, 1)
            else:
                with source.lend(1):
                    report = trainer.swap(policy(), 1, timeout=90)
        assert report.outcome == "committed"
        assert all(torch.equal(mine[name], full[name]) for name in full)
    del live


def test_fills_and_casts_happen_across_nodes_too(nodes: Callable[..., Nodes]) -> None:
    n0, n1 = nodes(2)
    with n0.connect() as trainer, n1.connect() as engine:
        full = {"w": torch.randn(40, 8)}
        source = trainer.register_source(policy(), full)
        mine = {"w": torch.ones(40, 8, dtype=torch.bfloat16)}
        described = [shards.meta("w", mine["w"], resolved_name="w", cast_from="float32")]
        target = engine.register_target(policy(), mine, replica="far", metadata=described)
        go_live(trainer, source, 1, target)
        assert torch.equal(mine["w"], full["w"].to(torch.bfloat16))


class TwoNodes(FilledFleet):
    """A trainer on n0 and an engine on n1."""

    def __init__(self, found: Nodes, elements: int = 3_000_000) -> None:
        self.n0, self.n1 = found
        weights = {"w": torch.zeros(elements // 1000, 1000, dtype=torch.bfloat16)}
        super().__init__(self.n0.connect("trainer"), weights)
        self.engine = self.n1.connect("engine")
        self.target = self.add(self.engine, shards.zeros_like(weights), "far")


@pytest.fixture
def two(nodes: Callable[..., Nodes]):
    fleet = TwoNodes(nodes(2))
    yield fleet
    fleet.close()


@pytest.mark.slow
def test_a_stopped_worker_is_named_within_the_deadline_and_the_next_swap_works(nodes: Callable[..., Nodes]) -> None:
    two = TwoNodes(nodes(2, "[deadlines]\nplan_s = 60.0\nstage_s = 5.0\n"))
    two.swap(1)
    two.publish(2)
    victims = two.n1.node_of("n1").workers
    with stopped(victims):
        swap = RunningSwap(two.n0.connect(), policy(), 2, timeout=90)
        with pytest.raises(refitd.RefitFailed) as failed:
            swap.result()
        assert "on node n1" in str(failed.value)
        assert failed.value.report is not None and failed.value.report.phase == "stage"
        assert two.holds(1)
    two.swap(3)
    two.close()


@pytest.mark.parametrize("side", [pytest.param("source", marks=pytest.mark.slow), "target"])
def test_a_killed_worker_is_named_and_the_next_swap_works(two: TwoNodes, side: str) -> None:
    two.swap(1)
    daemon, name = (two.n0, "n0") if side == "source" else (two.n1, "n1")
    two.publish(2)
    victim = daemon.node_of(name).workers[-1]
    other = (two.n1 if side == "source" else two.n0).node_of("n1" if side == "source" else "n0").workers[0]
    with stopped((other,)):  # the swap must still be staging when its peer dies
        swap = RunningSwap(two.n0.connect(), policy(), 2, timeout=90)
        swap.wait_phase("stage")
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(refitd.RefitFailed) as failed:
            swap.result()
    assert f"on node {name}" in str(failed.value)
    assert two.holds(1)
    two.swap(3)


@pytest.mark.slow
def test_a_worker_that_does_not_come_to_the_epoch_is_named_and_the_next_swap_works(
    nodes: Callable[..., Nodes],
) -> None:
    fleet = TwoNodes(nodes(2, "[deadlines]\nplan_s = 8.0\n"), elements=100_000)
    fleet.publish(1)
    with stopped(fleet.n1.node_of("n1").workers[:1]), pytest.raises(refitd.RefitFailed) as failed:
        fleet.trainer.swap(policy(), 1, timeout=90)
    assert "worker 0 on node n1" in str(failed.value)
    assert failed.value.report is not None and failed.value.report.phase == "plan"
    fleet.swap(2)
    fleet.close()


@pytest.mark.parametrize(
    ("service", "said"),
    [("shm", "does not cross nodes"), ("carrier-pigeon", "unknown copy service 'carrier-pigeon'"), ("nvshmem", "pip")]
    + [(name, "services between nodes that can run here: gloo") for name in ("nccl", "carrier-pigeon")],
)
def test_a_service_that_cannot_run_is_refused_at_start(
    start_daemon: Callable[..., Daemon], service: str, said: str
) -> None:
    with pytest.raises(ProcessFailed, match=said) as failure:
        start_daemon(f'[transport]\nservice = "{service}"\n')
    assert "it has left" not in str(failure.value)


@pytest.mark.slow
def test_a_worker_that_dies_between_swaps_is_replaced_in_the_next_epoch(two: TwoNodes) -> None:
    two.swap(1)
    victim = two.n1.node_of("n1").workers[0]
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: all(link.state == "down" for link in two.n0.status().links), "the link is down")
    two.swap(2)


def test_a_node_that_dies_while_staging_aborts_and_its_successor_takes_over(
    two: TwoNodes, start_daemon: Callable[..., Daemon]
) -> None:
    two.swap(1)
    two.publish(2)
    with stopped(two.n0.node_of("n0").workers):
        swap = RunningSwap(two.n0.connect(), policy(), 2, timeout=90)
        swap.wait_phase("stage")
        two.n1.kill()
        with pytest.raises(refitd.RefitFailed) as failed:
            swap.result()
    assert "n1" in str(failed.value) or "replica 'far' rank 0" in str(failed.value)
    again = start_daemon(DEADLINES, name="n1", joins=two.n0.endpoint)
    two.engine.close()
    with again.connect("engine") as engine:
        eventually(lambda: len(two.n0.status().nodes) == 2, "the node is back")
        mine = {"w": torch.zeros_like(two.tensors["w"])}

        target = engine.register_target(policy(), mine, replica="far")
        with Engine(target):
            two.trainer.swap(policy(), 2, timeout=90)
        assert torch.equal(mine["w"], two.tensors["w"])


ENGINE = """
from tests.support.names import policy
import sys, time, torch, refitd
client = refitd.connect(sys.argv[1])
mine = {"w": torch.zeros(1000, 1000, dtype=torch.bfloat16)}
target = client.register_target(policy(), mine, replica="far")
print("ready", flush=True)
committing = sys.argv[2:] == ["commits"]
while True:
    if committing:
        target.poll()
    elif target.pending is not None:
        print("pending", flush=True)
        time.sleep(600)
    time.sleep(0.001)
"""


def far_engine(daemon: Daemon, *words: str) -> Program:
    """An engine of replica "far" in a separate process; without "commits" it stops at a decided version."""
    child = Program(python(daemon, ENGINE, *words))
    assert child.line() == "ready"
    return child


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["engine", "daemon"])
def test_a_peer_that_dies_after_the_decision_is_named_and_the_others_serve_the_new_version(
    nodes: Callable[..., Nodes], start_daemon: Callable[..., Daemon], victim: str
) -> None:
    n0, n1 = nodes(2)
    full = {"w": torch.ones(1000, 1000, dtype=torch.bfloat16)}
    near = shards.zeros_like(full)
    with n0.connect("trainer") as trainer, n0.connect("near") as engine, far_engine(n1) as far:
        source = trainer.register_source(policy(), full)
        target = engine.register_target(policy(), near, replica="near")
        source.publish(1)
        with Engine(target):
            swap = RunningSwap(n0.connect(), policy(), 1, timeout=90)
            assert far.line() == "pending"  # decided, and not committed
            (far if victim == "engine" else n1).kill()
            with pytest.raises(refitd.RefitFailed) as failed:
                swap.result()
        report = failed.value.report
        assert report is not None and (report.outcome, report.phase) == ("incomplete", "commit")
        assert "replica 'far' rank 0" in failed.value.causes and "replica 'far' rank 0" in str(failed.value)
        by_name = {member.replica: member for member in report.members}
        assert by_name["near"].state == "committed" and by_name["far"].state != "committed"
        assert target.version == 1 and torch.equal(near["w"], full["w"])
        if victim == "daemon":
            n1 = start_daemon(DEADLINES, name="n1", joins=n0.endpoint)
        eventually(lambda: len(n0.status().nodes) == 2, "both nodes are there")
        with far_engine(n1, "commits"):
            full["w"].fill_(2)
            report = go_live(trainer, source, 2, target)
            assert report.outcome == "committed"
            assert {(member.replica, member.state, member.version) for member in report.members} == {
                ("near", "committed", 2),
                ("far", "committed", 2),
            }
        assert torch.equal(near["w"], full["w"])
