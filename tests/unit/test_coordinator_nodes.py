"""The nodes of a coordinator: who is lost, who is refused, and what they say of their targets."""

from __future__ import annotations

import msgspec

from refitd.coordinator import actions as act
from refitd.coordinator.state import NODE_SILENCE_S
from refitd.events import Busy, Tick
from refitd.protocol import cluster, local
from refitd.protocol.base import PROTOCOL_VERSION
from refitd.protocol.reports import NodeStatus, StatusReport
from tests.support.coordinator_harness import Harness, kinds, reports


def test_a_silent_node_is_lost_and_its_members_with_it() -> None:
    h = Harness().ready()
    h.until_staging()
    h.now = NODE_SILENCE_S + 1
    h.tick()
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
    assert "node-again" in logged and "node-lost" not in logged and not h.state.models


def test_a_node_that_is_no_part_of_a_swap_is_refused_and_the_log_has_the_swaps_last_events() -> None:
    h = Harness().ready().join("n9", pid=12)
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
    (report,) = reports(h.say("n0", cluster.NodeLeaves()))
    assert report.swap == swap and "node n0: its daemon was stopped" in report.reason
    assert not h.state.nodes and not h.state.models
    status = NodeStatus(node="n0", host="h", pid=99, workers=(), clients=0, arenas=0, arena_bytes=0)
    (welcome,) = h.say("another", cluster.NodeHello(protocol=PROTOCOL_VERSION, status=status))
    assert isinstance(welcome, cluster.NodeWelcome)
    (unknown,) = h.say("n0", cluster.NodeLeaves())  # said twice
    assert isinstance(unknown, local.Failure) and unknown.code == "unknown-node"
    assert h.state.nodes["n0"].status.pid == 99


def test_a_coordinator_that_was_busy_calls_nobody_silent_for_it() -> None:
    h = Harness().ready()
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
