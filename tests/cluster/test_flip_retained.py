"""The arena of a dead flipping engine is compared with its version's digests before a successor gets it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import refitd
from refitd.testing import Daemon, eventually
from refitd.testing.processes import stopped
from tests.support.flips import version

# SIGUSR1 has it write one element of its live tensors, which only versions may do.
ENGINE = """
import signal, sys, time, refitd, torch
from tests.support.flips import SHAPES
client = refitd.connect(sys.argv[1])
live = client.allocate(SHAPES)
def seen():
    return sorted({float(v) for t in live.values() if t.numel() for v in t.unique()})
def damage(*_):
    live["w"][5, 7] = -1
    print("damaged", flush=True)
signal.signal(signal.SIGUSR1, damage)
target = client.register_target("policy", live, replica="a", timeout=float(sys.argv[2]))
print("registered", target.version, seen(), flush=True)
while True:
    if (number := target.poll()) is not None:
        print("committed", number, seen(), flush=True)
    time.sleep(0.002)
"""


class Engines:
    """The engine's processes, one after the other."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._now: subprocess.Popen[str] | None = None

    def start(self, timeout: float = 20.0) -> None:
        command = [sys.executable, "-c", ENGINE, str(self._daemon.directory), str(timeout)]
        self._now = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def said(self) -> str:
        assert self._now is not None and self._now.stdout is not None
        return self._now.stdout.readline().strip()

    def damage(self) -> None:
        assert self._now is not None
        os.kill(self._now.pid, signal.SIGUSR1)
        assert self.said() == "damaged"

    def kill(self) -> str:
        """End it; return what it has logged."""
        assert self._now is not None
        self._now.kill()
        return self._now.communicate()[1]


@contextmanager
def served(daemon: Daemon) -> Iterator[tuple[refitd.Client, Engines]]:
    """An engine with version 1, which is proven."""
    engines = Engines(daemon)
    with daemon.connect() as trainer:
        source = trainer.register_source("policy", version(1))
        engines.start()
        try:
            assert engines.said() == "registered None [0.0]"
            source.publish(1)
            trainer.swap("policy", 1, timeout=30)
            assert engines.said() == "committed 1 [1.0]"
            assert trainer.verify("policy").outcome == "proven"
            yield trainer, engines
        finally:
            engines.kill()


def test_what_an_engine_has_changed_is_not_given_back(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon("[node]\nkeep_targets_s = 60.0\n")
    with served(daemon) as (trainer, engines):
        engines.damage()
        engines.kill()
        engines.start()
        assert engines.said() == "registered None [0.0]"
        assert engines.said() == "committed 1 [1.0]"  # brought from the source
        assert trainer.verify("policy").outcome == "proven"
        says = engines.kill()
        assert "version 1, which its predecessor left, is not restored: 1 blocks of 1 tensors" in says
        assert "(w[0:300, :])" in says and "not-restored" in daemon.log()


@pytest.mark.slow
def test_what_cannot_be_compared_in_time_is_not_given_back(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon("[node]\nkeep_targets_s = 60.0\n")
    with served(daemon) as (trainer, engines):
        engines.kill()
        with stopped(daemon.workers()):
            engines.start(timeout=3.0)
            assert engines.said() == "registered None [0.0]"
        assert engines.said() == "committed 1 [1.0]"
        eventually(lambda: trainer.verify("policy").outcome == "proven", "proven", 20)
        assert "have not read its live tensors within 2.7 s" in engines.kill()


@pytest.mark.slow
def test_an_engine_that_dies_while_what_it_restores_is_compared(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon("[node]\nkeep_targets_s = 60.0\n")
    with served(daemon) as (trainer, engines):
        engines.kill()
        with stopped(daemon.workers()):
            engines.start()
            # two slots, what is retained, and the new engine's own
            eventually(lambda: trainer.status().nodes[0].arenas == 4, "its arena is there", 20)
            time.sleep(0.5)
            engines.kill()
        engines.start()
        assert engines.said() == "registered 1 [1.0]"
        for pid in daemon.workers():  # what is compared is compared again
            os.kill(pid, signal.SIGSTOP)
        engines.kill()
        engines.start()
        for pid in daemon.workers():
            os.kill(pid, signal.SIGKILL)
        assert engines.said() == "registered 1 [1.0]"
        assert trainer.verify("policy").outcome == "proven"
