"""Versions that a daemon's sources publish, and members that return with their arenas."""

from __future__ import annotations

import pytest
from msgspec import structs

from refitd.commit.target_state import fresh, restoring
from refitd.daemon import actions as act
from refitd.daemon.arenas import RetainedTargets
from refitd.daemon.members import Arena, LocalMember, TargetMemory
from refitd.daemon.new_members import checked, new_member
from refitd.errors import ArenaError, RefusedError
from refitd.protocol import cluster, local
from refitd.protocol.base import PROTOCOL_VERSION
from refitd.protocol.shards import Place
from refitd.states import Tick
from tests.support.daemon_harness import SHARD, SOURCE, TARGET, Harness


def test_a_slot_that_is_being_read_is_not_overwritten() -> None:
    h = Harness()
    source, _ = h.fleet()
    runs = h.stage()
    assert h.publish(source, 2) == local.Done()  # the other slot
    assert h.ask(local.BeginPublish(member=source, version=3, timeout_s=5.0)) == local.SlotGranted(slot=1)
    assert h.said(local.Withdraw) == [local.Withdraw(member=source, version=2)]
    # now both are taken: the next one waits, and is served when the swap has read
    assert h.ask(local.BeginPublish(member=source, version=4, timeout_s=5.0)) is None
    h.done(runs)
    h.feed(act.CoordinatorSaid(0, cluster.EndSwap(swap="s")))
    assert (1, 7, local.SlotGranted(slot=0)) in h.to_client


def test_a_publish_that_waits_too_long_is_told_who_reads() -> None:
    h = Harness()
    source, _ = h.fleet()
    h.stage()
    h.ask(local.BeginPublish(member=source, version=2, timeout_s=5.0))
    assert h.ask(local.BeginPublish(member=source, version=3, timeout_s=5.0)) is None
    h.now = 6.0
    h.feed(act.CoordinatorSaid(0, local.Done()), Tick())
    (failure,) = [m for _, _, m in h.to_client if isinstance(m, local.Failure)]
    assert "no snapshot slot became free for version 3" in failure.message and "['s']" in failure.message


def test_a_trainer_that_leaves_keeps_its_versions_and_an_engine_that_leaves_nothing() -> None:
    h = Harness()
    source, target = h.fleet()
    h.feed(act.SessionClosed(1, "died"))
    assert list(h.daemon.members) == [source]
    assert h.said(local.Deregister) and h.said(local.Deregister)[0].member == target
    assert len(h.daemon.arenas) == 2
    # its rank registers again and takes the place
    h.feed(act.SessionOpened(2, 200, "again"))
    assert isinstance(h.ask(SOURCE, session=2), local.Registered)
    assert source not in h.daemon.members and len(h.daemon.members) == 1
    assert len(h.daemon.arenas) == 2


def test_a_version_that_the_coordinator_refuses_is_not_held_and_its_slot_is_free() -> None:
    h = Harness()
    source, _ = h.fleet()
    h.refuse_with = local.Failure(code="refused", message="version 2 was live with other contents; publish 5 or above")
    assert isinstance(h.publish(source, 2), local.Failure)
    assert h.daemon.members[source].held() == [1]
    h.refuse_with = None
    assert h.publish(source, 2) == local.Done()


def test_a_source_that_was_admitted_above_what_was_live_is_refused_lower_numbers_before_it_copies() -> None:
    h = Harness()
    h.refuse_with = local.Done(run="r2", next_version=12)
    source = h.ask(SOURCE)
    assert isinstance(source, local.Registered) and (source.next_version, source.run) == (12, "r2")
    h.refuse_with = None
    refused = h.ask(local.BeginPublish(member=source.member, version=3, timeout_s=5.0))
    assert isinstance(refused, local.Failure) and "publish 12 or above" in refused.message
    assert h.publish(source.member, 12) == local.Done()
    # the next coordinator learns which versions the source may not publish again, and their incarnation
    h.to_coordinator.clear()
    h.feed(act.CoordinatorSaid(0, cluster.NodeWelcome(protocol=PROTOCOL_VERSION, boot="another")))
    (again,) = h.said(cluster.AddShard)
    assert (again.run, again.newest, again.versions) == ("r2", 12, (12,))


