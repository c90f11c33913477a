"""Drained nodes, decided without sockets: who is left out of a swap, what is refused, what outlives a coordinator."""

from __future__ import annotations

from refitd.config import Config
from refitd.coordinator.metrics import figures
from refitd.errors import CommitError
from refitd.protocol import cluster, control, local
from refitd.protocol.reports import DrainReport, ReplicaName, ResumeReport, StatusReport
from tests.support.coordinator_harness import Harness, commit, kinds, reports


def two_nodes(h: Harness | None = None) -> Harness:
    """One source and replica a on n0, replica b on n1; version 1 is published."""
    h = (h or Harness()).join("n0").join("n1", pid=11)
    h.add("src")
    h.add("a")
    h.add("b", node="n1", pid=6)
    h.say("n0", cluster.ShardPublished(member="src", version=1), request=4)
    return h


def drain(h: Harness, node: str = "n1", via: str = "n0") -> DrainReport | local.Failure:
    (answer,) = [
        m for m in h.say(via, local.DrainNode(node=node), request=7) if isinstance(m, DrainReport | local.Failure)
    ]
    return answer


def resume(h: Harness, node: str = "n1") -> ResumeReport | local.Failure:
    sent = h.say("n0", local.ResumeNode(node=node), request=7)
    (answer,) = [m for m in sent if isinstance(m, ResumeReport | local.Failure)]
    return answer


def status(h: Harness) -> StatusReport:
    (found,) = [m for m in h.say("n0", local.GetStatus(), request=8) if isinstance(m, StatusReport)]
    return found


def swapped(h: Harness, version: int, *members: str) -> str:
    """Swap to this version with these members, all on n0; return the swap's id."""
    h.say("n0", cluster.ShardPublished(member="src", version=version), request=4)
    swap = h.until_staging()
    (report,) = reports(commit(h, swap, *members))
    assert (report.version, report.outcome) == (version, "committed")
    return swap


def test_a_drained_nodes_replicas_are_left_out_fenced_by_the_next_decision_and_caught_up_on_resume():
    h = two_nodes()
    answer = drain(h)
    assert isinstance(answer, DrainReport)
    assert (answer.changed, answer.replicas, answer.stranded, answer.sources, answer.running) == (
        True,
        (ReplicaName("m", "b"),),
        (),
        (),
        (),
    )
    swap = h.until_staging()
    sent = h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    assert [m.swap for m in sent if isinstance(m, cluster.CommitStaged)] == [swap]
    (report,) = reports(h.say("n0", cluster.MemberCommitted(swap=swap, member="a", paused_s=0.0)))
    assert (report.drained, [m.replica for m in report.members]) == (("b",), ["a"])
    found = status(h)
    assert found.drained == ("n1",)
    assert [(t.replica, t.is_drained) for t in found.models[0].targets] == [("a", False), ("b", True)]
    answer = resume(h)
    assert isinstance(answer, ResumeReport) and answer.replicas == (ReplicaName("m", "b"),)
    assert any(isinstance(m, cluster.LoadPlan) for _, _, m in h.sent), "it is caught up at once"
    assert status(h).drained == ()


def test_what_serves_an_older_version_on_a_drained_node_serves_nothing_once_another_is_decided():
    h = two_nodes()
    sent = h.say("n0", local.StartSwap("m"), request=9)
    (plan,) = {m.plan for m in sent if isinstance(m, cluster.LoadPlan)}
    for node in ("n0", "n1"):
        sent = h.say(node, cluster.PlanLoaded(plan=plan, epoch="boot.1"))
    stage = next(m for m in sent if isinstance(m, cluster.Stage))
    for node in ("n0", "n1"):
        h.say(node, cluster.StageDone(swap=stage.swap, copies=1, bytes=32, seconds=0.1))
    for node, member in (("n0", "a"), ("n1", "b")):
        sent = h.say(node, cluster.MemberCommitted(swap=stage.swap, member=member, paused_s=0.0))
    assert reports(sent)[0].outcome == "committed"
    drain(h)
    assert not [m for _, _, m in h.sent if isinstance(m, cluster.FenceMember)], "it serves on until then"
    h.say("n0", cluster.ShardPublished(member="src", version=2), request=4)
    swap = h.until_staging()
    sent = h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    assert [m.member for m in sent if isinstance(m, cluster.FenceMember)] == ["b"]


def test_a_running_swap_goes_on_and_is_named():
    h = two_nodes()
    asked = h.say("n0", local.StartSwap("m"), request=9)
    assert any(isinstance(m, cluster.LoadPlan) for m in asked)
    answer = drain(h)
    assert isinstance(answer, DrainReport)
    assert [(s.model, s.version) for s in answer.running] == [("m", 1)]
    assert status(h).models[0].swap is not None
    again = drain(h)
    assert isinstance(again, DrainReport) and not again.changed and again.running == answer.running


