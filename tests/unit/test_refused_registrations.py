"""A refused registration is in the node's status: who, since when, why, until it registers or stops trying."""

from __future__ import annotations

from msgspec import structs

from refitd.coordinator.metrics import figures
from refitd.daemon import actions as act
from refitd.daemon.refused import MAX_REFUSED, STOPPED_S
from refitd.events import Tick
from refitd.protocol import cluster, local
from refitd.protocol.reports import NodeStatus, RefusedRegistration
from tests.support.coordinator_harness import Harness as CoordinatorHarness
from tests.support.daemon_harness import SOURCE, TARGET, Harness

TAKEN = local.Failure(code="refused", message="rank 0 of replica 'r' is taken by pid 71")


def refused(h: Harness) -> tuple[RefusedRegistration, ...]:
    return h.daemon.status().refused


def test_who_is_refused_since_when_and_why() -> None:
    h = Harness()
    h.refuse_with = TAKEN
    assert h.ask(TARGET) == TAKEN
    h.now = 1.0
    h.ask(TARGET)
    h.now = 3.5
    h.feed(Tick())
    (one,) = refused(h)
    assert (one.model, one.replica, one.rank, one.node, one.pid, one.name) == ("m", "r", 0, "n0", 100, "client")
    assert (one.since_s, one.last_s, one.tries, one.reason) == (3.5, 2.5, 2, TAKEN.message)
    assert "replica 'r' rank 0 of model 'm' is refused (node n0, pid 100, for 4 s, 2 tries)" in str(one)


def test_the_coordinator_is_told_at_the_first_refusal_without_waiting_for_a_heartbeat() -> None:
    h = Harness()
    h.refuse_with = TAKEN
    h.to_coordinator.clear()
    h.ask(TARGET)
    (update,) = h.said(cluster.NodeUpdate)
    assert isinstance(update, cluster.NodeUpdate) and len(update.status.refused) == 1


def test_what_this_daemon_refuses_itself_is_listed_too() -> None:
    h = Harness(max_arena_bytes=10)
    assert isinstance(h.ask(TARGET), local.Failure)
    (one,) = refused(h)
    assert "10" in one.reason


def test_a_source_is_listed_without_a_replica() -> None:
    h = Harness()
    h.refuse_with = TAKEN
    h.ask(SOURCE)
    (one,) = refused(h)
    assert one.replica == "" and str(one).startswith("source rank 0 of model 'm' is refused")


def test_an_entry_is_gone_once_the_process_is_registered() -> None:
    h = Harness()
    h.refuse_with = TAKEN
    h.ask(TARGET)
    h.refuse_with = None
    assert isinstance(h.ask(structs.replace(TARGET, replica="other")), local.TargetRegistered)
    assert refused(h) == (), "it chose another name"
    last = h.said(cluster.NodeUpdate)[-1]
    assert isinstance(last, cluster.NodeUpdate) and last.status.refused == (), "the coordinator knows"


def test_a_source_that_registers_leaves_the_targets_of_its_process_refused() -> None:
    h = Harness()
    h.refuse_with = TAKEN
    h.ask(TARGET)
    h.refuse_with = None
    h.ask(SOURCE)
    assert len(refused(h)) == 1


def test_an_entry_stays_while_its_client_is_connected() -> None:
    h = Harness()
    h.refuse_with = TAKEN
    h.ask(TARGET)
    h.now = 10 * STOPPED_S
    h.feed(Tick())
    assert len(refused(h)) == 1, "its process runs, and is not refitted"
    h.feed(act.SessionClosed(1, "closed"))
    h.feed(Tick())
    assert refused(h) == ()


def test_an_entry_stays_for_a_while_after_the_last_try_of_a_client_that_has_left() -> None:
    h = Harness()
    h.refuse_with = TAKEN
    h.ask(TARGET)
    h.feed(act.SessionClosed(1, "closed"))
    h.now = STOPPED_S - 1
    h.feed(Tick())
    assert len(refused(h)) == 1, "adapters connect again for each try"
    h.now += 1
    h.feed(Tick())
    assert refused(h) == ()


def test_a_process_that_connects_again_for_each_try_has_one_entry() -> None:
    h = Harness()
    h.refuse_with = TAKEN
    for session in (2, 3, 4):
        h.feed(act.SessionOpened(session, 300, "sglang"))
        h.ask(TARGET, session)
        h.feed(act.SessionClosed(session, "closed"))
    (one,) = refused(h)
    assert (one.pid, one.tries) == (300, 3)


def test_a_coordinator_that_is_away_refuses_nothing() -> None:
    h = Harness()
    h.refuse_with = local.Failure(code="transport", message="no coordinator")
    h.ask(TARGET)
    assert refused(h) == ()


def test_the_table_is_bounded_and_drops_what_was_tried_longest_ago() -> None:
    h = Harness()
    h.refuse_with = TAKEN
    for number in range(MAX_REFUSED + 5):
        h.now = float(number)
        h.ask(structs.replace(TARGET, replica=f"r{number}"))
    assert len(refused(h)) == MAX_REFUSED
    assert refused(h)[0].replica == "r5"


def test_a_status_of_an_older_daemon_has_no_refused_registrations() -> None:
    assert NodeStatus("n", "h", 1, (), 0, 0, 0).refused == ()


def test_refused_ranks_are_counted_by_model_and_replica() -> None:
    h = CoordinatorHarness()
    for node, ranks in {"n0": 2, "n1": 1}.items():
        found = tuple(RefusedRegistration("m", "a", rank, node, 7) for rank in range(ranks))
        h.join(node)
        status = structs.replace(h.state.nodes[node].status, refused=found)
        h.say(node, cluster.NodeUpdate(status=status))
    assert figures(h.state, {}).refused == {("m", "a"): 3}
