"""Daemons that tests pass on: a start takes a second of CPU time, and most tests leave nothing in a daemon."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from refitd import RefitdError
from refitd.protocol.reports import StatusReport
from refitd.testing import Daemon, eventually
from refitd.testing.fixtures import has_failed, nothing_left
from refitd.testing.processes import files_in
from tests.support.names import SUFFIX

MAX_KEPT = 3
LEAVES_S = 1.0  # a test's clients leave within this time, or its daemons are stopped
Start = Callable[..., tuple[Daemon, ...]]


@dataclass
class Group:
    """Connected daemons, the first of them standalone: how they were made, and what was there when they were new."""

    made: object
    daemons: tuple[Daemon, ...]
    status: object
    held: object

    def is_running(self) -> bool:
        return all(one.is_running for one in self.daemons)

    def is_new(self) -> bool:
        """Whether all that the test left is gone within LEAVES_S; versions of ended trainers are forgotten."""
        deadline = time.monotonic() + LEAVES_S
        with suppress(RefitdError), self.daemons[0].connect("tests") as client:
            while lasting(report := client.status()) != self.status:
                if time.monotonic() > deadline:
                    return False
                for model in report.models:
                    client.forget(model.model)
                time.sleep(0.02)
            return self.is_running() and held(self.daemons) == self.held
        return False


def lasting(found: Any) -> Any:
    """Return what a status says, without its times."""
    match found:
        case StatusReport():
            return lasting(msgspec.to_builtins(found))
        case dict():
            return {key: lasting(value) for key, value in found.items()}
        case list() | tuple():
            return [lasting(value) for value in found]
        case float():
            return 0.0
    return found


def held(daemons: Sequence[Daemon]) -> object:
    """Return the child processes and files of daemons."""
    return [(one.children(), files_in(one.directory)) for one in daemons]


class Shelf:
    """Groups that no test uses now, the latest first."""

    def __init__(self) -> None:
        self._groups: list[Group] = []

    @contextmanager
    def lend(self, test: pytest.Item) -> Iterator[Start]:
        """Give a function that returns connected daemons, one for each number of workers, new or passed on."""
        started: list[Daemon] = []
        taken: list[Group] = []

        def take(config: str = "", workers: tuple[int, ...] = (1,)) -> tuple[Daemon, ...]:
            ours = {name: text for name, text in os.environ.items() if not name.startswith(("PYTEST_", SUFFIX))}
            made = config, workers, ours
            group = next((one for one in self._groups if one.made == made and one.is_running()), None)
            if group is None:
                group = _started(made, config, workers, started)
            else:
                self._groups.remove(group)
                started.extend(group.daemons)
            taken.append(group)
            for one in group.daemons:
                one.log_path.write_text("")  # its lines are appended
            return group.daemons

        with nothing_left(test, started):
            yield take
            kept = [group for group in taken if not has_failed(test) and group.is_new()]
            self._groups[:0] = kept
            started[:] = [one for one in started if not any(one in group.daemons for group in kept)]
        self.close(MAX_KEPT)

    def close(self, most: int = 0) -> None:
        """Stop all groups except this many."""
        for group in self._groups[most:]:
            for one in reversed(group.daemons):
                assert not (left := one.stop()), f"left behind: {left}"
                one.remove()
        del self._groups[most:]


def _started(made: object, config: str, workers: tuple[int, ...], started: list[Daemon]) -> Group:
    daemons: list[Daemon] = []
    for number, count in enumerate(workers):
        joins = daemons[0].endpoint if daemons else ""
        daemons.append(Daemon(config, workers=count, name=f"n{number}", joins=joins))
        started.append(daemons[-1].start())
    with daemons[0].connect("tests") as client:
        eventually(
            lambda: [all(node.workers) for node in client.status().nodes] == [True] * len(workers),
            "every node has its workers",
        )
        return Group(made, tuple(daemons), lasting(client.status()), held(daemons))


@pytest.fixture(scope="session")
def _shelf() -> Iterator[Shelf]:
    shelf = Shelf()
    yield shelf
    shelf.close()


@pytest.fixture
def daemons(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, _shelf: Shelf) -> Iterator[Start]:
    """Return a function that starts connected daemons, or passes on those of an earlier test that left nothing."""
    with _shelf.lend(request.node) as take:
        monkeypatch.setenv(SUFFIX, f"-{zlib.crc32(request.node.nodeid.encode()):08x}")
        yield take


@pytest.fixture
def daemon(request: pytest.FixtureRequest) -> Daemon:
    """A daemon whose models only this test has if it names them by tests/support/names.py, or a daemon of its own."""
    config = "[deadlines]\ncommit_s = 4.0\n"  # a short deadline for a rank that misses its commit point
    if request.node.get_closest_marker("own_daemon"):
        own: Daemon = request.getfixturevalue("start_daemon")(config)
        return own
    daemons: tuple[Daemon, ...] = request.getfixturevalue("daemons")(config)
    return daemons[0]
