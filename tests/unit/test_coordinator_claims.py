"""Live versions that daemons report, and source ranks: incarnations, slots, modes."""

from __future__ import annotations

import pytest

from refitd.config import Config, ModelConfig
from refitd.coordinator.journals import SwapRecord
from refitd.coordinator.live_versions import SETTLE_S
from refitd.coordinator.reports import source_reports
from refitd.protocol import cluster, local
from refitd.protocol.base import PROTOCOL_VERSION
from refitd.protocol.reports import NodeStatus, SourceReport, StatusReport
from tests.support.coordinator_harness import Harness, commit, kinds, reports


def lost(h: Harness, *, version: int, run: str = "x", sequence: int = 5, journal: str = "old", **more: object) -> list:
    """Have a daemon introduce itself with a live version that it learned from another coordinator."""
    claim = cluster.LiveClaim("m", version, run, sequence, more.pop("swap", "s"), journal, more.pop("highest", 0))
    node = str(more.get("node", "n0"))
    status = NodeStatus(node=node, host="h", pid=10, workers=(), clients=0, arenas=0, arena_bytes=0)
    return h.say(node, cluster.NodeHello(protocol=PROTOCOL_VERSION, status=status, live=(claim,)))


def live_of(h: Harness) -> tuple[object, ...]:
    (status,) = h.say("n0", local.GetStatus(), request=1)
    assert isinstance(status, StatusReport)
    return status.models[0].live, status.models[0].live_run


def fenced(sent: list[object]) -> set[str]:
    return {m.member for m in sent if isinstance(m, local.Fence)}


def settled(h: Harness) -> list[object]:
    h.now += SETTLE_S + 0.1
    for node in h.state.nodes.values():
        node.last_heard = h.now
    return h.tick()


def test_a_coordinator_without_its_journal_learns_from_daemons_what_is_live_and_fences_who_serves_another() -> None:
    h = Harness()
    lost(h, version=2, sequence=9)
    assert [(r.live.version, r.live.run, r.continues) for r in h.recovered] == [(2, "x", "old")]
    assert fenced(h.add("a", version=2, run="x")) == set()
    assert fenced(h.add("b", version=1, run="x")) == {"b"}
    h.add("src", versions=(1, 2), run="x")
    assert live_of(h) == (2, "x")
    (load,) = [m for m in settled(h) if isinstance(m, cluster.LoadPlan)]
    assert set(h.shares.open(load).members) == {"src", "b"}, "b alone is caught up"


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
    (refused,) = h.say("n0", local.Publish(member="src", version=3), request=4)
    assert "publish 5 or above" in refused.message
    h.say("n0", local.Publish(member="src", version=5), request=4)
    assert kinds(h.say("n0", local.StartSwap("m"), request=9)) == []
    assert "LoadPlan" in kinds(settled(h))


def test_a_new_journal_is_waited_with_and_one_that_daemons_know_is_not() -> None:
    alone = Harness(is_standalone=False)
    alone.ready()
    assert kinds(alone.say("n0", local.StartSwap("m"), request=9)) == []
    assert "LoadPlan" in kinds(settled(alone))
    known = Harness(journal={"s1": SwapRecord("s1", "m", 1, "committed", "", "", 1.0, run="x")}, is_standalone=False)
    lost(known, version=1, sequence=1, journal="j", swap="s1")
    known.add("src", versions=(1, 2), run="x")
    known.add("a", version=1, run="x")
    assert "LoadPlan" in kinds(known.say("n0", local.StartSwap("m"), request=9))


def test_an_older_journal_is_brought_up_to_what_daemons_were_told_and_an_exchanged_one_too() -> None:
    journal = {"s1": SwapRecord("s1", "m", 3, "committed", "", "", 1.0, run="x")}
    older = Harness(journal=dict(journal))
    lost(older, version=5, sequence=7, journal="j")
    older.add("a", version=3, run="x")
    assert live_of(older) == (5, "x") and older.recovered[0].live.sequence == 7
    exchanged = Harness(journal=dict(journal))
    lost(exchanged, version=2, run="y", sequence=1, journal="another")
    exchanged.add("a", version=2, run="y")
    assert live_of(exchanged) == (2, "y")
    # the adopted version outranks the journal's own entry, which other daemons may still report
    assert exchanged.recovered[0].live.sequence > 1 and exchanged.recovered[0].continues == "another"


