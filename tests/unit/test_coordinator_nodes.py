"""The nodes of a coordinator: lost, refused and drained ones, and their reports."""

from __future__ import annotations

import msgspec

from refitd.config import Config
from refitd.coordinator import actions as act
from refitd.coordinator.metrics import figures
from refitd.coordinator.nodes import RESERVED_FILES
from refitd.coordinator.state import NODE_SILENCE_S
from refitd.errors import CommitError
from refitd.protocol import cluster, local
from refitd.protocol.base import PROTOCOL_VERSION
from refitd.protocol.reports import DrainReport, NodeStatus, ReplicaName, StatusReport
from refitd.states import Busy, Tick
from refitd_cli.view import lost_lines
from tests.support.coordinator_harness import NO_CATCH_UP, Harness, commit, kinds, reports


def test_a_silent_node_is_lost_and_its_members_with_it() -> None:
    h = Harness().ready()
    h.until_staging()
    h.now = NODE_SILENCE_S + 1
    h.tick()
    assert not h.state.nodes and not h.state.models
    # the node sends again: it is asked to introduce itself
    (failure,) = h.say("n0", local.GetStatus(), request=1)
    assert isinstance(failure, local.Failure) and failure.code == "unknown-node"


def test_a_lost_node_stays_in_the_status_until_it_returns_or_is_forgotten() -> None:
    h = Harness().ready().join("n1", pid=12)

    def status(asks: str = "n1") -> StatusReport:
        (report,) = h.say(asks, local.GetStatus(), request=1)
        assert isinstance(report, StatusReport)
        return report

    h.now = 2.5
    (n0, n1) = status().nodes
    assert n0.is_late and n0.silent_s == 2.5 and not n1.is_late and not status().lost
    h.now = NODE_SILENCE_S + 1
    h.say("n1", local.GetStatus(), request=1)
    h.tick()
    h.now += 5
    report = status()
    (lost,) = report.lost
    assert (lost.node, lost.silent_s, lost.sources) == ("n0", NODE_SILENCE_S + 6, ("m",))
    assert lost.replicas == (ReplicaName("m", "a"),) and [node.node for node in report.nodes] == ["n1"]
    line = next(lost_lines(report))
    assert "n0: lost 16 s ago" in line and "replica a of m" in line and "refitctl forget --node n0" in line
    (refused,) = h.say("n1", local.Forget(node="n1"), request=1)
    assert isinstance(refused, local.Failure) and "it is connected" in refused.message
    h.say("n1", local.Forget(node="n0"), request=1)
    assert not status().lost
    h.now += NODE_SILENCE_S + 1
    h.join("n2", pid=13)
    h.tick()
    assert [lost.node for lost in status("n2").lost] == ["n1"]
    h.join("n1", pid=14)
    assert not status().lost


def test_the_next_coordinator_knows_which_nodes_are_lost_and_which_have_not_returned() -> None:
    h = Harness(NO_CATCH_UP).ready()
    commit(h, h.until_staging(), "a")
    h.join("n1", pid=12).join("n2", pid=13).join("n3", pid=14)
    h.say("n3", local.Goodbye())
    h.now = NODE_SILENCE_S + 1
    for node in ("n0", "n1"):
        h.say(node, local.GetStatus(), request=1)
    h.tick()
    assert [*h.state.lost] == ["n2"] and h.known["n3"].described is None

    later = Harness(NO_CATCH_UP, h.journal, known=[k for k in h.known.values() if k.described]).join("n1", pid=12)
    assert [*later.state.lost] == ["n2"] and [*later.state.awaited] == ["n0"]
    (report,) = later.say("n1", local.GetStatus(), request=1)
    assert [lost.node for lost in report.lost] == ["n2"]  # n0 may return any moment
    later.now = 2.5
    (report,) = later.say("n1", local.GetStatus(), request=1)
    assert [lost.node for lost in report.lost] == ["n2", "n0"]
    later.now = NODE_SILENCE_S + 1
    later.say("n1", local.GetStatus(), request=1)
    later.tick()
    (report,) = later.say("n1", local.GetStatus(), request=1)
    n2, n0 = report.lost
    assert n2.reason == "no word from it for 10 s" and n0.reason == "it has not returned since the coordinator started"
    assert n0.replicas == (ReplicaName("m", "a"),) and n0.sources == ("m",) and n0.silent_s == later.now
    assert later.known["n0"].described and later.known["n0"].described.reason
    later.say("n1", local.Forget(node="n2"), request=1)
    later.join("n0")
    assert not later.state.lost and later.known["n2"].described is None and not later.known["n0"].described.reason


