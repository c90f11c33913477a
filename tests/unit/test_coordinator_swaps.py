"""A swap in the coordinator, from what is asked for to its report."""

from __future__ import annotations

import pytest

from refitd.config import Config, ModelConfig
from refitd.errors import CommitError
from refitd.protocol import cluster, local
from refitd.protocol.reports import EvictReport, StatusReport
from tests.support.coordinator_harness import NO_CATCH_UP, Harness, commit, kinds, reports, stages


def test_a_swap_goes_from_plan_to_report() -> None:
    h = Harness().ready()
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
    h = Harness().ready()
    commit(h, h.until_staging(), "a")
    h.say("n0", cluster.ShardPublished(member="src", version=2))
    assert kinds(h.say("n0", local.StartSwap("m"))) == ["Stage"]


def test_a_changed_membership_drops_the_plan_and_makes_another() -> None:
    h = Harness(NO_CATCH_UP).ready()
    commit(h, h.until_staging(), "a")
    assert kinds(h.add("b")) == ["DropPlan", "Done"]
    h.say("n0", cluster.ShardPublished(member="src", version=2))
    assert kinds(h.say("n0", local.StartSwap("m"))) == ["LoadPlan"]


def test_a_member_that_joins_during_a_swap_leaves_its_plan_alone() -> None:
    h = Harness(NO_CATCH_UP).ready()
    swap = h.until_staging()
    assert kinds(h.add("b")) == ["Done"]
    ended = commit(h, swap, "a")
    assert kinds(ended) == ["DropPlan", "SwapReport"]
    assert [m.replica for m in reports(ended)[0].members] == ["a"]


def test_who_returns_during_a_swap_that_it_has_no_part_in_serves_nothing_else_once_that_is_decided() -> None:
    """Its node was lost for a moment, or it has crashed and found its weights again; the swap went on without it."""
    h = Harness(NO_CATCH_UP).ready()
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
    h = Harness().ready()
    swap = h.until_staging()
    h.journal_error = CommitError("disk full")
    ended = h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    assert "CommitStaged" not in kinds(ended) and "Abort" in kinds(ended)
    assert "disk full" in reports(ended)[0].reason


def of_target(h: Harness) -> tuple[int | None, int | None]:
    """The versions that `status` says the first target serves and has staged."""
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
    assert report.outcome == "incomplete" and "did not take over" in report.reason
    assert of_target(h) == (None, 1)
    h.say("n0", cluster.ShardPublished(member="src", version=2))
    (failure,) = h.say("n0", local.StartSwap("m"), request=1)
    assert "has not yet taken over the version" in failure.message
    h.say("n0", cluster.MemberCommitted(swap=swap, member="a", paused_s=0.0))
    assert of_target(h) == (1, None)
    assert kinds(h.say("n0", local.StartSwap("m"))) == ["Stage"]


def test_a_source_that_withdraws_what_is_being_read_aborts_the_swap() -> None:
    h = Harness().ready()
    h.until_staging()
    (report,) = reports(h.say("n0", cluster.ShardWithdrawn(member="src", version=1)))
    assert report.outcome == "aborted" and "withdrew version 1" in report.reason


def test_a_node_that_takes_back_what_it_has_staged_ends_a_decision_that_is_held() -> None:
    h = Harness().ready()
    h.add("b", node="n0", version=0)
    h.state._absent.lost(h.state._members["b"], h.now + 50.0)
    swap = h.until_staging()
    assert kinds(h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))) == ["EndSwap"]
    said = h.say("n0", cluster.StageFailed(swap=swap, where="src", reason="version 1 was taken back"))
    assert "Abort" in kinds(said) and swap in h.journal and h.journal[swap].state == "aborted"


@pytest.mark.parametrize("auto", [True, False])
def test_a_complete_version_is_swapped_by_itself_only_where_configured(auto: bool) -> None:
    h = Harness(Config(models={"m": ModelConfig(auto_swap=auto)})).join()
    h.add("src")
    h.add("a")
    sent = h.say("n0", cluster.ShardPublished(member="src", version=1), request=2)
    assert ("LoadPlan" in kinds(sent)) is auto


def test_whoever_asked_is_told_in_time_that_it_is_decided_and_who_is_late_and_it_goes_on() -> None:
    h = Harness().ready()
    h.add("b")
    swap = h.until_staging(timeout_s=2.0)
    commit(h, swap, "a")
    assert h.state.next_deadline() == 2.0
    h.now = 2.0
    (report,) = reports(h.tick())
    assert report.outcome == "decided" and "b rank 0" in report.reason and "a rank 0" not in report.reason
    assert [(m.replica, m.state) for m in report.members] == [("a", "committed"), ("b", "late")]
    h.now = 3.0
    assert h.tick() == [], "nobody is told twice"
    assert reports(h.say("n0", cluster.MemberCommitted(swap=swap, member="b", paused_s=0.0))) == []
    assert h.journal[swap].state == "committed" and h.state.models["m"].running is None


def test_a_member_that_fails_after_the_decision_is_fenced_and_the_next_swap_heals_it() -> None:
    h = Harness().ready()
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
    h = Harness().join()
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
    h = Harness().join()
    h.add("src")
    h.add("a", pauses=True)
    h.say("n0", cluster.ShardPublished(member="src", version=1))
    swap = h.until_staging()
    h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    h.now = Config().deadlines.pause_s + 1
    h.say("n0", cluster.NodeUpdate(status=h.state.nodes["n0"].status))
    (report,) = reports(h.tick())
    assert (report.outcome, report.phase) == ("aborted", "pause") and "a rank 0" in report.reason
    assert [member.state for member in report.members] == ["failed"]


def test_an_evicted_rank_ends_the_swap_that_waits_for_it_and_its_node_is_told_after_that() -> None:
    h = Harness().ready()
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
    assert answer.members == ("a rank 0 (node n0, host h, pid 5)",)
    assert kinds(h.add("a")) == ["Done", "LoadPlan"]  # it may register again, and is brought up to date
