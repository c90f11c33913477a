"""Lent private tensors: pulled by the workers or copied once by their trainer, as the measurement decides."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import refitd
from refitd.copy_services import measure
from refitd.testing import Cluster, Daemon, Engine, eventually
from tests.support import shards

CAP_SYS_PTRACE = 19


def short_rows() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(16384 * 16, dtype=torch.float32).reshape(16384, 16)}


def test_the_first_lend_measures_and_status_and_report_say_what_was_chosen(daemon: Daemon) -> None:
    full = {"w": torch.randn(1024, 2048)}
    live = shards.zeros_like(full)
    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source("policy", full)
        target = engine.register_target("policy", live, replica="r")
        source.publish(1)
        assert source.lending == ""
        row = trainer.status().models[0].sources[0]
        assert (row.mode, row.mode_reason) == ("copied", "")
        with Engine(target):
            assert [s.mode for s in trainer.swap("policy", 1, timeout=60).sources] == ["copied"]
            with source.lend(2):
                (given,) = trainer.swap("policy", 2, timeout=60).sources
        assert given.mode == source.lending != ""
        assert given.mode_reason.startswith("pulled at ") and "GB/s, copied at " in given.mode_reason
        row = trainer.status().models[0].sources[0]
        assert (row.mode, row.mode_reason) == (given.mode, given.mode_reason)
        assert shards.equal(live, full)


def test_rows_too_short_to_pull_are_copied_and_the_tensors_are_free_at_once(daemon: Daemon) -> None:
    full = short_rows()
    first, live = {"w": full["w"].clone()}, shards.zeros_like(full)
    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source("policy", full)
        target = engine.register_target("policy", live, replica="r")
        source.publish(1, lend=True, timeout=10)  # nobody has to swap it before this returns
        full["w"].zero_()
        assert source.lending == "copied"
        with Engine(target):
            (given,) = trainer.swap("policy", 1, timeout=60).sources
        assert given.mode == "copied" and "pulled at 0." in given.mode_reason
        assert shards.equal(live, first)


def test_a_lease_that_was_copied_stays_a_version_unless_its_block_fails(daemon: Daemon) -> None:
    with daemon.connect() as trainer:
        source = trainer.register_source("policy", short_rows(), pull=False)
        with source.lend(1) as lease:
            assert lease.has_ended
            lease.wait(0.0)
        with pytest.raises(ZeroDivisionError), source.lend(2):
            raise ZeroDivisionError
        assert trainer.status().models[0].complete_versions == (1,)
        lease.withdraw()
        assert trainer.status().models[0].complete_versions == ()


def test_tensors_that_nobody_can_read_in_place_are_copied_or_refused_as_demanded(daemon: Daemon) -> None:
    full = {"w": torch.randn(64, 32).t()}
    live = {"w": torch.zeros(32, 64)}
    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source("policy", full)
        target = engine.register_target("policy", live, replica="r")
        with Engine(target), source.lend(1):
            (given,) = trainer.swap("policy", 1, timeout=60).sources
        assert given.mode == "copied" and given.mode_reason.startswith("w: only contiguous CPU tensors can be pulled")
        assert torch.equal(live["w"], full["w"])
        demanding = trainer.register_source("other", full, pull=True)
        with pytest.raises(refitd.RefusedError, match="only contiguous CPU tensors can be pulled"):
            demanding.lend(1)


TRAINER = """
    import ctypes, sys, torch, refitd
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: nobody may look into this process
    client = refitd.connect(sys.argv[1], name="trainer")
    pull = {"pull": True, "auto": None}[sys.argv[2]]
    source = client.register_source("policy", {"w": torch.ones(512, 1024)}, pull=pull)
    with source.lend(1):
        print(source.lending, flush=True)
        sys.stdin.readline()
"""


def forbid_ptrace() -> None:
    """Take from this process's children the right to read any process, which root has."""
    if os.geteuid() == 0:
        ctypes.CDLL(None).prctl(24, CAP_SYS_PTRACE, 0, 0, 0)  # PR_CAPBSET_DROP


@pytest.mark.slow
def test_a_trainer_whose_memory_may_not_be_read_copies_and_the_report_says_why(
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon = start_daemon(prepare=forbid_ptrace)
    live = {"w": torch.zeros(512, 1024)}

    def trainer(way: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", textwrap.dedent(TRAINER), str(daemon.directory), way]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with daemon.connect() as engine:
        target = engine.register_target("policy", live, replica="r")
        with Engine(target):
            with trainer("pull") as process:
                assert process.stdout is not None and process.stdout.readline() == "pulled\n"
                with pytest.raises(refitd.RefitFailed, match="cannot be read: Operation not permitted") as failure:
                    engine.swap("policy", 1, timeout=60)
                assert failure.value.report is not None
                assert [source.mode for source in failure.value.report.sources] == ["pulled"]
                process.communicate("\n", timeout=60)
            with trainer("auto") as process:
                assert process.stdout is not None and process.stdout.readline() == "copied\n"
                (given,) = engine.swap("policy", 1, timeout=60).sources
                process.communicate("\n", timeout=60)
        assert given.mode == "copied" and "cannot be read: Operation not permitted" in given.mode_reason
        assert torch.equal(live["w"], torch.ones(512, 1024))


def test_a_measurement_larger_than_a_sample_is_refused(daemon: Daemon) -> None:
    from refitd.protocol import local

    with daemon.connect() as client:
        source = client.register_source("policy", short_rows())
        for spans in (((0, 1, 1 << 40),), ((0, 1 << 20, 1),), ()):
            with pytest.raises(refitd.RefusedError, match="to measure, the limits are"):
                client._connection.request(
                    local.MeasurePull(member=source.member, spans=spans), local.PullMeasured, timeout=5
                )
        # an address nobody has mapped is an answer, not a fault
        measured = client._connection.request(
            local.MeasurePull(member=source.member, spans=((4096, 1, 4096),)), local.PullMeasured, timeout=5
        )
        assert "Bad address" in measured.reason
    assert measure.MAX_SPANS * measure.MAX_ROWS <= 1 << 19, "what a client samples is within the daemon's limit"


@pytest.mark.slow
def test_a_lend_waits_for_a_coordinator_that_is_restarted() -> None:
    with Cluster(("n0",), workers=1) as cluster, cluster.daemons["n0"].connect() as client:
        given, live = {"w": torch.ones(8)}, {"w": torch.zeros(8)}
        source = client.register_source("policy", given)
        target = client.register_target("policy", live, replica="r")
        cluster.coordinator.kill()
        eventually(lambda: "coordinator-silent" in cluster.daemons["n0"].log(), "it is missed", 20)
        with pytest.raises(refitd.TransportError, match="no coordinator"):
            source.lend(1, timeout=0.5)
        with ThreadPoolExecutor(1) as other:
            lending = other.submit(source.lend, 1, timeout=60)
            cluster.coordinator.start()
            with lending.result(), Engine(target):
                assert client.swap("policy", 1, timeout=60).outcome == "committed"
        assert torch.equal(live["w"], given["w"])