def test_a_daemon_that_has_introduced_itself_several_times_before_it_was_answered_is_not_lost() -> None:
    h = Harness()
    logged: list[str] = []
    handle = h.state.handle

    def watched(event: act.Event, now: float, wall: float = 0.0) -> list[act.Instruction]:
        found = handle(event, now)
        logged.extend(i.event for i in found if isinstance(i, act.Log))
        return found

    h.state.handle = watched  # type: ignore[method-assign]
    h.join()
    h.join()
    assert "node-lost" not in logged
    h.add("src")
    h.join()  # the node had a member, and introduces itself without it
    assert "node-again" in logged and "node-lost" not in logged and not h.state.models


def test_a_node_that_is_no_part_of_a_swap_is_refused_and_the_log_has_the_swaps_last_events() -> None:
    h = Harness().ready().join("n9", pid=12)
    swap = h.until_staging()
    for message in (
        cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1),
        cluster.StageDone(swap=swap, where="w", reason="r"),
        local.CommitFailed(swap=swap, member="nobody", reason="r"),
    ):
        assert kinds(h.say("n9", message)) == []
    assert [("no node" in str(r), "NodeLoaded(node='n0') -> stage" in str(r)) for r in h.illegal] == [
        (True, True),
        (True, True),
        (False, True),
    ]
    done = cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1)
    assert kinds(h.say("n0", done)) == ["EndSwap", "CommitStaged"]
    (report,) = reports(h.say("n0", local.CommitDone(swap=swap, member="a", paused_s=0.1)))
    assert "CommitReported" in report.events[-1]


def test_status_shows_where_targets_stand_as_their_own_daemons_say() -> None:
    h = Harness().ready().join("n1", pid=12)
    status = next(node.status for node in h.state.nodes.values() if node.status.node == "n0")
    moved = cluster.TargetMoved("a", "staging swap s, empty", ("StageBegan -> staging swap s, empty",))
    assert h.say("n0", cluster.NodeUpdate(status=status, moved=(moved,)), request=8) == [cluster.HeartbeatAnswer(h.now)]
    others = cluster.NodeUpdate(status=msgspec.structs.replace(status, node="n1", pid=12), moved=(moved,))
    (refused,) = h.say("n1", others, request=8)
    assert isinstance(refused, local.Failure) and "one of node 'n0'" in refused.message
    h.until_staging()
    (report,) = h.say("n0", local.GetStatus(), request=8)
    assert isinstance(report, StatusReport)
    (target,) = report.models[0].targets
    assert (target.step, target.events) == (moved.step, moved.events)
    assert "-> stage" in report.models[0].swap_events[-1]


def test_a_node_name_in_use_is_refused_and_a_restarted_daemon_is_not() -> None:
    h = Harness().ready()
    status = NodeStatus(node="n0", host="h2", pid=99, workers=(), clients=0, arenas=0, arena_bytes=0)
    (refusal,) = h.say("other", cluster.NodeHello(protocol=PROTOCOL_VERSION, status=status))
    assert "in use by the daemon with pid 10" in refusal.message
    h.now = NODE_SILENCE_S - 1
    h.say("other", cluster.NodeHello(protocol=PROTOCOL_VERSION, status=status))
    assert h.state.nodes["n0"].status.pid == 99
    assert not h.state.models, "the old daemon's members went with it"


def test_a_node_that_says_goodbye_frees_its_name_at_once_and_aborts_its_swap_by_name() -> None:
    h = Harness().ready()
    swap = h.until_staging()
    (report,) = reports(h.say("n0", local.Goodbye()))
    assert report.swap == swap and "node n0: its daemon was stopped" in report.reason
    assert not h.state.nodes and not h.state.models
    status = NodeStatus(node="n0", host="h", pid=99, workers=(), clients=0, arenas=0, arena_bytes=0)
    (welcome,) = h.say("another", cluster.NodeHello(protocol=PROTOCOL_VERSION, status=status))
    assert isinstance(welcome, cluster.NodeWelcome)
    (unknown,) = h.say("n0", local.Goodbye())  # said twice
    assert isinstance(unknown, local.Failure) and unknown.code == "unknown-node"
    assert h.state.nodes["n0"].status.pid == 99


def test_a_coordinator_that_was_busy_calls_nobody_silent_for_it() -> None:
    h = Harness().ready()
    h.now = 30.0  # the coordinator received no message for 30 s because it was busy
    h.feed(Busy(29.0))
    h.feed(Tick())
    assert list(h.state.nodes) == ["n0"]
    h.join("n0")
    h.feed(Busy(29.0))  # the node was heard after the busy time, so it gets no extra time
    h.now = 30.0 + NODE_SILENCE_S - 1
    h.feed(Tick())
    assert h.state.nodes
    h.now = 30.0 + NODE_SILENCE_S + 1
    h.feed(Tick())
    assert not h.state.nodes


# --- Drained nodes, without sockets: swaps exclude them or are refused, and drains outlive a coordinator.


def two_nodes(h: Harness | None = None) -> Harness:
    """One source and replica a on n0, replica b on n1; version 1 is published."""
    h = (h or Harness()).join("n0").join("n1", pid=11)
    h.add("src")
    h.add("a")
    h.add("b", node="n1", pid=6)
    h.say("n0", local.Publish(member="src", version=1), request=4)
    return h


