"""Deaths of workers and clients with GPU arenas: every version survives, and all memory is freed."""

from __future__ import annotations

import contextlib
import os
import signal
import textwrap
from pathlib import Path

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine, RunningSwap, eventually, stopped
from tests.support import fake_cuda, shards
from tests.support.fleet import FilledFleet
from tests.support.gpu_tensors import MIB, allocated, copy_into, private
from tests.support.programs import Program, python


class Fleet(FilledFleet):
    """A trainer in main memory, an engine with live tensors on a GPU, serving version 1."""

    def __init__(self, daemon: Daemon, elements: int = 8 * MIB) -> None:
        self.daemon = daemon
        super().__init__(daemon.connect("trainer"), {"w": torch.zeros(elements, dtype=torch.bfloat16)})
        engine = daemon.connect("engine")
        self.live = allocated(engine, self.tensors, "cuda:0")
        self.target = self.add(engine, self.live, "r")
        self.swap(1)

    def gpu_worker(self) -> int:
        pids = self.daemon.node_of("n0").workers
        (found,) = (pid for pid in pids if "memfd:fake-cuda" in Path(f"/proc/{pid}/maps").read_text())
        return found

    def close(self) -> None:
        self.live.clear()
        super().close()


def test_a_worker_that_dies_while_it_stages_loses_nothing_and_its_successor_takes_over(daemon: Daemon) -> None:
    fleet = Fleet(daemon)
    at = fleet.live["w"].data_ptr()
    fleet.publish(2)
    victim = fleet.gpu_worker()
    with stopped((victim,)):
        swap = RunningSwap(daemon.connect(), "policy", 2, timeout=60)
        swap.wait_phase("stage")
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(refitd.RefitFailed, match="was killed by SIGKILL while staging") as failed:
            swap.result()
    assert failed.value.report is not None and failed.value.report.outcome == "aborted"
    assert fleet.holds(1) and fleet.target.version == 1
    fleet.swap(3)
    assert fleet.gpu_worker() != victim and fleet.live["w"].data_ptr() == at
    fleet.close()


@pytest.mark.slow
def test_an_abort_ends_the_worker_and_the_next_swap_has_a_fresh_one(daemon: Daemon) -> None:
    fleet = Fleet(daemon)
    fleet.publish(2)
    victim = fleet.gpu_worker()
    with stopped((victim,)):
        swap = RunningSwap(daemon.connect(), "policy", 2, timeout=60)
        swap.wait_phase("stage")
        with daemon.connect() as operator:
            operator.abort("policy", "a test")
        with pytest.raises(refitd.RefitFailed, match="a test"):
            swap.result()
    assert fleet.holds(1)
    fleet.swap(3)
    assert fleet.gpu_worker() != victim
    fleet.close()


@pytest.mark.slow
def test_a_worker_that_dies_while_it_commits_is_replaced_and_the_commit_is_done(daemon: Daemon) -> None:
    fleet = Fleet(daemon)
    fleet.publish(2)
    swap = RunningSwap(daemon.connect(), "policy", 2, timeout=60)
    eventually(lambda: fleet.target.pending == 2, "the version is decided", timeout=60)
    victim = fleet.gpu_worker()
    with stopped((victim,)), Engine(fleet.target):
        eventually(lambda: fleet.target.pending == 2, "the engine stands still")
        os.kill(victim, signal.SIGKILL)
        assert swap.result(60).outcome == "committed"
    assert fleet.holds(2)
    fleet.close()


@pytest.mark.slow
def test_a_client_that_is_killed_gives_its_memory_of_the_gpu_back(daemon: Daemon, gpus: fake_cuda.FakeGpus) -> None:
    def descriptors() -> list[str]:
        """The daemon's open descriptors, without connections of short-lived clients."""
        links = []
        for fd in Path(f"/proc/{daemon.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                links.append(os.readlink(fd))
        return sorted(link for link in links if "memfd" in link and "permits" not in link)

    assert descriptors() == []
    program = f"""
        import sys, time, torch, refitd
        client = refitd.connect(sys.argv[1])
        live = client.allocate({{"w": (({20 * MIB},), torch.uint8)}}, device="cuda:1")
        client.register_target("policy", live, replica="r")
        print("ready", flush=True)
        time.sleep(600)
    """
    with Program(python(daemon, textwrap.dedent(program))) as child:
        assert child.line() == "ready"
        assert gpus.used(1) == 40 * MIB and gpus.used(0) == 0
        assert daemon.node().gpus[0].arena_bytes == 40 * MIB
        assert len(descriptors()) == 2
    eventually(lambda: gpus.used() == 0, "the memory is free")
    eventually(lambda: descriptors() == [], "no descriptor is left")
    assert daemon.node().gpus == ()


@pytest.mark.slow
def test_a_trainer_that_leaves_keeps_its_version_on_the_gpu(daemon: Daemon, gpus: fake_cuda.FakeGpus) -> None:
    full = shards.whole(5)
    trainer = daemon.connect("trainer")
    given = private(full, 0)
    copy_into(given, full)
    trainer.register_source("policy", given).publish(1)
    trainer.close()
    with daemon.connect("engine") as engine:
        live = shards.zeros_like(full)
        with Engine(engine.register_target("policy", live, replica="r")):
            engine.swap("policy", 1, timeout=60)
        assert shards.equal(live, full)
        # its slots are freed when its rank registers again
        assert gpus.used(0) == 2 * fake_cuda.PAGE
        engine.register_source("policy", shards.whole(6)).publish(2)
        eventually(lambda: gpus.used(0) == 0, "the old slots are gone")
