"""Engine processes of two ranks that are killed and started again at any moment of swaps, with retained weights."""

# ruff: noqa: B023  # these closures run before their loop goes on

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

import refitd
from refitd.testing import Daemon, eventually
from tests.support.flips import version

pytestmark = pytest.mark.slow  # random, or many: test_flip_accidents.py and test_flip_returns.py are what was found

ENGINE = """
import sys, time, refitd, torch
from tests.support.flips import SHAPES
client = refitd.connect(sys.argv[1], timeout=30)
rank = int(sys.argv[2])
live = client.allocate(SHAPES)
def seen():
    return sorted({float(v) for t in live.values() if t.numel() for v in t.unique()})
while True:
    try:
        target = client.register_target("policy", live, replica=sys.argv[3], rank=rank, world_size=2)
        break
    except refitd.RefusedError as exc:
        time.sleep(0.05)
print("registered", target.flips, target.version, seen(), flush=True)
if target.version is not None and seen() != [float(target.version)]:
    print("BAD restored", target.version, seen(), flush=True)
step = 0
while True:
    try:
        target.poll()
    except refitd.CommitError as exc:
        print("commit", exc, flush=True)
    before = target.version
    if before is not None:
        found = seen()
        if target.version == before and found != [float(before)]:
            print("BAD", before, found, flush=True)
    time.sleep(0.001)
"""


@pytest.mark.parametrize("seed", [int(s) for s in os.environ.get("SEEDS", "1").split(",")])
def test_engines_killed_at_any_moment(start_daemon: Callable[..., Daemon], seed: int) -> None:
    rng = random.Random(seed)
    daemon = start_daemon("[node]\nkeep_targets_s = 60.0\n")
    lines: list[str] = []

    def start(rank: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", ENGINE, str(daemon.directory), str(rank), "a"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(f"{rank}: {line.strip()}")

        threading.Thread(target=read, daemon=True).start()
        return process

    trainer = daemon.connect()
    given = version(0)
    source = trainer.register_source("policy", given, slots=3)
    engines = [start(0), start(1)]
    counts: dict[str, int] = {}
    number = 0
    try:

        def whole() -> bool:
            found = trainer.status().models
            return bool(found) and len(found[0].targets) == 2

        eventually(whole, "two ranks", 30)
        until = time.monotonic() + float(os.environ.get("SECONDS_", "30"))
        while time.monotonic() < until:
            number += 1
            for name, value in version(number).items():
                given[name].copy_(value)
            source.publish(number)
            rank = rng.choice([0, 1, -1, -1])
            timer = None
            if rank >= 0:
                timer = threading.Timer(rng.random() * 0.06, lambda: engines[rank].send_signal(signal.SIGKILL))
                timer.start()
            try:
                what = "rollback" if number % 4 == 0 else "swap"
                if what == "rollback":
                    trainer.rollback("policy", timeout=15)
                else:
                    trainer.swap("policy", number, timeout=15, queue=True)
                counts[what] = counts.get(what, 0) + 1
            except refitd.RefitdError as exc:
                key = f"{type(exc).__name__} {str(exc)[:110]}"
                counts[key] = counts.get(key, 0) + 1
            if timer is not None:
                timer.join()
                engines[rank].wait()
                engines[rank] = start(rank)
                eventually(whole, "two ranks", 30)
            assert not [line for line in lines if "BAD" in line or "Traceback" in line], lines[-20:]
        number += 1
        for name, value in version(number).items():
            given[name].copy_(value)
        source.publish(number)
        eventually(lambda: not isinstance(attempt(trainer, number), Exception), "last swap", 40)
        eventually(lambda: trainer.verify("policy").outcome == "proven", "proven", 20)
        eventually(lambda: all(t.version == number for t in trainer.status().models[0].targets), "all", 20)
        time.sleep(0.3)
        assert not [line for line in lines if "BAD" in line or "Traceback" in line], lines[-20:]
        print("\nCOUNTS", number, counts, [line for line in lines if "registered" in line][-12:])
    finally:
        for engine in engines:
            engine.kill()
            engine.wait()


def attempt(trainer: refitd.Client, number: int) -> object:
    try:
        return trainer.swap("policy", number, timeout=15, queue=True)
    except refitd.RefitdError as exc:
        return None if "is newer" in str(exc) else exc
