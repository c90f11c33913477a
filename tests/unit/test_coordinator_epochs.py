"""Swaps between nodes in the coordinator: epochs and their messages."""

from __future__ import annotations

import pytest

from refitd import ParameterMetadata
from refitd.config import Config, TransportConfig
from refitd.coordinator import epochs
from refitd.daemon.plans import KeptParts, Missing
from refitd.protocol import cluster, local
from refitd.protocol.base import digest_of, pack
from refitd.protocol.reports import LaneStatus
from refitd.protocol.shards import shard_of
from tests.support.coordinator_harness import Harness, kinds, reports


def two_nodes() -> tuple[Harness, cluster.LoadPlan]:
    """A source on n0, a target on n1, a swap asked for; the plan as n1 gets it."""
    h = Harness().join("n0", workers=(1, 2, 3))
    h.join("n1", pid=11, workers=(4, 5))
    h.add("src")
    h.add("a", node="n1")
    h.say("n0", local.Publish(member="src", version=1))
    h.say("n0", local.StartSwap("m"), request=2)
    loads = {node: message for node, _, message in h.sent if isinstance(message, cluster.LoadPlan)}
    assert set(loads) == {"n0", "n1"}
    assert loads["n0"].epoch == loads["n1"].epoch
    return h, loads["n1"]


def loaded(h: Harness, plan: cluster.LoadPlan) -> list[object]:
    assert plan.epoch is not None
    h.say("n0", cluster.PlanLoaded(plan=plan.plan, epoch=plan.epoch.id))
    return h.say("n1", cluster.PlanLoaded(plan=plan.plan, epoch=plan.epoch.id))


def test_rows_between_nodes_make_an_epoch_of_as_many_lanes_as_the_smaller_node_has_workers() -> None:
    h, plan = two_nodes()
    assert plan.epoch is not None
    assert (h.shares.open(plan).nodes, plan.epoch.lanes, plan.epoch.service) == (("n0", "n1"), 2, "gloo")
    found = KeptParts().tables(plan)
    assert not isinstance(found, Missing) and (len(found.table), len(found.crossing)) == (0, 1)
    assert found.position == {0: 0, 1: 1}
    assert kinds(loaded(h, plan)) == ["Stage", "Stage"]


def test_a_node_is_told_where_the_workers_of_its_peers_listen_and_of_no_other_node() -> None:
    """A source on n0 and n2, targets on n1 and n3; n9 has no member."""
    h = Harness()
    for number in (0, 1, 2, 3, 9):
        lanes = tuple(LaneStatus(port=7000 + 10 * number + lane) for lane in range(2))
        h.join(f"n{number}", pid=10 + number, workers=(1, 2), lanes=lanes, address=f"10.0.0.{number}")
    for rank in (0, 1):
        shard = shard_of([ParameterMetadata(f"w{rank}", (4, 4), "bfloat16", 2, resolved_name=f"w{rank}")])
        for member, node, replica in ((f"src{rank}", f"n{2 * rank}", ""), (f"a{rank}", f"n{2 * rank + 1}", "a")):
            h.say(node, cluster.DescribeShard(digest=digest_of(shard), packed=pack(shard)))
            h.add(member, node, digest=digest_of(shard), rank=rank, world_size=2, replica=replica)
        h.say(f"n{2 * rank}", local.Publish(member=f"src{rank}", version=1))
    h.say("n0", local.StartSwap("m"), request=2)
    loads = {node: message for node, _, message in h.sent if isinstance(message, cluster.LoadPlan)}
    assert set(loads) == {"n0", "n1", "n2", "n3"} and len(loads) == len(h.sent) - 1, "one message to each node"
    for node, pair in (("n0", "n0 n1"), ("n1", "n0 n1"), ("n2", "n2 n3"), ("n3", "n2 n3")):
        found = KeptParts().tables(loads[node])
        assert not isinstance(found, Missing) and found.epoch is not None
        assert found.epoch.nodes == tuple(pair.split()) and found.epoch.peers == 1
        for name, doors in zip(found.epoch.nodes, found.epoch.doors, strict=True):
            assert doors == tuple(f"10.0.0.{name[1:]}:{7000 + 10 * int(name[1:]) + lane}" for lane in range(2))


