"""Arenas and registrations in a daemon: allocation, refusals, and what status lists of them."""

from __future__ import annotations

import pytest
import torch
from msgspec import structs

from refitd.coordinator.metrics import figures
from refitd.daemon import actions as act
from refitd.daemon.links import MAX_REFUSED, STOPPED_S
from refitd.daemon.router import handle
from refitd.errors import ArenaError, RefusedError
from refitd.protocol import cluster, local
from refitd.protocol.reports import NodeStatus, RefusedRegistration
from refitd.protocol.shards import Place
from refitd.states import Tick
from tests.support.coordinator_harness import Harness as CoordinatorHarness
from tests.support.daemon_harness import SHARD, SOURCE, TARGET, Harness

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
    assert str(structs.replace(one, replica="")).startswith("source rank 0 of model 'm' is refused")


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


def test_an_entry_is_gone_once_the_process_is_registered() -> None:
    h = Harness()
    h.refuse_with = TAKEN
    h.ask(TARGET)
    h.refuse_with = None
    assert isinstance(h.ask(structs.replace(TARGET, replica="other")), local.Registered)
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


# --- Arenas, live tensors and retained memory in a daemon: allocation and reclaim. ----------------------


def retaining() -> Harness:
    """Return a daemon with retained memory of an engine that died after its commit, and with another client."""
    h = Harness(keep_targets_s=60.0)
    _, target = h.fleet()
    h.done(h.stage())
    h.commit(target)
    h.feed(act.SessionClosed(1, "died"), act.SessionOpened(1, 100, "again"))
    return h


def test_a_registration_the_coordinator_refuses_leaves_no_arena() -> None:
    h = Harness()
    h.refuse_with = local.Failure(code="refused", message="rank 0 is already registered")
    assert h.ask(SOURCE) == h.refuse_with
    assert not h.daemon.members and not h.daemon.arenas and h.closed == [1, 2]


def test_a_client_that_dies_while_its_arenas_are_made_leaves_none() -> None:
    h = Harness()
    instructions = handle(h.daemon, act.ClientSaid(1, 1, SOURCE), 0.0)
    (make,) = [i for i in instructions if isinstance(i, act.MakeArenas)]
    h.feed(act.SessionClosed(1, "died"), act.ArenasMade(make.ticket, (11, 12)))
    assert h.closed == [11, 12]
    assert not h.daemon.arenas and not h.daemon.members


@pytest.mark.parametrize(
    ("live", "why"),
    [
        ((Place(99, 0, (96, 2)),) * 4, "arena 99 is not one of this client's"),
        ((Place(1, 0, (96, 2)),), "1 places for 4 tensors"),
        ((Place(1, 0, (2,)),) * 4, "1 strides for shape"),
        ((Place(1, 4000, (96, 2)),) * 4, "which has 4096"),
    ],
)
def test_live_places_outside_the_clients_own_arenas_are_refused(live: tuple[Place, ...], why: str) -> None:
    h = Harness()
    assert isinstance(h.ask(local.CreateArena(nbytes=4096)), local.ArenaDescriptor)
    failure = h.ask(local.RegisterTarget(model="m", replica="r", rank=0, world_size=1, shard=SHARD, live=live))
    assert isinstance(failure, local.Failure) and why in failure.message
    assert len(h.daemon.arenas) == 1


def test_an_arena_is_handed_only_to_its_own_session_and_as_it_may_be() -> None:
    h = Harness()
    target = h.ask(TARGET)
    assert h.daemon.may_fetch(1, target.staging, False).nbytes == target.nbytes
    with pytest.raises(RefusedError, match="for reading only"):
        h.daemon.may_fetch(1, target.staging, True)
    with pytest.raises(RefusedError, match="not one of this session's"):
        h.daemon.may_fetch(2, target.staging, False)


def test_the_limit_on_arenas_counts_those_being_made() -> None:
    h = Harness()
    half = local.CreateArena(nbytes=600 << 20)
    assert [type(i) for i in handle(h.daemon, act.ClientSaid(1, 1, half), 0.0)] == [act.MakeArenas]
    (refused,) = [i for i in handle(h.daemon, act.ClientSaid(1, 2, half), 0.0) if isinstance(i, act.ToClient)]
    assert refused.message.code == ArenaError.code and "node.max_arena_bytes" in refused.message.message


def test_arenas_are_asked_for_with_the_sizes_of_all_there_will_be() -> None:
    h = Harness()
    h.ask(local.CreateArena(nbytes=1000))
    asked = [
        i
        for request in (1, 2)
        for i in handle(h.daemon, act.ClientSaid(1, request, local.CreateArena(nbytes=2000 * request)), 0.0)
        if isinstance(i, act.MakeArenas)
    ]
    assert [make.held for make in asked] == [(1000,), (1000, 2000)]


