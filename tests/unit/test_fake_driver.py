"""The rules of the CUDA driver that the fake driver enforces; each is broken directly and must be refused."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from refitd.buffers.cuda_driver import Access, Location, properties
from tests.support.fake_calls import RELAXED, Calls, calls, failing
from tests.support.fake_cuda import PAGE

__all__ = ["calls"]

VALUE, MEMORY, CONTEXT, HANDLE, SUPPORTED, CAPTURE, INVALIDATED, IMPLICIT = 1, 2, 201, 400, 801, 900, 901, 906
PERMITTED, ILLEGAL = 800, 700
SIZE = 2 * PAGE


def access(gpu: int = 0, flags: int = 3) -> object:
    return ctypes.byref(Access(Location(1, gpu), flags))


def memory(calls: Calls, kind: object = None, size: int = SIZE) -> int:
    return calls.made("cuMemCreate", size, ctypes.byref(kind or properties(0)), 0)  # type: ignore[arg-type]


@pytest.fixture
def mapped(calls: Calls) -> Iterator[SimpleNamespace]:
    """Memory that is mapped and accessible, an unmapped reservation, and memory for it."""
    one = SimpleNamespace(calls=calls, handle=memory(calls), other=memory(calls))
    one.at, one.free = (calls.made("cuMemAddressReserve", SIZE, 0, 0, 0) for _ in range(2))
    assert calls.call("cuMemMap", one.at, SIZE, 0, one.handle, 0) == 0
    assert calls.call("cuMemSetAccess", one.at, SIZE, access(), 1) == 0
    yield one
    assert calls.call("cuCtxSynchronize") == 0
    assert calls.call("cuMemUnmap", one.at, SIZE) == 0
    for address in (one.at, one.free):
        assert calls.call("cuMemAddressFree", address, SIZE) == 0
    for handle in (one.handle, one.other):
        assert calls.call("cuMemRelease", handle) == 0
    assert calls.left() == {"handles": 0, "reservations": 0, "mappings": 0, "contexts": 1}


def fill(m: SimpleNamespace) -> int:
    assert m.calls.queue(m.at, 7, PAGE) == 0
    return VALUE


def no_context(m: SimpleNamespace) -> int:
    m.calls.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
    status = m.calls.call("cuCtxSynchronize")
    m.calls.call("cuCtxPushCurrent_v2", m.calls.context)
    return int(status)


def released(m: SimpleNamespace) -> int:
    handle = memory(m.calls)
    assert m.calls.call("cuMemRelease", handle) == 0
    return handle


def exported(m: SimpleNamespace, kind: object, handle_type: int) -> int:
    handle = memory(m.calls, kind)
    status = m.calls.call("cuMemExportToShareableHandle", ctypes.byref(ctypes.c_int()), handle, handle_type, 0)
    assert m.calls.call("cuMemRelease", handle) == 0
    return int(status)


def imported(m: SimpleNamespace, fd: int, handle_type: int = 1) -> int:
    return int(m.calls.call("cuMemImportFromShareableHandle", ctypes.byref(ctypes.c_uint64()), fd, handle_type))


def created(m: SimpleNamespace, size: int, kind: object) -> int:
    return int(m.calls.call("cuMemCreate", ctypes.byref(ctypes.c_uint64()), size, ctypes.byref(kind), 0))  # type: ignore[arg-type]


def reserved(m: SimpleNamespace, size: int) -> int:
    return int(m.calls.call("cuMemAddressReserve", ctypes.byref(ctypes.c_uint64()), size, 0, 0, 0))


RULES: dict[str, tuple[int, Callable[[SimpleNamespace], int]]] = {
    "map over a live mapping": (VALUE, lambda m: m.calls.call("cuMemMap", m.at, SIZE, 0, m.other, 0)),
    "map over a part of a live mapping": (VALUE, lambda m: m.calls.call("cuMemMap", m.at + PAGE, PAGE, 0, m.other, 0)),
    "map outside a reservation": (VALUE, lambda m: m.calls.call("cuMemMap", 1 << 40, SIZE, 0, m.other, 0)),
    "map beyond a reservation": (VALUE, lambda m: m.calls.call("cuMemMap", m.free + PAGE, SIZE, 0, m.other, 0)),
    "map at an offset": (VALUE, lambda m: m.calls.call("cuMemMap", m.free, PAGE, PAGE, m.other, 0)),
    "map half a page": (VALUE, lambda m: m.calls.call("cuMemMap", m.free, PAGE // 2, 0, m.other, 0)),
    "map beside a page": (VALUE, lambda m: m.calls.call("cuMemMap", m.free + 4096, PAGE, 0, m.other, 0)),
    "map more than the memory": (VALUE, lambda m: m.calls.call("cuMemMap", m.free, 2 * SIZE, 0, m.other, 0)),
    "map a released handle": (HANDLE, lambda m: m.calls.call("cuMemMap", m.free, SIZE, 0, released(m), 0)),
    "unmap twice": (VALUE, lambda m: m.calls.call("cuMemUnmap", m.free, SIZE)),
    "unmap a part": (VALUE, lambda m: m.calls.call("cuMemUnmap", m.at, PAGE)),
    "unmap the end": (VALUE, lambda m: m.calls.call("cuMemUnmap", m.at + PAGE, PAGE)),
    "unmap during queued work": (VALUE, lambda m: fill(m) and m.calls.call("cuMemUnmap", m.at, SIZE)),
    "free a mapped range": (VALUE, lambda m: m.calls.call("cuMemAddressFree", m.at, SIZE)),
    "free a part": (VALUE, lambda m: m.calls.call("cuMemAddressFree", m.free, PAGE)),
    "free an unknown address": (VALUE, lambda m: m.calls.call("cuMemAddressFree", 1 << 40, SIZE)),
    "access of an unmapped range": (VALUE, lambda m: m.calls.call("cuMemSetAccess", m.free, SIZE, access(), 1)),
    "access of a part": (VALUE, lambda m: m.calls.call("cuMemSetAccess", m.at, PAGE, access(), 1)),
    "access without a link": (SUPPORTED, lambda m: m.calls.call("cuMemSetAccess", m.at, SIZE, access(1), 1)),
    "access of no GPU": (VALUE, lambda m: m.calls.call("cuMemSetAccess", m.at, SIZE, access(9), 1)),
    "release of a released handle": (HANDLE, lambda m: m.calls.call("cuMemRelease", released(m))),
    "export without the type": (VALUE, lambda m: exported(m, properties(0, 0), 1)),
    "export as a fabric handle": (VALUE, lambda m: exported(m, properties(0), 8)),
    "import of a pipe": (VALUE, lambda m: imported(m, 0)),
    "import of no descriptor": (VALUE, lambda m: imported(m, 9999)),
    "import of a wrong type": (VALUE, lambda m: imported(m, 0, 8)),
    "create a part of a page": (VALUE, lambda m: created(m, PAGE + 1, properties(0))),
    "create of no size": (VALUE, lambda m: created(m, 0, properties(0))),
    "create more than there is": (MEMORY, lambda m: created(m, 64 << 20, properties(0))),
    "create for a fabric that is absent": (SUPPORTED, lambda m: created(m, SIZE, properties(0, 9))),
    "create of an unknown type": (VALUE, lambda m: created(m, SIZE, properties(0, 4))),
    "reserve a part of a page": (VALUE, lambda m: reserved(m, PAGE + 1)),
    "a context that nobody retains": (CONTEXT, lambda m: m.calls.call("cuDevicePrimaryCtxRelease_v2", 1)),
    "the end of a context with mappings": (CONTEXT, lambda m: m.calls.call("cuDevicePrimaryCtxRelease_v2", 0)),
    "synchronise without a context": (CONTEXT, no_context),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_refused(mapped: SimpleNamespace, rule: str) -> None:
    status, broken = RULES[rule]
    assert broken(mapped) == status


UNSAFE: dict[str, Callable[[SimpleNamespace], int]] = {
    "create": lambda m: created(m, SIZE, properties(0)),
    "export": lambda m: m.calls.call("cuMemExportToShareableHandle", ctypes.byref(ctypes.c_int()), m.handle, 1, 0),
    "import": lambda m: imported(m, 0),
    "reserve": lambda m: reserved(m, SIZE),
    "map": lambda m: m.calls.call("cuMemMap", m.free, SIZE, 0, m.other, 0),
    "access": lambda m: m.calls.call("cuMemSetAccess", m.at, SIZE, access(), 1),
    "unmap": lambda m: m.calls.call("cuMemUnmap", m.at, SIZE),
    "free": lambda m: m.calls.call("cuMemAddressFree", m.free, SIZE),
    "release": lambda m: m.calls.call("cuMemRelease", m.other),
    "synchronise": lambda m: m.calls.call("cuCtxSynchronize"),
}


@pytest.mark.parametrize("name", UNSAFE)
@pytest.mark.parametrize("where", ["this thread", "another thread"])
def test_a_call_during_a_capture_is_refused_and_invalidates_it(mapped: SimpleNamespace, name: str, where: str) -> None:
    stream = mapped.calls.made("cuStreamCreate", ctypes.c_uint(1))
    assert mapped.calls.call("cuStreamBeginCapture_v2", stream, ctypes.c_int(0)) == 0
    said: list[int] = []

    def call() -> None:
        if where == "another thread":
            mapped.calls.call("cuCtxPushCurrent_v2", mapped.calls.context)
        said.append(UNSAFE[name](mapped))

    if where == "this thread":
        call()
    else:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(60)
    assert said == [CAPTURE]
    assert mapped.calls.queue(mapped.at, 1, PAGE, stream) == INVALIDATED
    assert mapped.calls.call("cuStreamEndCapture", stream, ctypes.byref(ctypes.c_void_p())) == INVALIDATED


def test_a_relaxed_thread_may_map_during_a_capture_but_not_synchronise(mapped: SimpleNamespace) -> None:
    mode = ctypes.c_int(RELAXED)
    with mapped.calls.capture():
        assert mapped.calls.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode)) == 0 == mode.value
        assert mapped.calls.call("cuMemRelease", memory(mapped.calls)) == 0
    with pytest.raises(AssertionError, match="was invalidated"), mapped.calls.capture():
        assert mapped.calls.call("cuCtxSynchronize") == CAPTURE
    assert mapped.calls.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode)) == 0


def test_the_legacy_stream_sees_captures_of_blocking_streams_only_and_breaks_none(mapped: SimpleNamespace) -> None:
    status = ctypes.c_int()
    with mapped.calls.capture(is_blocking=True):
        assert mapped.calls.call("cuStreamIsCapturing", 0, ctypes.byref(status)) == IMPLICIT
    with mapped.calls.capture() as stream:
        assert mapped.calls.call("cuStreamIsCapturing", 0, ctypes.byref(status)) == 0 == status.value
        assert mapped.calls.call("cuStreamIsCapturing", stream, ctypes.byref(status)) == 0 != status.value


def test_queued_work_runs_late_and_fails_where_nothing_is_mapped(mapped: SimpleNamespace) -> None:
    fill(mapped)
    assert ctypes.string_at(mapped.at, 1) == b"\0"
    assert mapped.calls.call("cuCtxSynchronize") == 0
    assert ctypes.string_at(mapped.at, PAGE + 1) == b"\7" * PAGE + b"\0"
    assert mapped.calls.queue(mapped.free, 7, PAGE) == 0
    assert mapped.calls.call("cuCtxSynchronize") == ILLEGAL


def test_linked_gpus_may_access_each_other(mapped: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_PEERS", "10")
    assert mapped.calls.call("cuMemSetAccess", mapped.at, SIZE, access(1), 1) == 0


def test_an_address_without_access_faults() -> None:
    code = """
