"""The coordinator without sockets: a fleet of made-up daemons talks to it."""

from __future__ import annotations

import itertools

import pytest

from refitd import ParameterMetadata
from refitd.commit.journal import Record
from refitd.config import Config, ModelConfig
from refitd.coordinator import actions as act
from refitd.coordinator.plans import make_plan
from refitd.coordinator.state import NODE_SILENCE_S, Coordinator
from refitd.errors import CommitError, RefitdError
from refitd.protocol import cluster, local, shards
from refitd.protocol.codec import digest_of, pack
from refitd.protocol.reports import (
    HistoryEntry,
    HistoryReport,
    NodeStatus,
    SourceReport,
    StatusReport,
    SwapProgress,
    SwapReport,
    VerifyReport,
)

NO_CATCH_UP = Config(models={"m": ModelConfig(catch_up=False)})


class Harness:
    """Feeds a coordinator, performs its plans and journal writes at once, collects what it sends."""

    def __init__(self, config: Config | None = None, journal: dict[str, Record] | None = None) -> None:
        self.journal = {} if journal is None else journal
        self.journal_error: RefitdError | None = None
        numbers = itertools.count(1)
        self.state = Coordinator(
            config=config or Config(),
            boot="boot",
            pid=1,
            started=0.0,
            new_swap_id=lambda: f"swap{next(numbers)}",
            wall_clock=lambda: 1.0,
            decided=self.journal.get,
            recent=lambda model, limit: [r for r in reversed(self.journal.values()) if model in ("", r.model)][:limit],
        )
        self.now = 0.0
        self.plans_made = 0
        self.sent: list[tuple[str, int, object]] = []

    def feed(self, event: act.Event) -> None:
        pending = [event]
        while pending:
            for instruction in self.state.handle(pending.pop(0), self.now):
                match instruction:
                    case act.Send(identity, request, message):
                        self.sent.append((identity.decode(), request, message))
                    case act.MakePlan(ticket, rosters):
                        self.plans_made += 1
                        try:
                            pending.append(act.Planned(ticket, make_plan(rosters)))
                        except RefitdError as exc:
                            pending.append(act.Planned(ticket, None, exc))
                    case act.Decide(record):
                        if self.journal_error is None:
                            self.journal[record.swap] = record
                        pending.append(act.JournalWritten(record.swap, self.journal_error))
                    case act.Remember(record):
                        self.journal.pop(record.swap, None)
                        self.journal[record.swap] = record

    def say(self, node: str, message: cluster.NodeMessage, request: int = 0) -> list[object]:
        """A daemon says something; what it caused to be sent is returned."""
        self.sent.clear()
        self.feed(act.FromNode(node.encode(), request, message))
        return [message for _, _, message in self.sent]

    def join(self, node: str = "n0", pid: int = 10, workers: tuple[int, ...] = ()) -> None:
        status = NodeStatus(node=node, host="h", pid=pid, workers=workers, clients=0, arenas=0, arena_bytes=0)
        assert isinstance(self.say(node, cluster.NodeHello(protocol=1, status=status))[-1], cluster.NodeWelcome)

    def add(self, member: str, node: str = "n0", **fields: object) -> list[object]:
        role = "source" if member.startswith("src") else "target"
        metadata = [ParameterMetadata("w", (4, 4), "bfloat16", 2, resolved_name="w")]
        added = {
            "member": member,
            "model": "m",
            "role": role,
            "replica": "" if role == "source" else member,
            "rank": 0,
            "world_size": 1,
            "pid": 5,
            "digest": digest_of(shards.shard_of(metadata)),
        } | fields
        shard = shards.shard_of(metadata)
        self.say(node, cluster.DescribeShard(digest=digest_of(shard), packed=pack(shard)))
        return self.say(node, cluster.AddShard(**added), request=3)

    def ready(self) -> None:
        """One source with version 1, one target, on one node."""
        self.join()
        assert self.add("src") == [local.Done()]
        assert self.add("a") == [local.Done()]
        self.say("n0", cluster.ShardPublished(member="src", version=1), request=4)

    def until_staging(self) -> str:
        (load,) = [m for m in self.say("n0", local.StartSwap("m"), request=9) if isinstance(m, cluster.LoadPlan)]
        (stage,) = [m for m in self.say("n0", cluster.PlanLoaded(plan=load.plan)) if isinstance(m, cluster.Stage)]
        return stage.swap


def reports(sent: list[object]) -> list[SwapReport]:
    return [m for m in sent if isinstance(m, SwapReport)]


def kinds(sent: list[object]) -> list[str]:
    return [type(m).__name__ for m in sent if not isinstance(m, SwapProgress)]


def test_a_swap_goes_from_plan_to_report() -> None:
    h = Harness()
    h.ready()
    swap = h.until_staging()
    staged = h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    assert kinds(staged) == ["EndSwap", "Commit"]
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


def test_a_decision_that_cannot_be_journalled_is_not_taken() -> None:
    h = Harness()
    h.ready()
    swap = h.until_staging()
    h.journal_error = CommitError("disk full")
    ended = h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    assert "Commit" not in kinds(ended) and "Abort" in kinds(ended)
    assert "disk full" in reports(ended)[0].reason


