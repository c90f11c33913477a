"""A GPU engine without room for a second copy: its controller pauses it, and workers write its live arena."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import refitd
from refitd.testing import Daemon, RunningSwap, eventually, stopped
from tests.support import fake_cuda
from tests.support.controls import controlled
from tests.support.gpu_tensors import DEADLINES, Tensors, allocated, private

LIVE = 3 * fake_cuda.PAGE  # of a GPU of 4 pages, which has no room for as much again


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> fake_cuda.FakeGpus:
    return fake_cuda.install(monkeypatch, 4 * fake_cuda.PAGE)


class Paused:
    """An engine on GPU 0 whose weights fill three quarters of it, and its controller's calls."""

    def __init__(self, daemon: Daemon, given: Tensors, slots: int) -> None:
        self.daemon, self.given = daemon, given
        self.calls: list[tuple[str, int | None, bool]] = []  # hook, version, whether the engine had its old weights
        self.trainer, self.engine = daemon.connect("trainer"), daemon.connect("engine")
        self.source = self.trainer.register_source("policy", given, slots=slots)
        self.live = allocated(self.engine, {"w": torch.zeros(LIVE, dtype=torch.uint8)}, "cuda:0")
        self.served = 0
        self.target = controlled(
            self.engine,
            "policy",
            self.live,
            replica="r",
            mode="in-place",
            pause=lambda version: self.calls.append(("pause", version, self.holds(self.served))),
            resume=lambda version: self.calls.append(("resume", version, version is not None and self.holds(version))),
        )

    def holds(self, version: int) -> bool:
        return bool((self.live["w"] == version).all())

    def publish(self, version: int) -> None:
        self.given["w"].fill_(version)
        self.source.publish(version)

    def swap(self, version: int) -> refitd.SwapReport:
        self.publish(version)
        report = self.trainer.swap("policy", version, timeout=120)
        eventually(lambda: self.calls and self.calls[-1][0] == "resume", "the engine goes on")
        assert self.holds(version) and self.target.version == version
        self.served = version
        return report

    def worker(self) -> int:
        pids = self.daemon.node_of("n0").workers
        (found,) = (pid for pid in pids if "memfd:fake-cuda" in Path(f"/proc/{pid}/maps").read_text())
        return found

    def close(self) -> None:
        self.live.clear()
        del self.target
        self.engine.close()
        self.trainer.close()


@pytest.mark.parametrize("source_on", ["main memory", pytest.param("other GPU", marks=pytest.mark.slow)])
def test_an_engine_that_fills_its_gpu_is_paused_written_in_place_and_proven(
    daemon: Daemon, gpus: fake_cuda.FakeGpus, source_on: str
) -> None:
    given = {"w": torch.zeros(LIVE, dtype=torch.uint8)}
    fleet = Paused(daemon, private(given, 1) if source_on == "other GPU" else given, 1)
    with pytest.raises(refitd.RefitdError, match=r"asked for on GPU 0, \d+ of \d+ are free"):
        fleet.engine.allocate({"staging": ((LIVE,), torch.uint8)}, device="cuda:0")
    address = fleet.live["w"].data_ptr()
    for version in (1, 2):
        report = fleet.swap(version)
        assert report.digests == report.copies > 0
        assert gpus.used(0) == LIVE, "one copy of the weights"
    assert fleet.calls == [(hook, version, True) for version in (1, 2) for hook in ("pause", "resume")]
    assert fleet.live["w"].data_ptr() == address
    assert fleet.trainer.verify("policy", timeout=60).outcome == "proven"
    (memory,) = fleet.trainer.plan("policy").memory
    assert (memory.mode, memory.held_bytes, memory.staging_bytes) == ("in-place", LIVE, 0)
    assert memory.pause_s is not None and memory.pause_s > 0
    fleet.close()


def test_a_death_while_it_is_written_poisons_it_by_name_and_the_source_still_has_the_old_version(
    gpus: fake_cuda.FakeGpus, start_daemon: Callable[..., Daemon]
) -> None:
    daemon = start_daemon(f"{DEADLINES}[models.policy]\ncatch_up = false\n")  # which would bring it back by itself
    fleet = Paused(daemon, {"w": torch.zeros(LIVE, dtype=torch.uint8)}, 2)
    fleet.swap(1)
    victim = fleet.worker()
    fleet.publish(2)
    with stopped((victim,)):
        swap = RunningSwap(daemon.connect(), "policy", 2, timeout=60)
        swap.wait_phase("stage")
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(refitd.RefitFailed, match="was killed by SIGKILL while staging") as failed:
            swap.result()
    assert failed.value.report is not None
    (member,) = failed.value.report.members
    assert (member.replica, member.state) == ("r", "poisoned") and "swap" in member.reason, member
    eventually(lambda: fleet.calls[-1] == ("resume", None, False), "the engine is told to serve nothing")
    assert fleet.target.version is None
    report = fleet.trainer.rollback("policy", 1, timeout=60)
    assert report.outcome == "committed" and fleet.holds(1) and fleet.target.version == 1
    assert fleet.swap(3).outcome == "committed"
    assert gpus.used(0) == LIVE
    fleet.close()
