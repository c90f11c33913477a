"""A daemon whose GPUs are memory files behind a driver made for tests; a test must free all memory on them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest

from refitd.buffers.cuda import release_dropped
from refitd.testing import Daemon
from tests.support import fake_cuda
from tests.support.gpu_tensors import DEADLINES, GPU_BYTES


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_cuda.FakeGpus]:
    gpus = fake_cuda.install(monkeypatch, GPU_BYTES)
    yield gpus
    # arenas of detached sources ended with the test's daemons; this process must have freed its own
    gc.collect()
    assert release_dropped() == 0
    assert gpus.used() == 0


@pytest.fixture
def daemon(gpus: fake_cuda.FakeGpus, start_daemon: Callable[..., Daemon]) -> Daemon:
    return start_daemon(DEADLINES)
