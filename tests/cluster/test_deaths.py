"""Deaths of workers, clients, coordinators, daemons: named, nothing hung or lost, and the old version still serves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import refitd
from refitd.testing import Daemon, Engine, ProcessFailed, RunningSwap, eventually, stopped
from tests.support import shards
from tests.support.programs import ended
from tests.support.two_replicas import Fleet


def test_a_worker_killed_while_staging_aborts_the_swap_and_is_named(fleet: Fleet) -> None:
    workers = fleet.trainer.status().nodes[0].workers
    with stopped(workers):
        running = RunningSwap(fleet.daemon.connect(), "policy", 2)
        eventually(lambda: "version=2 phase=stage plan=" in fleet.daemon.log(), "the worker is told to stage")
        os.kill(workers[0], signal.SIGKILL)
        with pytest.raises(refitd.RefitFailed) as failure:
            running.result()
    text = str(failure.value)
    assert f"worker 0 (pid {workers[0]}) on node n0" in text and "SIGKILL" in text
    assert failure.value.report is not None
    assert (failure.value.report.outcome, failure.value.report.phase) == ("aborted", "stage")
    assert fleet.serves_first()
    assert fleet.swap_succeeds() and fleet.serves_second()
    assert not set(workers) & set(fleet.daemon.node().workers), "the workers of the failed epoch are gone"


def test_a_stopped_worker_ends_the_swap_at_its_deadline(fleet: Fleet) -> None:
    workers = fleet.trainer.status().nodes[0].workers
    with stopped(workers):
        running = RunningSwap(fleet.daemon.connect(), "policy", 2, timeout=1.0)
        with pytest.raises(refitd.RefitFailed, match=r"phase stage ended at its deadline .* waiting for n0"):
            running.result()
        # those that did not answer have been replaced: the next swap needs nobody's help
        assert fleet.swap_succeeds() and fleet.serves_second()


def in_other_process(daemon: Daemon, code: str) -> subprocess.Popen[bytes]:
    """Run a client in a process of its own; it says "there" on stdout when it has come that far."""
    head = f"""
        import os, sys, torch, refitd
        client = refitd.connect({str(daemon.directory)!r}, name="victim")
        def there(): os.write(1, b"there")
    """
    program = textwrap.dedent(head) + textwrap.dedent(code)
    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@contextmanager
def victim(daemon: Daemon, code: str) -> Iterator[subprocess.Popen[bytes]]:
    with ended(in_other_process(daemon, code)) as process:
        assert process.stdout is not None
        assert process.stdout.read(5) == b"there"
        yield process


VICTIM_TARGET = """
    sizes = {"embedding.weight": (64, 48), "layers.0.fc1.weight": (96, 48),
             "layers.0.fc2.weight": (48, 96), "layers.0.norm.weight": (48,)}
    tensors = {n: torch.zeros(s, dtype=torch.bfloat16) for n, s in sizes.items()}
    target = client.register_target("policy", tensors, replica="victim")
    target.wait(1, timeout=30)  # it catches up with the others
    there()
    sys.stdin.read()
