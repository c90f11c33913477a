"""The pytest plugin of refitd.testing: put `pytest_plugins = ["refitd.testing.fixtures"]` in the top conftest.py."""

from __future__ import annotations

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


@pytest.fixture
def start_daemon(request: pytest.FixtureRequest) -> Iterator[Callable[..., Daemon]]:
    """Return a function that starts a Daemon. After the test all are stopped; leftovers fail the test."""
    started: list[Daemon] = []
    gc.collect()
    before = len(processes.own_memory_files())

    def start(config: str = "", **options: object) -> Daemon:
        daemon = Daemon(config, **options)  # type: ignore[arg-type]
        started.append(daemon)
        return daemon.start()

    yield start
    left = [what for daemon in started if daemon.is_running for what in daemon.stop()]
    gc.collect()
    held = processes.own_memory_files()[before:]
    has_failed = request.node.stash.get(_FAILED, False)
    for daemon in started:
        if has_failed or left or held:
            print(f"--- log of the daemon in {daemon.directory}\n{daemon.log()[-LOG_TAIL:]}")
        daemon.remove()
    assert has_failed or not left, f"left behind: {left}"
    assert has_failed or not held, f"descriptors of arenas left in the client: {held}"
