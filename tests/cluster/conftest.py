"""Fixtures of cluster tests: a daemon per test or a shared one, and its clients; print logs on failure, check leaks."""

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

NODES = "[deadlines]\nplan_s = 60.0\nstage_s = 20.0\ncommit_s = 10.0\n"


@pytest.fixture(autouse=True)
def _forked(forked: None) -> None:
    """Fork the programs of each test."""


@pytest.fixture
def shared_daemon(daemon: Daemon) -> Iterator[Daemon]:
    """A daemon of which the test must leave no registration, client or arena."""
    yield daemon
    with daemon.connect("status") as client:
        eventually(lambda: client.status().nodes[0].clients == 1, "the test's clients have left")
        eventually(lambda: not client.status().models, "no model is left")
        eventually(lambda: client.status().nodes[0].arenas == 0, "no arena is left")


@pytest.fixture
def trainer(daemon: Daemon) -> Iterator[Trainer]:
    found = Trainer(daemon)
    yield found
    found.client.close()


@pytest.fixture
def nodes(daemons: Callable[..., tuple[Daemon, ...]]) -> Callable[..., tuple[Daemon, ...]]:
    """Start a standalone daemon n0, and others that join its coordinator."""
    return lambda count, config=NODES, workers=(): daemons(config, workers or (1,) * count)


@pytest.fixture
def meddle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Alter the data that workers receive from other nodes in later jobs; call the result with the kind of change."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(meddled.SITE), str(Path(__file__).parents[2])]))
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
    """The `Fleet` of the test's module, with a daemon to itself."""
    found = request.module.Fleet(daemon)
    yield found
    found.close()
