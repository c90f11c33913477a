"""A daemon per test, or one for all that leave no trace, and a trainer; logs on failure, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from refitd.testing import Daemon, eventually
from tests.support.trainer import Trainer


@pytest.fixture
def daemon(start_daemon: Callable[..., Daemon]) -> Daemon:
    # a rank that misses its commit point is given up soon
    return start_daemon("[deadlines]\ncommit_s = 4.0\n")


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
