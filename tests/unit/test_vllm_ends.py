"""A vLLM process ends with the process that it serves."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import time
from multiprocessing.connection import Connection

import pytest

from refitd.adapters.vllm import seams

ENDS_S = 60.0


def engine(pipe: Connection, ignores: bool) -> None:
    if ignores:
        seams.ENDS_S = 0.1
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lifeline = seams.live_with_server()
    pipe.send((os.getpid(), lifeline is not None))
    while True:
        time.sleep(1)


def server(pipe: Connection, method: str, name: str, ignores: bool) -> None:
    multiprocessing.get_context(method).Process(target=engine, args=(pipe, ignores), name=name).start()
    signal.pause()


def started(method: str, name: str, *, ignores: bool = False) -> tuple[multiprocessing.process.BaseProcess, int, bool]:
    """Start a server, and an engine that it starts; return the server, the engine's pidfd, and whether it watches."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=server, args=(there, method, name, ignores))
    process.start()
    assert here.poll(ENDS_S)
    pid, watches = here.recv()
    return process, os.pidfd_open(pid), watches


def has_ended(pidfd: int, within_s: float) -> bool:
    return bool(select.select([pidfd], [], [], within_s)[0])


@pytest.mark.parametrize(
    ("method", "name"), [("spawn", "EngineCore"), ("fork", "EngineCore_DP1"), ("forkserver", "VllmWorker-1")]
)
def test_an_engine_ends_with_its_server(method: str, name: str) -> None:
    process, pidfd, watches = started(method, name)
    assert watches and not has_ended(pidfd, 0)
    process.kill()
    assert has_ended(pidfd, ENDS_S)
    os.close(pidfd)


def starting_worker(pipe: Connection) -> None:
    """An EngineCore that does not end."""
    seams.live_with_server(starts_workers=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    multiprocessing.get_context("spawn").Process(target=engine, args=(pipe, False), name="VllmWorker-0").start()
    while True:
        time.sleep(1)


def serving(pipe: Connection) -> None:
    core = multiprocessing.get_context("spawn").Process(target=starting_worker, args=(pipe,), name="EngineCore")
    core.start()
    pipe.send(core.pid)
    signal.pause()


def test_a_worker_ends_with_its_server_while_its_engine_core_has_not_ended_yet() -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serving, args=(there,))
    process.start()
    assert here.poll(ENDS_S)
    core = os.pidfd_open(here.recv())
    signal.pidfd_send_signal(core, 0)
    assert here.poll(ENDS_S)
    worker = os.pidfd_open(here.recv()[0])
    signal.pidfd_send_signal(core, signal.SIGSTOP)
    process.kill()
    assert has_ended(worker, ENDS_S) and not has_ended(core, 0)
    signal.pidfd_send_signal(core, signal.SIGKILL)
    os.close(worker)
    os.close(core)


def test_an_engine_that_does_not_end_is_killed() -> None:
    process, pidfd, _ = started("spawn", "EngineCore_DP0", ignores=True)
    process.kill()
    assert has_ended(pidfd, ENDS_S)
    os.close(pidfd)


def test_a_process_that_vllm_has_not_started_is_left_alone() -> None:
    assert seams.live_with_server() is None
    process, pidfd, watches = started("spawn", "trainer")
    assert not watches
    process.kill()
    process.join()
    assert not has_ended(pidfd, 0)
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)


def test_an_engine_whose_server_ended_before_it_looked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pid of the ended parent now belongs to another process: this one."""

    class Ended:
        pid = os.getpid()

        def is_alive(self) -> bool:
            return False

    monkeypatch.setattr(multiprocessing, "parent_process", Ended)
    monkeypatch.setattr(multiprocessing.current_process(), "_name", "EngineCore")
    with pytest.raises(seams.refitd.Orphaned, match=r"the API server .* has ended"):
        seams.live_with_server()
