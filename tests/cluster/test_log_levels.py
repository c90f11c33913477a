"""Log lines above info: none in a healthy run, and for each fault one line that names the culprit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import torch

import refitd
from refitd.testing import Daemon, eventually
from tests.support.controls import controlled
from tests.support.fleet import go_live


def above_info(daemon: Daemon) -> list[str]:
    """Return warnings and errors, without those of a loop that a busy machine has held up."""
    loud = (line for line in daemon.log().splitlines() if " level=warning " in line or " level=error " in line)
    return [line for line in loud if " event=slow-turn " not in line]


def test_a_healthy_run_alarms_nobody_and_faults_are_named(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    refuses: list[int] = []

    def pause(version: int) -> None:
        if version in refuses:
            raise RuntimeError("cannot stand still")

    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine:
        source = trainer.register_source("policy", {"w": torch.ones(64)})
        target = controlled(engine, "policy", {"w": torch.zeros(64)}, replica="a", pause=pause)
        for version in (1, 2):
            go_live(trainer, source, version)
        assert trainer.verify("policy").outcome == "proven" and target.version == 2
        assert above_info(daemon) == []
        refuses.append(3)
        source.publish(3)
        with pytest.raises(refitd.SwapFailed):
            trainer.swap("policy", 3, timeout=30)
        assert any("cannot stand still" in line and "phase=aborted" in line for line in above_info(daemon))
        before = daemon.workers()[0]
        os.kill(before, signal.SIGKILL)
        died = f" event=worker-died worker=0 pid={before} "
        eventually(lambda: any(died in line for line in above_info(daemon)), "the log names it")
        eventually(lambda: before not in daemon.workers(), "a new worker")
    loud = len(above_info(daemon))
    with daemon.connect("passes") as client:
        client.status()
    daemon.node()  # a later request: the daemon has noticed that it left
    assert len(above_info(daemon)) == loud, "a client that closes in order is no alarm"
