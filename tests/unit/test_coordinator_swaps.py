"""A swap in the coordinator, from the request to the report, and the order of swaps."""

from __future__ import annotations

from refitd.config import Config, ModelConfig
from refitd.protocol import cluster, local
from refitd.protocol.reports import EvictReport, StatusReport
from tests.support.coordinator_harness import NO_CATCH_UP, Harness, commit, kinds, reports, stages


def test_who_returns_during_a_swap_that_it_has_no_part_in_serves_nothing_else_once_that_is_decided() -> None:
    """Its node was lost briefly, or it crashed and restored its weights; the swap continued without it."""
    h = Harness(NO_CATCH_UP).ready()
    h.say("n0", cluster.StageDone(swap=h.until_staging(), copies=1, bytes=32, seconds=0.1))
    h.say("n0", local.CommitDone(swap="swap1", member="a", paused_s=0.0))
    h.join("n1", pid=11)
    h.say("n0", local.Publish(member="src", version=2))
    (stage,) = [m for m in h.say("n0", local.StartSwap("m"), request=9) if isinstance(m, cluster.Stage)]
    assert kinds(h.add("b", "n1", version=1, run="run1")) == ["Done"]  # version 1 is live as yet
    decided = h.say("n0", cluster.StageDone(swap=stage.swap, copies=1, bytes=32, seconds=0.1))
    (fence,) = [m for m in decided if isinstance(m, local.Fence)]
    assert fence.member == "b" and "version 1, and 2 is live" in fence.reason
    (commit,) = [m for m in decided if isinstance(m, cluster.CommitStaged)]
    assert decided.index(fence) < decided.index(commit)


def of_target(h: Harness) -> tuple[int | None, int | None]:
    """Return the versions that the first target serves and has staged, by `status`."""
    (status,) = h.say("n0", local.GetStatus(), request=9)
    assert isinstance(status, StatusReport)
    found = status.models[0].targets[0]
    return found.version, found.staged


def test_a_late_commit_blocks_the_next_swap_until_it_is_made() -> None:
    h = Harness().ready()
    swap = h.until_staging()
    h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    h.now += Config().deadlines.commit_s + 1
    h.state.nodes["n0"].last_heard = h.now
    (report,) = reports(h.tick())
    assert report.outcome == "incomplete" and "poll() more often, or raise deadlines.commit_s" in report.reason
    assert of_target(h) == (None, 1)
    h.say("n0", local.Publish(member="src", version=2))
    (failure,) = h.say("n0", local.StartSwap("m"), request=1)
    assert "has not yet taken over the version" in failure.message
    h.say("n0", local.CommitDone(swap=swap, member="a", paused_s=0.0))
    assert of_target(h) == (1, None)
    assert kinds(h.say("n0", local.StartSwap("m"))) == ["Stage"]


def test_a_source_that_withdraws_what_is_being_read_aborts_the_swap() -> None:
    h = Harness().ready()
    h.until_staging()
    (report,) = reports(h.say("n0", local.Withdraw(member="src", version=1)))
    assert report.outcome == "aborted" and "withdrew version 1" in report.reason


def test_a_node_that_takes_back_what_it_has_staged_ends_a_decision_that_is_held() -> None:
    h = Harness().ready()
    h.add("b", node="n0", version=0)
    h.state.absent.lost(h.state.members["b"], h.now + 50.0)
    swap = h.until_staging()
    assert kinds(h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))) == ["EndSwap"]
    said = h.say("n0", cluster.StageDone(swap=swap, where="src", reason="version 1 was taken back"))
    assert "Abort" in kinds(said) and swap in h.journal and h.journal[swap].state == "aborted"


def test_whoever_asked_is_told_in_time_that_it_is_decided_and_who_is_late_and_it_goes_on() -> None:
    h = Harness().ready()
    h.add("b")
    swap = h.until_staging(timeout_s=2.0)
    commit(h, swap, "a")
    assert h.state.next_deadline() == 2.0
    h.now = 2.0
    (report,) = reports(h.tick())
    assert report.outcome == "decided" and "replica 'b' rank 0" in report.reason and "'a' rank 0" not in report.reason
    assert [(m.replica, m.state) for m in report.members] == [("a", "committed"), ("b", "late")]
    h.now = 3.0
    assert h.tick() == [], "nobody is told twice"
    assert reports(h.say("n0", local.CommitDone(swap=swap, member="b", paused_s=0.0))) == []
    assert h.journal[swap].state == "committed" and h.state.models["m"].running is None


