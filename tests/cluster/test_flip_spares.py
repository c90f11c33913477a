"""The other arena's version is compared with its digests before a rollback, and again after it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

import refitd
from refitd.testing import Daemon, Engine, eventually
from tests.support.flips import Fleet, holds


def compared(daemon: Daemon, version: int) -> bool:
    lines = [line for line in daemon.log().splitlines() if "spare-compared" in line]
    return bool(lines) and f"version={version}" in lines[-1]


def test_a_version_that_was_changed_while_it_was_live_does_not_come_back_by_an_exchange(
    start_daemon: Callable[..., Daemon],
) -> None:
    fleet = Fleet(daemon := start_daemon())
    fleet.swap(1)
    assert fleet.trainer.verify("policy").outcome == "proven"
    fleet.live["w"][3, 5] = 99.0
    fleet.swap(2)
    with Engine(fleet.target):
        with pytest.raises(refitd.SwapFailed, match="w: its memory has changed since version 1 went live"):
            fleet.trainer.rollback("policy", timeout=30)
        assert holds(fleet.live, 2) and fleet.target.version == 2
        assert fleet.trainer.rollback("policy", timeout=30).bytes > 0, "from the source, which holds it"
        assert holds(fleet.live, 1)
    assert "differs" in daemon.log()


def test_a_version_that_was_changed_after_it_was_compared_is_found_once_it_is_live_and_not_served(
    start_daemon: Callable[..., Daemon],
) -> None:
    fleet = Fleet(daemon := start_daemon())
    for number in (1, 2):
        fleet.swap(number)
    eventually(lambda: compared(daemon, 1), "the other arena has been compared")
    pair = fleet.target._take_over.pair
    assert pair is not None
    address, _ = pair.staging
    ctypes.memset(address + 1000, 0x5A, 4)  # as a forked child could, which has the arenas as they were
    with Engine(fleet.target):
        assert fleet.trainer.rollback("policy", timeout=30).bytes == 0
        eventually(lambda: "its memory has changed since version 1" in fleet.target.fenced, "it is fenced")
        fleet.swap(3)
        assert fleet.target.version == 3 and not fleet.target.fenced and holds(fleet.live, 3)


def test_a_rollback_that_comes_at_once_waits_until_the_other_arena_is_compared(
    start_daemon: Callable[..., Daemon],
) -> None:
    fleet = Fleet(daemon := start_daemon())
    for number in (1, 2):
        fleet.swap(number)
    with Engine(fleet.target):
        for number in (1, 2, 1):
            assert fleet.trainer.rollback("policy", number, timeout=30).bytes == 0
            assert compared(daemon, number) and holds(fleet.live, number)
    assert fleet.trainer.verify("policy").outcome == "proven"