def test_what_was_decided_in_this_life_is_not_outranked_by_what_others_remember() -> None:
    h = Harness().ready()
    commit(h, h.until_staging(), "a")
    lost(h, version=9, sequence=50, journal="j", node="n1")
    assert live_of(h) == (1, "run1")
    assert fenced(h.add("b", "n1", version=9, run="x")) == {"b"}
    assert h.recovered[-1].live.sequence == 51, "and so it stays when the coordinator starts again"


@pytest.mark.parametrize("how", ["told", "another", "serves"])
def test_a_swap_that_was_decided_is_finished_though_the_journal_is_lost(how: str) -> None:
    h = Harness()
    if how == "another":
        lost(h, version=2, swap="s9")  # its daemon knows that another member got the commit
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
    lost(h, version=2, sequence=9, swap="s9", node="n1")  # the daemon that got the commit
    assert cluster.CommitStaged(swap="s9", version=2, run="x") in settled(h)


def test_replicas_of_two_versions_that_nobody_can_explain_are_never_both_let_be() -> None:
    h = Harness().join()
    sent = h.add("a", version=1, run="x") + h.add("b", version=2, run="x")
    assert fenced(sent) == {"a"}
    assert fenced(h.add("c", version=1, run="x")) == {"c"}


def trainer_starts_again(h: Harness, *versions: int) -> list[object]:
    h.say("n0", local.Deregister(member="src", reason="it has ended", detached=True))
    sent = h.add("src2")
    for version in versions:
        sent += h.say("n0", local.Publish(member="src2", version=version), request=5)
    return sent


def test_a_number_that_was_live_is_refused_to_another_run_with_the_number_to_use() -> None:
    h = Harness().ready()
    commit(h, h.until_staging(), "a")
    admitted, refused, taken = (m for m in trainer_starts_again(h, 1, 2) if not isinstance(m, cluster.DropPlan))
    assert admitted == local.Done(run="run2", next_version=2)
    assert isinstance(refused, local.Failure) and "was live with other contents" in refused.message
    assert "publish 2 or above" in refused.message
    assert taken == local.Done()
    # a new member gets no plan under the old number
    assert "LoadPlan" not in kinds(h.add("b"))
    commit_both = h.until_staging()
    h.say("n0", cluster.StageDone(swap=commit_both, copies=2, bytes=64, seconds=0.1))
    assert live_of(h) == (2, "run2")


def test_what_was_rolled_back_is_not_swapped_to_again_whoever_remembers_it() -> None:
    auto = Config(models={"m": ModelConfig(auto_swap=True)})
    h = Harness(auto)
    lost(h, version=1, highest=2)
    h.add("src", versions=(1, 2), run="x")
    assert fenced(h.add("a", version=1, run="x")) == set()
    assert "LoadPlan" not in kinds(settled(h))


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
    assert "CommitStaged" in kinds(h.tick())


def test_swaps_of_several_models_wait_for_a_coordinator_that_has_just_started() -> None:
    h = Harness(Config(models={"m": ModelConfig(catch_up=False)}))
    lost(h, version=2, sequence=9)
    for model in ("m", "other"):
        h.add(f"src-{model}", model=model, versions=(3,), run="x")
        h.add(f"a-{model}", model=model, replica="a")
    pairs = (local.ModelVersion("m", 3), local.ModelVersion("other", 3))
    assert kinds(h.say("n0", local.StartSwaps(pairs), request=7)) == []
    assert kinds(h.say("n0", local.StartSwaps((local.ModelVersion("nobody", 1), *pairs)), request=8)) == []
    begun = settled(h)
    assert {m.model for m in begun if isinstance(m, cluster.LoadPlan)} == {"m", "other"}
    (refused,) = [m for m in begun if isinstance(m, local.Failure)]
    assert "nobody" in refused.message


# --- Source ranks in the coordinator: incarnations, slots, and modes of publishing. ---------------------


def two_ranks(*published: tuple[str, int]) -> Harness:
    """Two source ranks, src0 and src1, that have published these versions."""
    h = Harness().join()
    for rank in range(2):
        h.add(f"src{rank}", rank=rank, world_size=2)
    for member, version in published:
        h.say("n0", local.Publish(member=member, version=version))
    return h