def test_a_source_cannot_be_left_out_so_swaps_that_read_it_are_refused():
    h = two_nodes()
    answer = drain(h, "n0", via="n1")
    assert isinstance(answer, DrainReport)
    assert ([s.rank for s in answer.sources], answer.replicas) == ([0], (ReplicaName("m", "a"),))
    (refused,) = h.say("n1", local.StartSwap("m"), request=9)
    assert isinstance(refused, local.Failure)
    assert "source rank 0 (node n0, host h, pid 5) is on drained node 'n0'" in refused.message
    assert "refitctl resume n0" in refused.message
    assert h.say("n0", cluster.ShardPublished(member="src", version=2), request=4) == [local.Done()], "it may publish"


def test_drains_without_a_trainer_still_seed_nobody_and_are_seeded_by_nobody():
    h = two_nodes()
    drain(h)
    swap = h.until_staging()
    h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    h.say("n0", cluster.MemberCommitted(swap=swap, member="a", paused_s=0.0, seeds=True))
    sent = h.add("c", node="n1", pid=8)
    assert kinds(sent) == ["Done"], "who joins on a drained node waits for its resume"
    assert [m.replica for m in reports(sent)] == []
    drain(h, "n0")
    resume(h)
    assert not [m for _, _, m in h.sent if isinstance(m, cluster.LoadPlan)], "a and the source are on n0"


def test_the_last_node_is_drained_and_says_that_nothing_is_left():
    h = two_nodes()
    drain(h)
    answer = drain(h, "n0")
    assert isinstance(answer, DrainReport) and answer.stranded == ("m",)
    (refused,) = h.say("n0", local.StartSwap("m"), request=9)
    assert isinstance(refused, local.Failure)
    assert "every replica is left out (on a drained node: a, b; refitctl resume n0 or n1)" in refused.message


def test_unknown_names_and_needless_calls_are_told_apart():
    h = two_nodes()
    wrong = drain(h, "n7")
    assert isinstance(wrong, local.Failure) and "no node 'n7' is connected; connected nodes: n0, n1" in wrong.message
    assert resume(h) == ResumeReport(node="n1", changed=False)
    drain(h)
    wrong = resume(h, "n7")
    assert isinstance(wrong, local.Failure) and "drained nodes: n1" in wrong.message


def test_a_replica_whose_rank_was_on_a_drained_node_stays_left_out_while_that_rank_is_gone():
    h = Harness().join("n0").join("n1", pid=11)
    h.add("src")
    h.add("a")
    h.add("w0", replica="wide", world_size=2)
    h.add("w1", node="n1", pid=6, replica="wide", rank=1, world_size=2)
    h.say("n0", cluster.ShardPublished(member="src", version=1), request=4)
    answer = drain(h)
    assert isinstance(answer, DrainReport) and answer.replicas == (ReplicaName("m", "wide"),)
    h.say("n1", cluster.RemoveShard(member="w1", reason="stopped"))
    swapped(h, 1, "a")
    # the same for the coordinator that comes next
    later = Harness(journal=h.journal, drained=h.drained).join("n0")
    later.add("src", run="run1", versions=(1,), newest=1)
    later.add("a", version=1, run="run1")
    later.add("w0", replica="wide", world_size=2)
    assert swapped(later, 2, "a")
    # on another node it takes part again
    later.join("n2", pid=12)
    later.add("w1", node="n2", pid=7, replica="wide", rank=1, world_size=2)
    assert [t.is_drained for t in status(later).models[0].targets] == [False] * 3


def test_a_replica_whose_controller_is_on_a_drained_node_is_left_out():
    h = two_nodes()
    h.add("c", replica="driven", controlled=True)
    h.say("n1", control.AddController(member="ctl", model="m", replica="driven", pid=9), request=5)
    answer = drain(h)
    assert isinstance(answer, DrainReport) and [r.replica for r in answer.replicas] == ["b", "driven"]
    h.say("n1", control.RemoveController(member="ctl", reason="stopped"))
    assert [t.replica for t in status(h).models[0].targets if t.is_drained] == ["b", "driven"]
    swapped(h, 1, "a")


def test_what_the_journal_cannot_write_is_not_drained():
    h = two_nodes()
    h.journal_error = CommitError("disk full")
    assert [m for m in h.say("n0", local.DrainNode(node="n1"), request=7) if isinstance(m, DrainReport)] == []
    assert status(h).drained == ()


def test_metrics_count_drained_ranks_apart_and_show_no_lag_of_theirs():
    h = two_nodes()
    drain(h)
    found = figures(h.state, {})
    assert found.drained == 1
    assert found.models["m"].members[("target", "drained")] == 1
    assert list(found.models["m"].replicas) == ["a"]


def test_an_automatic_swap_waits_in_silence_for_a_drained_source():
    h = Harness(Config()).join("n0").join("n1", pid=11)
    h.add("src")
    h.add("b", node="n1", pid=6)
    drain(h, "n0")
    h.state.models["m"].membership.auto_swap = True
    sent = h.say("n0", cluster.ShardPublished(member="src", version=1), request=4)
    assert sent == [local.Done()]
    resume(h, "n0")
    assert any(isinstance(m, cluster.LoadPlan) for _, _, m in h.sent)
