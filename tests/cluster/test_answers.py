"""A swap answers its caller within the timeout, whatever the outcome."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import refitd
from refitd.testing import Daemon, eventually, stopped
from tests.support import programs
from tests.support.names import policy
from tests.support.trainer import ANSWER_S, Trainer


def decided(trainer: Trainer) -> refitd.SwapReport:
    """Swap to a new version that no engine commits; return the report of the swap that ended as decided."""
    seconds = 2.0
    while True:
        trainer.publish()
        with pytest.raises(refitd.RefitFailed) as late:
            trainer.client.swap(policy(), timeout=seconds)
        report = late.value.report
        assert report is not None
        if report.outcome == refitd.SwapOutcome.DECIDED:
            assert "'b' rank 0" in str(late.value) and late.value.causes
            return report
        seconds *= 2  # the machine is slow: the caller's time was over before the decision


def refitctl_swap(daemon: Daemon, *words: str, seconds: int = 1) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "refitd_cli.control", "swap", policy(), *words, "--timeout", str(seconds)]
    return programs.run(command, env={**os.environ, "REFITD_RUNTIME_DIR": str(daemon.directory)})


def test_whoever_asks_for_a_swap_is_answered_in_the_time_that_was_given(daemon: Daemon, start_daemon) -> None:
    slow = start_daemon("[deadlines]\ncommit_s = 60.0\n")
    trainer = Trainer(slow)
    with trainer.client, slow.connect("engine") as engine:
        live = {"w": torch.zeros(64, 64)}
        target = engine.register_target(policy(), live, replica="b")
        report = decided(trainer)  # before `commit_s`, at which it would be incomplete
        assert report.version == trainer.version
        assert [(m.replica, m.state) for m in report.members] == [("b", "late")]
        # the swap continues without another request
        assert target.wait(trainer.version, timeout=ANSWER_S) == trainer.version
        eventually(lambda: trainer.client.history(policy()).swaps[0].state == "committed", "it has committed")


def test_a_swap_that_waits_its_turn_is_answered_in_time_too(start_daemon) -> None:
    daemon = start_daemon("[deadlines]\ncommit_s = 60.0\n")
    trainer = Trainer(daemon)
    with trainer.client, daemon.connect("engine") as engine:
        target = engine.register_target(policy(), {"w": torch.zeros(64, 64)}, replica="b")
        version = decided(trainer).version
        trainer.publish()
        with pytest.raises(refitd.DeadlineExceeded, match=r"its turn did not come .* waits for replica 'b' rank 0"):
            trainer.client.swap(policy(), timeout=1.0, queue=True)
        ran = refitctl_swap(daemon, "--queue")
        assert ran.returncode == 1 and "its turn did not come" in ran.stderr
        assert target.pending == version  # the first swap has not ended: it waits for 60 s
        assert target.wait(version, timeout=ANSWER_S) == version


def test_a_coordinator_that_does_not_answer_keeps_nobody_for_longer_than_asked(
    daemon: Daemon, trainer: Trainer
) -> None:
    with daemon.connect("engine") as engine:
        engine.register_target(policy(), {"w": torch.zeros(64, 64)}, replica="b")
        trainer.publish()
        pid = trainer.client.status().coordinator_pid
        with stopped((pid,)):  # the outcome is unknown
            for ask in (trainer.client.swap, trainer.client.rollback, trainer.client.verify):
                with pytest.raises(refitd.TransportError):
                    ask(policy(), timeout=0.5)


@pytest.mark.slow
def test_refitctl_says_that_a_swap_is_decided_and_goes_on(start_daemon) -> None:
    daemon = start_daemon("[deadlines]\ncommit_s = 60.0\n")
    trainer = Trainer(daemon)
    with trainer.client, daemon.connect("engine") as engine:
        target = engine.register_target(policy(), {"w": torch.zeros(64, 64)}, replica="b")
        trainer.publish()
        for seconds in (1, 4, 16):  # on a slow machine the time may be over before the decision
            ran = refitctl_swap(daemon, seconds=seconds)
            assert ran.returncode == 1
            if "is decided and goes on" in ran.stderr:
                break
            trainer.publish()
        assert "is decided and goes on" in ran.stderr and "rank 0 of replica b" in ran.stderr, ran.stderr
        assert target.wait(trainer.version, timeout=ANSWER_S) == trainer.version
