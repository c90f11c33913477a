"""Abandoned requests leave no version, slot, registration or arena."""

from __future__ import annotations

import signal

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine, eventually, stopped
from refitd.testing.daemon import joined
from tests.support.names import policy

SECOND = 1.0


def test_a_version_whose_lend_was_given_up_is_never_swapped_in(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as client:
        tensors, live = {"w": torch.full((64,), 1.0)}, {"w": torch.zeros(64)}
        source = trainer.register_source(policy(), tensors)
        target = client.register_target(policy(), live, replica="a")
        with Engine(target):
            with source.lend(1):
                trainer.swap(policy(), 1, timeout=60)
            with stopped((daemon.pid,)), pytest.raises(refitd.DeadlineExceeded):
                source.lend(2, timeout=SECOND)
            tensors["w"].fill_(99)  # the lend has failed: the trainer may write its tensors again
            eventually(lambda: policy() in {m.model for m in trainer.status().models}, "the daemon answers")
            with pytest.raises(refitd.RefusedError, match="version 2 is not held"):
                trainer.swap(policy(), 2, timeout=60)
        assert target.version == 1 and bool((live["w"] == 1).all())


def test_a_publish_that_was_given_up_keeps_no_slot(daemon: Daemon) -> None:
    with daemon.connect() as trainer:
        tensors = {"w": torch.full((64,), 1.0)}
        source = trainer.register_source(policy(), tensors, slots=1)
        source.publish(1)
        for version in (2, 3):
            with stopped((daemon.pid,)), pytest.raises(refitd.DeadlineExceeded):
                source.publish(version, timeout=SECOND)
            eventually(lambda: joined(trainer) > 0, "the daemon and its coordinator have found each other again")
        source.publish(4, timeout=60)
        assert trainer.status().models[0].complete_versions == (4,)


def test_a_registration_that_was_given_up_is_not_in_the_way_of_the_next(daemon: Daemon) -> None:
    with daemon.connect() as client:
        tensors = {"w": torch.zeros(64)}
        before = daemon.node().arenas
        for register in (
            lambda timeout: client.register_source(policy(), tensors, timeout=timeout),
            lambda timeout: client.register_target(policy(), tensors, replica="a", timeout=timeout),
        ):
            with stopped((daemon.pid,)), pytest.raises(refitd.DeadlineExceeded):
                register(SECOND)
            eventually(lambda: daemon.node().arenas == before, "nothing is left of it")
            register(20.0).close()
        with stopped((daemon.pid,)), pytest.raises(refitd.DeadlineExceeded):
            client.allocate({"w": ((64,), torch.float32)}, timeout=SECOND)
        eventually(lambda: daemon.node().arenas == before, "no arena is left that nobody can free")


def test_a_lend_that_a_signal_handler_has_ended_is_taken_back(daemon: Daemon) -> None:
    def handler(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    with daemon.connect() as trainer:
        tensors = {"w": torch.full((64,), 1.0)}
        source = trainer.register_source(policy(), tensors)
        previous = signal.signal(signal.SIGALRM, handler)
        try:
            with stopped((daemon.pid,)), pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.3)
                source.lend(1, timeout=60)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        eventually(lambda: bool(trainer.status().models), "the daemon answers")
        eventually(lambda: trainer.status().models[0].complete_versions == (), "it holds nothing")


def test_a_swap_without_any_time_is_answered_and_not_left_to_run(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as client:
        source = trainer.register_source(policy(), {"w": torch.full((64,), 1.0)})
        client.register_target(policy(), {"w": torch.zeros(64)}, replica="a")  # and it never polls
        source.publish(1)
        with pytest.raises(refitd.SwapFailed, match=r"aborted|decided"):
            trainer.swap(policy(), 1, timeout=0)


def test_a_daemon_that_does_not_answer_at_once_is_a_deadline(daemon: Daemon) -> None:
    with stopped((daemon.pid,)), pytest.raises(refitd.DeadlineExceeded, match="does not answer"):
        refitd.connect(daemon.directory, timeout=0)