def test_a_report_says_how_the_version_was_given_even_when_its_lease_has_ended() -> None:
    h = Harness().ready()
    h.say("n0", local.Publish(member="src", version=2, mode="arena"))
    swap = h.until_staging()
    h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    h.say("n0", local.Withdraw(member="src", version=2))
    (report,) = reports(h.say("n0", local.CommitDone(swap=swap, member="a", paused_s=0.0)))
    assert report.sources == (SourceReport(rank=0, node="n0", host="h", mode="arena"),)
    (status,) = h.say("n0", local.GetStatus(), request=1)
    assert isinstance(status, StatusReport)
    assert status.models[0].sources[0].mode == "arena"


def test_a_coordinator_that_starts_anew_knows_how_held_versions_are_given() -> None:
    h = Harness().join()
    h.add("src", versions=(1, 2), modes=("copied", "arena"), mode="arena")
    fleet = h.state.models["m"].membership
    assert [source_reports(fleet, version)[0].mode for version in (1, 2, 3)] == ["copied", "arena", ""]


def test_a_version_is_complete_only_where_all_ranks_hold_it_of_one_run() -> None:
    h = Harness().join()
    h.add("a")
    h.add("src0", rank=0, world_size=2, run="x", versions=(7,))
    h.add("src1", rank=1, world_size=2, run="y", versions=(7,))
    (refused,) = h.say("n0", local.StartSwap("m"), request=9)
    assert "several runs" in refused.message


def test_the_newest_complete_version_and_what_others_have_yet_to_publish_are_never_dropped() -> None:
    h = two_ranks(("src0", 1), ("src1", 1), ("src0", 2))
    (none,) = h.say("n0", local.BeginPublish(member="src0", version=3, slots=2))
    assert none.versions == () and "source rank 1" in none.reason and "has published 1 last" in none.reason
    told = h.say("n0", local.Publish(member="src1", version=2))
    assert [m for m in told if isinstance(m, local.MayDrop)] == [local.MayDrop("src0", (1,))]
    # with one slot there is no room for the complete version beside the next
    (some,) = h.say("n0", local.BeginPublish(member="src1", version=3, slots=1))
    assert some.versions == (1, 2)


def test_a_rank_that_comes_back_alone_publishes_above_what_any_rank_of_its_run_has_published() -> None:
    h = two_ranks(("src0", 1), ("src1", 1), ("src1", 2))
    h.say("n0", local.Deregister(member="src0", reason="it has ended", detached=True))
    # rank 1 has already published 2, so a 2 of the new rank 0 would not belong to that version
    (admitted,) = h.add("src0b", rank=0, world_size=2)
    assert admitted == local.Done(run="run1", next_version=3)


def test_forgetting_waits_for_no_swap_and_takes_nothing_from_who_is_there() -> None:
    h = Harness().ready()
    swap = h.until_staging()
    h.say("n0", local.Deregister(member="src", reason="its process has ended", detached=True))
    (refused,) = [m for m in h.say("n0", local.Forget(model="m"), request=3) if isinstance(m, local.Failure)]
    assert f"swap {swap} is running" in refused.message
    h.say("n0", local.AbortSwap(model="m"), request=4)
    sent = h.say("n0", local.Forget(model="m"), request=5)
    assert [m.member for m in sent if isinstance(m, local.Evicted)] == ["src"]
    assert [m.model for m in sent if isinstance(m, local.Forget)] == ["m"]
    assert h.state.models["m"].membership.sources == {} and len(h.state.models["m"].membership.targets) == 1


def test_ranks_of_a_trainer_of_another_size_replace_all_that_is_left_and_abort_what_reads_it() -> None:
    h = Harness().ready()
    swap = h.until_staging()
    h.say("n0", local.Deregister(member="src", reason="its process has ended", detached=True))
    sent = h.add("src2", rank=1, world_size=2)
    assert [m.swap for m in sent if isinstance(m, cluster.Abort)] == [swap]
    assert [m.member for m in sent if isinstance(m, local.Evicted)] == ["src"]
    assert kinds(h.add("src3", rank=0, world_size=2)) == ["Done"]
    failure = h.add("src4", rank=2, world_size=3)[-1]
    assert isinstance(failure, local.Failure) and "says there are 3 ranks" in failure.message