def test_words_that_others_cross_on_their_way_are_not_refused() -> None:
    h, plan = two_nodes()
    assert plan.epoch is not None
    stage = next(m for m in loaded(h, plan) if isinstance(m, cluster.Stage))
    loaded(h, plan)  # two answers to two swaps with one plan
    for node in ("n0", "n1"):
        h.say(node, cluster.StageDone(swap=stage.swap, copies=1, bytes=32, seconds=0.1))
    h.say("n0", local.Withdraw(member="src", version=1))
    h.say("n0", cluster.StageDone(swap=stage.swap, where="src", reason="version 1 was taken back"))
    h.say("n1", cluster.PlanLoaded(plan=plan.plan, epoch=plan.epoch.id, where="worker 1", reason="was killed"))
    h.say("n0", local.Evict(model="m", replica="a"), request=9)
    h.say("n1", local.CommitDone(swap=stage.swap, member="a", paused_s=0.1))
    assert not h.illegal
    assert h.journal[stage.swap].state == "incomplete"


def test_a_lost_epoch_aborts_the_swap_that_uses_it_and_the_next_gets_a_new_one() -> None:
    h, plan = two_nodes()
    loaded(h, plan)
    assert plan.epoch is not None
    lost = cluster.PlanLoaded(plan=plan.plan, epoch=plan.epoch.id, where="worker 1 on node n1", reason="was killed")
    ended = h.say("n1", lost)
    (report,) = reports(ended)
    assert report.reason == "worker 1 on node n1: was killed" and report.phase == "stage"
    assert kinds(ended).count("Abort") == 2 and kinds(ended).count("DropPlan") == 2
    again = [m for m in h.say("n0", local.StartSwap("m"), request=3) if isinstance(m, cluster.LoadPlan)]
    assert len(again) == 2
    assert again[0].epoch is not None and again[0].epoch.id != plan.epoch.id
    # late messages of the old epoch are ignored
    assert kinds(h.say("n0", lost)) == []
    assert kinds(h.say("n0", cluster.PlanLoaded(plan=plan.plan, epoch=plan.epoch.id))) == []


def test_an_aborted_swap_ends_its_epoch_and_the_next_gets_a_new_one() -> None:
    """Workers that were still copying are replaced, and a worker is in an epoch only once."""
    h, plan = two_nodes()
    stage = next(m for m in loaded(h, plan) if isinstance(m, cluster.Stage))
    ended = h.say("n1", cluster.StageDone(swap=stage.swap, where="worker 4", reason="was killed"))
    assert kinds(ended).count("DropPlan") == 2
    again = [m for m in h.say("n0", local.StartSwap("m"), request=3) if isinstance(m, cluster.LoadPlan)]
    assert plan.epoch is not None and again[0].epoch is not None and again[0].epoch.id != plan.epoch.id


def test_a_node_that_cannot_use_the_plan_ends_the_swap_with_its_words() -> None:
    h, plan = two_nodes()
    assert plan.epoch is not None
    refused = cluster.PlanLoaded(plan=plan.plan, epoch=plan.epoch.id, where="worker 0 on node n1", reason="no route")
    (report,) = reports(h.say("n1", refused))
    assert (report.phase, report.reason) == ("plan", "worker 0 on node n1: no route")


