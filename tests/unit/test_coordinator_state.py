"""The coordinator without sockets: a fleet of made-up daemons talks to it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from refitd import ParameterMetadata
from refitd.config import Config, ModelConfig
from refitd.coordinator import actions as act
from refitd.coordinator.live_versions import SETTLE_S
from refitd.coordinator.plans import make_plan
from refitd.coordinator.records import Record
from refitd.coordinator.state import NODE_SILENCE_S
from refitd.errors import CommitError
from refitd.events import Busy, Tick
from refitd.protocol import cluster, local, shards
from refitd.protocol.codec import digest_of, pack
from refitd.protocol.reports import (
    EvictReport,
    HistoryEntry,
    HistoryReport,
    NodeStatus,
    SourceReport,
    StatusReport,
    SwapReport,
    VerifyReport,
)
from tests.support.coordinator_harness import Harness, kinds, reports

NO_CATCH_UP = Config(models={"m": ModelConfig(catch_up=False)})


def test_a_swap_goes_from_plan_to_report() -> None:
    h = Harness()
    h.ready()
    swap = h.until_staging()
    staged = h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    assert kinds(staged) == ["EndSwap", "CommitStaged"]
    assert h.journal[swap].state == "decided"
    (report,) = reports(h.say("n0", cluster.MemberCommitted(swap=swap, member="a", paused_s=0.01)))
    assert (report.outcome, report.version, report.digests, report.bytes) == ("committed", 1, 1, 32)
    assert h.journal[swap].state == "committed"
    (status,) = h.say("n0", local.GetStatus(), request=1)
    assert isinstance(status, StatusReport)
    assert status.models[0].targets[0].version == 1


def test_the_second_swap_of_a_membership_sends_no_plan() -> None:
    h = Harness()
    h.ready()
    swap = h.until_staging()
    h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    h.say("n0", cluster.MemberCommitted(swap=swap, member="a", paused_s=0.0))
    h.say("n0", cluster.ShardPublished(member="src", version=2))
    assert kinds(h.say("n0", local.StartSwap("m"))) == ["Stage"]


def test_a_changed_membership_drops_the_plan_and_makes_another() -> None:
    h = Harness(NO_CATCH_UP)
    h.ready()
    swap = h.until_staging()
    h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    h.say("n0", cluster.MemberCommitted(swap=swap, member="a", paused_s=0.0))
    assert kinds(h.add("b")) == ["DropPlan", "Done"]
    h.say("n0", cluster.ShardPublished(member="src", version=2))
    assert kinds(h.say("n0", local.StartSwap("m"))) == ["LoadPlan"]


def test_a_member_that_joins_during_a_swap_leaves_its_plan_alone() -> None:
    h = Harness(NO_CATCH_UP)
    h.ready()
    swap = h.until_staging()
    assert kinds(h.add("b")) == ["Done"]
    h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    ended = h.say("n0", cluster.MemberCommitted(swap=swap, member="a", paused_s=0.0))
    assert kinds(ended) == ["DropPlan", "SwapReport"]
    assert [m.replica for m in reports(ended)[0].members] == ["a"]


def test_who_returns_during_a_swap_that_it_has_no_part_in_serves_nothing_else_once_that_is_decided() -> None:
    """Its node was lost for a moment, or it has crashed and found its weights again; the swap went on without it."""
    h = Harness(NO_CATCH_UP)
    h.ready()
    h.say("n0", cluster.StageDone(swap=h.until_staging(), copies=1, bytes=32, seconds=0.1))
    h.say("n0", cluster.MemberCommitted(swap="swap1", member="a", paused_s=0.0))
    h.join("n1", pid=11)
    h.say("n0", cluster.ShardPublished(member="src", version=2))
    (stage,) = [m for m in h.say("n0", local.StartSwap("m"), request=9) if isinstance(m, cluster.Stage)]
    assert kinds(h.add("b", "n1", version=1, run="run1")) == ["Done"]  # version 1 is live as yet
    decided = h.say("n0", cluster.StageDone(swap=stage.swap, copies=1, bytes=32, seconds=0.1))
    (fence,) = [m for m in decided if isinstance(m, cluster.FenceMember)]
    assert fence.member == "b" and "version 1, and 2 is live" in fence.reason
    (commit,) = [m for m in decided if isinstance(m, cluster.CommitStaged)]
    assert decided.index(fence) < decided.index(commit)


def test_a_decision_that_cannot_be_journalled_is_not_taken() -> None:
    h = Harness()
    h.ready()
    swap = h.until_staging()
    h.journal_error = CommitError("disk full")
    ended = h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    assert "CommitStaged" not in kinds(ended) and "Abort" in kinds(ended)
    assert "disk full" in reports(ended)[0].reason


def test_a_silent_node_is_lost_and_its_members_with_it() -> None:
    h = Harness()
    h.ready()
    h.until_staging()
    h.now = NODE_SILENCE_S + 1
    h.sent.clear()
    h.feed(Tick())
    assert not h.state.nodes and not h.state.models
    # the node comes back: it is asked to introduce itself
    (failure,) = h.say("n0", local.GetStatus(), request=1)
    assert isinstance(failure, local.Failure) and failure.code == "unknown-node"


def test_a_daemon_that_has_introduced_itself_several_times_before_it_was_answered_is_not_lost() -> None:
    h = Harness()
    logged: list[str] = []
    handle = h.state.handle

    def watched(event: act.Event, now: float) -> list[act.Instruction]:
        found = handle(event, now)
        logged.extend(i.event for i in found if isinstance(i, act.Log))
        return found

    h.state.handle = watched  # type: ignore[method-assign]
    h.join()
    h.join()
    assert "node-lost" not in logged
    h.add("src")
    h.join()  # now it has somebody registered, and has forgotten that
    assert "node-lost" in logged and not h.state.models


def test_a_restarted_coordinator_finishes_what_was_decided_and_undoes_what_was_not() -> None:
    journal = {"s1": Record("s1", "m", 7, "decided", "", "", 1.0)}
    h = Harness(journal=journal)
    h.join()
    assert h.add("a", staged="s1") == [cluster.CommitStaged(swap="s1", version=7), local.Done()]
    h.say("n0", cluster.MemberCommitted(swap="s1", member="a", paused_s=0.0))
    undone = h.add("b", staged="s2")
    assert kinds(undone) == ["Abort", "Done"]
    (status,) = h.say("n0", local.GetStatus(), request=1)
    versions = {t.replica: (t.version, t.state) for t in status.models[0].targets}
    assert versions == {"a": (7, "serving"), "b": (None, "fenced")}


def test_a_restarted_coordinator_catches_up_what_an_undecided_swap_had_written_in_place() -> None:
    h = Harness(journal={"s1": Record("s1", "m", 7, "committed", "", "", 1.0, run="x")})
    h.join()
    h.add("src", versions=(7, 8), run="x")
    undone = h.add(
        "a", version=7, run="x", staged="s2", pauses=True, in_place=True
    )  # it was at 7, and all of 8 was there
    assert kinds(undone) == ["Abort", "Done", "LoadPlan"]
    (status,) = h.say("n0", local.GetStatus(), request=1)
    assert [(t.replica, t.version) for t in status.models[0].targets] == [("a", None)]


def test_a_late_commit_blocks_the_next_swap_until_it_is_made() -> None:
    h = Harness()
    h.ready()
    swap = h.until_staging()
    h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    h.now += Config().deadlines.commit_s + 1
    h.state.nodes["n0"].last_heard = h.now
    h.sent.clear()
    h.feed(Tick())
    (report,) = reports([m for _, _, m in h.sent])
    assert report.outcome == "incomplete" and "did not take over" in report.reason
    h.say("n0", cluster.ShardPublished(member="src", version=2))
    (failure,) = h.say("n0", local.StartSwap("m"), request=1)
    assert "has not yet taken over the version" in failure.message
    h.say("n0", cluster.MemberCommitted(swap=swap, member="a", paused_s=0.0))
    assert kinds(h.say("n0", local.StartSwap("m"))) == ["Stage"]


def test_a_source_that_withdraws_what_is_being_read_aborts_the_swap() -> None:
    h = Harness()
    h.ready()
    h.until_staging()
    (report,) = reports(h.say("n0", cluster.ShardWithdrawn(member="src", version=1)))
    assert report.outcome == "aborted" and "withdrew version 1" in report.reason


def two_nodes() -> tuple[Harness, cluster.LoadPlan]:
    """A source on n0, a target on n1, a swap asked for; the plan as n1 gets it."""
    h = Harness()
    h.join("n0", workers=(1, 2, 3))
    h.join("n1", pid=11, workers=(4, 5))
    h.add("src")
    h.add("a", node="n1")
    h.say("n0", cluster.ShardPublished(member="src", version=1))
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
    assert (plan.epoch.nodes, plan.epoch.lanes, plan.epoch.service) == (("n0", "n1"), 2, "gloo")
    assert plan.table["rows"] == 0 and plan.crossing["rows"] == 1
    assert dict(zip(plan.ranks, plan.crossing_nodes, strict=True)) == {0: 0, 1: 1}
    assert kinds(loaded(h, plan)) == ["Stage", "Stage"]


def test_what_a_worker_leaves_reaches_the_other_nodes_of_its_epoch_only() -> None:
    h, plan = two_nodes()
    h.join("n2", pid=12)
    assert plan.epoch is not None
    left = cluster.EpochPut(epoch=plan.epoch.id, lane=1, key="k", value=b"v")
    h.say("n0", left)
    assert h.sent == [("n1", 0, cluster.EpochValue(epoch=plan.epoch.id, lane=1, key="k", value=b"v"))]
    assert h.say("n2", left) == []
    assert h.say("n0", cluster.EpochPut(epoch=plan.epoch.id, lane=2, key="k", value=b"v")) == []
    assert h.say("n0", cluster.EpochPut(epoch="another", lane=0, key="k", value=b"v")) == []


def test_a_source_node_takes_part_until_everything_is_staged() -> None:
    h, plan = two_nodes()
    stage = next(m for m in loaded(h, plan) if isinstance(m, cluster.Stage))
    assert kinds(h.say("n1", cluster.StageDone(swap=stage.swap, copies=1, bytes=32, seconds=0.1))) == []
    done = h.say("n0", cluster.StageDone(swap=stage.swap, copies=0, bytes=0, seconds=0.1))
    assert kinds(done) == ["EndSwap", "CommitStaged"]


def test_words_that_others_cross_on_their_way_are_not_refused() -> None:
    h, plan = two_nodes()
    assert plan.epoch is not None
    stage = next(m for m in loaded(h, plan) if isinstance(m, cluster.Stage))
    loaded(h, plan)  # two answers to two swaps that asked for the same plan
    for node in ("n0", "n1"):
        h.say(node, cluster.StageDone(swap=stage.swap, copies=1, bytes=32, seconds=0.1))
    h.say("n0", cluster.ShardWithdrawn(member="src", version=1))
    h.say("n0", cluster.StageFailed(swap=stage.swap, where="src", reason="version 1 was taken back"))
    h.say("n1", cluster.EpochLost(plan=plan.plan, epoch=plan.epoch.id, where="worker 1", reason="was killed"))
    h.say("n0", local.Evict(model="m", replica="a"), request=9)
    h.say("n1", cluster.MemberCommitted(swap=stage.swap, member="a", paused_s=0.1))
    assert not h.illegal
    assert h.journal[stage.swap].state == "incomplete"


def test_a_node_that_takes_back_what_it_has_staged_ends_a_decision_that_is_held() -> None:
    h = Harness()
    h.ready()
    h.add("b", node="n0", version=0)
    h.state._absent.lost(h.state._members["b"], h.now + 50.0)
    swap = h.until_staging()
    assert kinds(h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))) == ["EndSwap"]
    said = h.say("n0", cluster.StageFailed(swap=swap, where="src", reason="version 1 was taken back"))
    assert "Abort" in kinds(said) and swap in h.journal and h.journal[swap].state == "aborted"


def test_a_node_that_is_no_part_of_a_swap_is_refused_and_the_log_has_the_swaps_last_events() -> None:
    h = Harness()
    h.ready()
    h.join("n9", pid=12)
    swap = h.until_staging()
    for message in (
        cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1),
        cluster.StageFailed(swap=swap, where="w", reason="r"),
        cluster.MemberQuiet(swap=swap, member="nobody"),
    ):
        assert kinds(h.say("n9", message)) == []
    assert [("no node" in str(r), "NodeLoaded(node='n0') -> stage" in str(r)) for r in h.illegal] == [
        (True, True),
        (True, True),
        (False, True),
    ]
    done = cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1)
    assert kinds(h.say("n0", done)) == ["EndSwap", "CommitStaged"]
    (report,) = reports(h.say("n0", cluster.MemberCommitted(swap=swap, member="a", paused_s=0.1)))
    assert "CommitReported" in report.events[-1]


def test_status_shows_where_targets_stand_as_their_own_daemons_say() -> None:
    h = Harness()
    h.ready()
    h.join("n1", pid=12)
    status = next(node.status for node in h.state.nodes.values() if node.status.node == "n0")
    moved = cluster.TargetMoved("a", "staging swap s, empty", ("StageBegan -> staging swap s, empty",))
    assert h.say("n0", cluster.NodeUpdate(status=status, moved=(moved,)), request=8) == [local.Done()]
    others = cluster.NodeUpdate(status=msgspec.structs.replace(status, node="n1", pid=12), moved=(moved,))
    (refused,) = h.say("n1", others, request=8)
    assert isinstance(refused, local.Failure) and "one of node 'n0'" in refused.message
    h.until_staging()
    (report,) = h.say("n0", local.GetStatus(), request=8)
    assert isinstance(report, StatusReport)
    (target,) = report.models[0].targets
    assert (target.step, target.events) == (moved.step, moved.events)
    assert "-> stage" in report.models[0].swap_events[-1]


def test_a_lost_epoch_aborts_the_swap_that_uses_it_and_the_next_gets_a_new_one() -> None:
    h, plan = two_nodes()
    loaded(h, plan)
    assert plan.epoch is not None
    lost = cluster.EpochLost(plan=plan.plan, epoch=plan.epoch.id, where="worker 1 on node n1", reason="was killed")
    ended = h.say("n1", lost)
    (report,) = reports(ended)
    assert report.reason == "worker 1 on node n1: was killed" and report.phase == "stage"
    assert kinds(ended).count("Abort") == 2 and kinds(ended).count("DropPlan") == 2
    again = [m for m in h.say("n0", local.StartSwap("m"), request=3) if isinstance(m, cluster.LoadPlan)]
    assert len(again) == 2
    assert again[0].epoch is not None and again[0].epoch.id != plan.epoch.id
    # an echo of the old epoch changes nothing
    assert kinds(h.say("n0", lost)) == []
    assert kinds(h.say("n0", cluster.PlanLoaded(plan=plan.plan, epoch=plan.epoch.id))) == []


def test_a_node_that_cannot_use_the_plan_ends_the_swap_with_its_words() -> None:
    h, plan = two_nodes()
    assert plan.epoch is not None
    refused = cluster.PlanRefused(plan=plan.plan, epoch=plan.epoch.id, where="worker 0 on node n1", reason="no route")
    (report,) = reports(h.say("n1", refused))
    assert (report.phase, report.reason) == ("plan", "worker 0 on node n1: no route")


def test_a_node_name_in_use_is_refused_and_a_restarted_daemon_is_not() -> None:
    h = Harness()
    h.ready()
    status = NodeStatus(node="n0", host="h2", pid=99, workers=(), clients=0, arenas=0, arena_bytes=0)
    (refusal,) = h.say("other", cluster.NodeHello(protocol=1, status=status))
    assert "in use by the daemon with pid 10" in refusal.message
    h.now = NODE_SILENCE_S - 1
    h.say("other", cluster.NodeHello(protocol=1, status=status))
    assert h.state.nodes["n0"].status.pid == 99
    assert not h.state.models, "the old daemon's members went with it"


@pytest.mark.parametrize("auto", [True, False])
def test_a_complete_version_is_swapped_by_itself_only_where_configured(auto: bool) -> None:
    h = Harness(Config(models={"m": ModelConfig(auto_swap=auto)}))
    h.join()
    h.add("src")
    h.add("a")
    sent = h.say("n0", cluster.ShardPublished(member="src", version=1), request=2)
    assert ("LoadPlan" in kinds(sent)) is auto


def test_ranks_are_numbered_source_first_then_replica_by_replica() -> None:
    h = Harness()
    h.join()
    for rank in (1, 0):
        h.add(f"src{rank}", rank=rank, world_size=2)
    for replica, world in (("b", 1), ("a", 2)):
        for rank in range(world):
            h.add(f"{replica}{rank}", replica=replica, rank=rank, world_size=world)
    assert h.state.models["m"].fleet.ranks() == {"src0": 0, "src1": 1, "a0": 2, "a1": 3, "b0": 4}


def test_a_member_whose_shard_is_not_known_is_asked_to_describe_it() -> None:
    h = Harness()
    h.join()
    (failure,) = h.add("src", digest="0" * 32)
    assert isinstance(failure, local.Failure) and failure.code == "unknown-shard"
    assert not h.state.models


def test_a_shard_under_a_wrong_digest_is_refused() -> None:
    h = Harness()
    h.join()
    shard = shards.shard_of([ParameterMetadata("w", (4, 4), "bfloat16", 2)])
    (failure,) = h.say("n0", cluster.DescribeShard(digest="0" * 32, packed=pack(shard)), request=1)
    assert isinstance(failure, local.Failure) and "its content is" in failure.message


def test_a_membership_that_comes_back_finds_its_plan_and_a_changed_one_never_does() -> None:
    h = Harness()
    h.ready()
    h.say("n0", local.GetPlan("m"), request=1)
    h.add("b")
    h.say("n0", local.GetPlan("m"), request=2)
    assert h.plans_made == 2
    h.say("n0", cluster.RemoveShard(member="b", reason="left"))
    (report,) = h.say("n0", local.GetPlan("m"), request=3)
    assert h.plans_made == 2 and report.bytes == 32
    # the same rank with another layout is another membership
    h.say("n0", cluster.RemoveShard(member="a", reason="left"))
    other = shards.shard_of(
        [ParameterMetadata("w", (4, 4), "bfloat16", 2, resolved_name="w", tiles=None, global_shape=(4, 4))]
    )
    h.say("n0", cluster.DescribeShard(digest=digest_of(other), packed=pack(other)))
    h.add("a", digest=digest_of(other))
    h.say("n0", local.GetPlan("m"), request=4)
    assert h.plans_made == 3


def test_a_report_says_how_the_version_was_given_even_when_its_lease_has_ended() -> None:
    h = Harness()
    h.ready()
    h.say("n0", cluster.ShardPublished(member="src", version=2, mode="pulled", mode_reason="it is fast"))
    swap = h.until_staging()
    h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    h.say("n0", cluster.ShardWithdrawn(member="src", version=2))
    (report,) = reports(h.say("n0", cluster.MemberCommitted(swap=swap, member="a", paused_s=0.0)))
    assert report.sources == (SourceReport(rank=0, node="n0", host="h", way="pulled", why="it is fast"),)
    (status,) = h.say("n0", local.GetStatus(), request=1)
    assert isinstance(status, StatusReport)
    assert (status.models[0].sources[0].way, status.models[0].sources[0].why) == ("pulled", "it is fast")


def test_a_coordinator_that_starts_anew_knows_how_held_versions_are_given() -> None:
    h = Harness()
    h.join()
    h.add("src", versions=(1, 2), modes=("copied", "pulled"), mode="pulled", mode_reason="it is fast")
    fleet = h.state.models["m"].fleet
    assert [fleet.source_reports(version)[0].way for version in (1, 2, 3)] == ["copied", "pulled", ""]


# --- the queue, going back, catching up, standing still ---------------------------------------------------


def commit(h: Harness, swap: str, *members: str, node: str = "n0") -> list[object]:
    """Stage and commit on one node; return what the last word caused."""
    h.say(node, cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    sent: list[object] = []
    for member in members:
        sent = h.say(node, cluster.MemberCommitted(swap=swap, member=member, paused_s=0.0))
    return sent


def stages(sent: list[object]) -> list[cluster.Stage]:
    return [m for m in sent if isinstance(m, cluster.Stage)]


def test_a_queued_swap_begins_when_the_running_one_ends_and_others_are_refused() -> None:
    h = Harness()
    h.ready()
    first = h.until_staging()
    h.say("n0", cluster.ShardPublished(member="src", version=2))
    (refused,) = h.say("n0", local.StartSwap("m"), request=10)
    assert isinstance(refused, local.Failure) and "--queue" in refused.message
    assert h.say("n0", local.StartSwap("m", queue=True), request=11) == []
    ended = commit(h, first, "a")
    assert [r.version for r in reports(ended)] == [1]
    (second,) = stages(ended)
    assert [r.version for r in reports(commit(h, second.swap, "a"))] == [2]
    assert h.state.models["m"].live.version == 2


def test_a_queued_swap_waits_no_longer_than_asked_and_is_refused_if_it_cannot_begin_then() -> None:
    h = Harness()
    h.ready()
    first = h.until_staging()
    h.say("n0", local.StartSwap("m", version=7, queue=True), request=10)
    h.say("n0", local.StartSwap("m", queue=True, timeout_s=2.0), request=11)
    h.now = 3.0
    h.sent.clear()
    h.feed(Tick())
    assert [(request, m.code) for _, request, m in h.sent if isinstance(m, local.Failure)] == [(11, "deadline")]
    ended = commit(h, first, "a")
    assert [m.message for m in ended if isinstance(m, local.Failure)] != []
    assert h.state.models["m"].running is None


def test_whoever_asked_is_told_in_time_that_it_is_decided_and_who_is_late_and_it_goes_on() -> None:
    h = Harness()
    h.ready()
    h.add("b")
    swap = h.until_staging(timeout_s=2.0)
    h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    h.say("n0", cluster.MemberCommitted(swap=swap, member="a", paused_s=0.0))
    assert h.state.next_deadline() == 2.0
    h.now = 2.0
    h.sent.clear()
    h.feed(Tick())
    (report,) = reports([m for _, _, m in h.sent])
    assert report.outcome == "decided" and "b rank 0" in report.reason and "a rank 0" not in report.reason
    assert [(m.replica, m.state) for m in report.members] == [("a", "committed"), ("b", "late")]
    h.now = 3.0
    h.sent.clear()
    h.feed(Tick())
    assert h.sent == [], "nobody is told twice"
    assert reports(h.say("n0", cluster.MemberCommitted(swap=swap, member="b", paused_s=0.0))) == []
    assert h.journal[swap].state == "committed" and h.state.models["m"].running is None


def test_the_time_that_a_swap_waits_for_its_turn_is_its_own() -> None:
    h = Harness()
    h.ready()
    first = h.until_staging()
    h.say("n0", cluster.ShardPublished(member="src", version=2))
    h.say("n0", local.StartSwap("m", queue=True, timeout_s=5.0), request=11)
    h.now = 4.0
    (second,) = stages(commit(h, first, "a"))
    h.now = 5.1
    h.sent.clear()
    h.feed(Tick())
    (report,) = reports([m for _, _, m in h.sent])
    assert (report.swap, report.outcome) == (second.swap, "aborted")


def test_rollback_goes_to_the_version_before_the_live_one_and_no_further_by_itself() -> None:
    h = Harness(config=Config(models={"m": ModelConfig(auto_swap=True)}))
    h.ready()
    assert h.state.models["m"].running is not None
    versions = []
    for version in (1, 2, 3):
        if version > 1:
            h.say("n0", cluster.ShardPublished(member="src", version=version))
        running = h.state.models["m"].running
        assert running is not None
        for load in [m for _, _, m in h.sent if isinstance(m, cluster.LoadPlan)]:
            h.say("n0", cluster.PlanLoaded(plan=load.plan))
        commit(h, running.swap.swap, "a")
        versions.append(h.state.models["m"].live.version)
    assert versions == [1, 2, 3]
    (refused,) = h.say("n0", local.StartSwap("m", version=2), request=9)
    assert isinstance(refused, local.Failure) and "rollback" in refused.message
    (stage,) = stages(h.say("n0", local.StartSwap("m", rollback=True), request=9))
    assert stage.version == 2
    (report,) = reports(commit(h, stage.swap, "a"))
    assert (report.kind, report.version, report.outcome) == ("rollback", 2, "committed")
    assert h.state.models["m"].running is None, "auto-swap must not undo what an operator has gone back to"
    (stage,) = stages(h.say("n0", local.StartSwap("m", rollback=True), request=9))
    assert stage.version == 1


def test_a_replica_that_joins_is_brought_to_the_live_version_alone() -> None:
    h = Harness()
    h.ready()
    commit(h, h.until_staging(), "a")
    joined = h.add("b")
    assert kinds(joined) == ["DropPlan", "Done", "LoadPlan"]  # it knows that it is in before it is asked for anything
    load = joined[-1]
    assert isinstance(load, cluster.LoadPlan) and load.members == ("src", "b")
    (stage,) = stages(h.say("n0", cluster.PlanLoaded(plan=load.plan)))
    assert stage.version == 1
    commit(h, stage.swap, "b")
    (model,) = next(m for m in h.say("n0", local.GetStatus(), request=5) if isinstance(m, StatusReport)).models
    assert {t.replica: (t.state, t.version) for t in model.targets} == {"a": ("serving", 1), "b": ("serving", 1)}
    assert model.last_swap is not None and model.last_swap.kind == "catch-up"


def test_a_catch_up_that_fails_is_not_repeated_until_something_changes() -> None:
    h = Harness()
    h.ready()
    commit(h, h.until_staging(), "a")
    load = h.add("b")[-1]
    assert isinstance(load, cluster.LoadPlan)
    (stage,) = stages(h.say("n0", cluster.PlanLoaded(plan=load.plan)))
    ended = h.say("n0", cluster.StageFailed(swap=stage.swap, where="worker 0", reason="broken"))
    assert "Abort" in kinds(ended) and not any(isinstance(m, cluster.LoadPlan) for m in ended)
    h.say("n0", cluster.RemoveShard(member="b", reason="gone"))
    assert isinstance(h.add("b2", replica="b")[-1], cluster.LoadPlan)


def test_a_catch_up_that_was_aborted_is_tried_again_after_a_pause_and_not_for_ever() -> None:
    h = Harness()
    h.ready()
    commit(h, h.until_staging(), "a")
    tried, load = 0, h.add("b")[-1]
    while isinstance(load, cluster.LoadPlan):
        tried += 1
        (stage,) = stages(h.say("n0", cluster.PlanLoaded(plan=load.plan)))
        h.say("n0", cluster.StageFailed(swap=stage.swap, where="worker 0", reason="broken"))
        sent: list[object] = []
        for _ in range(20):
            h.now += 1.0
            h.say("n0", local.GetStatus())  # it is not silent
            h.sent.clear()
            h.feed(Tick())
            sent += [message for _, _, message in h.sent]
        load = next((m for m in sent if isinstance(m, cluster.LoadPlan)), None)
    assert tried == 4


def test_a_catch_up_gives_way_to_what_somebody_asks_for_until_it_is_decided() -> None:
    h = Harness()
    h.ready()
    commit(h, h.until_staging(), "a")
    h.say("n0", cluster.ShardPublished(member="src", version=2))
    load = h.add("b")[-1]
    assert isinstance(load, cluster.LoadPlan)
    h.say("n0", cluster.PlanLoaded(plan=load.plan))
    asked = h.say("n0", local.StartSwap("m"), request=9)
    assert kinds(asked) == ["Abort", "DropPlan", "LoadPlan"]
    (load,) = [m for m in asked if isinstance(m, cluster.LoadPlan)]
    (stage,) = stages(h.say("n0", cluster.PlanLoaded(plan=load.plan)))
    assert [r.version for r in reports(commit(h, stage.swap, "a", "b"))] == [2]

    load = h.add("c")[-1]
    assert isinstance(load, cluster.LoadPlan)
    (stage,) = stages(h.say("n0", cluster.PlanLoaded(plan=load.plan)))
    h.say("n0", cluster.StageDone(swap=stage.swap, copies=1, bytes=32, seconds=0.1))
    assert h.say("n0", local.StartSwap("m"), request=9) == []  # it is decided: it ends first
    ended = h.say("n0", cluster.MemberCommitted(swap=stage.swap, member="c", paused_s=0.0))
    assert "LoadPlan" in kinds(ended)


def test_a_member_that_fails_after_the_decision_is_fenced_and_the_next_swap_heals_it() -> None:
    h = Harness()
    h.ready()
    swap = h.until_staging()
    h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    (report,) = reports(h.say("n0", cluster.MemberCommitFailed(swap=swap, member="a", reason="moved")))
    assert report.outcome == "incomplete" and "moved" in report.reason
    (model,) = next(m for m in h.say("n0", local.GetStatus(), request=5) if isinstance(m, StatusReport)).models
    assert [(t.state, t.version) for t in model.targets] == [("fenced", None)]
    assert h.state.models["m"].running is None
    (stage,) = stages(h.say("n0", local.StartSwap("m"), request=9))
    assert [r.outcome for r in reports(commit(h, stage.swap, "a"))] == ["committed"]


def test_nothing_is_decided_before_engines_that_are_asked_stand_still() -> None:
    h = Harness()
    h.join()
    h.add("src")
    h.add("a", pauses=True)
    h.add("b")
    h.say("n0", cluster.ShardPublished(member="src", version=1))
    swap = h.until_staging()
    staged = h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    assert [m for m in staged if isinstance(m, cluster.Pause)] == [cluster.Pause(swap, 1, ("a",))]
    assert not h.journal and "CommitStaged" not in kinds(staged)
    assert "CommitStaged" in kinds(h.say("n0", cluster.MemberQuiet(swap=swap, member="a")))
    assert h.journal[swap].state == "decided"


def test_an_engine_that_does_not_stand_still_aborts_the_swap_by_name() -> None:
    h = Harness()
    h.join()
    h.add("src")
    h.add("a", pauses=True)
    h.say("n0", cluster.ShardPublished(member="src", version=1))
    swap = h.until_staging()
    h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    h.now = Config().deadlines.pause_s + 1
    h.say("n0", cluster.NodeUpdate(status=h.state.nodes["n0"].status))
    h.sent.clear()
    h.feed(Tick())
    (report,) = reports([m for _, _, m in h.sent])
    assert (report.outcome, report.phase) == ("aborted", "pause") and "a rank 0" in report.reason
    assert [member.state for member in report.members] == ["failed"]


def test_a_restarted_coordinator_knows_what_is_live_and_what_was_before() -> None:
    journal: dict[str, Record] = {}
    h = Harness(journal=journal)
    h.ready()
    commit(h, h.until_staging(), "a")
    later = Harness(journal=journal)
    later.join()
    later.add("src", versions=(1,), run="run1")
    assert str(later.state.models["m"].live) == "1 (run run1)"
    assert any(isinstance(m, cluster.LoadPlan) for m in later.add("c"))  # a replica that serves nothing yet
    (found,) = [m for m in later.say("n0", local.GetHistory("m"), request=4) if isinstance(m, HistoryReport)]
    assert [(s.version, s.state, s.report.kind if s.report else "") for s in found.swaps] == [(1, "committed", "asked")]


def decided_and_died() -> tuple[Harness, str]:
    """The coordinator that comes after one which died as soon as it had decided about replicas a and b."""
    journal: dict[str, Record] = {}
    h = Harness(NO_CATCH_UP, journal)
    h.ready()
    h.add("b")
    swap = h.until_staging()
    h.say("n0", cluster.StageDone(swap=swap, copies=2, bytes=64, seconds=0.1))
    later = Harness(NO_CATCH_UP, journal)
    later.join()
    later.add("src", versions=(1,), run="run1")
    return later, swap


def last(h: Harness) -> HistoryEntry:
    (found,) = [m for m in h.say("n0", local.GetHistory("m"), request=4) if isinstance(m, HistoryReport)]
    return found.swaps[0]


def test_a_coordinator_learns_how_a_swap_ended_that_an_earlier_one_decided() -> None:
    h, swap = decided_and_died()
    before = last(h)
    assert before.state == "decided" and before.report is not None
    assert {m.replica: m.state for m in before.report.members} == {"a": "staged", "b": "staged"}
    h.add("a", version=1, run="run1")  # it has taken it over meanwhile
    assert last(h).state == "decided"
    assert h.add("b", staged=swap)[0] == cluster.CommitStaged(swap=swap, version=1, run="run1")
    h.say("n0", cluster.MemberCommitted(swap=swap, member="b", paused_s=0.25))
    entry = last(h)
    assert (entry.state, entry.reason) == ("committed", "the coordinator ended after the decision")
    assert entry.report is not None and entry.report.bytes == 64
    assert {(m.replica, m.state, m.version, m.paused_s) for m in entry.report.members} == {
        ("a", "committed", 1, 0.0),
        ("b", "committed", 1, 0.25),
    }
    (status,) = h.say("n0", local.GetStatus(), request=1)
    assert isinstance(status, StatusReport) and status.models[0].last_swap == entry.report


def test_a_report_of_another_version_in_the_journal_does_not_keep_a_coordinator_from_starting() -> None:
    journal = {"s1": Record("s1", "m", 7, "decided", "", "", 1.0, b'{"type": "SwapReport", "of": "tomorrow"}')}
    h = Harness(NO_CATCH_UP, journal)
    h.join()
    assert h.add("a", staged="s1") == [cluster.CommitStaged(swap="s1", version=7), local.Done()]
    assert (last(h).state, last(h).report) == ("decided", None)


def test_who_does_not_come_back_after_a_decision_is_named() -> None:
    h, _ = decided_and_died()
    h.add("a", version=1, run="run1")
    h.now = NODE_SILENCE_S + Config().deadlines.commit_s + 1
    h.feed(Tick())
    h.join()  # it has been silent for as long
    entry = last(h)
    assert entry.state == "incomplete" and entry.reason.endswith("not known to serve it: b rank 0 (host h, pid 5)")
    assert entry.report is not None
    assert {m.replica: m.state for m in entry.report.members} == {"a": "committed", "b": "lost"}


def test_the_next_swap_ends_what_was_decided_earlier() -> None:
    h, swap = decided_and_died()
    h.add("a", version=1, run="run1")
    h.add("b", staged=swap)
    h.say("n0", cluster.MemberCommitFailed(swap=swap, member="b", reason="no room"))
    entry = last(h)  # both are known now
    assert entry.state == "incomplete" and entry.report is not None
    assert {m.replica: m.reason for m in entry.report.members} == {"a": "", "b": "no room"}

    h, swap = decided_and_died()
    h.add("a", version=1, run="run1")
    h.say("n0", cluster.ShardPublished(member="src", version=2))
    h.say("n0", local.StartSwap("m"), request=9)
    assert (last(h).swap, last(h).state) == (swap, "incomplete")


def test_verification_is_switched_off_by_the_models_configuration() -> None:
    for verify in (True, False):
        h = Harness(Config(models={"m": ModelConfig(verify=verify)}))
        h.ready()
        h.say("n0", local.StartSwap("m"), request=9)
        (load,) = [m for _, _, m in h.sent if isinstance(m, cluster.LoadPlan)]
        (stage,) = [m for m in h.say("n0", cluster.PlanLoaded(plan=load.plan)) if isinstance(m, cluster.Stage)]
        assert stage.verify is verify
        h.say("n0", cluster.StageDone(swap=stage.swap, copies=1, bytes=32, seconds=0.1))
        said = h.say("n0", cluster.MemberCommitted(swap=stage.swap, member="a", paused_s=0.0))
        (report,) = [m for m in said if isinstance(m, SwapReport)]
        assert (report.copies, report.digests) == (1, int(verify))
        (status,) = h.say("n0", local.GetStatus(), request=5)
        assert isinstance(status, StatusReport) and status.models[0].verify is verify


def test_verify_asks_the_nodes_and_answers_when_all_have() -> None:
    h = Harness()
    h.ready()
    h.join("n1", pid=11)
    h.add("b", "n1")
    h.say("n0", local.Verify("m"), request=9)
    asked = {node: m for node, _, m in h.sent if isinstance(m, cluster.CheckMembers)}
    assert {node: m.members for node, m in asked.items()} == {"n0": ("a",), "n1": ("b",)}
    check = asked["n0"].check
    proven = {m: cluster.MemberChecked(member=m, state="proven", version=1, digest="d") for m in ("a", "b")}
    assert h.say("n0", cluster.MembersChecked(check=check, members=(proven["a"],))) == []
    # a node speaks for its own members only
    (refused,) = h.say("n0", cluster.MembersChecked(check=check, members=(proven["b"],)))
    assert isinstance(refused, local.Failure) and "node n1" in refused.message.replace("'", "")
    h.say("n1", cluster.MembersChecked(check=check, members=(proven["b"],)))
    ((node, request, report),) = h.sent
    assert (node, request) == ("n0", 9) and isinstance(report, VerifyReport) and report.outcome == "proven"


def test_verify_of_a_node_that_is_lost_says_so_and_a_model_without_targets_is_refused() -> None:
    h = Harness()
    h.ready()
    h.join("n1", pid=11)
    h.add("b", "n1")
    h.say("n0", local.Verify("m", timeout_s=60.0), request=9)
    (check,) = {m.check for _, _, m in h.sent if isinstance(m, cluster.CheckMembers)}
    h.say("n0", cluster.MembersChecked(check=check, members=(cluster.MemberChecked("a", "proven", version=1),)))
    h.now = NODE_SILENCE_S + 1
    h.state.nodes["n0"].last_heard = h.now
    h.sent.clear()
    h.feed(Tick())
    (report,) = [m for _, _, m in h.sent if isinstance(m, VerifyReport)]
    assert [m.state for m in report.members] == ["proven", "unknown"] and "no word" in report.members[1].reason
    (refused,) = h.say("n0", local.Verify("nobody"), request=9)
    assert isinstance(refused, local.Failure)


def planned_later(h: Harness, say: Callable[[], object]) -> Callable[[], list[object]]:
    """Do something that asks for a plan; return what makes it, as the thread beside the loop does, and what is sent."""
    asked: list[act.MakePlan] = []
    handle = h.state.handle

    def hold(event: act.Event, now: float) -> list[act.Instruction]:
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
    h = Harness()
    h.ready()
    make = planned_later(h, lambda: h.say("n0", local.StartSwap("m"), request=9))
    h.add("b")
    (load,) = [m for m in make() if isinstance(m, cluster.LoadPlan)]
    assert set(load.members) == {"src", "a"}
    (stage,) = [m for m in h.say("n0", cluster.PlanLoaded(plan=load.plan)) if isinstance(m, cluster.Stage)]
    h.say("n0", cluster.StageDone(swap=stage.swap, copies=1, bytes=32, seconds=0.1))
    ended = h.say("n0", cluster.MemberCommitted(swap=stage.swap, member="a", paused_s=0.0))
    (report,) = reports(ended)
    assert report.outcome == "committed" and [m.replica for m in report.members] == ["a"]
    (load,) = [m for m in ended if isinstance(m, cluster.LoadPlan)]  # a catch-up, with a plan of its own
    assert set(load.members) == {"src", "b"}


def test_who_leaves_while_the_plan_is_made_aborts_the_swap_by_name_and_the_plan_is_for_nobody() -> None:
    h = Harness()
    h.ready()
    make = planned_later(h, lambda: h.say("n0", local.StartSwap("m"), request=9))
    (report,) = reports(h.say("n0", cluster.RemoveShard(member="a", reason="its process has ended")))
    assert report.outcome == "aborted" and "a rank 0" in report.reason
    assert kinds(make()) == []
    h.add("a")
    (load,) = [m for m in h.say("n0", local.StartSwap("m"), request=9) if isinstance(m, cluster.LoadPlan)]
    assert set(load.members) == {"src", "a"}


def test_a_coordinator_that_was_busy_calls_nobody_silent_for_it() -> None:
    h = Harness()
    h.ready()
    h.now = 30.0  # nothing was heard for so long, because it did not listen
    h.feed(Busy(29.0))
    h.feed(Tick())
    assert list(h.state.nodes) == ["n0"]
    h.join("n0")
    h.feed(Busy(29.0))  # it has been heard since, and has no more time than anybody for that
    h.now = 30.0 + NODE_SILENCE_S - 1
    h.feed(Tick())
    assert h.state.nodes
    h.now = 30.0 + NODE_SILENCE_S + 1
    h.feed(Tick())
    assert not h.state.nodes


def test_an_evicted_rank_ends_the_swap_that_waits_for_it_and_its_node_is_told_after_that() -> None:
    h = Harness()
    h.ready()
    swap = h.until_staging()
    h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    (unknown,) = h.say("n0", local.Evict(model="m", replica="a", rank=4), request=7)
    assert isinstance(unknown, local.Failure) and "registered: a rank 0" in unknown.message
    said = h.say("n0", local.Evict(model="m", replica="a", reason="it hangs"), request=7)
    (report,) = reports(said)
    assert report.outcome == "incomplete" and "evicted on request: it hangs" in report.members[0].reason
    (evicted,) = [m for m in said if isinstance(m, cluster.EvictMember)]
    assert evicted.member == "a"
    assert said.index(report) < said.index(evicted)
    (answer,) = [m for m in said if isinstance(m, EvictReport)]
    assert answer.members == ("a rank 0 (host h, pid 5)",)
    assert kinds(h.add("a")) == ["Done", "LoadPlan"]  # it may register again, and is brought up to date


# --- a version's identity, and what is live where the journal is lost ---------------------------------------


def lost(h: Harness, *, version: int, run: str = "x", sequence: int = 5, journal: str = "old", **more: object) -> list:
    """A daemon introduces itself to a coordinator, and says what it was told by another one."""
    claim = cluster.LiveClaim("m", version, run, sequence, more.pop("swap", "s"), journal, more.pop("highest", 0))
    node = str(more.get("node", "n0"))
    status = NodeStatus(node=node, host="h", pid=10, workers=(), clients=0, arenas=0, arena_bytes=0)
    return h.say(node, cluster.NodeHello(protocol=1, status=status, live=(claim,)))


def live_of(h: Harness) -> tuple[object, ...]:
    (status,) = h.say("n0", local.GetStatus(), request=1)
    assert isinstance(status, StatusReport)
    return status.models[0].live, status.models[0].live_run


def fenced(sent: list[object]) -> set[str]:
    return {m.member for m in sent if isinstance(m, cluster.FenceMember)}


def settled(h: Harness) -> list[object]:
    h.now += SETTLE_S + 0.1
    for node in h.state.nodes.values():
        node.last_heard = h.now
    h.sent.clear()
    h.feed(Tick())
    return [m for _, _, m in h.sent]


def test_a_coordinator_without_its_journal_learns_from_daemons_what_is_live_and_fences_who_serves_another() -> None:
    h = Harness()
    lost(h, version=2, sequence=9)
    assert [(r.live.version, r.live.run, r.continues) for r in h.recovered] == [(2, "x", "old")]
    assert fenced(h.add("a", version=2, run="x")) == set()
    assert fenced(h.add("b", version=1, run="x")) == {"b"}
    h.add("src", versions=(1, 2), run="x")
    assert live_of(h) == (2, "x")
    (load,) = [m for m in settled(h) if isinstance(m, cluster.LoadPlan)]
    assert set(load.members) == {"src", "b"}, "b alone is caught up"


def test_a_claim_that_comes_late_outranks_an_earlier_lower_one_and_fences_who_had_been_let_be() -> None:
    h = Harness()
    lost(h, version=1, sequence=8)
    h.add("a", version=1, run="x")
    told = lost(h, version=2, sequence=9, node="n1")
    assert fenced(told) == {"a"}
    assert [m.live.version for m in told if isinstance(m, cluster.LiveIs)] == [2, 2], "both daemons are told"
    assert live_of(h) == (2, "x")


def test_nothing_is_decided_before_daemons_had_the_time_to_say_what_is_live() -> None:
    h = Harness()
    lost(h, version=4)
    h.add("src")
    h.add("a")
    (refused,) = h.say("n0", cluster.ShardPublished(member="src", version=3), request=4)
    assert "publish 5 or above" in refused.message
    h.say("n0", cluster.ShardPublished(member="src", version=5), request=4)
    assert kinds(h.say("n0", local.StartSwap("m"), request=9)) == []
    assert "LoadPlan" in kinds(settled(h))


def test_a_new_journal_is_waited_with_and_one_that_daemons_know_is_not() -> None:
    alone = Harness(is_beside=False)
    alone.ready()
    assert kinds(alone.say("n0", local.StartSwap("m"), request=9)) == []
    assert "LoadPlan" in kinds(settled(alone))
    known = Harness(journal={"s1": Record("s1", "m", 1, "committed", "", "", 1.0, run="x")}, is_beside=False)
    lost(known, version=1, sequence=1, journal="j", swap="s1")
    known.add("src", versions=(1, 2), run="x")
    known.add("a", version=1, run="x")
    assert "LoadPlan" in kinds(known.say("n0", local.StartSwap("m"), request=9))


def test_an_older_journal_is_brought_up_to_what_daemons_were_told_and_an_exchanged_one_too() -> None:
    journal = {"s1": Record("s1", "m", 3, "committed", "", "", 1.0, run="x")}
    older = Harness(journal=dict(journal))
    lost(older, version=5, sequence=7, journal="j")
    older.add("a", version=3, run="x")
    assert live_of(older) == (5, "x") and older.recovered[0].live.sequence == 7
    exchanged = Harness(journal=dict(journal))
    lost(exchanged, version=2, run="y", sequence=1, journal="another")
    exchanged.add("a", version=2, run="y")
    assert live_of(exchanged) == (2, "y")
    # what the journal says by itself is older from now on, whoever remembers it
    assert exchanged.recovered[0].live.sequence > 1 and exchanged.recovered[0].continues == "another"


def test_what_was_decided_in_this_life_is_not_outranked_by_what_others_remember() -> None:
    h = Harness()
    h.ready()
    commit(h, h.until_staging(), "a")
    lost(h, version=9, sequence=50, journal="j", node="n1")
    assert live_of(h) == (1, "run1")
    assert fenced(h.add("b", "n1", version=9, run="x")) == {"b"}
    assert h.recovered[-1].live.sequence == 51, "and so it stays when the coordinator starts again"


@pytest.mark.parametrize("how", ["told", "another", "serves"])
def test_a_swap_that_was_decided_is_finished_though_the_journal_is_lost(how: str) -> None:
    h = Harness()
    if how == "another":
        lost(h, version=2, swap="s9")  # its daemon knows that another member of it was told to commit
        sent = h.add("a", version=1, run="x", staged="s9", staged_version=2, staged_run="x")
    elif how == "told":
        h.join()
        sent = h.add("a", version=1, run="x", staged="s9", staged_version=2, staged_run="x", committing=True)
    else:
        lost(h, version=2, swap="a catch-up later on")
        sent = h.add("a", version=1, run="x", staged="s9", staged_version=2, staged_run="x")
    assert cluster.CommitStaged(swap="s9", version=2, run="x") in sent


def test_a_swap_of_which_nobody_knows_that_it_was_decided_is_undone_once_all_had_the_time_to_say_so() -> None:
    h = Harness()
    lost(h, version=1, swap="s8")
    assert kinds(h.add("a", version=1, run="x", staged="s9", staged_version=2, staged_run="x")) == ["Done"]
    assert "Abort" in kinds(settled(h))
    h = Harness()
    lost(h, version=1, sequence=8, swap="s8")
    h.add("a", version=1, run="x", staged="s9", staged_version=2, staged_run="x")
    lost(h, version=2, sequence=9, swap="s9", node="n1")  # the one that was told
    assert cluster.CommitStaged(swap="s9", version=2, run="x") in settled(h)


def test_replicas_of_two_versions_that_nobody_can_explain_are_never_both_let_be() -> None:
    h = Harness()
    h.join()
    sent = h.add("a", version=1, run="x") + h.add("b", version=2, run="x")
    assert fenced(sent) == {"a"}
    assert fenced(h.add("c", version=1, run="x")) == {"c"}


def trainer_starts_again(h: Harness, *versions: int) -> list[object]:
    h.say("n0", cluster.DetachShard(member="src", reason="it has ended"))
    sent = h.add("src2")
    for version in versions:
        sent += h.say("n0", cluster.ShardPublished(member="src2", version=version), request=5)
    return sent


def test_a_number_that_was_live_is_refused_to_another_run_with_the_number_to_use() -> None:
    h = Harness()
    h.ready()
    commit(h, h.until_staging(), "a")
    admitted, refused, taken = (m for m in trainer_starts_again(h, 1, 2) if not isinstance(m, cluster.DropPlan))
    assert admitted == cluster.SourceAdmitted(run="run2", next_version=2)
    assert isinstance(refused, local.Failure) and "was live with other contents" in refused.message
    assert "publish 2 or above" in refused.message
    assert taken == local.Done()
    # whoever joins now gets nothing under the old number
    assert "LoadPlan" not in kinds(h.add("b"))
    commit_both = h.until_staging()
    h.say("n0", cluster.StageDone(swap=commit_both, copies=2, bytes=64, seconds=0.1))
    assert live_of(h) == (2, "run2")


def test_ranks_that_come_back_alone_go_on_above_what_they_had_published_and_others_wait_for_no_new_run() -> None:
    h = Harness()
    h.join()
    for rank in range(2):
        h.add(f"src{rank}", rank=rank, world_size=2)
        for version in (1, 2):
            h.say("n0", cluster.ShardPublished(member=f"src{rank}", version=version))
    h.say("n0", cluster.DetachShard(member="src1", reason="it has ended"))
    (admitted,) = h.add("src1b", rank=1, world_size=2)
    assert admitted == cluster.SourceAdmitted(run="run1", next_version=3)


def test_a_version_is_complete_only_where_all_ranks_hold_it_of_one_run() -> None:
    h = Harness()
    h.join()
    h.add("a")
    h.add("src0", rank=0, world_size=2, run="x", versions=(7,))
    h.add("src1", rank=1, world_size=2, run="y", versions=(7,))
    (refused,) = h.say("n0", local.StartSwap("m"), request=9)
    assert "several runs" in refused.message


def test_what_was_rolled_back_is_not_swapped_to_again_whoever_remembers_it() -> None:
    auto = Config(models={"m": ModelConfig(auto_swap=True)})
    h = Harness(auto)
    lost(h, version=1, highest=2)
    h.add("src", versions=(1, 2), run="x")
    assert fenced(h.add("a", version=1, run="x")) == set()
    assert "LoadPlan" not in kinds(settled(h))


# --- slots, and ranks that drift ------------------------------------------------------------------------------


def test_the_newest_complete_version_and_what_others_have_yet_to_publish_are_never_dropped() -> None:
    h = Harness()
    h.join()
    for rank in range(2):
        h.add(f"src{rank}", rank=rank, world_size=2)
    for member, version in (("src0", 1), ("src1", 1), ("src0", 2)):
        h.say("n0", cluster.ShardPublished(member=member, version=version))
    (none,) = h.say("n0", cluster.WantsRoom(member="src0", version=3, slots=2))
    assert none.versions == () and "source rank 1" in none.reason and "has published 1 last" in none.reason
    told = h.say("n0", cluster.ShardPublished(member="src1", version=2))
    assert [m for m in told if isinstance(m, cluster.MayDrop)] == [cluster.MayDrop("src0", (1,))]
    # with one slot there is no room for the complete version beside the next
    (some,) = h.say("n0", cluster.WantsRoom(member="src1", version=3, slots=1))
    assert some.versions == (1, 2)


def test_what_another_rank_has_left_out_is_not_waited_for() -> None:
    h = Harness()
    h.join()
    for rank in range(2):
        h.add(f"src{rank}", rank=rank, world_size=2)
    for member, version in (("src0", 1), ("src0", 2), ("src1", 2)):
        h.say("n0", cluster.ShardPublished(member=member, version=version))
    (some,) = h.say("n0", cluster.WantsRoom(member="src0", version=3, slots=2))
    assert some.versions == (1,)


def test_a_rank_that_comes_back_alone_publishes_above_what_any_rank_of_its_run_has_published() -> None:
    h = Harness()
    h.join()
    for rank in range(2):
        h.add(f"src{rank}", rank=rank, world_size=2)
    for member, version in (("src0", 1), ("src1", 1), ("src1", 2)):
        h.say("n0", cluster.ShardPublished(member=member, version=version))
    h.say("n0", cluster.DetachShard(member="src0", reason="it has ended"))
    # rank 1 holds 2 of the time before: what rank 0 would publish as 2 belongs to none of it
    (admitted,) = h.add("src0b", rank=0, world_size=2)
    assert admitted == cluster.SourceAdmitted(run="run1", next_version=3)


def test_nothing_is_decided_with_a_lost_journal_before_permits_that_it_knew_of_have_ended() -> None:
    h = Harness()
    lost(h, version=1, sequence=8)
    h.add("src", versions=(1, 2), run="x")
    h.add("a", version=1, run="x")
    h.say("n0", local.StartSwap("m", version=2), request=9)
    (load,) = [m for m in settled(h) if isinstance(m, cluster.LoadPlan)]
    (stage,) = [m for m in h.say("n0", cluster.PlanLoaded(plan=load.plan)) if isinstance(m, cluster.Stage)]
    staged = cluster.StageDone(swap=stage.swap, copies=1, bytes=32, seconds=0.1)
    assert "CommitStaged" not in kinds(h.say("n0", staged))
    h.now = Config().deadlines.lease_s + 0.1
    h.state.nodes["n0"].last_heard = h.now
    h.sent.clear()
    h.feed(Tick())
    assert "CommitStaged" in kinds([m for _, _, m in h.sent])


def test_what_a_trainer_has_left_on_another_node_is_given_back() -> None:
    h = Harness()
    h.ready()
    h.join("n1")
    h.say("n0", cluster.DetachShard(member="src", reason="its process has ended"))
    sent = h.add("src2", node="n1")
    assert [m.member for m in sent if isinstance(m, cluster.EvictMember)] == ["src"]
    assert [m.next_version for m in sent if isinstance(m, cluster.SourceAdmitted)] == [0]


def test_ranks_of_a_trainer_of_another_size_replace_all_that_is_left_and_abort_what_reads_it() -> None:
    h = Harness()
    h.ready()
    swap = h.until_staging()
    h.say("n0", cluster.DetachShard(member="src", reason="its process has ended"))
    sent = h.add("src2", rank=1, world_size=2)
    assert [m.swap for m in sent if isinstance(m, cluster.Abort)] == [swap]
    assert [m.member for m in sent if isinstance(m, cluster.EvictMember)] == ["src"]
    assert kinds(h.add("src3", rank=0, world_size=2)) == ["SourceAdmitted"]
    failure = h.add("src4", rank=2, world_size=3)[-1]
    assert isinstance(failure, local.Failure) and "says there are 3 ranks" in failure.message


def test_an_observer_is_caught_up_even_where_engines_are_not_and_is_fenced_by_the_next_decision() -> None:
    h = Harness(NO_CATCH_UP)
    h.ready()
    swap = h.until_staging()
    h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    h.say("n0", cluster.MemberCommitted(swap=swap, member="a", paused_s=0.0))
    assert kinds(h.add("late")) == ["DropPlan", "Done"]
    done, load = (m for m in h.add("o", observes=True))
    assert isinstance(done, local.Done) and isinstance(load, cluster.LoadPlan)
    (stage,) = (m for m in h.say("n0", cluster.PlanLoaded(plan=load.plan)) if isinstance(m, cluster.Stage))
    h.say("n0", cluster.StageDone(swap=stage.swap, copies=1, bytes=32, seconds=0.1))
    h.say("n0", cluster.MemberCommitted(swap=stage.swap, member="o", paused_s=0.0))
    h.say("n0", cluster.ShardPublished(member="src", version=2))
    swap = h.until_staging()
    decided = h.say("n0", cluster.StageDone(swap=swap, copies=2, bytes=64, seconds=0.1))
    assert [m.member for m in decided if isinstance(m, cluster.FenceMember)] == ["o"]
    h.say("n0", cluster.MemberCommitted(swap=swap, member="a", paused_s=0.0))
    ended = h.say("n0", cluster.MemberCommitted(swap=swap, member="late", paused_s=0.0))
    assert [member.replica for member in reports(ended)[0].members] == ["a", "late"]
