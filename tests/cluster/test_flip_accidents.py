"""Faults of swaps that go live by exchanging arenas; tensors are compared with the published values."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine, RunningSwap, eventually
from tests.support.flips import SHAPES, Fleet, holds, version


def values(live: dict[str, torch.Tensor]) -> set[float]:
    return {float(v) for t in live.values() if t.numel() for v in t.unique()}


def test_a_refresh_hook_that_raises_after_the_exchange(start_daemon: Callable[..., Daemon]) -> None:
    fails = [False]

    def refresh(tensor: torch.Tensor) -> None:
        if fails[0]:
            raise RuntimeError("no")
        tensor.fill_(1.0)

    derived = {"d": refitd.Derived(torch.zeros(3), ("w",), refresh)}
    fleet = Fleet(start_daemon(), derived=derived)
    assert fleet.target.flips
    fleet.swap(1)
    fails[0] = True
    fleet.publish(2)
    with Engine(fleet.target), pytest.raises(refitd.SwapFailed):
        fleet.trainer.swap("policy", 2, timeout=30)
    assert fleet.target.version is None
    fails[0] = False
    for number in (3, 4, 5):
        with Engine(fleet.target):
            fleet.publish(number)
            fleet.trainer.swap("policy", number, timeout=30)
        assert fleet.target.version == number
        assert values(fleet.live) == {float(number)}, number
        assert fleet.trainer.verify("policy").outcome == "proven"


def test_an_eviction_while_arenas_are_exchanged(start_daemon: Callable[..., Daemon]) -> None:
    fleet = Fleet(start_daemon())
    fleet.swap(1)
    pair = fleet.target._take_over.pair
    assert pair is not None
    flip = pair.flip

    def evicted() -> bool:
        fleet.trainer.evict("policy", "a")
        eventually(lambda: fleet.target._state.is_evicted, "it hears of it")
        return flip()

    pair.flip = evicted  # type: ignore[method-assign]
    fleet.publish(2)
    with Engine(fleet.target), pytest.raises(refitd.RefitdError):
        fleet.trainer.swap("policy", 2, timeout=30)
    assert fleet.target.version is None
    fleet.target.close()
    fleet.target = fleet.engine.register_target("policy", fleet.live, replica="a")
    with Engine(fleet.target):
        eventually(lambda: fleet.target.version == 2 or fleet.target.version is None, "caught up")
    for number in (3, 4, 5, 6):
        with Engine(fleet.target):
            fleet.publish(number)
            fleet.trainer.swap("policy", number, timeout=30, queue=True)
        assert values(fleet.live) == {float(number)}, number


def test_contents_that_a_sleeping_engine_lost_do_not_come_back_by_a_rollback(
    start_daemon: Callable[..., Daemon],
) -> None:
    fleet = Fleet(start_daemon())
    fleet.swap(1)
    fleet.target.suspend()
    for tensor in fleet.live.values():
        tensor.fill_(77)
    assert fleet.target.resume(kept=False) is None
    with Engine(fleet.target):
        eventually(lambda: fleet.target.version == 1, "it is caught up")
        fleet.publish(2)
    assert values(fleet.live) == {1.0}
    # the other arena holds what the engine has lost
    with Engine(fleet.target), contextlib.suppress(refitd.RefitdError):
        fleet.trainer.rollback("policy", 1, timeout=30)
    assert values(fleet.live) == {1.0}


def test_contents_lost_then_a_new_version_then_rollback(start_daemon: Callable[..., Daemon]) -> None:
    fleet = Fleet(start_daemon())
    fleet.swap(1)
    fleet.target.suspend()
    for tensor in fleet.live.values():
        tensor.fill_(77)
    fleet.target.resume(kept=False)
    fleet.publish(2)
    with Engine(fleet.target):
        fleet.trainer.swap("policy", 2, timeout=30, queue=True)
        assert values(fleet.live) == {2.0}
        fleet.trainer.rollback("policy", 1, timeout=30)
        assert values(fleet.live) == {1.0}


SLEEPER = """
import sys, time, refitd, torch
from tests.support.flips import SHAPES, holds
client = refitd.connect(sys.argv[1])
live = client.allocate(SHAPES)
target = client.register_target("policy", live, replica="sleeps")
assert target.flips
seen = sorted({float(v) for t in live.values() if t.numel() for v in t.unique()})
print("registered", target.version, seen, flush=True)
while target.poll() is None and target.version is None:
    time.sleep(0.002)
print("committed", target.version, flush=True)
target.suspend()
for tensor in live.values():
    tensor.fill_(77)  # discarded
if sys.argv[2] == "woken":
    target.resume(kept=False)
print("asleep", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["asleep", pytest.param("woken", marks=pytest.mark.slow)])
def test_a_sleeping_engine_that_crashes_is_not_restored_from_what_it_has_put_away(
    start_daemon: Callable[..., Daemon], how: str
) -> None:
    daemon = start_daemon("[node]\nkeep_targets_s = 60.0\n")
    with daemon.connect() as trainer:
        given = version(1)
        source = trainer.register_source("policy", given)
        engine = subprocess.Popen(
            [sys.executable, "-c", SLEEPER, str(daemon.directory), how], stdout=subprocess.PIPE, text=True
        )
        assert engine.stdout is not None
        again = None
        try:
            assert engine.stdout.readline().startswith("registered None")
            source.publish(1)
            trainer.swap("policy", 1, timeout=30)
            assert engine.stdout.readline().strip() == "committed 1"
            assert engine.stdout.readline().strip() == "asleep"
            engine.kill()
            engine.wait()
            again = subprocess.Popen(
                [sys.executable, "-c", SLEEPER, str(daemon.directory), how], stdout=subprocess.PIPE, text=True
            )
            assert again.stdout is not None
            said = again.stdout.readline().strip()
            assert said in ("registered 1 [1.0]", "registered None [0.0]"), said
        finally:
            for one in (engine, again):
                if one is not None:
                    one.kill()
                    one.wait()


