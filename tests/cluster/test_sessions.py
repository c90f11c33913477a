"""The end of sessions: messages sent before the end arrive, and several threads may close a client."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import refitd
from refitd.testing import Daemon, RunningSwap, eventually
from tests.support.leaver import WAYS
from tests.support.programs import Program
from tests.support.trainer import ANSWER_S, Trainer


class Leavers(Program):
    """Engines that commit a version and leave (tests.support.leaver)."""

    def __init__(self, directory: Path) -> None:
        super().__init__([sys.executable, "-m", "tests.support.leaver", str(directory)])

    def start(self, way: str, version: int) -> None:
        """Have one engine register as replica a; it leaves in this way after its commit."""
        self.tell(f"a {way} {version}")
        assert self.line() == "ready"

    def gone(self) -> None:
        """Return when the engine has ended."""
        assert self.line() == "gone"


@pytest.fixture
def lone(start_daemon: Callable[..., Daemon]) -> Daemon:
    """A daemon whose engines get only requested versions; automatic catch-up is off."""
    return start_daemon("[deadlines]\ncommit_s = 10.0\n[models.policy]\ncatch_up = false\n")


@pytest.fixture
def leavers(lone: Daemon) -> Iterator[Leavers]:
    with Leavers(lone.directory) as found:
        yield found


def _leaves_after_a_commit(trainer: Trainer, leavers: Leavers, way: str) -> None:
    version = trainer.version + 1
    leavers.start(way, version)
    trainer.publish()
    report = trainer.client.swap("policy", version, timeout=ANSWER_S)
    assert report.outcome == "committed", way
    leavers.gone()
    eventually(lambda: not trainer.targets(), f"an engine that left by {way} is gone")


@pytest.mark.slow
def test_an_engine_that_leaves_right_after_its_commit_has_committed(lone: Daemon, leavers: Leavers) -> None:
    trainer = Trainer(lone)
    with trainer.client:
        for way in WAYS:
            _leaves_after_a_commit(trainer, leavers, way)


@pytest.mark.slow
def test_it_has_committed_every_time(lone: Daemon, leavers: Leavers) -> None:
    trainer = Trainer(lone)
    with trainer.client:
        for way in WAYS * 20:
            _leaves_after_a_commit(trainer, leavers, way)


def test_a_stopped_daemon_hears_what_was_said_before_the_end_of_a_process(lone: Daemon, leavers: Leavers) -> None:
    # the engine commits and dies while the daemon is stopped: the daemon finds the commit and the hang-up together
    trainer = Trainer(lone)
    with trainer.client:
        leavers.start("stopped", 1)
        trainer.publish()
        swap = RunningSwap(lone.connect(), "policy", 1, ANSWER_S)
        leavers.gone()
        os.kill(lone.pid, signal.SIGCONT)
        assert swap.result().outcome == "committed"


@pytest.mark.slow
def test_an_interpreter_that_ends_closes_its_clients_in_order(lone: Daemon, leavers: Leavers) -> None:
    trainer = Trainer(lone)
    with trainer.client:
        before = trainer.client.status().nodes[0].arenas
        _leaves_after_a_commit(trainer, leavers, "return")
        eventually(
            lambda: trainer.client.status().nodes[0].arenas == before,
            "a process that ends in order leaves no staging arena behind",
        )


def test_a_client_may_be_closed_by_several_threads_while_requests_are_in_flight(shared_daemon: Daemon) -> None:
    for _ in range(5):
        client = shared_daemon.connect("crowd")
        errors: list[BaseException] = []
        begin = threading.Barrier(6)

        def ask(client: refitd.Client = client, begin: threading.Barrier = begin) -> None:
            begin.wait(ANSWER_S)
            with contextlib.suppress(refitd.PeerLost):
                while True:
                    client.status()

        def close(
            client: refitd.Client = client, begin: threading.Barrier = begin, errors: list[BaseException] = errors
        ) -> None:
            begin.wait(ANSWER_S)
            try:
                client.close()
            except BaseException as exc:
                errors.append(exc)

        threads = [threading.Thread(target=work) for work in (ask, ask, ask, close, close, close)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ANSWER_S)
        assert not any(thread.is_alive() for thread in threads) and not errors
        with pytest.raises(refitd.PeerLost):
            client.status()
        client.close()
