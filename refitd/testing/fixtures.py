"""The pytest plugin of refitd.testing: put `pytest_plugins = ["refitd.testing.fixtures"]` in the top conftest.py."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Generator, Iterator

import pytest

from refitd.testing import processes
from refitd.testing.daemon import LOG_TAIL, Daemon

_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note that a test has failed: its daemons' logs are then printed."""
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


def has_failed(test: pytest.Item) -> bool:
    """Whether the test has failed so far."""
    return test.stash.get(_FAILED, False)


@contextlib.contextmanager
def nothing_left(test: pytest.Item, started: list[Daemon]) -> Iterator[None]:
    """At the end of the block stop these daemons; leftovers fail the test, and a failed test prints their logs."""
    gc.collect()
    before = len(processes.own_memory_files())
    yield
    left = [what for daemon in started if daemon.is_running for what in daemon.stop()]
    gc.collect()
    held = processes.own_memory_files()[before:]
    failed = has_failed(test)
    for daemon in started:
        if failed or left or held:
            print(f"--- log of the daemon in {daemon.directory}\n{daemon.log()[-LOG_TAIL:]}")
        daemon.remove()
    assert failed or not left, f"left behind: {left}"
    assert failed or not held, f"descriptors of arenas left in the client: {held}"


@pytest.fixture
def start_daemon(request: pytest.FixtureRequest) -> Iterator[Callable[..., Daemon]]:
    """Return a function that starts a Daemon. After the test all are stopped; leftovers fail the test."""
    started: list[Daemon] = []

    def start(config: str = "", **options: object) -> Daemon:
        daemon = Daemon(config, **options)  # type: ignore[arg-type]
        started.append(daemon)
        return daemon.start()

    with nothing_left(request.node, started):
        yield start