@pytest.mark.parametrize("refuses", [False, True])
def test_a_node_that_only_copies_between_its_own_ranks_needs_no_epoch(refuses: bool) -> None:
    """Pipeline stages: stage 0 crosses from n0 to n1, stage 1 stays on n2."""
    h = Harness()
    for number in range(3):
        h.join(f"n{number}", pid=10 + number)
    for stage, (source_node, target_node) in enumerate((("n0", "n1"), ("n2", "n2"))):
        shard = shard_of([ParameterMetadata(f"w{stage}", (4, 4), "bfloat16", 2, resolved_name=f"w{stage}")])
        for member, node, replica in ((f"src{stage}", source_node, ""), (f"a{stage}", target_node, "a")):
            h.say(node, cluster.DescribeShard(digest=digest_of(shard), packed=pack(shard)))
            h.add(member, node, digest=digest_of(shard), rank=stage, world_size=2, replica=replica)
        h.say(source_node, local.Publish(member=f"src{stage}", version=1))
    h.say("n0", local.StartSwap("m"), request=2)
    loads = {node: message for node, _, message in h.sent if isinstance(message, cluster.LoadPlan)}
    assert {node: load.epoch is not None for node, load in loads.items()} == {"n0": True, "n1": True, "n2": False}
    for node in ("n0", "n1"):
        epoch = loads[node].epoch
        assert epoch is not None
        assert kinds(h.say(node, cluster.PlanLoaded(plan=loads[node].plan, epoch=epoch.id))) == []
    if refuses:
        refused = cluster.PlanLoaded(plan=loads["n2"].plan, epoch="", where="node n2", reason="no memory")
        (report,) = reports(h.say("n2", refused))
        assert (report.phase, report.reason) == ("plan", "node n2: no memory")
        return
    assert kinds(h.say("n2", cluster.PlanLoaded(plan=loads["n2"].plan))) == ["Stage"] * 3


def test_a_catch_up_that_gives_way_ends_once_its_epoch_is_formed() -> None:
    """A worker that is joining its peers cannot stop, so it would be missing in the requested swap."""
    h, plan = two_nodes()
    stage = next(m for m in loaded(h, plan) if isinstance(m, cluster.Stage))
    h.say("n0", cluster.StageDone(swap=stage.swap, copies=0, bytes=0, seconds=0.1))
    h.say("n1", cluster.StageDone(swap=stage.swap, copies=1, bytes=32, seconds=0.1))
    h.say("n1", local.CommitDone(swap=stage.swap, member="a", paused_s=0.0))
    h.join("n2", pid=12, workers=(6, 7))
    h.add("b", node="n2")
    (catch_up,) = {m.plan: m for _, _, m in h.sent if isinstance(m, cluster.LoadPlan)}.values()
    assert catch_up.epoch is not None and "n2" in h.shares.open(catch_up).nodes
    h.say("n0", local.Publish(member="src", version=2))
    assert h.say("n0", local.StartSwap("m"), request=9) == []
    *first, last = h.shares.open(catch_up).nodes
    for node in first:
        assert h.say(node, cluster.PlanLoaded(plan=catch_up.plan, epoch=catch_up.epoch.id)) == []
    ended = h.say(last, cluster.PlanLoaded(plan=catch_up.plan, epoch=catch_up.epoch.id))
    assert "Abort" in kinds(ended) and "Stage" not in kinds(ended)
    assert {node for node, _, m in h.sent if isinstance(m, cluster.LoadPlan)} == {"n0", "n1", "n2"}


def test_an_aborted_swap_ends_the_epoch_of_the_plan_that_is_kept_for_the_next_one() -> None:
    """Workers that were still copying are replaced, because they are in the epochs of both plans."""
    h = Harness()
    for number, node in enumerate(("n0", "n1", "n2")):
        h.join(node, pid=10 + number, workers=(number,))
    h.add("src")
    h.add("a", node="n1")
    h.add("b", node="n2")

    def load() -> tuple[cluster.LoadPlan, str]:
        """Let all nodes load the last plan; return it and the swap that stages next."""
        loads = {node: message for node, _, message in h.sent if isinstance(message, cluster.LoadPlan)}
        staging: list[object] = []
        for node, plan in loads.items():
            assert plan.epoch is not None
            staging = h.say(node, cluster.PlanLoaded(plan=plan.plan, epoch=plan.epoch.id))
        return plan, next(m.swap for m in staging if isinstance(m, cluster.Stage))

    def swap(version: int, **at: str) -> cluster.LoadPlan:
        h.say("n0", local.Publish(member="src", version=version))
        h.say("n0", local.StartSwap("m"), request=9)
        plan, running = load()
        for node in ("n0", *at.values()):
            h.say(node, cluster.StageDone(swap=running, copies=1, bytes=32, seconds=0.1))
        for member, node in at.items():
            h.say(node, local.CommitDone(swap=running, member=member, paused_s=0.0))
        return plan

    whole = swap(1, a="n1", b="n2")
    h.say("n2", local.Suspend(member="b", suspended=True), request=5)
    swap(2, a="n1")
    h.say("n2", local.Suspend(member="b", suspended=False), request=5)
    catch_up, _ = load()
    h.say("n0", local.Publish(member="src", version=3))
    asked = h.say("n0", local.StartSwap("m"), request=9)
    assert "Abort" in kinds(asked) and "Stage" not in kinds(asked)
    (again,) = {m.plan: m for m in asked if isinstance(m, cluster.LoadPlan)}.values()
    assert again.plan == whole.plan != catch_up.plan
    assert again.epoch is not None and whole.epoch is not None and again.epoch.id != whole.epoch.id