def test_a_registration_that_was_looked_at_beside_the_loop_is_like_any_other() -> None:
    h = Harness()
    for message in (SOURCE, TARGET):
        h.to_client.clear()
        h.feed(act.ClientSaid(1, 7, message, h.daemon.registering(1, message).check()))
        (found,) = [m for _, request, m in h.to_client if request == 7]
        assert h.daemon.members[found.member].id == found.member
    bad = local.RegisterSource(model="m", rank=3, world_size=1, shard=SHARD)
    h.to_client.clear()
    h.feed(act.ClientSaid(1, 7, bad, h.daemon.registering(1, bad).check()))
    (failure,) = [m for _, request, m in h.to_client if request == 7]
    assert isinstance(failure, local.Failure) and "rank 3 is not in 0..0" in failure.message


def test_a_rank_for_which_there_is_no_permit_leaves_what_is_retained_for_it() -> None:
    h = retaining()
    free, h.daemon.permits._free = h.daemon.permits._free, []
    refused = h.ask(TARGET)
    assert isinstance(refused, local.Failure) and "registered target ranks already" in refused.message
    h.daemon.permits._free = free
    again = h.ask(TARGET)
    assert isinstance(again, local.Registered) and again.restores


@pytest.mark.parametrize(("short", "frees"), [(0, False), (1, True), (1 << 40, False)])
def test_retained_memory_is_given_up_only_for_as_much_as_it_is(short: int, frees: bool) -> None:
    h = retaining()
    h.no_memory = ArenaError("there is no memory", short=short)
    made = h.ask(local.CreateArena(nbytes=4096))
    assert isinstance(made, local.ArenaDescriptor) is frees
    assert bool(h.daemon.retained.arenas()) is not frees and bool(h.closed) is frees


@pytest.mark.parametrize("lacking", ["the node's limit", "the system's memory"])
@pytest.mark.parametrize("refuses", [True, False])
def test_retained_memory_makes_room_for_a_rank_only_if_the_coordinator_takes_it_in(lacking: str, refuses: bool) -> None:
    h = retaining()
    retained = h.daemon.retained.arenas()
    if lacking == "the node's limit":
        h.daemon.arenas._max_bytes = sum(arena.nbytes for arena in h.daemon.arenas.values())
    else:
        h.no_memory, h.no_memory_times = ArenaError("there is no memory", short=1), 1 if refuses else 2
    h.refuse_with = local.Failure(code="refused", message="nobody expects it") if refuses else None
    h.to_coordinator.clear()
    answer = h.ask(structs.replace(TARGET, replica="another"))
    questions = [m.is_question for m in h.said(cluster.AddShard) if isinstance(m, cluster.AddShard)]
    if refuses:
        assert answer == h.refuse_with and questions == [True]
        assert h.daemon.retained.arenas() == retained and not h.closed
    else:
        assert isinstance(answer, local.Registered) and questions == [True, False]
        assert not h.daemon.retained.arenas() and {*h.closed} == retained


def test_an_engine_that_the_coordinator_does_not_take_back_leaves_what_is_retained_for_it() -> None:
    h = retaining()
    retained, members = h.daemon.retained.arenas(), {*h.daemon.members}
    for _ in range(2):
        again = h.ask(TARGET)
        assert isinstance(again, local.Registered) and again.restores
        h.refuse_with = local.Failure(code="refused", message="no")
        assert h.ask(local.Restored(member=again.member)) == h.refuse_with
        h.refuse_with = None
        assert h.daemon.retained.arenas() == retained and {*h.daemon.members} == members and not h.closed


def test_a_registration_whose_tensors_are_freed_while_its_arenas_are_made_is_refused_and_leaves_none() -> None:
    h = Harness()
    assert isinstance(h.ask(local.CreateArena(nbytes=1 << 20)), local.ArenaDescriptor)
    live = tuple(Place(1, 0, tuple(2 * s for s in torch.empty(t.shape).stride())) for t in SHARD.tensors)
    asked = handle(h.daemon, act.ClientSaid(1, 8, structs.replace(TARGET, live=live)), 0.0)
    (make,) = [i for i in asked if isinstance(i, act.MakeArenas)]
    assert h.ask(local.FreeArena(arena=1)) == local.Done()
    h.feed(act.ArenasMade(make.ticket, (7,)))
    failed = h.to_client[-1][2]
    assert isinstance(failed, local.Failure) and "have been freed" in failed.message
    assert h.closed == [1, 7] and not h.daemon.arenas and not h.daemon.members
