"""What a client tells a restarted daemon about a source's slots while a version is being copied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from refitd.client.slots import SourceSlots
from refitd.protocol import local
from refitd.protocol.base import Message
from refitd.protocol.shards import shard_of

MESSAGE = local.RegisterSource(model="policy", rank=0, world_size=1, shard=shard_of([]), slots=2)


class Daemon:
    """The next daemon: it takes registrations, and makes slots unless it is given some."""

    is_lost = False

    def __init__(self) -> None:
        self.heard: list[local.RegisterSource] = []

    def request(self, message: Message, reply: type[Message], timeout: float) -> Message:
        if isinstance(message, local.RegisterSource):
            self.heard.append(message)
        return local.SourceRegistered(member="m", slots=(1, 2), nbytes=8)

    def map_arena(self, arena: int, *, write: bool) -> Any:
        return SimpleNamespace(address=1000 + arena, nbytes=8)


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("is_finished", [True, False])
def test_only_a_slot_that_was_finished_before_the_registration_is_passed_on(is_given: bool, is_finished: bool) -> None:
    old: Any
    daemon: Any
    old, daemon = (SimpleNamespace(address=11, nbytes=8), SimpleNamespace(address=12, nbytes=8)), Daemon()
    registered = local.SourceRegistered(member="m", slots=(0, 1), nbytes=8)
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
    register()  # with another one: what was not written to a slot's memory is not in it
    told = {slot.version for slot in daemon.heard[-1].given}
    assert told == ({1, 2} if is_given and is_finished else {1, None} if is_given else set())


def test_a_version_that_is_copied_again_is_in_one_slot() -> None:
    daemon: Any = Daemon()
    arenas: Any = (SimpleNamespace(address=11, nbytes=8), SimpleNamespace(address=12, nbytes=8))
    slots = SourceSlots(MESSAGE, local.SourceRegistered(member="m", slots=(0, 1), nbytes=8), arenas)
    slots.offered(1, 0, arenas[0])
    assert not slots.passed_on(1) and slots.newest is None
    slots.offered(1, 1, arenas[1])
    slots.register_again(daemon, lambda address, nbytes: address, 1.0)
    assert [slot.version for slot in daemon.heard[-1].given] == [None, 1]