def test_a_silent_node_is_lost_and_its_members_with_it() -> None:
    h = Harness()
    h.ready()
    h.until_staging()
    h.now = NODE_SILENCE_S + 1
    h.sent.clear()
    h.feed(act.Tick())
    assert not h.state.nodes and not h.state.models
    # the node comes back: it is asked to introduce itself
    (failure,) = h.say("n0", local.GetStatus(), request=1)
    assert isinstance(failure, local.Failure) and failure.code == "unknown-node"


def test_a_restarted_coordinator_finishes_what_was_decided_and_undoes_what_was_not() -> None:
    journal = {"s1": Record("s1", "m", 7, "decided", "", "", 1.0)}
    h = Harness(journal=journal)
    h.join()
    assert h.add("a", staged="s1") == [cluster.Commit(swap="s1", version=7), local.Done()]
    h.say("n0", cluster.MemberCommitted(swap="s1", member="a", paused_s=0.0))
    undone = h.add("b", staged="s2")
    assert kinds(undone) == ["Abort", "Done"]
    (status,) = h.say("n0", local.GetStatus(), request=1)
    versions = {t.replica: (t.version, t.state) for t in status.models[0].targets}
    assert versions == {"a": (7, "serving"), "b": (None, "fenced")}


def test_a_restarted_coordinator_catches_up_what_an_undecided_swap_had_written_in_place() -> None:
    h = Harness(journal={"s1": Record("s1", "m", 7, "committed", "", "", 1.0)})
    h.join()
    h.add("src", versions=(7, 8))
    undone = h.add("a", version=7, staged="s2", pauses=True, in_place=True)  # it was at 7, and all of 8 was there
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
    h.feed(act.Tick())
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
    assert kinds(done) == ["EndSwap", "Commit"]


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
    h.say("n0", cluster.ShardPublished(member="src", version=2, way="pulled", why="it is fast"))
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
    h.add("src", versions=(1, 2), ways=("copied", "pulled"), way="pulled", why="it is fast")
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
    assert h.state.models["m"].live == 2


def test_a_queued_swap_waits_no_longer_than_asked_and_is_refused_if_it_cannot_begin_then() -> None:
    h = Harness()
    h.ready()
    first = h.until_staging()
    h.say("n0", local.StartSwap("m", version=7, queue=True), request=10)
    h.say("n0", local.StartSwap("m", queue=True, timeout_s=2.0), request=11)
    h.now = 3.0
    h.sent.clear()
    h.feed(act.Tick())
    assert [(request, m.code) for _, request, m in h.sent if isinstance(m, local.Failure)] == [(11, "deadline")]
    ended = commit(h, first, "a")
    assert [m.message for m in ended if isinstance(m, local.Failure)] != []
    assert h.state.models["m"].running is None


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
        versions.append(h.state.models["m"].live)
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
            h.feed(act.Tick())
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
    assert not h.journal and "Commit" not in kinds(staged)
    assert "Commit" in kinds(h.say("n0", cluster.MemberQuiet(swap=swap, member="a")))
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
    h.feed(act.Tick())
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
    later.add("src", versions=(1,))
    assert later.state.models["m"].live == 1
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
    later.add("src", versions=(1,))
    return later, swap


def last(h: Harness) -> HistoryEntry:
    (found,) = [m for m in h.say("n0", local.GetHistory("m"), request=4) if isinstance(m, HistoryReport)]
    return found.swaps[0]


def test_a_coordinator_learns_how_a_swap_ended_that_an_earlier_one_decided() -> None:
    h, swap = decided_and_died()
    before = last(h)
    assert before.state == "decided" and before.report is not None
    assert {m.replica: m.state for m in before.report.members} == {"a": "staged", "b": "staged"}
    h.add("a", version=1)  # it has taken it over meanwhile
    assert last(h).state == "decided"
    assert h.add("b", staged=swap)[0] == cluster.Commit(swap=swap, version=1)
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
    assert h.add("a", staged="s1") == [cluster.Commit(swap="s1", version=7), local.Done()]
    assert (last(h).state, last(h).report) == ("decided", None)


def test_who_does_not_come_back_after_a_decision_is_named() -> None:
    h, _ = decided_and_died()
    h.add("a", version=1)
    h.now = NODE_SILENCE_S + Config().deadlines.commit_s + 1
    h.feed(act.Tick())
    h.join()  # it has been silent for as long
    entry = last(h)
    assert entry.state == "incomplete" and entry.reason.endswith("not known to serve it: b rank 0 (host h, pid 5)")
    assert entry.report is not None
    assert {m.replica: m.state for m in entry.report.members} == {"a": "committed", "b": "lost"}


def test_the_next_swap_ends_what_was_decided_earlier() -> None:
    h, swap = decided_and_died()
    h.add("a", version=1)
    h.add("b", staged=swap)
    h.say("n0", cluster.MemberCommitFailed(swap=swap, member="b", reason="no room"))
    entry = last(h)  # both are known now
    assert entry.state == "incomplete" and entry.report is not None
    assert {m.replica: m.reason for m in entry.report.members} == {"a": "", "b": "no room"}

    h, swap = decided_and_died()
    h.add("a", version=1)
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
    h.feed(act.Tick())
    (report,) = [m for _, _, m in h.sent if isinstance(m, VerifyReport)]
    assert [m.state for m in report.members] == ["proven", "unknown"] and "no word" in report.members[1].reason
    (refused,) = h.say("n0", local.Verify("nobody"), request=9)
    assert isinstance(refused, local.Failure)
