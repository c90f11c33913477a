"""Daemons per test, or one for all that leave no trace, and who talks to them; logs on failure, nothing left."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from refitd.testing import Daemon, eventually
from tests.support import meddled
from tests.support.keyed import Head
from tests.support.trainer import Trainer

NODES = "[deadlines]\nplan_s = 60.0\nstage_s = 5.0\ncommit_s = 5.0\n"


@pytest.fixture(scope="session")
def _only_daemon() -> Iterator[Daemon]:
    with Daemon() as daemon:
        yield daemon


@pytest.fixture
def shared_daemon(_only_daemon: Daemon) -> Iterator[Daemon]:
    """The daemon of all tests that register nothing for good: a start takes a second of a processor."""
    begins = len(_only_daemon.log())
    yield _only_daemon
    print(f"--- log of the shared daemon\n{_only_daemon.log()[begins:]}")
    with _only_daemon.connect("status") as client:
        assert not client.status().models, "a test that shares the daemon has left a model; give it one of its own"
        eventually(lambda: client.status().nodes[0].clients == 1, "the test's clients have left")
        assert client.status().nodes[0].arenas == 0


@pytest.fixture
def trainer(daemon: Daemon) -> Iterator[Trainer]:
    found = Trainer(daemon)
    yield found
    found.client.close()


@pytest.fixture
def nodes(start_daemon: Callable[..., Daemon]) -> Callable[..., tuple[Daemon, ...]]:
    """Start a standalone daemon n0, and others that join its coordinator."""

    def start(count: int, config: str = NODES, workers: tuple[int, ...] = ()) -> tuple[Daemon, ...]:
        first, *others = workers or (1,) * count
        found = [start_daemon(config, workers=first)]
        for i, more in enumerate(others, 1):
            found.append(start_daemon(config, name=f"n{i}", workers=more, joins=found[0].endpoint))
        eventually(lambda: len(found[0].status().nodes) == count, "every node has joined")
        return tuple(found)

    return start


@pytest.fixture
def meddle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Alter what workers receive from other nodes: call the result to say how, in runs that begin later."""
    meddled.install(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])]))
    how = tmp_path / "how"
    monkeypatch.setenv(meddled.VARIABLE, str(how))
    how.write_text("")
    return lambda what: (how.write_text(what), None)[1]


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    head = Head(tmp_path)
    yield head
    print(f"--- log of the coordinator\n{head.log()}")
    if head.process is not None:
        head.process.remove()


@pytest.fixture
def fleet(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Any]:
    """The `Fleet` of the test's module, on a daemon of its own."""
    found = request.module.Fleet(daemon)
    yield found
    found.close()
