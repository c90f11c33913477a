"""Copies by copy engines on fake GPUs, whose work runs late: every byte arrives, and nothing is left behind."""

from __future__ import annotations

import ctypes
import logging
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from refitd.addressing.paths import Path
from refitd.addressing.places import LocalTensor
from refitd.buffers import arena, cuda
from refitd.copy_services import DigestMismatch, copy_engines
from refitd.copy_services.cuda import CudaCopyService
from refitd.errors import ArenaError, DeadlineExceeded
from tests.support.fake_calls import Calls, calls, failing
from tests.support.places import LateWriter, copies_of
from tests.unit.test_gpu_copies import random_tensor

__all__ = ["calls"]

SIZE = 1 << 21
ENDS = {"to a GPU": (-1, 0), "from a GPU": (0, -1), "to another GPU": (1, 0)}
NOTED = [(LocalTensor(1, at, (2000,), (4,)), LocalTensor(2, at, (2000,), (4,)), 4) for at in (0, 10000, 30000)]


def mapped(gpu: int, *, write: bool = True) -> Any:
    fd = arena.create(SIZE, "test") if gpu < 0 else cuda.create(SIZE, "test", gpu)
    found = arena.MappedArena(fd, SIZE, write=write) if gpu < 0 else cuda.MappedDeviceArena(fd, SIZE, gpu, write=write)
    os.close(fd)
    return found


def memory(found: Any) -> Any:
    if found.device < 0:
        return found.bytes
    return np.frombuffer((ctypes.c_uint8 * SIZE).from_address(found.address), np.uint8)


@pytest.fixture
def copier(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    monkeypatch.setattr(copy_engines, "WINDOW_BYTES", 4096)
    made = SimpleNamespace(service=CudaCopyService(0), arenas={}, calls=calls)
    kinds = ("streams", "blocking streams")
    others = {kind: calls.left(kind)[kind] for kind in kinds}  # of other tests

    def ends(name: str) -> tuple[Any, Any]:
        source, destination = ENDS[name]
        made.arenas.update({1: mapped(source), 2: mapped(destination)})
        memory(made.arenas[1])[:] = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)
        return memory(made.arenas[1]), memory(made.arenas[2])

    made.ends = ends
    yield made
    assert calls.left(*kinds)["blocking streams"] == others["blocking streams"]
    made.service.close()
    for found in made.arenas.values():
        assert getattr(found, "pin", None) is None or not found.pin.is_open
        if found.device >= 0:
            found.close()
    made.arenas.clear()
    assert calls.left("pins", "streams", "events") == {
        **dict.fromkeys(("handles", "reservations", "mappings", "pins", "events"), 0),
        "contexts": 1,
        "streams": others["streams"],
    }


