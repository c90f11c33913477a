"""Lifelines: every watcher notices the end of a process, for any cause."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

import refitd

ENDS_S = 20.0


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    yield process
    process.kill()
    process.wait()


class Watcher:
    """A watcher that records an end."""

    def __init__(self) -> None:
        self.errors: list[refitd.Orphaned] = []
        self.called = threading.Event()

    def end(self, error: refitd.Orphaned) -> None:
        self.errors.append(error)
        self.called.set()


def test_a_killed_process_is_noticed_before_its_parent_has_waited_for_it(sleeper: subprocess.Popen[bytes]) -> None:
    lifeline, watcher = refitd.Lifeline({os.getpid(): "the test", sleeper.pid: "the server"}), Watcher()
    lifeline.on_end(watcher.end)
    lifeline.check()
    sleeper.kill()
    assert watcher.called.wait(ENDS_S)
    assert os.path.exists(f"/proc/{sleeper.pid}"), "it is a zombie"
    assert lifeline.ended == f"the server (pid {sleeper.pid}) has ended"
    assert len(watcher.errors) == 1 and lifeline.ended in str(watcher.errors[0])
    with pytest.raises(refitd.Orphaned, match="the server"):
        lifeline.check()
    late = Watcher()
    lifeline.on_end(late.end)
    assert late.called.is_set(), "a process that has ended already is told at once"


def test_a_process_that_has_ended_already_is_refused(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(refitd.Orphaned, match=f"the server .pid {sleeper.pid}. has ended"):
        refitd.Lifeline({sleeper.pid: "the server"})
    sleeper.wait()
    with pytest.raises(refitd.Orphaned, match="has ended"):
        refitd.Lifeline({sleeper.pid: "the server"})


def test_a_forked_child_that_drops_the_lifeline_does_not_end_its_parents_watch(
    sleeper: subprocess.Popen[bytes],
) -> None:
    lifeline, watcher = refitd.Lifeline({sleeper.pid: "the server"}), Watcher()
    lifeline.on_end(watcher.end)
    child = os.fork()
    if child == 0:
        lifeline.close()
        os._exit(0)
    os.waitpid(child, 0)
    sleeper.kill()
    assert watcher.called.wait(ENDS_S)


def test_a_lifeline_keeps_no_object_alive_and_leaves_no_descriptor(sleeper: subprocess.Popen[bytes]) -> None:
    before = set(os.listdir("/proc/self/fd"))
    lifeline, watcher = refitd.Lifeline({sleeper.pid: "the server"}), Watcher()
    lifeline.on_end(watcher.end)
    threads = [one for one in threading.enumerate() if one.name == "refitd-lifeline"]
    del watcher
    lifeline.close()
    for thread in threads:
        thread.join(ENDS_S)
    del lifeline
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("processes", [{}, None, {0: "x"}, {-1: "x"}, {"7": "x"}, {1: ""}, [1]])
def test_a_lifeline_of_no_process_is_refused(processes: object) -> None:
    with pytest.raises(refitd.RefusedError):
        refitd.Lifeline(processes)  # type: ignore[arg-type]


def test_a_kernel_without_pidfds_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", absent)
    with pytest.raises(refitd.RefusedError, match=r"older than Linux 5.3.*without lives_with"):
        refitd.Lifeline({os.getpid(): "the server"})


def test_connect_refuses_what_is_no_lifeline() -> None:
    with pytest.raises(refitd.RefusedError, match=r"lives_with is 7 .int., expected a refitd.Lifeline"):
        refitd.connect("/nowhere", lives_with=7)  # type: ignore[arg-type]


def test_a_signal_that_does_not_end_a_process_is_no_end(sleeper: subprocess.Popen[bytes]) -> None:
    lifeline = refitd.Lifeline({sleeper.pid: "the server"})
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
    lifeline.check()
    sleeper.send_signal(signal.SIGCONT)
    lifeline.check()
    lifeline.close()
