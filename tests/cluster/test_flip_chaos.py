"""Random swaps, rollbacks, kills and returns of engines that flip, copy or are written in place: values are whole."""

# ruff: noqa: B023  # these closures run before their loop goes on

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch

import refitd
from refitd.testing import Daemon, eventually
from refitd.testing.processes import stopped
from tests.support.flips import SHAPES, version

pytestmark = pytest.mark.slow  # random, or many: test_flip_accidents.py and test_flip_returns.py are what was found

Tensors = dict[str, torch.Tensor]


class Rank:
    """An engine that checks, between two polls, that its values are those of the version that it says it serves."""

    def __init__(self, daemon: Daemon, replica: str, mode: str) -> None:
        self.replica, self.mode = replica, mode
        self.client = daemon.connect()
        self.live: Tensors = version(0) if mode == "private" else self.client.allocate(SHAPES)
        self.bad: list[str] = []
        self.register()

    def register(self) -> None:
        options: dict[str, object] = {}
        if self.mode == "in-place":
            options = {"mode": "in-place", "on_pause": lambda number: None}
        elif self.mode == "copy":
            options = {"mode": "copy"}
        self.target = self.client.register_target("policy", self.live, replica=self.replica, **options)  # type: ignore[arg-type]
        assert self.target.flips == (self.mode == "flip"), self.replica
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        while not self.stop.wait(0.001):
            try:
                if self.mode != "in-place":
                    self.target.poll()
                before = self.target.version
                if before is not None:
                    seen = {float(v) for t in self.live.values() if t.numel() for v in t.unique()}
                    if self.target.version == before and seen != {float(before)} and self.mode != "in-place":
                        self.bad.append(f"{self.replica}: serves {before}, holds {seen}")
            except refitd.RefitdError as exc:
                if "evicted" not in str(exc) and "registered no more" not in str(exc):
                    self.bad.append(f"{self.replica}: {exc!r}")
                return

    def end(self) -> None:
        self.stop.set()
        self.thread.join(10)

    def again(self) -> None:
        self.end()
        with contextlib.suppress(refitd.RefitdError):
            self.target.close()
        self.register()


@pytest.mark.parametrize("seed", [int(s) for s in os.environ.get("SEEDS", "1").split(",")])
def test_a_mixed_fleet_under_random_faults(start_daemon: Callable[..., Daemon], seed: int) -> None:
    rng = random.Random(seed)
    daemon = start_daemon("[node]\nkeep_targets_s = 60.0\n", workers=2)
    second = start_daemon(name="n1", joins=daemon.endpoint) if seed % 2 else daemon
    trainer = daemon.connect()
    given = version(0)
    source = trainer.register_source("policy", given, slots=3)
    ranks = [
        Rank(daemon, "f1", "flip"), Rank(daemon, "f2", "flip"), Rank(second, "f3", "flip"),
        Rank(daemon, "p", "private"),
    ]  # fmt: skip
    if seed % 3 == 0:
        ranks = ranks[:3]
    if seed % 5 == 1:
        ranks.append(Rank(daemon, "c", "copy"))
    if seed % 5 == 2:
        ranks.append(Rank(second, "i", "in-place"))
    number = 0
    counts: dict[str, int] = {}
    until = time.monotonic() + float(os.environ.get("SECONDS_", "20"))
    while time.monotonic() < until:
        what = rng.choice(
            [
                "swap",
                "swap",
                "swap",
                "rollback",
                "kill",
                "stop",
                "again",
                "evict",
                "abort",
                "verify",
                "exchange",
                "suspend",
            ]
        )
        rank = rng.choice(ranks)
        try:
            if what in ("swap", "kill", "stop", "abort", "exchange"):
                number += 1
                for name, value in version(number).items():
                    given[name].copy_(value)
                source.publish(number)
                timer = None
                if what == "kill":
                    victim = rng.choice([daemon, second])

                    def kill(at: Daemon = victim) -> None:
                        for pid in at.workers():
                            os.kill(pid, signal.SIGKILL)

                    timer = threading.Timer(rng.random() * 0.05, kill)
                if what == "abort":
                    timer = threading.Timer(rng.random() * 0.03, lambda: trainer.abort("policy", "no"))
                if what == "exchange" and rank.mode == "flip":
                    mapped = rank.target._take_over.pair._live

                    def refuse(other: object) -> None:
                        raise refitd.ArenaError("not today")

                    mapped.exchange = refuse
                if timer:
                    timer.start()
                try:
                    if what == "stop":
                        with stopped(daemon.workers()), contextlib.suppress(refitd.RefitdError):
                            trainer.swap("policy", number, timeout=1.0)
                    else:
                        trainer.swap("policy", number, timeout=20, queue=True)
                finally:
                    if timer:
                        timer.join()
                    if what == "exchange" and rank.mode == "flip":
                        eventually(lambda: rank.target.pending is None, "committed")
                        mapped.__dict__.pop("exchange", None)
            elif what == "rollback":
                trainer.rollback("policy", timeout=20)
            elif what == "again":
                rank.again()
            elif what == "evict" and rank.mode != "flip":
                trainer.evict("policy", rank.replica)
                rank.again()
            elif what == "verify":
                report = trainer.verify("policy", timeout=10)
                assert report.outcome != "differs", report
            elif what == "suspend" and rank.mode not in ("in-place",):
                rank.end()
                try:
                    rank.target.suspend()
                    kept = rng.random() < 0.5
                    if not kept:
                        for tensor in rank.live.values():
                            tensor.fill_(77)
                    rank.target.resume(kept=kept)
                finally:
                    rank.stop = threading.Event()
                    rank.thread = threading.Thread(target=rank.serve, daemon=True)
                    rank.thread.start()
            counts[what] = counts.get(what, 0) + 1
        except refitd.RefitdError as exc:
            key = f"{what}!{type(exc).__name__}: {str(exc)[:150]}"
            counts[key] = counts.get(key, 0) + 1
            if isinstance(exc, refitd.PeerLost):
                raise
        assert not [b for r in ranks for b in r.bad], [b for r in ranks for b in r.bad]
    print("COUNTS", seed, number, counts)
    number += 1
    for name, value in version(number).items():
        given[name].copy_(value)
    source.publish(number)

    def settled() -> bool:
        try:
            return trainer.swap("policy", number, timeout=20, queue=True).outcome == "committed"
        except refitd.RefitdError as exc:
            print("SETTLE", str(exc)[:200])
            return all(r.target.version == number for r in ranks)

    eventually(settled, "the last swap", 60)
    eventually(lambda: all(r.target.version == number for r in ranks), "all serve it", 30)
    for r in ranks:
        assert {float(v) for t in r.live.values() if t.numel() for v in t.unique()} == {float(number)}, r.replica
    eventually(lambda: trainer.verify("policy").outcome == "proven", "proven", 30)
    for r in ranks:
        r.end()
    assert not [b for r in ranks for b in r.bad]
