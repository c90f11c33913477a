"""Work on GPUs that runs as late as it may: what a call promises is in memory when it returns."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from refitd.addressing.places import LocalTensor
from refitd.buffers import cuda
from refitd.buffers.cuda import MappedDeviceArena
from refitd.copy_services.cuda import CudaCopyService
from refitd.copy_services.waits import Deadline, DeviceStream, on_streams
from refitd.dtypes import CASTS
from tests.support import fake_cuda
from tests.support.fake_torch import device_shim
from tests.support.places import LateWriter, copies_of

COUNT = 1024
Arenas = list[MappedDeviceArena]


@pytest.fixture
def arenas(monkeypatch: pytest.MonkeyPatch) -> Iterator[Arenas]:
    """Two arenas on GPU 0, all 0."""
    fake_cuda.install(monkeypatch, 64 << 20)
    monkeypatch.setenv("FAKE_CUDA_ALONE", "1")
    monkeypatch.setattr(device_shim, "is_late", True)
    found = []
    for _ in range(2):
        fd = cuda.create(4 * COUNT, "late")
        found.append(MappedDeviceArena(fd, 4 * COUNT, write=True))
        os.close(fd)
    yield found
    for arena in found:
        arena.close()


def held(arena: MappedDeviceArena, dtype: torch.dtype = torch.uint8, count: int = COUNT) -> list[float]:
    """Return what is in memory now; this waits for no GPU."""
    data = ctypes.string_at(arena.address, count * dtype.itemsize)
    found: list[float] = torch.frombuffer(bytearray(data), dtype=dtype).tolist()
    return found


def test_operations_wait_for_an_event_or_a_synchronise(arenas: Arenas) -> None:
    arena = arenas[0]
    stream = DeviceStream(torch.device("cpu"))
    with stream.queue():
        arena.tensor.fill_(1)
    assert set(held(arena)) == {0}
    stream.settle(Deadline.after(10), "the test")
    assert set(held(arena)) == {1}
    arena.tensor.fill_(2)  # on another stream
    assert set(held(arena)) == {1}
    assert torch.equal(arena.tensor, torch.full((4 * COUNT,), 2, dtype=torch.uint8))


def test_a_block_on_streams_sees_earlier_work_and_is_done_when_it_ends(arenas: Arenas) -> None:
    source, target = arenas
    source.tensor.fill_(5)
    with on_streams([0], 10, "the test"):
        target.tensor.copy_(source.tensor)
        assert set(held(target)) == {0}
    assert set(held(target)) == {5}


@pytest.mark.parametrize("verify", [False, True])
def test_a_cast_sees_earlier_work_and_is_done_when_its_job_ends(arenas: Arenas, verify: bool) -> None:
    source, target = arenas
    source.tensor.view(torch.float32).copy_(torch.arange(COUNT, dtype=torch.float32))
    ends = LocalTensor(1, 0, (COUNT,), (4,)), LocalTensor(2, 0, (COUNT,), (2,))
    (cast,) = (number for number, dtypes in CASTS.items() if dtypes == ("float32", "bfloat16"))
    copies = replace(copies_of([(*ends, 2)]), cast=np.array([cast]))
    service = CudaCopyService(0)
    told: list[int] = []
    service.prepare(copies, {1: source, 2: target}).run(verify=verify, on_progress=told.append)
    assert held(target, torch.bfloat16) == torch.arange(COUNT).bfloat16().tolist() and told == [2 * COUNT]
    service.close()


def test_tensors_are_copied_once_their_source_is_written(arenas: Arenas) -> None:
    source, target = arenas
    writer = LateWriter(1, lambda begin, end: source.tensor[begin:end].fill_(9))
    halves = [[LocalTensor(arena, at, (COUNT,), (1,)) for arena in (1, 2)] for at in (0, COUNT)]
    service = CudaCopyService(0)
    job = service.prepare(copies_of([(*ends, 1) for ends in halves]), {1: source, 2: target})
    assert job.follow(writer)
    job.run(verify=True, on_progress=lambda done: None)
    assert list(writer.waits) == [(0, COUNT), (COUNT, 2 * COUNT)] and set(held(target, count=2 * COUNT)) == {9}
    service.close()


def test_a_flip_waits_for_torchs_work(arenas: Arenas) -> None:
    live, staged = arenas
    staged.tensor.fill_(7)
    live.exchange(staged)
    assert set(held(live)) == {7} and set(held(staged)) == {0}
