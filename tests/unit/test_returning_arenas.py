"""Arenas and permits across a restart of the daemon."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from refitd.buffers.arena import PERMITS, MappedArena, create, read_only, taken_back
from refitd.buffers.permits import PAGE_BYTES, Permit, PermitPage
from refitd.client.arena_memory import ArenaMemory
from refitd.client.commit_state import CommitState
from refitd.client.connection import Connection
from refitd.client.slot_source import SourceSlots
from refitd.errors import ArenaError
from refitd.protocol import local
from refitd.protocol.base import Message
from refitd.protocol.shards import shard_of
from tests.support.shards import describe, whole

MESSAGE = local.RegisterSource(model="policy", rank=0, world_size=1, shard=shard_of([]), slots=2)


class Daemon:
    """The next daemon: it accepts registrations, and makes slots unless the client hands some over."""

    is_lost = False

    def __init__(self) -> None:
        self.heard: list[local.RegisterSource] = []

    def request(self, message: Message, reply: type[Message], timeout: float) -> Message:
        if isinstance(message, local.RegisterSource):
            self.heard.append(message)
        return local.Registered(member="m", slots=(1, 2), nbytes=8)

    def map_arena(self, arena: int, *, write: bool) -> Any:
        return SimpleNamespace(address=1000 + arena, nbytes=8)


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("is_finished", [True, False])
def test_only_a_slot_that_was_finished_before_the_registration_is_passed_on(is_given: bool, is_finished: bool) -> None:
    old: Any
    daemon: Any
    old, daemon = (SimpleNamespace(address=11, nbytes=8), SimpleNamespace(address=12, nbytes=8)), Daemon()
    registered = local.Registered(member="m", slots=(0, 1), nbytes=8)
    slots: Any = SourceSlots(MESSAGE, registered, old)
    slots.offered(1, 0, slots.granted(0, daemon))
    memory = slots.granted(1, daemon)

    def finish() -> None:
        slots.offered(2, 1, memory)

    def register() -> None:
        slots.register_again(daemon, lambda address, nbytes: address if is_given else None, 1.0)

    for step in (finish, register) if is_finished else (register, finish):
        step()
    assert slots.passed_on(1) == is_given and slots.passed_on(2) == (is_given and is_finished)
    assert slots.newest == (2 if is_finished and is_given else 1)
    register()  # as with another daemon: a version that was written to other memory is not in the slot
    told = {slot.version for slot in daemon.heard[-1].given}
    assert told == ({1, 2} if is_given and is_finished else {1, None} if is_given else set())


def test_a_version_that_is_copied_again_is_in_one_slot() -> None:
    daemon: Any = Daemon()
    arenas: Any = (SimpleNamespace(address=11, nbytes=8), SimpleNamespace(address=12, nbytes=8))
    slots = SourceSlots(MESSAGE, local.Registered(member="m", slots=(0, 1), nbytes=8), arenas)
    slots.offered(1, 0, arenas[0])
    assert not slots.passed_on(1) and slots.newest is None
    slots.offered(1, 1, arenas[1])
    slots.register_again(daemon, lambda address, nbytes: address, 1.0)
    assert [slot.version for slot in daemon.heard[-1].given] == [None, 1]


# --- The client keeps every arena that it does not hand over to a restarted daemon, even if its number is used again.


def test_arenas_of_two_daemons_that_had_the_same_number_stay_apart() -> None:
    line: Any = None
    memory: Any = ArenaMemory(line)
    kept = [object(), object(), object()]  # no arena is mapped from a file, as on a GPU
    for arena in kept:
        memory._arenas[1] = arena
        memory._give_back(lambda address, nbytes: None)
    assert set(memory._arenas.values()) == set(kept)
    assert all(number < 0 for number in memory._arenas) and memory._estranged == memory._arenas.keys()


# --- After its restart a daemon accepts from a client only memory that a daemon created. ----------------


NBYTES = 12_288
_F_ADD_SEALS, _SEALS = 1033, 7


def memory(name: str = "refitd:x", *, seals: int = _SEALS, mode: int = 0o600, filled: bool = True) -> int:
    fd = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    os.fchmod(fd, mode)
    os.ftruncate(fd, NBYTES)
    if filled:
        os.posix_fallocate(fd, 0, NBYTES)
    fcntl.fcntl(fd, _F_ADD_SEALS, seals)
    return fd


@pytest.fixture
def opened() -> Iterator[Callable[[int], int]]:
    fds: list[int] = []

    def opens(fd: int) -> int:
        fds.append(fd)
        return fd

    yield opens
    for fd in fds:
        os.close(fd)


def test_an_arena_is_taken_back_with_its_bytes(opened: Callable[[int], int]) -> None:
    fd = opened(create(NBYTES, "policy/source:0@n0#1/slot0"))
    os.pwrite(fd, b"weights", 5)
    taken, may_write = taken_back(fd, NBYTES)
    opened(taken)
    assert may_write and os.path.sameopenfile(fd, taken) and os.pread(taken, 7, 5) == b"weights"


def test_who_could_only_read_an_arena_can_only_read_it_afterwards(opened: Callable[[int], int]) -> None:
    fd = opened(read_only(opened(create(NBYTES, "staging"))))
    taken, may_write = taken_back(fd, NBYTES)
    opened(taken)
    assert not may_write and os.pwrite(taken, b"x", 0) == 1, "the daemon's workers write it"


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: memory("evil:x"), "no arena"),
        (lambda: memory("refitd"), "no arena"),
        (lambda: create(NBYTES, PERMITS), "no arena"),
        (lambda: memory(seals=1), "not sealed"),
        (lambda: memory(mode=0o666), "mode is 666"),
        (lambda: memory(filled=False), "0 bytes of it are allocated"),
        (lambda: os.open("/dev/null", os.O_RDWR), "no arena"),
        (lambda: os.open("/dev/zero", os.O_RDONLY), "no arena"),
        (lambda: os.pipe()[0], "no arena"),
    ],
)
def test_anything_else_is_refused_by_what_is_wrong(
    make: Callable[[], int], match: str, opened: Callable[[int], int]
) -> None:
    with pytest.raises(ArenaError, match=match):
        taken_back(opened(make()), NBYTES)


@pytest.mark.parametrize("nbytes", [0, 1, NBYTES - 1, NBYTES + 1, 1 << 62])
def test_another_size_is_refused(nbytes: int, opened: Callable[[int], int]) -> None:
    with pytest.raises(ArenaError, match="not taken back"):
        taken_back(opened(create(NBYTES, "x")), nbytes)


# --- An engine without a valid permit reports the reason. -----------------------------------------------


TARGET = local.RegisterTarget(model="m", replica="a", rank=0, world_size=1, shard=shard_of(describe(whole(1), 0, 1)))


@pytest.fixture
def page() -> Iterator[tuple[PermitPage, CommitState]]:
    fd = create(PAGE_BYTES, "permits")
    made = PermitPage(fd)
    permit = Permit(MappedArena(os.dup(fd), PAGE_BYTES, write=False), 3, 7)
    registered = local.Registered(member="m/a:0@n0#1", staging=1, nbytes=1, version=1)
    yield made, CommitState(Connection.__new__(Connection), TARGET, registered, permit)
    os.close(fd)


def test_a_permit_that_ended_says_how_long_ago(page: tuple[PermitPage, CommitState]) -> None:
    made, state = page
    made.write(3, 7, time.monotonic() - 2.0)
    assert state.serves() is None and "its permit ended 2." in state.obstacle()


@pytest.mark.parametrize("token", [7, 8])
def test_a_rank_without_a_permit_says_so_and_not_how_long_the_machine_runs(
    page: tuple[PermitPage, CommitState], token: int
) -> None:
    made, state = page
    made.write(3, token, 0.0)
    assert state.serves() is None and "it has no permit: the coordinator has not confirmed" in state.obstacle()
    made.write(3, 7, time.monotonic() + 60)
    assert state.serves() == 1 and not state.obstacle()
