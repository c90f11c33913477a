"""The tests that a parallel run must keep in one process, because they share processes."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from typing import Any

import hypothesis
import pytest

from refitd.testing import actors

# the time of an example depends on the machine
hypothesis.settings.register_profile("refitd", deadline=None)
hypothesis.settings.load_profile("refitd")

os.environ["OMP_NUM_THREADS"] = "1"  # the threads of many processes would wait for each other in busy loops
os.environ.pop("COLUMNS", None)  # xdist sets it, and commands here must not wrap their output

pytest.register_assert_rewrite("tests.support")
actors.preload(
    "torch._dynamo",  # DTensors import it when they are first computed with
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "refitd.inprocess.refit",
    "tests.spmd.dtensor_cases",
)
pytest_plugins = ["refitd.testing.fixtures", "tests.support.passed_on", "tests.support.forked"]

# each starts a process pool or a cluster that its tests share, or would overload the machine if run in parallel
SHARING = (
    "tests/spmd/",
    "refitd/testing/conformance/",
    "tests/faults/test_faults.py",
    # its programs have other imports: one process that has made them forks all programs
    "tests/cluster/device_arenas/",
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
