"""Arenas, live tensors and retained memory in a daemon: who gets them, and who has to give them up."""

from __future__ import annotations

import pytest
import torch
from msgspec import structs

from refitd.daemon import actions as act
from refitd.errors import ArenaError, RefusedError
from refitd.protocol import cluster, local
from refitd.protocol.shards import Place
from tests.support.daemon_harness import SHARD, SOURCE, TARGET, Harness


def retaining() -> Harness:
    """A daemon that retains what an engine had, which has died after its commit; another client is there."""
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
    instructions = h.daemon.handle(act.ClientSaid(1, 1, SOURCE), 0.0)
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
    assert isinstance(h.ask(local.CreateArena(nbytes=4096)), local.ArenaCreated)
    failure = h.ask(local.RegisterTarget(model="m", replica="r", rank=0, world_size=1, shard=SHARD, live=live))
    assert isinstance(failure, local.Failure) and why in failure.message
    assert len(h.daemon.arenas) == 1


def test_an_arena_is_handed_only_to_its_own_session_and_as_it_may_be() -> None:
    h = Harness()
    target = h.ask(TARGET)
    assert isinstance(target, local.TargetRegistered)
    assert h.daemon.clients.may_fetch(1, target.staging, False).nbytes == target.nbytes
    with pytest.raises(RefusedError, match="for reading only"):
        h.daemon.clients.may_fetch(1, target.staging, True)
    with pytest.raises(RefusedError, match="not one of this session's"):
        h.daemon.clients.may_fetch(2, target.staging, False)


def test_the_limit_on_arenas_counts_those_being_made() -> None:
    h = Harness()
    half = local.CreateArena(nbytes=600 << 20)
    assert [type(i) for i in h.daemon.handle(act.ClientSaid(1, 1, half), 0.0)] == [act.MakeArenas]
    (refused,) = [i for i in h.daemon.handle(act.ClientSaid(1, 2, half), 0.0) if isinstance(i, act.ToClient)]
    assert refused.message.code == ArenaError.code and "node.max_arena_bytes" in refused.message.message


def test_arenas_are_asked_for_with_the_sizes_of_all_there_will_be() -> None:
    h = Harness()
    h.ask(local.CreateArena(nbytes=1000))
    asked = [
        i
        for request in (1, 2)
        for i in h.daemon.handle(act.ClientSaid(1, request, local.CreateArena(nbytes=2000 * request)), 0.0)
        if isinstance(i, act.MakeArenas)
    ]
    assert [make.held for make in asked] == [(1000,), (1000, 2000)]


def test_a_client_has_only_its_own_memory_measured() -> None:
    h = Harness()
    source = h.ask(SOURCE)
    assert isinstance(source, local.SourceRegistered)
    h.feed(act.SessionOpened(2, 200, "other"))
    measure = local.MeasurePull(member=source.member, spans=((4096, 2, 100),))
    refused = h.ask(measure, session=2)
    assert isinstance(refused, local.Failure) and "not a registration of this session" in refused.message
    assert h.daemon.handle(act.ClientSaid(1, 7, measure), 0.0) == [act.TimePull(1, 7, 100, ((4096, 2, 100),))]


def test_a_registration_that_was_looked_at_beside_the_loop_is_like_any_other() -> None:
    h = Harness()
    for message, kind in ((SOURCE, local.SourceRegistered), (TARGET, local.TargetRegistered)):
        h.to_client.clear()
        h.feed(act.ClientSaid(1, 7, message, h.daemon.prepare(1, message)()))
        (found,) = [m for _, request, m in h.to_client if request == 7]
        assert isinstance(found, kind)
        assert h.daemon.members[found.member].id == found.member
    bad = local.RegisterSource(model="m", rank=3, world_size=1, shard=SHARD)
    h.to_client.clear()
    h.feed(act.ClientSaid(1, 7, bad, h.daemon.prepare(1, bad)()))
    (failure,) = [m for _, request, m in h.to_client if request == 7]
    assert isinstance(failure, local.Failure) and "rank 3 is not in 0..0" in failure.message


def test_a_rank_for_which_there_is_no_permit_leaves_what_is_retained_for_it() -> None:
    h = retaining()
    free, h.daemon.permits._free = h.daemon.permits._free, []
    refused = h.ask(TARGET)
    assert isinstance(refused, local.Failure) and "registered target ranks already" in refused.message
    h.daemon.permits._free = free
    again = h.ask(TARGET)
    assert isinstance(again, local.TargetRegistered) and again.restores


@pytest.mark.parametrize(("short", "frees"), [(0, False), (1, True), (1 << 40, False)])
def test_retained_memory_is_given_up_only_for_as_much_as_it_is(short: int, frees: bool) -> None:
    h = retaining()
    h.no_memory = ArenaError("there is no memory", short=short)
    made = h.ask(local.CreateArena(nbytes=4096))
    assert isinstance(made, local.ArenaCreated) is frees
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
        assert isinstance(answer, local.TargetRegistered) and questions == [True, False]
        assert not h.daemon.retained.arenas() and {*h.closed} == retained


def test_an_engine_that_the_coordinator_does_not_take_back_leaves_what_is_retained_for_it() -> None:
    h = retaining()
    retained, members = h.daemon.retained.arenas(), {*h.daemon.members}
    for _ in range(2):
        again = h.ask(TARGET)
        assert isinstance(again, local.TargetRegistered) and again.restores
        h.refuse_with = local.Failure(code="refused", message="no")
        assert h.ask(local.Restored(member=again.member)) == h.refuse_with
        h.refuse_with = None
        assert h.daemon.retained.arenas() == retained and {*h.daemon.members} == members and not h.closed


def test_a_registration_whose_tensors_are_freed_while_its_arenas_are_made_is_refused_and_leaves_none() -> None:
    h = Harness()
    assert isinstance(h.ask(local.CreateArena(nbytes=1 << 20)), local.ArenaCreated)
    live = tuple(Place(1, 0, tuple(2 * s for s in torch.empty(t.shape).stride())) for t in SHARD.tensors)
    asked = h.daemon.handle(act.ClientSaid(1, 8, structs.replace(TARGET, live=live)), 0.0)
    (make,) = [i for i in asked if isinstance(i, act.MakeArenas)]
    assert h.ask(local.FreeArena(arena=1)) == local.Done()
    h.feed(act.ArenasMade(make.ticket, (7,)))
    failed = h.to_client[-1][2]
    assert isinstance(failed, local.Failure) and "have been freed" in failed.message
    assert h.closed == [1, 7] and not h.daemon.arenas and not h.daemon.members
