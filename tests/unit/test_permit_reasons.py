"""What an engine without a valid permit says about it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from refitd.buffers.arena import MappedArena, create
from refitd.buffers.permits import PAGE_BYTES, Permit, PermitPage
from refitd.client.commit_state import CommitState
from refitd.client.connection import Connection
from refitd.protocol import local
from refitd.protocol.shards import shard_of
from tests.support.shards import describe, whole

TARGET = local.RegisterTarget(model="m", replica="a", rank=0, world_size=1, shard=shard_of(describe(whole(1), 0, 1)))


@pytest.fixture
def page() -> Iterator[tuple[PermitPage, CommitState]]:
    fd = create(PAGE_BYTES, "permits")
    made = PermitPage(fd)
    permit = Permit(MappedArena(os.dup(fd), PAGE_BYTES, write=False), 3, 7)
    registered = local.TargetRegistered(member="m/a:0@n0#1", staging=1, nbytes=1, version=1)
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
