"""Runs of copy jobs: how they are cancelled, that nothing is written afterwards, and the order of their chunks."""

from __future__ import annotations

import os

import numpy as np
import pytest

from refitd.addressing.places import PROCESS_MEMORY, LocalTensor
from refitd.buffers import arena as memory
from refitd.buffers.arena import MappedArena
from refitd.buffers.layout import row_major_strides
from refitd.copy_services import shm
from refitd.copy_services.base import DigestMismatch, PreparedJob
from tests.support.places import copies_of

NBYTES = 4 << 20


class Cancelled(Exception):
    pass


@pytest.fixture
def arenas(monkeypatch):
    monkeypatch.setattr(shm, "PROGRESS_BYTES", 1 << 20)
    found = {}
    for number in (1, 2):
        fd = memory.create(NBYTES, "test")
        found[number] = MappedArena(fd, NBYTES, write=True)
        os.close(fd)
    found[1].bytes[:] = np.random.default_rng(0).integers(1, 256, NBYTES, dtype=np.uint8)
    return found


def prepared(arenas, threads: int, source: LocalTensor | None = None) -> PreparedJob:
    whole = [LocalTensor(arena, 0, (NBYTES,), (1,)) for arena in (1, 2)]
    return shm.SharedMemoryService(threads).prepare(copies_of([(source or whole[0], whole[1], 1)]), arenas)


@pytest.mark.parametrize("lent", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_what_progress_raises_ends_the_run_and_nothing_is_written_afterwards(arenas, threads, lent) -> None:
    private = arenas[1].bytes.copy()
    source = LocalTensor(PROCESS_MEMORY, private.ctypes.data, (NBYTES,), (1,), pid=os.getpid()) if lent else None
    job, seen = prepared(arenas, threads, source), []

    def stop(done: int) -> None:
        seen.append(done)
        raise Cancelled

    with pytest.raises(Cancelled):
        job.run(verify=True, on_progress=stop)
    assert len(seen) == 1 and seen[0] < NBYTES
    written = np.flatnonzero(arenas[2].bytes)
    # at most what each thread had under way when the first was stopped
    assert len(written) <= seen[0] + threads * (shm.PROGRESS_BYTES + shm.CHUNK_BYTES)
    arenas[2].bytes[:] = 0
    assert not arenas[2].bytes.any()

    job.run(verify=True, on_progress=seen.append)
    assert seen[-1] == NBYTES and np.array_equal(arenas[1].bytes, arenas[2].bytes)


def test_a_thread_that_fails_ends_the_others_work(arenas, monkeypatch) -> None:
    original, calls = np.copyto, []

    def corrupting(dst, src):
        calls.append(dst)
        original(dst, src)
        dst[0] ^= 1

    monkeypatch.setattr(np, "copyto", corrupting)
    with pytest.raises(DigestMismatch):
        prepared(arenas, 3).run(verify=True, on_progress=lambda done: None)
    assert len(calls) <= 3


@pytest.mark.parametrize("cut", ["source", "destination"])
def test_the_parts_of_a_row_are_moved_one_after_the_other(arenas, monkeypatch, cut) -> None:
    # [256, 8192] in two halves of 4096 columns: [a|b] -> [a] [b], or back
    strided = [LocalTensor(1, half * 4096, (256, 4096), (8192, 1)) for half in (0, 1)]
    packed = [LocalTensor(2, half << 20, (256, 4096), row_major_strides((256, 4096), 1)) for half in (0, 1)]
    pairs = list(zip(strided, packed, strict=True))
    if cut == "destination":
        arenas = {1: arenas[2], 2: arenas[1]}
        pairs = [(b, a) for a, b in pairs]
    job = shm.SharedMemoryService().prepare(copies_of([(*pair, 1) for pair in pairs]), arenas)
    original, halves = np.copyto, []

    def noting(dst, src):
        side = src if cut == "source" else dst
        halves.append((side.ctypes.data - arenas[1].address) % 8192 // 4096)
        original(dst, src)

    monkeypatch.setattr(np, "copyto", noting)
    job.run(verify=True, on_progress=lambda done: None)
    assert halves == [0, 1] * (len(halves) // 2) and len(halves) == (2 << 20) // shm.CHUNK_BYTES
