"""Registrations of clients that come back: with the arenas that they have given back, and with nobody else's."""

from __future__ import annotations

import pytest
from msgspec import structs

from refitd.daemon import actions as act
from refitd.errors import ArenaError, RefusedError
from refitd.protocol import cluster, local
from tests.support.daemon_harness import SHARD, SOURCE, TARGET, Harness


def nbytes_of() -> int:
    found = Harness().ask(SOURCE)
    assert isinstance(found, local.SourceRegistered) and SHARD.tensors
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
    assert isinstance(back, local.SourceRegistered) and back.slots == (101, 102) and not h.arenas
    (added,) = h.said(cluster.AddShard)
    assert isinstance(added, cluster.AddShard)
    assert (added.versions, added.run, added.newest) == ((3, 4), "r", 4)
    assert h.daemon.clients.may_fetch(1, 101, write=True)
    # they are its slots now: the client cannot free them, and they go when it closes the registration
    assert isinstance(h.ask(local.FreeArena(arena=101)), local.Failure)
    assert h.ask(local.Deregister(member=back.member)) == local.Done()
    assert sorted(h.closed) == [101, 102]


def test_a_target_comes_back_with_what_it_serves_which_it_may_read_and_not_write() -> None:
    h = Harness()
    given(h, 7, writable=False)
    back = h.ask(structs.replace(TARGET, given=7, version=4, run="r", returns=True))
    assert isinstance(back, local.TargetRegistered) and (back.staging, back.version, back.run) == (7, 4, "r")
    (added,) = h.said(cluster.AddShard)
    assert isinstance(added, cluster.AddShard) and (added.version, added.run, added.seeds) == (4, "r", False)
    with pytest.raises(RefusedError, match="for reading only"):
        h.daemon.clients.may_fetch(1, 7, write=True)


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
    assert isinstance(h.ask(slots((101, 4), (102, 3))), local.SourceRegistered)
    assert isinstance(h.ask(structs.replace(TARGET, given=101)), local.Failure), "it is a slot already"


def test_what_is_given_back_counts_and_goes_with_its_client() -> None:
    h = Harness(max_arena_bytes=3 * nbytes_of())
    given(h, 101, 102)
    h.daemon.clients.check_given(1, nbytes_of())
    given(h, 103)
    with pytest.raises(ArenaError, match="max_arena_bytes"):
        h.daemon.clients.check_given(1, 1)
    with pytest.raises(RefusedError, match="Hello"):
        h.daemon.clients.check_given(9, 1)
    h.feed(act.SessionClosed(1, "died"))
    assert sorted(h.closed) == [101, 102, 103] and not h.daemon.arenas


def test_arenas_of_a_rank_that_the_coordinator_refuses_are_freed() -> None:
    h = Harness()
    given(h, 101, 102)
    h.refuse_with = local.Failure(code="refused", message="the rank is taken")
    assert isinstance(h.ask(slots((101, 4), (102, 3))), local.Failure)
    assert sorted(h.closed) == [101, 102] and not h.daemon.members
