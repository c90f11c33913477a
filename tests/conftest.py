"""Daemons for tests, and the tests that a parallel run must keep in one process because they share processes."""

from __future__ import annotations

import gc
import os
import zlib
from collections.abc import Generator, Iterator
from typing import Any

import hypothesis
import pytest

from refitd.testing import Daemon
from tests.support import passed_on
from tests.support.names import SUFFIX

# the time of an example depends on the machine
hypothesis.settings.register_profile("refitd", deadline=None)
hypothesis.settings.load_profile("refitd")

os.environ.pop("COLUMNS", None)  # xdist sets it, and commands here must not wrap their output

pytest.register_assert_rewrite("tests.support")
pytest_plugins = ["refitd.testing.fixtures"]

# each starts a process pool or a cluster that its tests share, or would overload the machine if run in parallel
SHARING = (
    "tests/spmd/",
    "tests/conformance/",
    "tests/faults/test_faults.py",
)
# their tests start their own processes and are slow: dealt singly they spread best
ALONE = ("tests/cluster/", "tests/faults/")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude the half million collected objects from garbage collection, which took 0.3 s each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def _shelf() -> Iterator[passed_on.Shelf]:
    shelf = passed_on.Shelf()
    yield shelf
    shelf.close()


@pytest.fixture
def daemons(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, _shelf: passed_on.Shelf
) -> Iterator[passed_on.Start]:
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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal folders with shared processes as a whole, tests of other folders singly or by file, in their order."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            shared = next((name for name in SHARING if nodeid.startswith(name)), None)
            return shared or (nodeid if nodeid.startswith(ALONE) else nodeid.partition("::")[0])

    config.option.loadscopereorder = False
    return Scheduling(config, log)
