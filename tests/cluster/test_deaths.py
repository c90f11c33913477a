"""Deaths of workers, clients, coordinators, daemons: each is named, no call hangs, the old version is still live."""

from __future__ import annotations

import os
import signal
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import refitd
from refitd.testing import Daemon, Engine, ProcessFailed, RunningSwap, eventually, stopped
from tests.support import shards
from tests.support.names import policy
from tests.support.programs import Program, python
from tests.support.two_replicas import Fleet


def test_a_worker_killed_while_staging_aborts_the_swap_and_is_named(fleet: Fleet) -> None:
    workers = fleet.trainer.status().nodes[0].workers
    with stopped(workers):
        running = RunningSwap(fleet.daemon.connect(), policy(), 2)
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
        running = RunningSwap(fleet.daemon.connect(), policy(), 2, timeout=1.0)
        with pytest.raises(refitd.RefitFailed, match=r"phase stage ended at its deadline .* waiting for n0"):
            running.result()
        # silent workers have been replaced: the next swap needs no manual step
        assert fleet.swap_succeeds() and fleet.serves_second()


@contextmanager
def victim(daemon: Daemon, code: str) -> Iterator[Program]:
    """Run a client in another process, until it says that it is there."""
    head = """
        import os, sys, torch, refitd
        from tests.support.names import policy
        client = refitd.connect(sys.argv[1], name="victim")
        def there(): os.write(1, b"there\\n")
    """
    with Program(python(daemon, textwrap.dedent(head) + textwrap.dedent(code))) as process:
        assert process.line() == "there"
        yield process


VICTIM_TARGET = """
    sizes = {"embedding.weight": (64, 48), "layers.0.fc1.weight": (96, 48),
             "layers.0.fc2.weight": (48, 96), "layers.0.norm.weight": (48,)}
    tensors = {n: torch.zeros(s, dtype=torch.bfloat16) for n, s in sizes.items()}
    target = client.register_target(policy(), tensors, replica="victim")
    target.wait(1, timeout=30)  # it catches up with the others
    there()
    sys.stdin.read()
"""


def test_a_client_that_dies_while_staging_aborts_the_swap_and_is_named(fleet: Fleet) -> None:
    workers = fleet.trainer.status().nodes[0].workers
    with victim(fleet.daemon, VICTIM_TARGET) as process:
        with stopped(workers):
            running = RunningSwap(fleet.daemon.connect(), policy(), 2)
            running.wait_phase("stage")
            process.kill()
            with pytest.raises(
                refitd.RefitFailed, match=rf"replica 'victim' rank 0 \(node n0, .+ pid {process.pid}\)"
            ) as failure:
                running.result()
        assert failure.value.report is not None and failure.value.report.outcome == "aborted"
    assert fleet.serves_first()
    assert fleet.swap_succeeds() and fleet.serves_second()


@pytest.mark.slow
def test_an_engine_that_its_supervisor_restarts_in_the_middle_of_a_swap_is_back_at_what_was_live(fleet: Fleet) -> None:
    workers = fleet.trainer.status().nodes[0].workers
    with victim(fleet.daemon, VICTIM_TARGET) as process, stopped(workers):
        running = RunningSwap(fleet.daemon.connect(), policy(), 2)
        running.wait_phase("stage")
        process.kill()
        with victim(fleet.daemon, VICTIM_TARGET) as successor:  # registers immediately, under the dead client's name
            with pytest.raises(refitd.RefitFailed, match=rf"replica 'victim' rank 0 \(node n0, .+ pid {process.pid}\)"):
                running.result()

            def shown() -> tuple[int | None, list[tuple[int, int | None]]]:
                (model,) = fleet.trainer.status().models
                return model.live, [(t.pid, t.version) for t in model.targets if t.replica == "victim"]

            eventually(lambda: shown() == (1, [(successor.pid, 1)]), "the successor serves version 1")
            assert fleet.serves_first()
    assert fleet.swap_succeeds() and fleet.serves_second()


def test_a_client_that_dies_after_the_decision_is_named_and_the_others_commit(fleet: Fleet) -> None:
    with victim(fleet.daemon, VICTIM_TARGET) as process:
        running = RunningSwap(fleet.daemon.connect(), policy(), 2)
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
        threading.Thread(target=client.register_target, args=(policy(), tensors), kwargs={"replica": "v"}).start()
        there()
        os.kill(os.getpid(), 9)
    """
    with victim(fleet.daemon, code) as process:
        process.process.wait()
        eventually(
            lambda: (fleet.daemon.node().arenas, fleet.daemon.node().clients) == (before.arenas, before.clients),
            "the dead client's arenas are freed",
        )
    assert fleet.swap_succeeds() and fleet.serves_second()


def test_a_coordinator_that_cannot_start_ends_the_daemon_with_the_reason(
    start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    with pytest.raises(ProcessFailed, match=r"journal .* check coordinator\.journal") as failure:
        start_daemon(f'[coordinator]\njournal = "{tmp_path}"\n')
    assert "as soon as it had started" in str(failure.value)


def test_a_client_notices_at_once_that_the_daemon_is_gone(daemon: Daemon) -> None:
    with daemon.connect() as client:
        target = client.register_target(policy(), shards.whole(1), replica="r")
        daemon.kill()
        with pytest.raises(refitd.PeerLost, match="daemon of node n0 has ended"):
            target.wait(1, timeout=10)
        with pytest.raises(refitd.PeerLost):
            client.status()
        eventually(lambda: isinstance(target.error, refitd.PeerLost), "the target says it")
