"""Runs of copy jobs: a cancelled run stops writing, and chunks run in order."""

from __future__ import annotations

import numpy as np
import pytest

from refitd.addressing.places import LocalTensor
from refitd.buffers.layout import row_major_strides
from refitd.copy_services import PreparedJob, shm
from tests.support.arenas import arena_of
from tests.support.places import copies_of

NBYTES = 4 << 20


class Cancelled(Exception):
    pass


@pytest.fixture
def arenas(monkeypatch):
    monkeypatch.setattr(shm, "PROGRESS_BYTES", 1 << 20)
    found = {number: arena_of(NBYTES) for number in (1, 2)}
    found[1].bytes[:] = np.random.default_rng(0).integers(1, 256, NBYTES, dtype=np.uint8)
    return found


def prepared(arenas) -> PreparedJob:
    whole = [LocalTensor(arena, 0, (NBYTES,), (1,)) for arena in (1, 2)]
    return shm.SharedMemoryService().prepare(copies_of([(*whole, 1)]), arenas)


def test_progress_is_reported_while_chunks_are_left_and_its_error_ends_the_run(arenas) -> None:
    job, seen = prepared(arenas), []

    def stop(done: int) -> None:
        seen.append(done)
        raise Cancelled

    with pytest.raises(Cancelled):
        job.run(verify=True, on_progress=stop)
    assert len(seen) == 1 and not arenas[2].bytes[seen[0] :].any()
    job.run(verify=True, on_progress=seen.append)
    assert len(seen) > 2 and seen[-1] == NBYTES and np.array_equal(arenas[1].bytes, arenas[2].bytes)


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