@pytest.mark.parametrize("pins", ["", "refused"])
@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize(("verify", "order"), [(False, "late"), (True, "late"), (True, "others")])
def test_every_stride_arrives_and_nothing_else_changes(
    copier: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str, pins: str, verify: bool, order: str
) -> None:
    monkeypatch.setenv("FAKE_CUDA_PINS", pins)
    monkeypatch.setenv("FAKE_CUDA_ORDER", order)
    source, target = copier.ends(name)
    rng = random.Random(7)
    expected, rows = target.copy(), []
    for number in range(12):
        es = rng.choice([1, 2, 4, 8, 16])
        shape = tuple(rng.choice([1, 2, 3, 8, 5, 40]) for _ in range(rng.randrange(5)))
        ends = [random_tensor(rng, side, shape, es) for side in (1, 2)]
        at = number * (SIZE // 12) // 16 * 16
        src, dst = (LocalTensor(end.arena, end.offset + at, shape, end.strides) for end in ends)
        expected_view = np.ndarray(shape, f"V{es}", expected.data, dst.offset, dst.strides)
        expected_view[...] = np.ndarray(shape, f"V{es}", source.data, src.offset, src.strides)
        rows.append((src, dst, es))
    told: list[int] = []
    copies = copies_of(rows)
    job = copier.service.prepare(copies, copier.arenas)
    result = job.run(verify=verify, on_progress=told.append)
    assert np.array_equal(target, expected)
    assert result.copies == 12 and result.bytes == int(copies.row_bytes.sum()) == told[-1] and told == sorted(told)
    assert result.paths == (Path.WINDOWS if pins or name == "to another GPU" else Path.PINNED,)
    job.run(verify=verify, on_progress=told.append)


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("pins", ["", "refused"])
def test_a_chunk_is_copied_once_its_source_is_written_while_later_ones_are_not(
    copier: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str, pins: str
) -> None:
    monkeypatch.setenv("FAKE_CUDA_PINS", pins)
    source, target = copier.ends(name)
    new, told = 255 - source, list[int]()
    writer = LateWriter(1, lambda begin, end: (np.copyto(source[begin:end], new[begin:end]), len(told))[1])
    ends = [LocalTensor(arena, 0, (3000,), (1,)) for arena in (1, 2)]
    copies = copies_of([(*(replace(end, offset=at) for end in ends), 1) for at in range(0, 16000, 4000)])
    job = copier.service.prepare(copies, copier.arenas)
    assert job.follow(writer)
    job.run(verify=True, on_progress=told.append)
    assert list(writer.waits) == [(at, at + 3000) for at in range(0, 16000, 4000)]
    assert all(np.array_equal(target[begin:end], new[begin:end]) for begin, end in writer.waits)
    assert [*writer.waits.values()][-1] > 0, "earlier chunks had arrived"
    assert job.follow(None)
    job.run(verify=True, on_progress=told.append)
    assert len(writer.waits) == 4


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("side", [1, 2])
@pytest.mark.parametrize("pins", ["", "refused"])
def test_an_end_that_changes_after_a_chunk_was_copied_is_noticed(
    copier: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str, side: int, pins: str
) -> None:
    monkeypatch.setenv("FAKE_CUDA_PINS", pins)
    changed = copier.ends(name)[side - 1]
    finish, asked, count = copy_engines.EngineJob._finish, copy_engines.Engine.await_event, [0, 0]
    # main memory changes after a window was emptied, a GPU before it is read back
    when = 2 if copier.arenas[side].device < 0 else 1

    def counted(self: Any, *arguments: Any, **options: Any) -> None:
        count[:] = [count[0] + 1, 0]
        finish(self, *arguments, **options)

    def change(self: Any, event: int, deadline: Any) -> None:
        asked(self, event, deadline)
        count[1] += 1
        if count == [3, when]:  # the second chunk of row 1
            changed[10000 + 4096 - 100] ^= 1

    monkeypatch.setattr(copy_engines.EngineJob, "_finish", counted)
    monkeypatch.setattr(copy_engines.Engine, "await_event", change)
    job = copier.service.prepare(copies_of(NOTED), copier.arenas)
    with pytest.raises(DigestMismatch) as failed:
        job.run(verify=True, on_progress=lambda done: None)
    assert failed.value.copy == 1


def test_a_refused_pin_is_said_once_and_a_pin_stays_with_its_memory(
    copier: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = copier.ends("to a GPU")
    other = mapped(-1)
    other.bytes[:] = 9
    service = CudaCopyService(0)
    job = service.prepare(copies_of(NOTED), copier.arenas)

    def ran() -> str:
        target[:] = 0
        (way,) = job.run(verify=True, on_progress=lambda done: None).paths
        assert np.array_equal(target[:8000], source[:8000])
        return way

    with caplog.at_level(logging.WARNING, "refitd.worker"):
        monkeypatch.setenv("FAKE_CUDA_PINS", "refused")
        assert [ran(), ran()] == [Path.WINDOWS] * 2
        assert [record.message for record in caplog.records if "through pinned windows" in record.message] != []
        assert len(caplog.records) == 1
    monkeypatch.delenv("FAKE_CUDA_PINS")
    service.close()
    job = copier.service.prepare(copies_of(NOTED), copier.arenas)
    assert ran() == Path.PINNED
    copier.arenas[1].exchange(other)  # the address shows the other memory now, which is not pinned yet
    assert source[0] == 9 and ran() == Path.PINNED and copier.calls.left("pins")["pins"] >= 2
    copier.arenas[1].exchange(other)
    assert source[1] != source[2] and ran() == Path.PINNED
    other.unpin()


@pytest.mark.parametrize(("pins", "way"), [("", Path.PINNED), ("writable", Path.WINDOWS)])
def test_memory_that_is_mapped_for_reading_is_pinned_where_the_driver_can(
    copier: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, pins: str, way: Path
) -> None:
    monkeypatch.setenv("FAKE_CUDA_PINS", pins)
    _, target = copier.ends("to a GPU")
    target[:8000] = 5
    copier.arenas[1] = mapped(-1, write=False)
    job = copier.service.prepare(copies_of(NOTED), copier.arenas)
    assert job.run(verify=True, on_progress=lambda done: None).paths == (way,)
    assert not target[:8000].any()


def test_what_is_cancelled_has_no_work_left_and_a_hung_gpu_ends_at_the_deadline(
    copier: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, target = copier.ends("to a GPU")
    job = copier.service.prepare(copies_of(NOTED), copier.arenas)

    def cancel(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.run(verify=True, on_progress=cancel)
    target[:] = 7
    assert copier.calls.call("cuCtxSynchronize") == 0
    assert (target == 7).all(), "queued work wrote after the run had ended"
    with monkeypatch.context() as patch, pytest.raises(DeadlineExceeded, match="copy engine"):
        patch.setattr("refitd.buffers.cuda_driver.Driver.is_done", lambda driver, event: False)
        job.run(verify=True, on_progress=lambda done: None, timeout=0.05)
    assert copier.calls.call("cuCtxSynchronize") == 0


@pytest.mark.parametrize("name", ["cuStreamCreate:2", "cuEventCreate:3", "cuMemHostAlloc:2", "cuMemcpy2DAsync_v2:3"])
def test_a_call_that_fails_is_an_error_after_which_the_next_run_works(copier: SimpleNamespace, name: str) -> None:
    source, target = copier.ends("to another GPU")
    with failing(name), pytest.raises(ArenaError, match=r"out of memory"):
        copier.service.prepare(copies_of(NOTED), copier.arenas).run(verify=True, on_progress=lambda done: None)
    copier.service.prepare(copies_of(NOTED), copier.arenas).run(verify=True, on_progress=lambda done: None)
    assert np.array_equal(target[:8000], source[:8000])


def test_a_gpu_is_opened_to_another_one_only_where_the_driver_allows_it(
    copier: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier.ends("to another GPU")
    found, other = copier.arenas[1], mapped(1)
    may = lambda: copier.calls.call("fakeCudaMay", ctypes.c_int(0), found.address)  # noqa: E731
    monkeypatch.setattr("refitd.copy_services.cuda.has_kernels", lambda: True)
    ends = copier.arenas[1], copier.arenas[2]
    assert not found.open_to(0) and not may() and copier.service._path(*ends) is Path.WINDOWS
    monkeypatch.setenv("FAKE_CUDA_PEERS", "01")
    assert copier.service._path(*ends) is Path.PEER and copier.service._path(*reversed(ends)) is Path.WINDOWS
    assert not copier.arenas[2].open_to(1)
    assert found.open_to(0) and found.open_to(0) and may() == 3
    found.exchange(other)
    assert may() == 3, "after an exchange too"
    other.close()