def drain(h: Harness, node: str = "n1", via: str = "n0") -> DrainReport | local.Failure:
    (answer,) = [
        m for m in h.say(via, local.DrainNode(node=node), request=7) if isinstance(m, DrainReport | local.Failure)
    ]
    return answer


def resume(h: Harness, node: str = "n1") -> DrainReport | local.Failure:
    sent = h.say("n0", local.DrainNode(node=node, drained=False), request=7)
    (answer,) = [m for m in sent if isinstance(m, DrainReport | local.Failure)]
    return answer


def status(h: Harness) -> StatusReport:
    (found,) = [m for m in h.say("n0", local.GetStatus(), request=8) if isinstance(m, StatusReport)]
    return found


def swapped(h: Harness, version: int, *members: str) -> str:
    """Swap to this version with these members, all on n0; return the swap's id."""
    h.say("n0", local.Publish(member="src", version=version), request=4)
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
    (report,) = reports(h.say("n0", local.CommitDone(swap=swap, member="a", paused_s=0.0)))
    assert (report.drained, [m.replica for m in report.members]) == (("b",), ["a"])
    found = status(h)
    assert found.drained == ("n1",)
    assert [(t.replica, t.is_drained) for t in found.models[0].targets] == [("a", False), ("b", True)]
    answer = resume(h)
    assert isinstance(answer, DrainReport) and answer.replicas == (ReplicaName("m", "b"),)
    assert any(isinstance(m, cluster.LoadPlan) for _, _, m in h.sent), "it is caught up at once"
    assert status(h).drained == ()


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
    assert h.say("n0", local.Publish(member="src", version=2), request=4) == [local.Done()], "it may publish"


def test_drains_without_a_trainer_still_seed_nobody_and_are_seeded_by_nobody():
    h = two_nodes()
    drain(h)
    swap = h.until_staging()
    h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    h.say("n0", local.CommitDone(swap=swap, member="a", paused_s=0.0, seeds=True))
    sent = h.add("c", node="n1", pid=8)
    assert kinds(sent) == ["Done"], "who joins on a drained node waits for its resume"
    assert [m.replica for m in reports(sent)] == []
    drain(h, "n0")
    resume(h)
    assert not [m for _, _, m in h.sent if isinstance(m, cluster.LoadPlan)], "a and the source are on n0"


def test_unknown_names_and_needless_calls_are_told_apart():
    h = two_nodes()
    wrong = drain(h, "n7")
    assert isinstance(wrong, local.Failure) and "no node 'n7' is connected; connected nodes: n0, n1" in wrong.message
    assert resume(h) == DrainReport(node="n1", changed=False)
    drain(h)
    wrong = resume(h, "n7")
    assert isinstance(wrong, local.Failure) and "drained nodes: n1" in wrong.message


def test_a_replica_whose_rank_was_on_a_drained_node_stays_left_out_while_that_rank_is_gone():
    h = Harness().join("n0").join("n1", pid=11)
    h.add("src")
    h.add("a")
    h.add("w0", replica="wide", world_size=2)
    h.add("w1", node="n1", pid=6, replica="wide", rank=1, world_size=2)
    h.say("n0", local.Publish(member="src", version=1), request=4)
    answer = drain(h)
    assert isinstance(answer, DrainReport) and answer.replicas == (ReplicaName("m", "wide"),)
    h.say("n1", local.Deregister(member="w1", reason="stopped"))
    swapped(h, 1, "a")
    # also for the next coordinator
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
    h.say("n1", local.RegisterController(member="ctl", model="m", replica="driven", pid=9), request=5)
    answer = drain(h)
    assert isinstance(answer, DrainReport) and [r.replica for r in answer.replicas] == ["b", "driven"]
    h.say("n1", local.Deregister(member="ctl", reason="stopped"))
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
    sent = h.say("n0", local.Publish(member="src", version=1), request=4)
    assert sent == [local.Done()]
    resume(h, "n0")
    assert any(isinstance(m, cluster.LoadPlan) for _, _, m in h.sent)


def test_more_nodes_than_the_coordinator_may_open_files_for_are_refused_with_the_limit() -> None:
    h = Harness()
    h.state.max_files = RESERVED_FILES + 2
    h.join("n0").join("n1", pid=11)
    hello = cluster.NodeHello(PROTOCOL_VERSION, NodeStatus("n2", "h", 12, (), 0, 0, 0))
    (refused,) = h.say("n2", hello)
    assert isinstance(refused, local.Failure)
    assert refused.message.startswith("node 'n2': 2 nodes are connected, and this coordinator may open only 66 files")
    assert "RLIMIT_NOFILE" in refused.message and "raise LimitNOFILE" in refused.message
    h.join("n1", pid=11)  # a node that is known may return
