"""The rules of streams, events, pinned memory and copies that the fake driver enforces, each broken directly."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from refitd.buffers.cuda_driver import Copy2D
from tests.support.fake_calls import calls
from tests.unit.test_fake_driver import CAPTURE, HANDLE, ILLEGAL, SIZE, SUPPORTED, VALUE, access, mapped

__all__ = ["calls", "mapped"]

NOT_READY, TWICE, UNKNOWN, PERMITTED = 600, 712, 713, 800
ROOM = 1 << 16


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@pytest.fixture
def pinned(mapped: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """Pinned memory at `here`, memory that is not at `there`, an event, and a stream of each of two GPUs."""
    m, call = mapped, mapped.calls.call
    m.memory = [mmap.mmap(-1, ROOM) for _ in range(2)]
    m.here, m.there = (address_of(memory) for memory in m.memory)
    assert call("cuMemHostRegister_v2", m.here, ROOM, 1) == 0
    m.stream, m.event = m.calls.made("cuStreamCreate", ctypes.c_uint(1)), m.calls.made("cuEventCreate", 2)
    context = ctypes.c_void_p()
    assert call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 1) == 0
    assert call("cuCtxPushCurrent_v2", context) == 0
    m.other_stream = m.calls.made("cuStreamCreate", ctypes.c_uint(1))
    m.other_event = m.calls.made("cuEventCreate", 2)
    assert call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p())) == 0
    yield m
    call("cuCtxSynchronize")
    for name, one in (("cuStreamDestroy_v2", m.stream), ("cuEventDestroy_v2", m.event)):
        assert call(name, one) == 0
    assert call("cuStreamDestroy_v2", m.other_stream) == call("cuEventDestroy_v2", m.other_event) == 0
    assert call("cuMemHostUnregister", m.here) == 0
    assert call("cuDevicePrimaryCtxRelease_v2", 1) == 0
    assert m.calls.left("pins", "events")["pins"] == 0


def copied(m: SimpleNamespace, to_gpu: bool = True, stream: int | None = None, **changed: int) -> int:
    ends = {"here": m.here, "at": m.at, "width": 64, "height": 4, "src_pitch": 64, "dst_pitch": 128} | changed
    here, at = ends.pop("here"), ends.pop("at")
    copy = Copy2D(src_type=1, src_host=here, dst_type=2, dst_device=at)
    if not to_gpu:
        copy = Copy2D(src_type=2, src_device=at, dst_type=1, dst_host=here)
    for name, value in ends.items():
        setattr(copy, name, value)
    return int(m.calls.call("cuMemcpy2DAsync_v2", ctypes.byref(copy), m.stream if stream is None else stream))


def after_copy(m: SimpleNamespace, name: str, *arguments: int) -> int:
    assert copied(m) == 0
    return int(m.calls.call(name, *arguments))


def read_only(m: SimpleNamespace, flags: int) -> int:
    assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(m.there), ROOM, mmap.PROT_READ)
    status = m.calls.call("cuMemHostRegister_v2", m.there, ROOM, flags)
    if not status:
        assert copied(m, to_gpu=False, here=m.there) == VALUE, "a GPU cannot write there"
        assert m.calls.call("cuMemHostUnregister", m.there) == 0
    return int(status)


RULES: dict[str, tuple[int, Callable[[SimpleNamespace], int]]] = {
    "register twice": (TWICE, lambda m: m.calls.call("cuMemHostRegister_v2", m.here, ROOM, 1)),
    "register a part twice": (TWICE, lambda m: m.calls.call("cuMemHostRegister_v2", m.here + 4096, 4096, 1)),
    "register unmapped memory": (VALUE, lambda m: m.calls.call("cuMemHostRegister_v2", 1 << 40, ROOM, 1)),
    "register read-only memory for writing": (VALUE, lambda m: read_only(m, 1)),
    "register read-only memory": (0, lambda m: read_only(m, 9)),
    "register of an unknown flag": (VALUE, lambda m: m.calls.call("cuMemHostRegister_v2", m.there, ROOM, 16)),
    "unregister unknown memory": (UNKNOWN, lambda m: m.calls.call("cuMemHostUnregister", m.there)),
    "unregister a part": (UNKNOWN, lambda m: m.calls.call("cuMemHostUnregister", m.here + 4096)),
    "unregister during a copy": (VALUE, lambda m: after_copy(m, "cuMemHostUnregister", m.here)),
    "unmap during a copy": (VALUE, lambda m: after_copy(m, "cuMemUnmap", m.at, SIZE)),
    "free what was registered": (VALUE, lambda m: m.calls.call("cuMemFreeHost", m.here)),
    "copy of pageable memory": (VALUE, lambda m: copied(m, here=m.there)),
    "copy beyond pinned memory": (VALUE, lambda m: copied(m, here=m.here + ROOM - 64)),
    "copy of ranges that overlap": (VALUE, lambda m: copied(m, src_pitch=32)),
    "copy of nothing": (VALUE, lambda m: copied(m, width=0)),
    "copy with a long step": (VALUE, lambda m: copied(m, dst_pitch=1 << 31)),
    "copy on a stream of another GPU": (HANDLE, lambda m: copied(m, stream=m.other_stream)),
    "copy on no stream": (HANDLE, lambda m: copied(m, stream=999)),
    "record on a stream of another GPU": (HANDLE, lambda m: m.calls.call("cuEventRecord", m.event, m.other_stream)),
    "record of an event of another GPU": (HANDLE, lambda m: m.calls.call("cuEventRecord", m.other_event, m.stream)),
    "wait for no event": (VALUE, lambda m: m.calls.call("cuStreamWaitEvent", m.stream, 999, 0)),
    "query of no event": (HANDLE, lambda m: m.calls.call("cuEventQuery", 999)),
    "destroy a stream with work": (VALUE, lambda m: after_copy(m, "cuStreamDestroy_v2", m.stream)),
    "destroy no stream": (HANDLE, lambda m: m.calls.call("cuStreamDestroy_v2", 999)),
    "destroy no event": (HANDLE, lambda m: m.calls.call("cuEventDestroy_v2", 999)),
    "an event with timing": (VALUE, lambda m: m.calls.call("cuEventCreate", ctypes.byref(ctypes.c_uint64()), 0)),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_refused(pinned: SimpleNamespace, rule: str) -> None:
    status, broken = RULES[rule]
    assert broken(pinned) == status


@pytest.mark.parametrize(("pins", "flags", "status"), [("refused", 1, PERMITTED), ("writable", 9, SUPPORTED)])
def test_a_driver_that_pins_nothing_says_so(
    pinned: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, pins: str, flags: int, status: int
) -> None:
    monkeypatch.setenv("FAKE_CUDA_PINS", pins)
    assert pinned.calls.call("cuMemHostRegister_v2", pinned.there, ROOM, flags) == status


def test_pins_and_windows_are_refused_during_a_capture(pinned: SimpleNamespace) -> None:
    found = ctypes.byref(ctypes.c_uint64())
    for name, arguments in {
        "cuMemHostRegister_v2": (pinned.there, ROOM, 1),
        "cuMemHostUnregister": (pinned.here,),
        "cuMemHostAlloc": (found, ROOM, 1),
        "cuMemFreeHost": (pinned.here,),
    }.items():
        with pytest.raises(AssertionError, match="was invalidated"), pinned.calls.capture():
            assert pinned.calls.call(name, *arguments) == CAPTURE, name


def test_work_runs_late_and_only_as_far_as_an_event_needs_it(pinned: SimpleNamespace) -> None:
    m, call = pinned, pinned.calls.call
    late = m.calls.made("cuStreamCreate", ctypes.c_uint(1))
    last = m.calls.made("cuEventCreate", 2)
    m.memory[0][:ROOM] = bytes(range(256)) * (ROOM // 256)
    assert copied(m) == 0 and call("cuEventRecord", m.event, m.stream) == 0
    assert copied(m, at=m.at + 4096) == 0  # after the event: nothing waits for it
    assert call("cuStreamWaitEvent", late, m.event, 0) == 0
    assert copied(m, False, late, here=m.here + 4096, src_pitch=128, dst_pitch=64) == 0
    assert call("cuEventRecord", last, late) == 0
    assert call("cuEventQuery", last) == NOT_READY and ctypes.string_at(m.at, 64) == bytes(64)
    assert call("cuEventQuery", last) == 0 == call("cuEventQuery", m.event)
    assert ctypes.string_at(m.at + 128, 64) == bytes(range(64, 128))
    assert m.memory[0][4096 : 4096 + 256] == bytes(range(256))
    assert ctypes.string_at(m.at + 4096, 64) == bytes(64)
    assert call("cuCtxSynchronize") == 0 and ctypes.string_at(m.at + 4096, 64) == bytes(range(64))
    assert call("cuStreamDestroy_v2", late) == call("cuEventDestroy_v2", last) == 0


def test_in_the_other_order_streams_run_before_the_one_that_is_asked(
    pinned: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_ORDER", "others")
    m, call = pinned, pinned.calls.call
    m.memory[0][:ROOM] = b"x" * ROOM
    early, held = (m.calls.made("cuStreamCreate", ctypes.c_uint(1)) for _ in range(2))
    assert copied(m) == 0 == call("cuEventRecord", m.event, m.stream)
    assert copied(m, stream=early, at=m.at + 4096) == 0 == call("cuStreamWaitEvent", held, m.event, 0)
    assert copied(m, stream=held, at=m.at + 8192) == 0
    assert call("cuEventQuery", m.event) == NOT_READY
    assert [ctypes.string_at(m.at + at, 1) for at in (0, 4096, 8192)] == [b"\0", b"x", b"\0"]
    assert call("cuCtxSynchronize") == 0
    assert call("cuStreamDestroy_v2", early) == call("cuStreamDestroy_v2", held) == 0


@pytest.mark.parametrize(("flags", "status"), [(0, VALUE), (1, 0)])
def test_memory_that_is_pinned_for_one_gpu_is_pageable_for_others(
    pinned: SimpleNamespace, flags: int, status: int
) -> None:
    m, call, context = pinned, pinned.calls.call, ctypes.c_void_p()
    window = m.calls.made("cuMemHostAlloc", ROOM, flags)
    assert copied(m, here=window) == 0
    assert call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 1) == call("cuCtxPushCurrent_v2", context) == 0
    assert copied(m, False, m.other_stream, here=window + 4096, src_pitch=128, dst_pitch=64) == status
    call("cuCtxSynchronize")  # GPU 1 may not read the memory of GPU 0
    assert call("cuCtxPopCurrent_v2", ctypes.byref(context)) == call("cuDevicePrimaryCtxRelease_v2", 1) == 0
    assert call("cuCtxSynchronize") == call("cuMemFreeHost", window) == 0


@pytest.mark.parametrize("flags", [0, 1])
def test_a_copy_to_memory_that_its_gpu_may_not_write_fails_at_its_event(pinned: SimpleNamespace, flags: int) -> None:
    m, call = pinned, pinned.calls.call
    assert call("cuMemSetAccess", m.at, SIZE, access(0, flags), 1) == 0
    assert copied(m) == 0 == call("cuEventRecord", m.event, m.stream)
    assert [call("cuEventQuery", m.event) for _ in range(2)] == [NOT_READY, ILLEGAL]
    assert copied(m) == ILLEGAL, "later calls say so too"