def test_an_evicted_rank_ends_the_swap_that_waits_for_it_and_its_node_is_told_after_that() -> None:
    h = Harness().ready()
    swap = h.until_staging()
    h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    (unknown,) = h.say("n0", local.Evict(model="m", replica="a", rank=4), request=7)
    assert isinstance(unknown, local.Failure) and "registered: replica 'a' rank 0" in unknown.message
    said = h.say("n0", local.Evict(model="m", replica="a", reason="it hangs"), request=7)
    (report,) = reports(said)
    assert report.outcome == "incomplete" and "evicted on request: it hangs" in report.members[0].reason
    (evicted,) = [m for m in said if isinstance(m, local.Evicted)]
    assert evicted.member == "a"
    assert said.index(report) < said.index(evicted)
    (answer,) = [m for m in said if isinstance(m, EvictReport)]
    assert answer.members == ("replica 'a' rank 0 (node n0, host h, pid 5)",)
    assert kinds(h.add("a")) == ["Done", "LoadPlan"]  # it may register again, and is brought up to date


# --- The coordinator's order of work: queued swaps, rollbacks and catch-ups. ----------------------------


def test_a_rank_that_commits_the_live_version_late_is_not_fenced_by_a_catch_up_of_another() -> None:
    """Its report could cross the fence: the rank would stay fenced with the live version."""
    h = Harness().ready()
    commit(h, h.until_staging(), "a")
    h.say("n0", local.Publish(member="src", version=2))
    (late,) = stages(h.say("n0", local.StartSwap("m"), request=5))
    h.say("n0", cluster.StageDone(swap=late.swap, copies=1, bytes=32, seconds=0.1))
    h.now = h.state.nodes["n0"].last_heard = Config().deadlines.commit_s + 1
    assert [report.outcome for report in reports(h.tick())] == ["incomplete"]
    (load,) = [m for m in h.add("b") if isinstance(m, cluster.LoadPlan)]
    (stage,) = stages(h.say("n0", cluster.PlanLoaded(plan=load.plan)))
    decided = h.say("n0", cluster.StageDone(swap=stage.swap, copies=1, bytes=32, seconds=0.1))
    assert "CommitStaged" in kinds(decided) and "Fence" not in kinds(decided)
    assert kinds(h.say("n0", local.CommitDone(swap=late.swap, member="a", paused_s=0.0))) == []


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
    assert late(3.0) == (
        "(asked, phase commit) runs and waits for replica 'a' rank 0 (node n0, host h, pid 5) to take it over (poll() "
        "or wait(), or its controller's call); if it hangs: `refitctl evict m --replica a --rank 0`"
    )


def test_the_time_that_a_swap_waits_for_its_turn_is_its_own() -> None:
    h = Harness().ready()
    first = h.until_staging()
    h.say("n0", local.Publish(member="src", version=2))
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
            h.say("n0", local.Publish(member="src", version=version))
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


def test_a_catch_up_that_was_aborted_is_tried_again_after_a_pause_and_not_for_ever() -> None:
    h = Harness().ready()
    commit(h, h.until_staging(), "a")
    tried, load = 0, h.add("b")[-1]
    while isinstance(load, cluster.LoadPlan):
        tried += 1
        (stage,) = stages(h.say("n0", cluster.PlanLoaded(plan=load.plan)))
        h.say("n0", cluster.StageDone(swap=stage.swap, where="worker 0", reason="broken"))
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
    h.say("n0", local.Publish(member="src", version=2))
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
    ended = h.say("n0", local.CommitDone(swap=stage.swap, member="c", paused_s=0.0))
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
    h.say("n0", local.Publish(member="src", version=2))
    swap = h.until_staging()
    decided = h.say("n0", cluster.StageDone(swap=swap, copies=2, bytes=64, seconds=0.1))
    assert [m.member for m in decided if isinstance(m, local.Fence)] == ["o"]
    h.say("n0", local.CommitDone(swap=swap, member="a", paused_s=0.0))
    ended = h.say("n0", local.CommitDone(swap=swap, member="late", paused_s=0.0))
    assert [member.replica for member in reports(ended)[0].members] == ["a", "late"]