def test_a_decision_repeated_at_the_end_of_a_commit(start_daemon: Callable[..., Daemon]) -> None:
    """A new coordinator repeats its decision just after the exchange: the answer must say that there was one."""
    fleet = Fleet(start_daemon())
    target = fleet.target
    flipped = target._state.steps.flipped
    prepares = []
    notified = target._notified

    def note(message: object) -> None:
        if type(message).__name__ == "PrepareCommit":
            prepares.append(message)
        notified(message)  # type: ignore[arg-type]

    fleet.engine._connection.current.listen(target.member, note)

    def repeated() -> None:
        flipped()
        target._notified(prepares[-1])

    target._state.steps.flipped = repeated  # type: ignore[method-assign]
    for number in (1, 2, 3):
        fleet.swap(number)
        assert values(fleet.live) == {float(number)}, number
        assert fleet.trainer.verify("policy").outcome == "proven"


def test_unregistered_parts_of_an_arena_keep_their_values(start_daemon: Callable[..., Daemon]) -> None:
    """Views that leave a hole: what lies in the hole is not refitd's."""
    daemon = start_daemon()
    with daemon.connect() as trainer, daemon.connect() as engine:
        given = {"first": torch.ones(8), "last": torch.ones(8)}
        source = trainer.register_source("policy", given)
        whole = engine.allocate({"w": ((4, 8), torch.float32)})["w"]
        whole.fill_(5.0)
        target = engine.register_target("policy", {"ends": whole[::3]}, replica="x") if False else None
        given2 = {"ends": torch.ones(2, 8)}
        source2 = trainer.register_source("ends", given2)
        target = engine.register_target("ends", {"ends": whole[::3]}, replica="a")
        source2.publish(1)
        with Engine(target):
            trainer.swap("ends", 1, timeout=30)
        assert whole[0].unique() == 1 and whole[3].unique() == 1
        assert whole[1].unique() == 5.0 and whole[2].unique() == 5.0, (target.flips, whole)
        source.close()


def test_kept_tensors_in_an_arena_keep_their_values(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    with daemon.connect() as trainer, daemon.connect() as engine:
        given = {"w": torch.zeros(64)}
        source = trainer.register_source("policy", given, partial=True)
        live = engine.allocate({"w": ((64,), torch.float32), "base": ((32,), torch.float32)})
        live["base"].fill_(5.0)
        target = engine.register_target("policy", live, replica="a", keeps=True)
        for number in (1, 2, 3):
            given["w"].fill_(number)
            source.publish(number)
            with Engine(target):
                trainer.swap("policy", number, timeout=30)
            assert live["w"].unique() == number and live["base"].unique() == 5.0, (target.flips, number)


def test_a_rollback_after_an_aborted_stage_uses_the_sources(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    refuses = [False]

    def pause(number: int) -> None:
        if refuses[0]:
            raise RuntimeError("not now")

    fleet = Fleet(daemon)
    paused = fleet.engine.allocate(SHAPES)
    fleet.engine.register_target("policy", paused, replica="p", on_pause=pause)
    fleet.swap(1)
    fleet.swap(2)
    other = daemon.connect()

    refuses[0] = True
    fleet.publish(3)
    with Engine(fleet.target), pytest.raises(refitd.SwapFailed):
        fleet.trainer.swap("policy", 3, timeout=30)
    refuses[0] = False
    with Engine(fleet.target):
        try:
            report = fleet.trainer.rollback("policy", 1, timeout=30)
            assert holds(fleet.live, 1) and holds(paused, 1), report
        except refitd.RefitdError as exc:
            assert "held by every source rank" in str(exc), exc
        assert fleet.target.version in (1, 2) and values(fleet.live) == {float(fleet.target.version)}
        fleet.trainer.swap("policy", 3, timeout=30)
        assert holds(fleet.live, 3) and holds(paused, 3)
        assert fleet.trainer.rollback("policy", 2, timeout=30).version == 2
        assert holds(fleet.live, 2) and holds(paused, 2)
    other.close()


def test_a_commit_that_is_interrupted_after_the_exchange_is_not_exchanged_back(
    start_daemon: Callable[..., Daemon],
) -> None:
    interrupts = [False]

    def refresh(tensor: torch.Tensor) -> None:
        if interrupts[0]:
            interrupts[0] = False
            raise KeyboardInterrupt

    fleet = Fleet(start_daemon(), derived={"d": refitd.Derived(torch.zeros(3), ("w",), refresh)})
    fleet.swap(1)
    interrupts[0] = True
    fleet.publish(2)
    swap = RunningSwap(fleet.trainer, "policy", 2)
    eventually(lambda: fleet.target.pending == 2, "it is decided")
    with pytest.raises(KeyboardInterrupt):
        fleet.target.poll()
    assert fleet.target.version == 2
    swap.result()
    assert fleet.target.poll() is None and values(fleet.live) == {2.0}


def test_a_wait_that_is_cancelled_commits_nothing_afterwards(start_daemon: Callable[..., Daemon]) -> None:
    fleet = Fleet(start_daemon())

    async def given_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fleet.target.wait_async(1, timeout=60), 0.3)

    asyncio.run(given_up())
    fleet.publish(1)
    swap = RunningSwap(fleet.trainer, "policy", 1)
    eventually(lambda: fleet.target.pending == 1 or fleet.target.version == 1, "it is decided")
    time.sleep(1.0)
    assert fleet.target.version is None and values(fleet.live) == {0.0}, "it went live between two commit points"
    assert fleet.target.poll() == 1
    swap.result()
