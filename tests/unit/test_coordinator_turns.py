"""Whose turn it is in the coordinator: the queue, going back, and catching up."""

from __future__ import annotations

from refitd.config import Config, ModelConfig
from refitd.protocol import cluster, local
from refitd.protocol.reports import StatusReport
from tests.support.coordinator_harness import NO_CATCH_UP, Harness, commit, kinds, reports, stages


def test_a_queued_swap_begins_when_the_running_one_ends_and_others_are_refused() -> None:
    h = Harness().ready()
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
    h = Harness().ready()
    first = h.until_staging()
    h.say("n0", local.StartSwap("m", version=7, queue=True), request=10)
    h.say("n0", local.StartSwap("m", queue=True, timeout_s=2.0), request=11)
    h.now = 3.0
    h.tick()
    assert [(request, m.code) for _, request, m in h.sent if isinstance(m, local.Failure)] == [(11, "deadline")]
    ended = commit(h, first, "a")
    assert [m.message for m in ended if isinstance(m, local.Failure)] != []
    assert h.state.models["m"].running is None


def test_a_swap_that_waits_in_vain_is_told_for_whom_and_what_to_do() -> None:
    h = Harness().ready()
    h.until_staging()
    swap = h.state.models["m"].running.swap.swap

    def late(at: float) -> str:
        h.say("n0", local.StartSwap("m", queue=True, timeout_s=1.0), request=11)
        h.now = at
        (failure,) = [m for m in h.tick() if isinstance(m, local.Failure)]
        return failure.message.removeprefix(f"model 'm': its turn did not come within 1.5 s: swap {swap} to version 1 ")

    awaited = "(asked, phase stage) runs and waits for node n0 to stage it; look at that node, or stop the swap: "
    assert late(1.5) == f"{awaited}`refitctl abort m`"
    h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    awaited = "(asked, phase commit) runs and waits for a rank 0 (node n0, host h, pid 5) to take it over (poll() or "
    assert (
        late(3.0) == f"{awaited}wait(), or its controller's call); if it hangs: `refitctl evict m --replica a --rank 0`"
    )


def test_the_time_that_a_swap_waits_for_its_turn_is_its_own() -> None:
    h = Harness().ready()
    first = h.until_staging()
    h.say("n0", cluster.ShardPublished(member="src", version=2))
    h.say("n0", local.StartSwap("m", queue=True, timeout_s=5.0), request=11)
    h.now = 4.0
    (second,) = stages(commit(h, first, "a"))
    h.now = 5.1
    (report,) = reports(h.tick())
    assert (report.swap, report.outcome) == (second.swap, "aborted")


def test_rollback_goes_to_the_version_before_the_live_one_and_no_further_by_itself() -> None:
    h = Harness(config=Config(models={"m": ModelConfig(auto_swap=True)})).ready()
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
    h = Harness().ready()
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
    h = Harness().ready()
    commit(h, h.until_staging(), "a")
    load = h.add("b")[-1]
    assert isinstance(load, cluster.LoadPlan)
    (stage,) = stages(h.say("n0", cluster.PlanLoaded(plan=load.plan)))
    ended = h.say("n0", cluster.StageFailed(swap=stage.swap, where="worker 0", reason="broken"))
    assert "Abort" in kinds(ended) and not any(isinstance(m, cluster.LoadPlan) for m in ended)
    h.say("n0", cluster.RemoveShard(member="b", reason="gone"))
    assert isinstance(h.add("b2", replica="b")[-1], cluster.LoadPlan)


def test_a_catch_up_that_was_aborted_is_tried_again_after_a_pause_and_not_for_ever() -> None:
    h = Harness().ready()
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
            sent += h.tick()
        load = next((m for m in sent if isinstance(m, cluster.LoadPlan)), None)
    assert tried == 4


def test_a_catch_up_gives_way_to_what_somebody_asks_for_until_it_is_decided() -> None:
    h = Harness().ready()
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


def test_an_observer_is_caught_up_even_where_engines_are_not_and_is_fenced_by_the_next_decision() -> None:
    h = Harness(NO_CATCH_UP).ready()
    swap = h.until_staging()
    commit(h, swap, "a")
    assert kinds(h.add("late")) == ["DropPlan", "Done"]
    done, load = (m for m in h.add("o", observes=True))
    assert isinstance(done, local.Done) and isinstance(load, cluster.LoadPlan)
    (stage,) = (m for m in h.say("n0", cluster.PlanLoaded(plan=load.plan)) if isinstance(m, cluster.Stage))
    commit(h, stage.swap, "o")
    h.say("n0", cluster.ShardPublished(member="src", version=2))
    swap = h.until_staging()
    decided = h.say("n0", cluster.StageDone(swap=swap, copies=2, bytes=64, seconds=0.1))
    assert [m.member for m in decided if isinstance(m, cluster.FenceMember)] == ["o"]
    h.say("n0", cluster.MemberCommitted(swap=swap, member="a", paused_s=0.0))
    ended = h.say("n0", cluster.MemberCommitted(swap=swap, member="late", paused_s=0.0))
    assert [member.replica for member in reports(ended)[0].members] == ["a", "late"]