def test_tensors_outside_arenas_are_not_lent() -> None:
    h = Harness()
    source, _ = h.fleet()
    answer = h.ask(local.Publish(member=source, version=2))
    assert isinstance(answer, local.Failure) and "only tensors in arenas are lent" in answer.message
    assert h.daemon.members[source].held() == [1]


def test_a_version_whose_coordinator_is_lost_before_it_answers_is_published() -> None:
    h = Harness()
    source, _ = h.fleet()
    h.refuse_with = local.Failure(code="transport", message="the coordinator has restarted")
    assert h.publish(source, 2) == local.Done()
    assert h.daemon.members[source].held() == [1, 2]
    h.refuse_with = None
    h.to_coordinator.clear()
    h.feed(act.CoordinatorSaid(0, cluster.NodeWelcome(protocol=PROTOCOL_VERSION, boot="another")))
    assert {again.versions for again in h.said(cluster.AddShard)} == {(1, 2), ()}


def test_without_a_coordinator_nothing_is_published() -> None:
    h = Harness()
    source, _ = h.fleet()
    h.now = 100.0
    for failed in (h.publish(source, 2), h.ask(local.Publish(member=source, version=2))):
        assert isinstance(failed, local.Failure) and "no coordinator" in failed.message
    h.feed(act.CoordinatorSaid(0, local.Done()))
    assert h.daemon.members[source].held() == [1]
    assert h.publish(source, 2) == local.Done()


# --- A client that registers again gets the arenas that it handed over, and no other client's arenas. ---


def nbytes_of() -> int:
    found = Harness().ask(SOURCE)
    assert isinstance(found, local.Registered) and SHARD.tensors
    return found.nbytes


def given(h: Harness, *numbers: int, session: int = 1, nbytes: int | None = None, writable: bool = True) -> None:
    for number in numbers:
        h.feed(act.ArenaHandedBack(session, number, nbytes_of() if nbytes is None else nbytes, writable))


def slots(*pairs: tuple[int, int | None], run: str = "r", newest: int | None = 4) -> local.RegisterSource:
    held = tuple(local.GivenSlot(arena, version) for arena, version in pairs)
    return structs.replace(SOURCE, given=held, run=run, newest=newest)


def test_a_source_comes_back_with_its_slots_and_versions() -> None:
    h = Harness()
    given(h, 101, 102)
    back = h.ask(slots((101, 4), (102, 3)))
    assert isinstance(back, local.Registered) and back.slots == (101, 102) and not h.arenas
    (added,) = h.said(cluster.AddShard)
    assert (added.versions, added.run, added.newest) == ((3, 4), "r", 4)
    assert h.daemon.may_fetch(1, 101, write=True)
    # they are its slots now: the client cannot free them, and they go when it closes the registration
    assert isinstance(h.ask(local.FreeArena(arena=101)), local.Failure)
    assert h.ask(local.Deregister(member=back.member)) == local.Done()
    assert sorted(h.closed) == [101, 102]


def test_a_target_comes_back_with_what_it_serves_which_it_may_read_and_not_write() -> None:
    h = Harness()
    given(h, 7, writable=False)
    back = h.ask(structs.replace(TARGET, given=7, version=4, run="r", returns=True))
    assert isinstance(back, local.Registered) and (back.staging, back.version, back.run) == (7, 4, "r")
    (added,) = h.said(cluster.AddShard)
    assert isinstance(added, cluster.AddShard) and (added.version, added.run, added.seeds) == (4, "r", False)
    with pytest.raises(RefusedError, match="for reading only"):
        h.daemon.may_fetch(1, 7, write=True)


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (slots((101, 4)), "1 arenas are given back, 2 different ones are needed"),
        (slots((101, 4), (101, 3)), "different"),
        (slots((101, 4), (102, 4)), "slots hold"),
        (slots((101, 5), (102, 3)), "slots hold"),
        (slots((101, 4), (102, 3), run=""), "slots hold"),
        (slots((101, 4), (102, 3), newest=None), "slots hold"),
        (slots((101, 4), (999, 3)), "arena 999 is not one"),
        (slots((101, 4), (200, 3)), "arena 200 is not one"),  # another client's
        (slots((101, 4), (103, 3)), "arena 103 has"),  # too small
        (slots((101, 4), (104, 3)), "arena 104 has"),  # the client could only read it
        (structs.replace(TARGET, given=200), "arena 200 is not one"),
        (structs.replace(TARGET, given=103), "arena 103 has"),
    ],
)
def test_what_is_not_its_own_or_does_not_fit_is_refused_and_changes_nothing(
    message: local.RegisterSource | local.RegisterTarget, match: str
) -> None:
    h = Harness()
    h.feed(act.SessionOpened(2, 200, "other"))
    given(h, 101, 102)
    given(h, 103, nbytes=64)
    given(h, 104, writable=False)
    given(h, 200, session=2)
    refused = h.ask(message)
    assert isinstance(refused, local.Failure) and match in refused.message, refused
    assert not h.daemon.members and not h.closed and not h.arenas
    assert isinstance(h.ask(slots((101, 4), (102, 3))), local.Registered)
    assert isinstance(h.ask(structs.replace(TARGET, given=101)), local.Failure), "it is a slot already"


