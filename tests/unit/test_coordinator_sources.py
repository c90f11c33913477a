"""Source ranks in the coordinator: their runs, their slots, and how they give a version."""

from __future__ import annotations

from refitd.coordinator.report import source_reports
from refitd.protocol import cluster, local
from refitd.protocol.reports import SourceReport, StatusReport
from tests.support.coordinator_harness import Harness, kinds, reports


def two_ranks(*published: tuple[str, int]) -> Harness:
    """Two source ranks, src0 and src1, that have published these versions."""
    h = Harness().join()
    for rank in range(2):
        h.add(f"src{rank}", rank=rank, world_size=2)
    for member, version in published:
        h.say("n0", cluster.ShardPublished(member=member, version=version))
    return h


def test_a_report_says_how_the_version_was_given_even_when_its_lease_has_ended() -> None:
    h = Harness().ready()
    h.say("n0", cluster.ShardPublished(member="src", version=2, mode="pulled", mode_reason="it is fast"))
    swap = h.until_staging()
    h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    h.say("n0", cluster.ShardWithdrawn(member="src", version=2))
    (report,) = reports(h.say("n0", cluster.MemberCommitted(swap=swap, member="a", paused_s=0.0)))
    assert report.sources == (SourceReport(rank=0, node="n0", host="h", mode="pulled", mode_reason="it is fast"),)
    (status,) = h.say("n0", local.GetStatus(), request=1)
    assert isinstance(status, StatusReport)
    assert (status.models[0].sources[0].mode, status.models[0].sources[0].mode_reason) == ("pulled", "it is fast")


def test_a_coordinator_that_starts_anew_knows_how_held_versions_are_given() -> None:
    h = Harness().join()
    h.add("src", versions=(1, 2), modes=("copied", "pulled"), mode="pulled", mode_reason="it is fast")
    fleet = h.state.models["m"].membership
    assert [source_reports(fleet, version)[0].mode for version in (1, 2, 3)] == ["copied", "pulled", ""]


def test_ranks_that_come_back_alone_go_on_above_what_they_had_published_and_others_wait_for_no_new_run() -> None:
    h = Harness().join()
    for rank in range(2):
        h.add(f"src{rank}", rank=rank, world_size=2)
        for version in (1, 2):
            h.say("n0", cluster.ShardPublished(member=f"src{rank}", version=version))
    h.say("n0", cluster.DetachShard(member="src1", reason="it has ended"))
    (admitted,) = h.add("src1b", rank=1, world_size=2)
    assert admitted == cluster.SourceAdmitted(run="run1", next_version=3)


def test_a_version_is_complete_only_where_all_ranks_hold_it_of_one_run() -> None:
    h = Harness().join()
    h.add("a")
    h.add("src0", rank=0, world_size=2, run="x", versions=(7,))
    h.add("src1", rank=1, world_size=2, run="y", versions=(7,))
    (refused,) = h.say("n0", local.StartSwap("m"), request=9)
    assert "several runs" in refused.message


def test_the_newest_complete_version_and_what_others_have_yet_to_publish_are_never_dropped() -> None:
    h = two_ranks(("src0", 1), ("src1", 1), ("src0", 2))
    (none,) = h.say("n0", cluster.WantsRoom(member="src0", version=3, slots=2))
    assert none.versions == () and "source rank 1" in none.reason and "has published 1 last" in none.reason
    told = h.say("n0", cluster.ShardPublished(member="src1", version=2))
    assert [m for m in told if isinstance(m, cluster.MayDrop)] == [cluster.MayDrop("src0", (1,))]
    # with one slot there is no room for the complete version beside the next
    (some,) = h.say("n0", cluster.WantsRoom(member="src1", version=3, slots=1))
    assert some.versions == (1, 2)


def test_what_another_rank_has_left_out_is_not_waited_for() -> None:
    h = two_ranks(("src0", 1), ("src0", 2), ("src1", 2))
    (some,) = h.say("n0", cluster.WantsRoom(member="src0", version=3, slots=2))
    assert some.versions == (1,)


def test_a_rank_that_comes_back_alone_publishes_above_what_any_rank_of_its_run_has_published() -> None:
    h = two_ranks(("src0", 1), ("src1", 1), ("src1", 2))
    h.say("n0", cluster.DetachShard(member="src0", reason="it has ended"))
    # rank 1 holds 2 of the time before: what rank 0 would publish as 2 belongs to none of it
    (admitted,) = h.add("src0b", rank=0, world_size=2)
    assert admitted == cluster.SourceAdmitted(run="run1", next_version=3)


def test_what_a_trainer_has_left_on_another_node_is_given_back() -> None:
    h = Harness().ready().join("n1")
    h.say("n0", cluster.DetachShard(member="src", reason="its process has ended"))
    sent = h.add("src2", node="n1")
    assert [m.member for m in sent if isinstance(m, cluster.EvictMember)] == ["src"]
    assert [m.next_version for m in sent if isinstance(m, cluster.SourceAdmitted)] == [0]


def test_forgetting_waits_for_no_swap_and_takes_nothing_from_who_is_there() -> None:
    h = Harness().ready()
    swap = h.until_staging()
    h.say("n0", cluster.DetachShard(member="src", reason="its process has ended"))
    (refused,) = [m for m in h.say("n0", local.Forget(model="m"), request=3) if isinstance(m, local.Failure)]
    assert f"swap {swap} is running" in refused.message
    h.say("n0", local.AbortSwap(model="m"), request=4)
    sent = h.say("n0", local.Forget(model="m"), request=5)
    assert [m.member for m in sent if isinstance(m, cluster.EvictMember)] == ["src"]
    assert [m.model for m in sent if isinstance(m, cluster.ForgetRetained)] == ["m"]
    assert h.state.models["m"].membership.sources == {} and len(h.state.models["m"].membership.targets) == 1


def test_ranks_of_a_trainer_of_another_size_replace_all_that_is_left_and_abort_what_reads_it() -> None:
    h = Harness().ready()
    swap = h.until_staging()
    h.say("n0", cluster.DetachShard(member="src", reason="its process has ended"))
    sent = h.add("src2", rank=1, world_size=2)
    assert [m.swap for m in sent if isinstance(m, cluster.Abort)] == [swap]
    assert [m.member for m in sent if isinstance(m, cluster.EvictMember)] == ["src"]
    assert kinds(h.add("src3", rank=0, world_size=2)) == ["SourceAdmitted"]
    failure = h.add("src4", rank=2, world_size=3)[-1]
    assert isinstance(failure, local.Failure) and "says there are 3 ranks" in failure.message
