"""Coordinators that die at every point of swaps by exchange, of rollbacks and of joint swaps."""

# ruff: noqa: B023  # these closures run before their loop goes on

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine, RunningSwap, eventually
from tests.support.flips import SHAPES, Fleet, back, kill_coordinator, quietly, values

pytestmark = pytest.mark.slow  # random, or many: test_flip_accidents.py and test_flip_returns.py are what was found


def test_decided_then_the_coordinator_dies_then_the_engine_flips(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    fleet = Fleet(daemon)
    other = fleet.engine.allocate(SHAPES)
    second = fleet.engine.register_target("policy", other, replica="b")
    fleet.swap(1, second)
    for number in (2, 3, 4):
        fleet.publish(number)
        swap = RunningSwap(daemon.connect(), "policy", number)
        eventually(lambda: fleet.target.pending == number and second.pending == number, "decided")
        if number == 2:
            fleet.target.poll()
        kill_coordinator(daemon, wait=False)
        if number == 3:
            eventually(lambda: fleet.target.poll() == number, "it takes it over without a coordinator")
        back(daemon)
        with Engine(fleet.target, second):
            eventually(lambda: fleet.target.version == number and second.version == number, "both have it", 30)
        quietly(swap.result)
        assert values(fleet.live) == values(other) == {float(number)}
        assert fleet.trainer.verify("policy").outcome == "proven"
        eventually(
            lambda: (
                fleet.trainer.status().models[0].swap is None
                if hasattr(fleet.trainer.status().models[0], "swap")
                else True
            ),
            "over",
        )
    fleet.source.close()
    with Engine(fleet.target, second):
        report = fleet.trainer.rollback("policy", timeout=30)
        assert report.version == 3 and report.bytes == 0
        assert values(fleet.live) == values(other) == {3.0}
        kill_coordinator(daemon)
        report = fleet.trainer.rollback("policy", 4, timeout=30)
        assert report.bytes == 0 and values(fleet.live) == values(other) == {4.0}


def test_the_coordinator_dies_in_a_rollback(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    fleet = Fleet(daemon)
    holds_up = threading.Event()
    holds_up.set()
    paused = fleet.engine.allocate(SHAPES)
    p = fleet.engine.register_target("policy", paused, replica="p", on_pause=lambda number: holds_up.wait(20))
    for number in (1, 2):
        fleet.swap(number)
    fleet.source.close()
    holds_up.clear()
    done: list[object] = []
    thread = threading.Thread(target=lambda: done.append(quietly(lambda: fleet.trainer.rollback("policy", timeout=20))))
    thread.start()
    eventually(lambda: p._state.asked is not None, "it is asked to pause")
    kill_coordinator(daemon, wait=False)
    back(daemon)
    holds_up.set()
    thread.join(30)
    with Engine(fleet.target):
        time.sleep(1)
        assert values(fleet.live) == values(paused) == {float(fleet.target.version or 0)}, (done, fleet.target.fenced)
        eventually(
            lambda: isinstance(quietly(lambda: fleet.trainer.rollback("policy", 1, timeout=20)), refitd.SwapReport),
            "again",
            20,
        )
    assert values(fleet.live) == values(paused) == {1.0}
    assert fleet.trainer.verify("policy").outcome == "proven"


@pytest.mark.parametrize("seed", [int(s) for s in os.environ.get("SEEDS", "1").split(",")])
def test_joint_swaps_are_all_or_nothing_when_the_coordinator_dies(
    start_daemon: Callable[..., Daemon], seed: int
) -> None:
    rng = random.Random(seed)
    daemon = start_daemon()
    trainer, engine = daemon.connect(), daemon.connect()
    names = ("policy", "draft", "reward")
    given = {name: {"w": torch.zeros(64, 8)} for name in names}
    live = {name: engine.allocate({"w": ((64, 8), torch.float32)}) for name in names}
    live["draft"] = {"w": torch.zeros(64, 8)}
    sources = {name: trainer.register_source(name, given[name], slots=3) for name in names}
    targets = {name: engine.register_target(name, live[name], replica="a") for name in names}
    before = 0
    seen = {"all": 0, "none": 0}
    with Engine(*targets.values()) as polling:
        for number in range(1, int(os.environ.get("ROUNDS", "5"))):
            for name in names:
                given[name]["w"].fill_(number)
                sources[name].publish(number)
            timer = threading.Timer(rng.random() * 0.12, lambda: kill_coordinator(daemon, wait=False))
            timer.start()
            said = quietly(lambda: trainer.swap_together(dict.fromkeys(names, number), timeout=10))
            timer.join()
            back(daemon)
            eventually(lambda: all(not t.fenced and t.pending is None for t in targets.values()), "settled", 30)
            time.sleep(0.5)
            found = {float(one["w"].unique()) for one in live.values()}
            assert found in ({float(number)}, {float(before)}), (
                number,
                before,
                {n: o["w"].unique() for n, o in live.items()},
                said,
            )
            if found == {float(number)}:
                seen["all"] += 1
                before = number
            else:
                seen["none"] += 1
                assert isinstance(said, Exception), said
            assert not polling.errors
    print("SEEN", seen)
