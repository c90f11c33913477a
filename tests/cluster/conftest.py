"""A daemon per test, everybody's log on failure, nothing left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest

from tests.support.cluster import RunningDaemon, own_memory_files


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        item.stash.setdefault(FAILED, True)


FAILED = pytest.StashKey[bool]()


@pytest.fixture
def start_daemon(request: pytest.FixtureRequest) -> Iterator[Callable[..., RunningDaemon]]:
    """Start daemons that are stopped, checked for leavings and cleaned up after the test."""
    started: list[RunningDaemon] = []
    gc.collect()
    before = len(own_memory_files())

    def start(config: str = "", **options: object) -> RunningDaemon:
        started.append(RunningDaemon(config, **options))
        return started[-1]

    yield start
    left = [what for daemon in started if daemon.process.poll() is None for what in daemon.stop()]
    gc.collect()
    held = own_memory_files()[before:]
    if request.node.stash.get(FAILED, False) or left or held:
        for daemon in started:
            print(f"--- log of the daemon in {daemon.directory}\n{daemon.log()[-20000:]}")
    for daemon in started:
        daemon.clean()
    if not request.node.stash.get(FAILED, False):
        assert not left, f"left behind: {left}"
        assert not held, f"descriptors of arenas left in the client: {held}"


@pytest.fixture
def daemon(start_daemon: Callable[..., RunningDaemon]) -> RunningDaemon:
    # a rank that misses its commit point is given up soon
    return start_daemon("[deadlines]\ncommit_s = 4.0\n")