import ctypes, os, signal, _pytest.monkeypatch
from tests.support import fake_calls, fake_cuda
from tests.unit.test_fake_driver import SIZE, access, memory
fake_cuda.install(_pytest.monkeypatch.MonkeyPatch(), 64 << 20)
calls = fake_calls.Calls()
at, handle = calls.made("cuMemAddressReserve", SIZE, 0, 0, 0), memory(calls)

def faults():
    child = os.fork()
    if not child:
        ctypes.memset(at, 1, 1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGSEGV

found = [faults()]
assert calls.call("cuMemMap", at, SIZE, 0, handle, 0) == 0
found.append(faults())
assert calls.call("cuMemSetAccess", at, SIZE, access(), 1) == 0
found.append(faults())
assert calls.call("cuMemUnmap", at, SIZE) == 0
found.append(faults())
print(found)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert ran.stdout == "[True, True, False, True]\n", ran.stderr


def test_the_nth_call_fails_and_the_others_do_not(mapped: SimpleNamespace) -> None:
    def fails(times: int) -> list[bool]:
        return [m.calls.call("cuMemSetAccess", m.at, SIZE, access(), 1) == MEMORY for m in [mapped] * times]

    with failing("cuMemSetAccess:2"):
        assert fails(4) == [False, True, False, False]
    with failing("cuMemUnmap:1,cuMem:3+"):
        assert fails(4) == [False, False, True, True]
    assert fails(1) == [False]
    assert "FAKE_CUDA_FAIL" not in os.environ
