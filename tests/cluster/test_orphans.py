"""An engine whose server has ended closes its registrations, and its version is None."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine, eventually, stopped
from tests.support import programs
from tests.support.names import policy
from tests.support.trainer import ANSWER_S, Trainer

LINE_S = 120.0  # enough for an import of torch on a busy machine
ORPHANED = ["Orphaned None Orphaned", "Orphaned", "Orphaned"]  # of poll, wait and status


class Server:
    """A server, and the engine behind it (tests.support.orphan)."""

    def __init__(self, daemon: Daemon, depth: int = 1) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.orphan", str(daemon.directory), str(depth)],
            stdout=subprocess.PIPE,
            cwd=programs.ROOT,
        )
        self.engine = int(self.line())

    @property
    def pid(self) -> int:
        return self._process.pid

    def line(self) -> str:
        """Return the engine's next line."""
        assert self._process.stdout is not None
        pipe, found = self._process.stdout.fileno(), b""
        while not found.endswith(b"\n"):
            assert select.select([pipe], [], [], LINE_S)[0], f"no line, only {found!r}"
            found += os.read(pipe, 1)
        return found.decode().strip()

    def kill(self) -> None:
        """Kill the server alone, as the out-of-memory killer does."""
        self._process.kill()
        self._process.wait()

    def remove(self) -> None:
        os.kill(self.engine, signal.SIGKILL)
        self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def serve(daemon: Daemon) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(depth: int = 1) -> Server:
        started.append(Server(daemon, depth))
        return started[-1]

    yield start
    for server in started:
        server.remove()


def successor_serves(daemon: Daemon, trainer: Trainer) -> None:
    """Register replica a in this process, and swap to it."""
    with daemon.connect("successor") as client:
        weights = {"w": torch.zeros(64, 64)}
        target = client.register_target(policy(), weights, replica="a")
        version = trainer.publish()
        with Engine(target):
            report = trainer.client.swap(policy(), version, timeout=ANSWER_S)
        assert report.version == version and trainer.targets() == ["a"]
        assert target.version == version and torch.all(weights["w"] == version)


def test_an_engine_whose_server_was_killed_lets_go_of_its_name(
    daemon: Daemon, trainer: Trainer, serve: Callable[..., Server]
) -> None:
    server = serve()
    trainer.client.swap(policy(), trainer.publish(), timeout=ANSWER_S)
    assert server.line() == "serves 1"
    server.kill()
    assert [server.line() for _ in ORPHANED] == ORPHANED
    os.kill(server.engine, 0)  # it is alive, and still has its memory
    eventually(lambda: trainer.targets() == [], "its name is free")
    successor_serves(daemon, trainer)


def test_a_worker_lives_with_its_engines_server_too(
    daemon: Daemon, trainer: Trainer, serve: Callable[..., Server]
) -> None:
    server = serve(depth=2)
    server.kill()  # the worker's parent is alive
    assert [server.line() for _ in ORPHANED] == ORPHANED
    eventually(lambda: trainer.targets() == [], "its name is free")
    successor_serves(daemon, trainer)


def test_an_orphan_does_not_take_its_name_again_from_the_next_daemon(
    daemon: Daemon, serve: Callable[..., Server]
) -> None:
    server = serve()
    daemon.kill()
    server.kill()
    assert [server.line() for _ in ORPHANED] == ORPHANED
    daemon.start()
    trainer = Trainer(daemon)
    successor_serves(daemon, trainer)
    eventually(lambda: trainer.targets() == [], "the successor has left, and the orphan has not come back")
    trainer.client.close()


def test_an_orphan_whose_daemon_is_stopped_is_gone_when_that_goes_on(
    daemon: Daemon, trainer: Trainer, serve: Callable[..., Server]
) -> None:
    server = serve()
    with stopped((daemon.pid,)):
        server.kill()
        assert server.line() == ORPHANED[0]
    eventually(lambda: trainer.targets() == [], "its name is free")
    successor_serves(daemon, trainer)


def test_an_engine_that_was_stopped_while_its_server_ended_takes_part_in_no_swap(
    daemon: Daemon, trainer: Trainer, serve: Callable[..., Server]
) -> None:
    server = serve()
    version = trainer.publish()
    with stopped((server.engine,)):
        server.kill()
    assert server.line() == ORPHANED[0]
    eventually(lambda: trainer.targets() == [], "its name is free")
    with pytest.raises(refitd.RefusedError, match="has no target"):
        trainer.client.swap(policy(), version, timeout=ANSWER_S)


def test_a_source_whose_processes_have_ended_offers_nothing_more(daemon: Daemon) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    lifeline = refitd.Lifeline({sleeper.pid: "the controller"})
    with refitd.connect(daemon.directory, lives_with=lifeline) as client, daemon.connect() as other:
        source = client.register_source(policy(), {"w": torch.zeros(8)})
        sleeper.kill()
        sleeper.wait()
        eventually(lambda: not other.status().models, "its name is free")
        with pytest.raises(refitd.Orphaned, match="the controller"):
            source.publish(1)
        with pytest.raises(refitd.Orphaned, match="the controller"):
            client.register_source(policy(), {"w": torch.zeros(8)})
    with pytest.raises(refitd.Orphaned, match="the controller"):
        refitd.connect(daemon.directory, lives_with=lifeline)


def test_a_server_that_is_refused_is_in_status_and_in_the_results_of_swaps_until_it_registers(
    daemon: Daemon, trainer: Trainer, serve: Callable[..., Server]
) -> None:
    server = serve()
    with daemon.connect("restarted server") as client:
        weights = {"w": torch.zeros(64, 64)}
        with pytest.raises(refitd.RefusedError) as raised:
            client.register_target(policy(), weights, replica="a")
        report = trainer.client.swap(policy(), trainer.publish(), timeout=ANSWER_S)
        (node,) = trainer.client.status().nodes
        for (found,) in (node.refused, report.refused):
            assert (found.replica, found.rank, found.pid, found.name) == ("a", 0, os.getpid(), "restarted server")
            assert found.reason == str(raised.value) and str(server.engine) in found.reason
        for command in (["status"], ["swap", policy()]):
            ran = programs.refitctl(daemon, *command)
            assert f"replica 'a' rank 0 of model '{policy()}' is refused" in ran.stdout + ran.stderr
        server.kill()
        eventually(lambda: trainer.targets() == [], "its name is free")
        target = client.register_target(policy(), weights, replica="a")
        with Engine(target):
            assert trainer.client.swap(policy(), trainer.publish(), timeout=ANSWER_S).refused == ()
        assert trainer.client.status().nodes[0].refused == ()
