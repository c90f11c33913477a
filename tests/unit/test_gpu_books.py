"""The daemon's accounts of GPU arenas, and their display: mappings, copies and refusals."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from refitd.addressing.places import LocalTensor
from refitd.buffers import cuda
from refitd.buffers.arena import MappedArena, create
from refitd.copy_services import registry
from refitd.copy_services.base import DigestMismatch
from refitd.daemon.actions import Instruction, ToWorker
from refitd.daemon.jobs import shares_of
from refitd.daemon.worker_arenas import WorkerArenas
from refitd.protocol import sidecar
from refitd.protocol.reports import GpuStatus, NodeStatus
from refitd_cli import checks, view
from tests.support import fake_cuda
from tests.support.places import copies_of

MIB = 1 << 20


def told(out: list[Instruction], kind: type) -> list[tuple[int, int]]:
    """(worker, arena) of every message of this kind; forgets all."""
    found = [(i.worker, i.message.arena) for i in out if isinstance(i, ToWorker) and isinstance(i.message, kind)]
    out.clear()
    return found


def test_an_arena_on_a_gpu_goes_to_one_worker_and_to_another_when_that_needs_it() -> None:
    out: list[Instruction] = []
    maps = WorkerArenas(2, out.append)
    maps.add(1, 100, "", write=False)
    maps.add(2, 100, "GPU-a", write=True)
    maps.add(3, 100, "GPU-b", write=False)
    maps.add(4, 100, "GPU-a", write=True)
    maps.add(5, 100, "GPU-c", write=True)
    assert told(out, sidecar.MapArena) == [(0, 1), (1, 1), (0, 2), (1, 3), (0, 4), (0, 5)]
    assert maps.homes({1, 2, 3, 5, 99}) == {2: 0, 3: 1, 5: 0}
    maps.need(0, {1, 2, 3})
    assert told(out, sidecar.MapArena) == [(0, 3)]
    maps.need(0, {1, 2, 3})
    assert out == []
    # a fresh process has what belongs to it, and is given the rest when it needs it
    maps.renewed(0)
    assert told(out, sidecar.MapArena) == [(0, 1), (0, 2), (0, 4), (0, 5)]
    maps.need(0, {3})
    assert told(out, sidecar.MapArena) == [(0, 3)]
    maps.remove(3)
    maps.remove(2)
    assert told(out, sidecar.UnmapArena) == [(0, 3), (1, 3), (0, 2), (1, 2)]


def test_what_could_not_be_sent_is_sent_again_when_it_is_needed_as_it_was() -> None:
    out: list[Instruction] = []
    maps = WorkerArenas(1, out.append)
    maps.add(7, 100, "", write=True)
    first = out[:]
    told(out, sidecar.MapArena)
    maps.doubt(0, 7)
    maps.need(0, {7})
    assert out == first and isinstance(out[0], ToWorker) and out[0].arena == 7


def test_copies_go_to_the_worker_of_the_gpu_they_write_else_read_and_the_rest_to_all() -> None:
    def place(arena: int) -> LocalTensor:
        return LocalTensor(arena, 0, (64,), (4,))

    ends = [(1, 2), (1, 20), (20, 2), (20, 21), (21, 20), (30, 20), (20, 30), (1, 2), (1, 3)]
    copies = copies_of([(place(src), place(dst), 4) for src, dst in ends])
    shares = {share.worker: share.rows for share in shares_of(copies, 2, {20: 1, 21: 1, 30: 0})}
    by_worker = {worker: set(rows.origin.tolist()) for worker, rows in shares.items()}
    assert by_worker[0] | by_worker[1] == set(range(9)) and not by_worker[0] & by_worker[1]
    assert {1, 2, 3, 4, 5} <= by_worker[1] and 6 in by_worker[0]
    assert by_worker[0] & {0, 7, 8} and by_worker[1] & {0, 7, 8}
    # without GPUs as ever, and one worker's share may be all there is
    assert len(shares_of(copies, 2)) == 2
    assert [s.worker for s in shares_of(copies.select(np.array([1, 3])), 3, {20: 2, 21: 2})] == [2]


@pytest.mark.parametrize("ends", [("gpu", "gpu"), ("gpu", "host"), ("host", "gpu")])
def test_bytes_that_differ_after_they_were_written_are_noticed(
    monkeypatch: pytest.MonkeyPatch, ends: tuple[str, str]
) -> None:
    """The destination of the second copy changes as soon as it has been written."""
    gpus = fake_cuda.install(monkeypatch, 64 * MIB, visible="0")
    fds = [cuda.create(MIB, end, 0) if end == "gpu" else create(MIB, end) for end in ends]
    arenas = {
        number: cuda.MappedDeviceArena(fd, MIB, 0, write=True) if end == "gpu" else MappedArena(fd, MIB, write=True)
        for number, (fd, end) in enumerate(zip(fds, ends, strict=True), 1)
    }
    for fd in fds:
        os.close(fd)
    rows = [(LocalTensor(1, at, (100,), (4,)), LocalTensor(2, at, (100,), (4,)), 4) for at in (0, 4096, 8192)]
    make = registry.installed().find("cuda").on_device
    assert make is not None
    service = make(0)
    job = service.prepare(copies_of(rows), arenas)
    assert job.run(verify=True, on_progress=lambda done: None).bytes == 1200
    copy = torch.Tensor.copy_
    copied: list[torch.Tensor] = []

    def copy_and_spoil(self: torch.Tensor, source: torch.Tensor, *more: object) -> torch.Tensor:
        done = copy(self, source, *more)
        copied.append(self)
        if len(copied) == 2:
            self.view(-1)[7] ^= 1
        return done

    monkeypatch.setattr(torch.Tensor, "copy_", copy_and_spoil)
    with pytest.raises(DigestMismatch) as failed:
        job.run(verify=True, on_progress=lambda done: None)
    assert failed.value.copy == 1
    copied.clear()
    del job, arenas, service, failed
    monkeypatch.undo()
    assert gpus.used() == 0


def test_status_says_how_much_of_the_arenas_is_on_gpus() -> None:
    gpus = (
        GpuStatus(device="GPU-a", arenas=2, arena_bytes=10**9),
        GpuStatus(device="GPU-b", arenas=1, arena_bytes=10**9),
    )
    fields = {"node": "n", "host": "h", "pid": 1, "workers": (), "clients": 0, "arenas": 4, "arena_bytes": 3 * 10**9}
    shown = [view._arena_bytes(NodeStatus(**fields, gpus=found)) for found in ((), gpus[:1], gpus)]
    assert shown == ["3 GB", "3 GB, 1 GB of it on a GPU", "3 GB, 2 GB of it on 2 GPUs"]


def test_doctor_says_on_which_gpus_arenas_can_lie() -> None:
    assert checks.gpu_arenas(lambda: []).state == "ok"
    assert checks.gpu_arenas(lambda: [("GPU-a", ""), ("GPU-b", "")]) == checks.CheckResult(
        "GPU arenas", "ok", "GPU-a, GPU-b"
    )
    worse = checks.gpu_arenas(lambda: [("GPU-a", ""), ("GPU 1", "GPU 1 has no virtual memory management")])
    assert worse.state == "warn" and "device='cpu'" in worse.advice and "GPU 1 has no virtual" in worse.advice


def test_the_survey_names_the_gpus_that_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = fake_cuda.install(monkeypatch, MIB, visible="3,1")
    assert cuda.survey() == [(gpus.name(3), ""), (gpus.name(1), "")]
    monkeypatch.setenv("FAKE_CUDA_VISIBLE", "")
    assert cuda.survey() == []
