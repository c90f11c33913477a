"""Direct calls of the fake driver, and what this process has not given back to it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from refitd.buffers.cuda_driver import Driver
from tests.support import fake_cuda

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2  # CU_STREAM_CAPTURE_MODE_*


class Calls:
    """The fake driver, with GPU 0's context current on this thread; a call returns its CUresult."""

    def __init__(self) -> None:
        Driver()
        self._library = ctypes.CDLL(str(fake_cuda.driver()))
        self.context = ctypes.c_void_p()
        assert self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0) == 0
        assert self.call("cuCtxPushCurrent_v2", self.context) == 0

    def close(self) -> None:
        assert self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p())) == 0
        assert self.call("cuDevicePrimaryCtxRelease_v2", 0) == 0

    def call(self, name: str, *arguments: object) -> int:
        """Call a function; integers are passed as 64 bits."""
        found: int = getattr(self._library, name)(
            *(ctypes.c_uint64(one) if isinstance(one, int) else one for one in arguments)
        )
        return found

    def made(self, name: str, *arguments: object) -> int:
        """Return what a function writes through its first argument; it must succeed."""
        value = ctypes.c_uint64()
        assert self.call(name, ctypes.byref(value), *arguments) == 0, name
        return value.value

    def left(self, *more: str) -> dict[str, int]:
        """Return the counts of what was taken and not given back; `more` kinds are pins, streams and events."""
        kinds = ("handles", "reservations", "mappings", "contexts", *more)
        return {kind: self.call("fakeCudaLeft", ctypes.c_char_p(kind.encode())) for kind in kinds}

    def queue(self, address: int, value: int, nbytes: int, stream: int = 0) -> int:
        """Queue work that fills memory. It runs when the context is synchronised."""
        return self.call("cuMemsetD8Async", address, ctypes.c_ubyte(value), nbytes, stream)

    @contextmanager
    def capture(self, *, is_blocking: bool = False, mode: int = GLOBAL) -> Iterator[int]:
        """Capture on a new stream; the capture must end whole."""
        stream = self.made("cuStreamCreate", ctypes.c_uint(0 if is_blocking else 1))
        assert self.call("cuStreamBeginCapture_v2", stream, ctypes.c_int(mode)) == 0
        try:
            yield stream
        finally:
            ended = self.call("cuStreamEndCapture", stream, ctypes.byref(ctypes.c_void_p()))
        assert ended == 0, "the capture was invalidated"


@contextmanager
def failing(rule: str) -> Iterator[None]:
    """Make calls of the driver fail, by a rule of FAKE_CUDA_FAIL, in this process."""
    os.environ["FAKE_CUDA_FAIL"] = rule
    try:
        yield
    finally:
        del os.environ["FAKE_CUDA_FAIL"]
        Driver().call("cuDevicePrimaryCtxRetain", ctypes.byref(ctypes.c_void_p()), 0)  # the counts start again
        Driver().call("cuDevicePrimaryCtxRelease_v2", 0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """GPUs 0 and 1 of 64 MiB without a link, and direct calls of their driver."""
    fake_cuda.install(monkeypatch, 64 << 20)
    monkeypatch.setenv("FAKE_CUDA_ALONE", "1")
    calls = Calls()
    yield calls
    calls.close()
