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
def gpus(monkeypatch: pytest.MonkeyPatch) -> fake_cuda.FakeGpus:
    return fake_cuda.install(monkeypatch, GPU_BYTES)


@pytest.fixture
def daemon(gpus: fake_cuda.FakeGpus, start_daemon: Callable[..., Daemon]) -> Iterator[Daemon]:
    daemon = start_daemon(DEADLINES)
    yield daemon
    # arenas of detached sources end with the daemon; this process must have freed its own
    assert daemon.stop() == []
    gc.collect()
    assert release_dropped() == 0
    assert gpus.used() == 0
