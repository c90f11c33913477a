"""The plans that a coordinator requests, caches and drops, and their recipients."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from refitd import ParameterMetadata
from refitd.clusters import ClusterSpeeds, NodeSpeed
from refitd.coordinator import actions as act
from refitd.coordinator.plans import make_plan
from refitd.protocol import cluster, local, shards
from refitd.protocol.base import digest_of, pack
from refitd.protocol.plan_reports import PlanReport
from refitd.protocol.reports import ReloadReport
from tests.support.coordinator_harness import Harness, commit, kinds, reports


def test_ranks_are_numbered_source_first_then_replica_by_replica() -> None:
    h = Harness().join()
    for rank in (1, 0):
        h.add(f"src{rank}", rank=rank, world_size=2)
    for replica, world in (("b", 1), ("a", 2)):
        for rank in range(world):
            h.add(f"{replica}{rank}", replica=replica, rank=rank, world_size=world)
    assert h.state.models["m"].membership.ranks() == {"src0": 0, "src1": 1, "a0": 2, "a1": 3, "b0": 4}


def test_a_member_whose_shard_is_not_known_is_asked_to_describe_it() -> None:
    h = Harness().join()
    (failure,) = h.add("src", digest="0" * 32)
    assert isinstance(failure, local.Failure) and failure.code == "unknown-shard"
    assert not h.state.models


def test_a_membership_that_comes_back_finds_its_plan_and_a_changed_one_never_does() -> None:
    h = Harness().ready()
    h.say("n0", local.GetPlan("m"), request=1)
    h.add("b")
    h.say("n0", local.GetPlan("m"), request=2)
    assert h.plans_made == 2
    h.say("n0", local.Deregister(member="b", reason="left"))
    (report,) = h.say("n0", local.GetPlan("m"), request=3)
    assert h.plans_made == 2 and report.bytes == 32
    # the same rank with another layout is another membership
    h.say("n0", local.Deregister(member="a", reason="left"))
    other = shards.shard_of(
        [ParameterMetadata("w", (4, 4), "bfloat16", 2, resolved_name="w", tiles=None, global_shape=(4, 4))]
    )
    h.say("n0", cluster.DescribeShard(digest=digest_of(other), packed=pack(other)))
    h.add("a", digest=digest_of(other))
    h.say("n0", local.GetPlan("m"), request=4)
    assert h.plans_made == 3


def test_plans_are_made_anew_when_the_speeds_of_cables_change() -> None:
    h = Harness().ready()
    slow = ClusterSpeeds(name="measured", nic_gb_s=1.0, nodes=(NodeSpeed("n9", send_gb_s=0.1),))
    h.say("n0", local.GetPlan("m"), request=1)
    h.feed(act.FilesRead(None, (b"n0", 7), slow))
    (told,) = [message for _, _, message in h.sent if isinstance(message, ReloadReport)]
    assert (told.cables, told.absent) == ("measured", ("n9",))
    (report,) = h.say("n0", local.GetPlan("m"), request=2)
    assert h.plans_made == 2 and report.speeds == "measured"
    h.feed(act.FilesRead(None, None, ClusterSpeeds(name="measured", nic_gb_s=1.0, nodes=slow.nodes)))
    h.say("n0", local.GetPlan("m"), request=3)
    assert h.plans_made == 2, "nothing has changed"
    h.feed(act.FilesRead(None))
    (report,) = h.say("n0", local.GetPlan("m"), request=4)
    assert h.plans_made == 2 and not report.speeds, "the plan for cables that are alike is kept"


def test_a_plan_that_was_asked_for_before_the_speeds_changed_is_used_once() -> None:
    h = Harness().ready()
    finish = planned_later(h, lambda: h.say("n0", local.GetPlan("m"), request=1))
    h.feed(act.FilesRead(None, None, ClusterSpeeds(name="measured", nic_gb_s=1.0)))
    assert any(isinstance(message, PlanReport) for message in finish())
    (report,) = h.say("n0", local.GetPlan("m"), request=2)
    assert report.speeds == "measured"


def planned_later(h: Harness, say: Callable[[], object]) -> Callable[[], list[object]]:
    """Call `say`, which requests a plan; return a function that plans, as the thread does, and returns the messages."""
    asked: list[act.MakePlan] = []
    handle = h.state.handle

    def hold(event: act.Event, now: float, wall: float = 0.0) -> list[act.Instruction]:
        found = handle(event, now)
        asked.extend(i for i in found if isinstance(i, act.MakePlan))
        return [i for i in found if not isinstance(i, act.MakePlan)]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(h.state, "handle", hold)
        say()
    (instruction,) = asked

    def make() -> list[object]:
        h.sent.clear()
        h.feed(act.Planned(instruction.ticket, make_plan(instruction.rosters)))
        return [message for _, _, message in h.sent]

    return make


def test_who_joins_while_the_plan_is_made_takes_no_part_and_is_brought_up_to_date_afterwards() -> None:
    h = Harness().ready()
    make = planned_later(h, lambda: h.say("n0", local.StartSwap("m"), request=9))
    h.add("b")
    (load,) = [m for m in make() if isinstance(m, cluster.LoadPlan)]
    assert set(h.shares.open(load).members) == {"src", "a"}
    (stage,) = [m for m in h.say("n0", cluster.PlanLoaded(plan=load.plan)) if isinstance(m, cluster.Stage)]
    ended = commit(h, stage.swap, "a")
    (report,) = reports(ended)
    assert report.outcome == "committed" and [m.replica for m in report.members] == ["a"]
    (load,) = [m for m in ended if isinstance(m, cluster.LoadPlan)]  # a catch-up has a separate plan
    assert set(h.shares.open(load).members) == {"src", "b"}


def test_who_leaves_while_the_plan_is_made_aborts_the_swap_by_name_and_the_plan_is_for_nobody() -> None:
    h = Harness().ready()
    make = planned_later(h, lambda: h.say("n0", local.StartSwap("m"), request=9))
    (report,) = reports(h.say("n0", local.Deregister(member="a", reason="its process has ended")))
    assert report.outcome == "aborted" and "replica 'a' rank 0" in report.reason
    assert kinds(make()) == []
    h.add("a")
    (load,) = [m for m in h.say("n0", local.StartSwap("m"), request=9) if isinstance(m, cluster.LoadPlan)]
    assert set(h.shares.open(load).members) == {"src", "a"}


def test_nodes_with_a_replica_that_is_written_in_place_pass_on_last_from_the_first_version_on() -> None:
    """Such a rank never has a base, so later ranks on its path would always get full versions."""
    h = Harness()
    large = shards.shard_of([ParameterMetadata("w", (1024, 1024), "bfloat16", 2, resolved_name="w")])
    for node, member in (("n0", "src"), ("n1", "a"), ("n2", "b")):
        h.join(node, pid=10 + int(node[1]), workers=(1,))
        h.say(node, cluster.DescribeShard(digest=digest_of(large), packed=pack(large)))
        h.add(member, node, digest=digest_of(large), in_place=member == "a", controlled=member == "a")
    h.say("n1", local.RegisterController("m", "a", pauses=True, member="c", pid=11), request=3)
    h.say("n0", local.Publish(member="src", version=1), request=4)
    h.say("n0", local.StartSwap("m"), request=9)
    plan = h.state.models["m"].plan
    assert plan is not None and [path.nodes for path in plan.routed.relays.paths] == [("n2", "n1")]


LARGE = shards.shard_of([ParameterMetadata("w", (1024, 1024), "bfloat16", 2, resolved_name="w")])


def relaying() -> tuple[Harness, Callable[[], list[tuple[str, ...]]]]:
    """Targets a and b on nodes n1 and n2 that serve a version; and a function that returns the paths to them."""
    h = Harness()
    for node, member in (("n0", "src"), ("n1", "a"), ("n2", "b")):
        h.join(node, pid=10 + int(node[1]), workers=(1,))
        h.say(node, cluster.DescribeShard(digest=digest_of(LARGE), packed=pack(LARGE)))
        h.add(member, node, digest=digest_of(LARGE))
    h.say("n0", local.Publish(member="src", version=1), request=4)
    h.say("n0", local.StartSwap("m"), request=9)
    loads = {to: message for to, _, message in h.sent if isinstance(message, cluster.LoadPlan)}
    for node, load in loads.items():
        h.say(node, cluster.PlanLoaded(plan=load.plan, epoch=load.epoch.id if load.epoch is not None else ""))
    swap = h.state.models["m"].running.swap.swap  # type: ignore[union-attr]
    for node in loads:
        h.say(node, cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    for node, member in (("n1", "a"), ("n2", "b")):
        h.say(node, local.CommitDone(swap, member, 0.0))

    def paths() -> list[tuple[str, ...]]:
        (report,) = h.say("n0", local.GetPlan("m"), request=5)
        return [path.nodes for path in report.relays.paths]  # type: ignore[attr-defined]

    return h, paths


def test_a_kept_plan_is_made_anew_if_a_node_that_passes_on_has_lost_its_base() -> None:
    h, paths = relaying()
    assert paths() == [("n1", "n2")]
    h.say("n1", local.Deregister(member="a", reason="its process has ended"))
    h.add("a", "n1", digest=digest_of(LARGE))
    assert paths() == [("n2", "n1")]
    made = h.plans_made
    assert paths() == [("n2", "n1")] and h.plans_made == made
    status = next(node.status for node in h.state.nodes.values() if node.status.node == "n2")
    moved = cluster.TargetMoved("b", "idle", (), lacks_base=True)  # now both lack it, in any order
    h.say("n2", cluster.NodeUpdate(status=status, moved=(moved,)))
    assert paths() == [("n2", "n1")] and h.plans_made == made


def test_a_node_whose_daemon_says_that_its_base_is_wrong_passes_on_last() -> None:
    h, paths = relaying()
    assert paths() == [("n1", "n2")]
    status = next(node.status for node in h.state.nodes.values() if node.status.node == "n1")
    made = []
    for version, lacks_base in ((2, True), (3, False)):
        moved = cluster.TargetMoved("a", "idle", (), lacks_base=lacks_base)
        h.say("n1", cluster.NodeUpdate(status=status, moved=(moved,)))
        h.say("n0", local.Publish(member="src", version=version), request=4)
        h.say("n0", local.StartSwap("m"), request=9)
        assert paths() == [("n2", "n1")]
        made.append(h.plans_made)
        h.say("n0", local.AbortSwap("m"), request=10)
    assert made == [2, 2], "a plan is kept while no node of its paths waits for one without a base"


def test_a_model_that_has_no_ranks_any_more_has_a_plan_that_moves_nothing() -> None:
    plan = make_plan([])
    assert plan.traffic.total_bytes == 0 and not plan.routed.links and not plan.senders
    assert not len(plan.routed.inner.uses)
