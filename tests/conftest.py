"""A daemon per test; what runs side by side in a parallel run, and what stays together because it shares processes."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator
from typing import Any

import hypothesis
import pytest

from refitd.testing import Daemon

# how long an example takes is the machine's business
hypothesis.settings.register_profile("refitd", deadline=None)
hypothesis.settings.load_profile("refitd")

os.environ.pop("COLUMNS", None)  # xdist sets it; what commands print here is as wide as its text

pytest.register_assert_rewrite("tests.support")
pytest_plugins = ["refitd.testing.fixtures"]

# each starts a pool of processes, or a cluster, that its tests share; or as many as a machine should have at once
SHARING = (
    "tests/spmd/",
    "tests/conformance/",
    "tests/faults/test_faults.py",
    "tests/cluster/test_nemo_rl.py",
    "tests/cluster/test_verl.py",
)
# their tests start what they need themselves, and take long: one by one they spread best
ALONE = ("tests/cluster/", "tests/faults/")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what is collected, half a million objects, out of every later search for garbage, 0.3 s each."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture
def daemon(start_daemon: Callable[..., Daemon]) -> Daemon:
    # a rank that misses its commit point is given up soon
    return start_daemon("[deadlines]\ncommit_s = 4.0\n")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal the folders that share something, tests of other folders one by one or by file, in the order they are in."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            shared = next((name for name in SHARING if nodeid.startswith(name)), None)
            return shared or (nodeid if nodeid.startswith(ALONE) else nodeid.partition("::")[0])

    config.option.loadscopereorder = False
    return Scheduling(config, log)