"""


def test_a_client_that_dies_while_staging_aborts_the_swap_and_is_named(fleet: Fleet) -> None:
    workers = fleet.trainer.status().nodes[0].workers
    with victim(fleet.daemon, VICTIM_TARGET) as process:
        with stopped(workers):
            running = RunningSwap(fleet.daemon.connect(), "policy", 2)
            running.wait_phase("stage")
            process.kill()
            with pytest.raises(
                refitd.RefitFailed, match=rf"victim rank 0 \(node n0, .+ pid {process.pid}\)"
            ) as failure:
                running.result()
        assert failure.value.report is not None and failure.value.report.outcome == "aborted"
    assert fleet.serves_first()
    assert fleet.swap_succeeds() and fleet.serves_second()


@pytest.mark.slow
def test_an_engine_that_its_supervisor_restarts_in_the_middle_of_a_swap_is_back_at_what_was_live(fleet: Fleet) -> None:
    workers = fleet.trainer.status().nodes[0].workers
    with victim(fleet.daemon, VICTIM_TARGET) as process, stopped(workers):
        running = RunningSwap(fleet.daemon.connect(), "policy", 2)
        running.wait_phase("stage")
        process.kill()
        with victim(fleet.daemon, VICTIM_TARGET) as successor:  # at once, under the same name
            with pytest.raises(refitd.RefitFailed, match=rf"victim rank 0 \(node n0, .+ pid {process.pid}\)"):
                running.result()

            def shown() -> tuple[int | None, list[tuple[int, int | None]]]:
                (model,) = fleet.trainer.status().models
                return model.live, [(t.pid, t.version) for t in model.targets if t.replica == "victim"]

            eventually(lambda: shown() == (1, [(successor.pid, 1)]), "the successor serves version 1")
            assert fleet.serves_first()
    assert fleet.swap_succeeds() and fleet.serves_second()


def test_a_client_that_dies_after_the_decision_is_named_and_the_others_commit(fleet: Fleet) -> None:
    with victim(fleet.daemon, VICTIM_TARGET) as process:
        running = RunningSwap(fleet.daemon.connect(), "policy", 2)
        running.wait_phase("commit")
        process.kill()
        with Engine(*fleet.targets), pytest.raises(refitd.RefitFailed, match="incomplete in phase commit") as failure:
            running.result()
    report = failure.value.report
    assert report is not None
    states = {m.replica: m.state for m in report.members}
    assert states == {"engine-0": "committed", "engine-1": "committed", "victim": "failed"}
    assert fleet.serves_second()


def test_a_client_that_dies_while_registering_leaves_nothing(fleet: Fleet) -> None:
    before = fleet.daemon.node()
    code = """
        import threading
        tensors = {"w": torch.zeros(64 << 20, dtype=torch.uint8)}
        threading.Thread(target=client.register_target, args=("policy", tensors), kwargs={"replica": "v"}).start()
        there()
        os.kill(os.getpid(), 9)
    """
    with victim(fleet.daemon, code) as process:
        process.wait(10)
        eventually(
            lambda: (fleet.daemon.node().arenas, fleet.daemon.node().clients) == (before.arenas, before.clients),
            "the dead client's arenas are freed",
        )
    assert fleet.swap_succeeds() and fleet.serves_second()


def test_a_coordinator_that_dies_beside_its_daemon_is_started_again_and_loses_nothing(fleet: Fleet) -> None:
    def pid() -> int:
        try:
            return fleet.trainer.status().coordinator_pid
        except refitd.TransportError:
            return first

    first = fleet.trainer.status().coordinator_pid
    eventually(lambda: fleet.trainer.status().uptime_s > 3.5, "it has run for a while")
    os.kill(first, signal.SIGKILL)
    eventually(lambda: pid() != first, "another coordinator answers", timeout=60)
    assert fleet.swap_succeeds() and fleet.serves_second()


def test_a_coordinator_that_cannot_start_ends_the_daemon_with_the_reason(
    start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    with pytest.raises(ProcessFailed, match=r"journal .* check coordinator\.journal") as failure:
        start_daemon(f'[coordinator]\njournal = "{tmp_path}"\n')
    assert "as soon as it had started" in str(failure.value)


def test_a_client_notices_at_once_that_the_daemon_is_gone(daemon: Daemon) -> None:
    with daemon.connect() as client:
        target = client.register_target("policy", shards.whole(1), replica="r")
        called = client.register_target("policy", shards.whole(1), replica="c", on_commit=lambda commit: commit.apply())
        daemon.kill()
        with pytest.raises(refitd.PeerLost, match="daemon of node n0 has ended"):
            target.wait(1, timeout=10)
        with pytest.raises(refitd.PeerLost):
            client.status()
        eventually(lambda: isinstance(called.error, refitd.PeerLost), "the engine with a callback is told as well")


def test_a_coordinator_that_is_killed_and_comes_back_is_told_everything_again(
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon = start_daemon(standalone=False)
    coordinator = daemon.start_coordinator()
    with daemon.connect() as client:
        full = shards.whole(1)
        source = client.register_source("policy", full)
        live = shards.zeros_like(full)
        target = client.register_target("policy", live, replica="r")
        source.publish(1)
        with Engine(target):
            client.swap("policy", 1, timeout=60)
            coordinator.kill()
            with pytest.raises(refitd.TransportError, match="coordinator"):
                client.swap("policy", 1, timeout=60)
            daemon.start_coordinator()
            eventually(lambda: bool(client.status().models), "members are known again")
            status = client.status().models[0]
            assert status.complete_versions == (1,)
            assert status.targets[0].version == 1
            full["layers.0.norm.weight"].add_(1)
            source.publish(2)
            assert client.swap("policy", 2, timeout=60).outcome == "committed"
        assert shards.equal(live, full)