def test_what_is_given_back_counts_and_goes_with_its_client() -> None:
    h = Harness(max_arena_bytes=3 * nbytes_of())
    given(h, 101, 102)
    h.daemon.check_given(1, nbytes_of())
    given(h, 103)
    with pytest.raises(ArenaError, match="max_arena_bytes"):
        h.daemon.check_given(1, 1)
    with pytest.raises(RefusedError, match="Hello"):
        h.daemon.check_given(9, 1)
    h.feed(act.SessionClosed(1, "died"))
    assert sorted(h.closed) == [101, 102, 103] and not h.daemon.arenas


# --- Engines with fixed tensor addresses return to retained weights, even if a tensor has another offset in its page.


UID = 1000


def member(offset: int, *, reads_live: bool = True, strides: tuple[int, ...] = ()) -> LocalMember:
    tensors = SHARD.tensors
    live = tuple(Place(1, offset + 65536 * i, strides or rowwise(t.shape)) for i, t in enumerate(tensors))
    asked = local.RegisterTarget(
        model="m", replica="r", rank=0, world_size=1, shard=SHARD, live=live, flips=True, reads_live=reads_live
    )
    found = new_member("m/r:0", 1, checked(1, 7, asked, {1: Arena(1, 1 << 20, "live", 1, True)}))
    found.memory = TargetMemory(2)
    return found


def rowwise(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [4] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def left_by(one: LocalMember) -> RetainedTargets:
    kept = RetainedTargets(60.0)
    one.state = restoring(3, flips=True)
    assert kept.keep(one, UID, 0.0)
    return kept


def test_a_place_in_a_page_may_change_and_the_client_is_told_the_old_one() -> None:
    first, second, third = member(64), member(4032), member(64 + 4032)
    kept = left_by(first)
    found = kept.fitting(second, UID)
    assert found is not None
    kept.give(found, second)
    assert second.memory.staging == 2
    assert second.memory.content == tuple(64 + 65536 * i for i in range(len(SHARD.tensors)))
    kept = left_by(second)  # the second engine died before it restored them
    found = kept.fitting(third, UID)
    assert found is not None
    kept.give(found, third)
    assert third.memory.content == second.memory.content, "where they are, not where the second engine wanted them"


@pytest.mark.parametrize(
    ("offset", "reads_live", "fits"), [(64, True, True), (64 + 4096, True, False), (64, False, False)]
)
def test_other_layouts_are_no_return(offset: int, reads_live: bool, fits: bool) -> None:
    again = member(offset, reads_live=reads_live)
    found = left_by(member(64)).fitting(again, UID)
    assert (found is not None) is fits
    plain = left_by(member(64, reads_live=False))
    assert plain.fitting(member(65, reads_live=False), UID) is None
    found = plain.fitting(one := member(64, reads_live=False), UID)
    assert found is not None
    plain.give(found, one)
    assert one.memory.content == () and one.state != fresh(in_place=False, flips=True)


def test_whoever_forgets_or_replaces_a_rank_is_given_all_of_its_arenas_to_free() -> None:
    def left() -> RetainedTargets:
        one = member(64)
        one.memory = TargetMemory(2, 3)  # a tensor is converted into its staging arena
        return left_by(one)

    assert left().forget("m") == set(left().clear()) == left().replaced_by(member(64)) == {2, 3}
    assert left().forget("other") == set()
