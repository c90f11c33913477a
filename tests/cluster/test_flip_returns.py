"""An engine that crashes while it takes its retained weights back; a lent arena that flips."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine
from tests.support.flips import SHAPES, Fleet, holds, version

ENGINE = """
import os, sys, time, refitd, torch
from refitd.client import flip
from tests.support.flips import SHAPES
if sys.argv[2] == "dies":
    flip.ArenaPair.restore = lambda *_: os._exit(9)
client = refitd.connect(sys.argv[1])
live = client.allocate(SHAPES)
target = client.register_target("policy", live, replica="a")
def seen():
    return sorted({float(v) for t in live.values() if t.numel() for v in t.unique()})
print("registered", target.version, seen(), flush=True)
while True:
    if (number := target.poll()) is not None:
        print("committed", number, seen(), flush=True)
    time.sleep(0.002)
"""


@pytest.mark.parametrize("swaps", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_an_engine_that_crashes_while_it_restores(start_daemon: Callable[..., Daemon], swaps: int) -> None:
    daemon = start_daemon("[node]\nkeep_targets_s = 60.0\n")

    def start(how: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", ENGINE, str(daemon.directory), how]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    with daemon.connect() as trainer:
        given = version(0)
        source = trainer.register_source("policy", given)
        engine = start("lives")
        assert engine.stdout is not None
        try:
            assert engine.stdout.readline().startswith("registered None")
            for number in range(1, swaps + 1):
                for name, value in version(number).items():
                    given[name].copy_(value)
                source.publish(number)
                trainer.swap("policy", number, timeout=30)
                assert engine.stdout.readline().strip() == f"committed {number} [{float(number)}]"
            engine.kill()
            engine.wait()
            for _ in range(2):
                engine = start("dies")
                assert engine.wait(30) == 9
            engine = start("lives")
            assert engine.stdout is not None
            assert engine.stdout.readline().strip() == f"registered {swaps} [{float(swaps)}]"
            assert trainer.verify("policy").outcome == "proven"
        finally:
            engine.kill()
            engine.wait()


def test_a_source_that_lends_tensors_that_flip(start_daemon: Callable[..., Daemon]) -> None:
    fleet = Fleet(start_daemon())
    relay = fleet.engine.register_source("relayed", fleet.live)
    live = version(0)
    last = fleet.trainer.register_target("relayed", live, replica="z")
    other = fleet.engine.allocate(SHAPES)
    flipping = fleet.engine.register_target("relayed", other, replica="y")
    for number in (1, 2, 3, 4):
        assert fleet.swap(number).outcome == "committed"
        with Engine(last, flipping), relay.lend(number):
            fleet.trainer.swap("relayed", number, timeout=30)
        assert holds(live, number) and holds(other, number), relay.lending


def test_a_source_registered_first_and_then_a_target_of_the_same_arena(start_daemon: Callable[..., Daemon]) -> None:
    """A trainer that is an engine, too: the source's dict names the arena's tensors before or after they flip."""
    daemon = start_daemon()
    with daemon.connect() as trainer, daemon.connect() as engine:
        given = {"w": torch.zeros(64)}
        source = trainer.register_source("policy", given)
        live = engine.allocate({"w": ((64,), torch.float32)})
        named = {"w": torch.zeros(64)}
        relay = engine.register_source("relayed", named)
        target = engine.register_target("policy", live, replica="a")
        assert target.flips
        out = {"w": torch.zeros(64)}
        last = trainer.register_target("relayed", out, replica="z")
        for number in (1, 2, 3):
            given["w"].fill_(number)
            source.publish(number)
            with Engine(target):
                trainer.swap("policy", number, timeout=30)
            named["w"] = live["w"]
            with Engine(last), relay.lend(number):
                trainer.swap("relayed", number, timeout=30)
            assert out["w"].unique() == number, (number, relay.lending)
    assert refitd


TORN = """
import ctypes, os, sys, time, refitd, torch
from refitd.client import flip
from tests.support.flips import SHAPES
client = refitd.connect(sys.argv[1])
live = client.allocate(SHAPES)
target = client.register_target("policy", live, replica="a")
def seen():
    return sorted({float(v) for t in live.values() if t.numel() for v in t.unique()})
print("registered", target.version, seen(), flush=True)
while True:
    if target.pending == int(sys.argv[2]):  # the kernel does not exchange, and the copy does not end
        def half(pair):
            ctypes.memmove(pair._live.address, pair._staging.address, pair._live.nbytes // 3)
            os._exit(9)
        flip.ArenaPair.flip = half
    if (number := target.poll()) is not None:
        print("committed", number, seen(), flush=True)
    time.sleep(0.002)
"""


@pytest.mark.slow
def test_an_engine_that_crashes_while_it_copies_because_it_cannot_exchange(
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon = start_daemon("[node]\nkeep_targets_s = 60.0\n")

    def start(dies: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", TORN, str(daemon.directory), str(dies)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    with daemon.connect() as trainer:
        given = version(1)
        source = trainer.register_source("policy", given, slots=2)
        engine = start(2)
        assert engine.stdout is not None
        try:
            engine.stdout.readline()
            source.publish(1)
            trainer.swap("policy", 1, timeout=30)
            assert engine.stdout.readline().strip() == "committed 1 [1.0]"
            for name, value in version(2).items():
                given[name].copy_(value)
            source.publish(2)
            with pytest.raises(refitd.SwapFailed):
                trainer.swap("policy", 2, timeout=10)
            assert engine.wait(10) == 9
            engine = start(0)
            assert engine.stdout is not None
            assert engine.stdout.readline().startswith("registered None")
            assert engine.stdout.readline().strip() == "committed 2 [2.0]"
            trainer.rollback("policy", 1, timeout=10)
            assert engine.stdout.readline().strip() == "committed 1 [1.0]"
        finally:
            engine.kill()
            engine.wait()