GPUS = ("GPU-a", "GPU-b")


def planned(service: str, on: tuple[str, str], able: tuple[str, str]) -> Harness:
    """A source on n0 and a target on n1, on these GPUs, of nodes with these services; a swap asked for."""
    h = Harness(Config(transport=TransportConfig(service=service)))
    for number, services in enumerate(able):
        h.join(f"n{number}", pid=10 + number, workers=(1, 2), services=tuple(services.split()))
    h.add("src", device=on[0])
    h.add("a", node="n1", device=on[1])
    h.say("n0", local.Publish(member="src", version=1))
    h.say("n0", local.StartSwap("m"), request=2)
    return h


@pytest.mark.parametrize(
    ("service", "on", "able", "formed"),
    [
        ("nccl", GPUS, ("", ""), ("gloo", "nccl")),
        ("nccl", ("GPU-a", ""), ("", ""), ("gloo", "")),
        ("gloo", GPUS, ("", ""), ("gloo", "")),
        # nodes with different services: the first that both have
        ("nccl", GPUS, ("gloo nccl nvshmem", "gloo nvshmem"), ("gloo", "nvshmem")),
        ("nvshmem", GPUS, ("gloo nccl", "gloo nccl nvshmem"), ("gloo", "nccl")),
        ("nccl", GPUS, ("gloo nccl", "gloo nvshmem"), ("gloo", "")),
        ("nixl", GPUS, ("gloo nixl", "gloo nixl"), ("nixl", "nixl")),
        ("nixl", GPUS, ("gloo nixl", "gloo"), ("gloo", "")),
    ],
)
def test_an_epoch_uses_a_service_that_all_its_nodes_have_and_gpus_form_a_group_of_their_own(
    service: str, on: tuple[str, str], able: tuple[str, str], formed: tuple[str, str]
) -> None:
    h = planned(service, on, able)
    plan = next(m for node, _, m in h.sent if node == "n1" and isinstance(m, cluster.LoadPlan))
    found = KeptParts().tables(plan)
    assert not isinstance(found, Missing) and found.epoch is not None
    epoch = found.epoch
    assert (epoch.service, epoch.gpu_service) == formed
    assert tuple(filter(None, epoch.gpus)) == ((("GPU-a",), ("GPU-b",)) if formed[1] else ())
    assert found.gpu == ({0: 0, 1: 1} if formed[1] else {})


def test_too_many_gpus_for_one_group_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "MAX_GROUP", 1)
    h = planned("nccl", GPUS, ("", ""))
    (report,) = reports([m for _, _, m in h.sent])
    assert "nccl needs one group of the 2 GPUs of nodes n0 to n1" in report.reason
    assert "a group may have 1, because each of its workers connects to all others" in report.reason


@pytest.mark.parametrize(
    ("service", "able", "tried"),
    [("nixl", ("gloo", "nixl"), "nixl, gloo"), ("nccl", ("nccl", "gloo nccl"), "gloo")],
)
def test_nodes_without_a_common_service_are_refused_by_name(service: str, able: tuple[str, str], tried: str) -> None:
    h = planned(service, GPUS, able)
    assert "LoadPlan" not in kinds([m for _, _, m in h.sent])
    (report,) = reports([m for _, _, m in h.sent])
    assert f"expected one of {tried}, found node n0: {able[0]}; node n1: {', '.join(able[1].split())}" in report.reason
