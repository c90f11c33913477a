"""Callers of swaps are answered within their timeout, whatever the swap's outcome."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch

import refitd
from refitd.testing import Daemon, eventually, stopped
from tests.support import programs
from tests.support.trainer import ANSWER_S, Trainer


def refitctl_swap(daemon: Daemon, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "refitd_cli.control", "swap", "policy", *words, "--timeout", "1"]
    return programs.run(command, env={**os.environ, "REFITD_RUNTIME_DIR": str(daemon.directory)})


def test_whoever_asks_for_a_swap_is_answered_in_the_time_that_was_given(daemon: Daemon, start_daemon) -> None:
    slow = start_daemon("[deadlines]\ncommit_s = 60.0\n")
    trainer = Trainer(slow)
    with trainer.client, slow.connect("engine") as engine:
        live = {"w": torch.zeros(64, 64)}
        target = engine.register_target("policy", live, replica="b")
        version = trainer.publish()
        began = time.monotonic()
        with pytest.raises(refitd.RefitFailed, match="decided") as caught:
            trainer.client.swap("policy", timeout=2.0)
        assert time.monotonic() - began < 2.0 + 2.0  # of 60
        report = caught.value.report
        assert report is not None and report.outcome == "decided" and report.version == version
        assert [(m.replica, m.state) for m in report.members] == [("b", "late")]
        assert "b rank 0" in str(caught.value) and caught.value.causes
        # it goes on, and nobody has to ask again
        assert target.wait(version, timeout=ANSWER_S) == version
        eventually(
            lambda: [s.state for s in trainer.client.history("policy").swaps] == ["committed"], "it has committed"
        )


def test_a_swap_that_waits_its_turn_is_answered_in_time_too(start_daemon) -> None:
    daemon = start_daemon("[deadlines]\ncommit_s = 60.0\n")
    trainer = Trainer(daemon)
    with trainer.client, daemon.connect("engine") as engine:
        target = engine.register_target("policy", {"w": torch.zeros(64, 64)}, replica="b")
        trainer.publish()
        with pytest.raises(refitd.SwapFailed) as late:
            trainer.client.swap("policy", timeout=4.0)
        assert late.value.report.outcome == refitd.SwapOutcome.DECIDED
        trainer.publish()
        began = time.monotonic()
        with pytest.raises(refitd.DeadlineExceeded, match=r"its turn did not come .* waits for b rank 0"):
            trainer.client.swap("policy", timeout=1.0, queue=True)
        ran = refitctl_swap(daemon, "--queue")
        assert ran.returncode == 1 and "its turn did not come" in ran.stderr
        assert time.monotonic() - began < 15.0  # of 60
        assert target.wait(1, timeout=ANSWER_S) == 1


def test_a_coordinator_that_does_not_answer_keeps_nobody_for_longer_than_asked(
    daemon: Daemon, trainer: Trainer
) -> None:
    with daemon.connect("engine") as engine:
        engine.register_target("policy", {"w": torch.zeros(64, 64)}, replica="b")
        trainer.publish()
        pid = trainer.client.status().coordinator_pid
        with stopped((pid,)):
            began = time.monotonic()
            for ask in (trainer.client.swap, trainer.client.rollback, trainer.client.verify):
                with pytest.raises(refitd.TransportError):  # nobody can say what became of it
                    ask("policy", timeout=0.5)
            assert time.monotonic() - began < 3 * (0.5 + 2.0)


@pytest.mark.slow
def test_refitctl_says_that_a_swap_is_decided_and_goes_on(start_daemon) -> None:
    daemon = start_daemon("[deadlines]\ncommit_s = 60.0\n")
    trainer = Trainer(daemon)
    with trainer.client, daemon.connect("engine") as engine:
        target = engine.register_target("policy", {"w": torch.zeros(64, 64)}, replica="b")
        trainer.publish()
        ran = refitctl_swap(daemon)
        assert ran.returncode == 1
        assert "is decided and goes on" in ran.stderr and "rank 0 of replica b" in ran.stderr, ran.stderr
        assert target.wait(1, timeout=ANSWER_S) == 1
