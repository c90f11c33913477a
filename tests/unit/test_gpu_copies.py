"""GPU arenas and copies between them, without a GPU: strides, accounts, refusals."""

from __future__ import annotations

import ctypes
import os
import random

import numpy as np
import pytest
import torch

from refitd.addressing.copies import CopyList
from refitd.addressing.places import LocalTensor
from refitd.buffers import cuda, cuda_driver
from refitd.buffers import cuda as memory
from refitd.buffers.layout import extent
from refitd.copy_services import DigestMismatch, registry
from refitd.copy_services.boxes import rows
from refitd.copy_services.cuda import Pair, pair
from refitd.daemon.actions import Instruction, ToWorker
from refitd.daemon.effects import Effects
from refitd.daemon.jobs import WorkerArenas, shares_of
from refitd.dtypes import CASTS
from refitd.errors import ArenaError, ConfigError, TransportError
from refitd.protocol import local, sidecar
from refitd.protocol.reports import GpuStatus, NodeStatus
from refitd_cli import view
from refitd_cli.commands import doctor as checks
from tests.support import fake_cuda
from tests.support.places import copies_of

ROOM = 1 << 16
no_gpu = pytest.mark.skipif(memory.visible_devices() > 0, reason="there is a GPU")


def pairs(copies: CopyList, arenas: dict[int, torch.Tensor], written: set[int]) -> list[Pair]:
    sizes = {number: arena.numel() for number, arena in arenas.items()}
    return [pair(row, arenas) for row in rows(copies, sizes, written)]


def copied(copies: CopyList, source: torch.Tensor, target: torch.Tensor) -> int:
    work = pairs(copies, {1: source, 2: target}, {2})
    for one in work:
        one.destination.copy_(one.source)
    return len(work)


def random_tensor(rng: random.Random, arena: int, shape: tuple[int, ...], es: int) -> LocalTensor:
    """Return a tensor with dimensions in any order, with gaps, and at any offset that torch could choose."""
    order = list(range(len(shape)))
    rng.shuffle(order)
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step * es
        step = step * shape[dim] + rng.choice([0, 0, 1, 8])
    return LocalTensor(arena, rng.randrange(8) * es, shape, tuple(strides))


@pytest.mark.parametrize("seed", range(150))
def test_every_stride_arrives_and_nothing_else_changes(seed: int) -> None:
    rng = random.Random(seed)
    es = rng.choice([1, 2, 4, 8, 16])
    shape = tuple(rng.choice([1, 2, 3, 8, 5]) for _ in range(rng.randrange(5)))
    src, dst = random_tensor(rng, 1, shape, es), random_tensor(rng, 2, shape, es)
    source = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, ROOM, dtype=np.uint8))
    target = torch.zeros(ROOM + rng.randrange(8), dtype=torch.uint8)
    expected = target.numpy().copy()
    np.ndarray(shape, f"V{es}", expected.data, dst.offset, dst.strides)[...] = np.ndarray(
        shape, f"V{es}", source.numpy().data, src.offset, src.strides
    )
    assert copied(copies_of([(src, dst, es)]), source, target) == 1
    assert np.array_equal(target.numpy(), expected)


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("seed", range(8))
def test_casts_are_those_of_torch_and_a_wrong_element_is_found(cast: int, seed: int) -> None:
    rng = random.Random(seed)
    held, wanted = (getattr(torch, name) for name in CASTS[cast])
    shape = tuple(rng.choice([1, 2, 3, 8, 5]) for _ in range(rng.randrange(1, 4)))
    src = random_tensor(rng, 1, shape, held.itemsize)
    dst = random_tensor(rng, 2, shape, wanted.itemsize)
    source = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, ROOM, dtype=np.uint8))
    target = torch.zeros(ROOM, dtype=torch.uint8)
    copies = copies_of([(src, dst, wanted.itemsize)])
    copies.cast[:] = cast
    (one,) = pairs(copies, {1: source, 2: target}, {2})
    assert (one.source.dtype, one.destination.dtype) == (held, wanted)
    one.destination.copy_(one.source)
    at = src.offset // held.itemsize
    values = source.view(held).as_strided(shape, [step // held.itemsize for step in src.strides], at)
    assert torch.equal(one.destination.nan_to_num(7), values.to(wanted).nan_to_num(7))
    assert not one.differs()
    changed = one.destination.reshape(-1)[0].clone()
    one.destination[(0,) * len(shape)] = 3.0 if changed != 3.0 else 4.0
    assert one.differs()


def test_elements_that_lie_askew_are_not_converted() -> None:
    arenas = {i: torch.zeros(ROOM, dtype=torch.uint8) for i in (1, 2)}
    copies = copies_of([(LocalTensor(1, 2, (5,), (4,)), LocalTensor(2, 0, (5,), (2,)), 2)])
    copies.cast[:] = 1
    with pytest.raises(TransportError, match="cannot be converted on a GPU"):
        pairs(copies, arenas, {2})
    copies.cast[:] = 9
    with pytest.raises(TransportError, match=r"conversion 9 .* does not exist"):
        pairs(copies, arenas, {2})


def test_contiguous_rows_are_copied_in_the_widest_words() -> None:
    ends = LocalTensor(1, 64, (4, 32), (128, 2)), LocalTensor(2, 0, (4, 32), (64, 2))
    (one,) = pairs(copies_of([(*ends, 2)]), {i: torch.zeros(ROOM, dtype=torch.uint8) for i in (1, 2)}, {2})
    assert one.source.dtype == torch.int64 and one.source.shape == (4, 8)
    assert one.destination.is_contiguous() and one.nbytes == 256


def test_an_empty_copy_is_none_and_a_repeated_element_is_read_again() -> None:
    target = torch.zeros(ROOM, dtype=torch.uint8)
    none = copies_of([(LocalTensor(1, 0, (0, 4), (8, 2)), LocalTensor(2, 0, (0, 4), (8, 2)), 2)])
    assert copied(none, target, target) == 0
    fill = copies_of([(LocalTensor(1, 0, (6,), (0,)), LocalTensor(2, 2, (6,), (2,)), 2)])
    copied(fill, torch.full((ROOM,), 7, dtype=torch.uint8), target)
    assert target[:16].tolist() == [0, 0, *[7] * 12, 0, 0]


@pytest.mark.parametrize(
    ("src", "dst", "says"),
    [
        (LocalTensor(1, ROOM - 8, (5,), (2,)), LocalTensor(2, 0, (5,), (2,)), "leave arena 1"),
        (LocalTensor(1, 0, (5,), (2,)), LocalTensor(2, -2, (5,), (2,)), "leave arena 2"),
        (LocalTensor(1, 0, (5,), (2,)), LocalTensor(3, 0, (5,), (2,)), "arena 3 is not mapped"),
        (LocalTensor(1, 0, (5,), (2,)), LocalTensor(1, 64, (5,), (2,)), "for reading only"),
    ],
)
def test_a_copy_that_must_not_be_is_refused_before_it_runs(src: LocalTensor, dst: LocalTensor, says: str) -> None:
    assert extent(dst.shape, dst.strides, 2) == 10
    arenas = {i: torch.zeros(ROOM, dtype=torch.uint8) for i in (1, 2)}
    with pytest.raises(TransportError, match=says):
        pairs(copies_of([(src, dst, 2)]), arenas, {2})


def test_the_drivers_structures_are_as_long_as_cuda_says() -> None:
    """Compared byte by byte with cuda.bindings 12.9, 13.0 and 13.4 when this was written."""
    properties = cuda_driver.properties(5, rdma=True)
    assert bytes(properties).hex() == "01000000010000000100000005000000" + "0" * 18 + "01" + "0" * 12
    assert bytes(cuda_driver.Access(cuda_driver.Location(1, 5), 3)).hex() == "010000000500000003000000"
    assert (ctypes.sizeof(cuda_driver.Properties), ctypes.sizeof(cuda_driver.Access)) == (32, 12)
    offsets = [getattr(cuda_driver.Copy2D, name).offset for name, *_ in cuda_driver.Copy2D._fields_]
    assert offsets == [0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120]


@no_gpu
def test_a_machine_without_a_driver_says_so_and_what_to_do() -> None:
    for make in (lambda: memory.create(1 << 20, "a"), lambda: memory.MappedDeviceArena(0, 1 << 20, write=True)):
        with pytest.raises(ArenaError, match=r"driver|GPU") as failure:
            make()
        assert "main memory" in str(failure.value) or "CUDA_VISIBLE_DEVICES" in str(failure.value)


@no_gpu
@pytest.mark.parametrize("name", ["nccl", "nvshmem", "cuda"])
def test_a_backend_that_needs_a_gpu_says_what_is_missing(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' cannot run here: no GPU is visible"):
        registry.installed().find(name)


@pytest.mark.parametrize(
    ("version", "cuda"),
    [
        ("cuda: Optional[str] = None\n", ""),
        ("cuda: Optional[str] = '12.8'\n", "12.8"),
        ("cuda = '13.0'\nhip: Optional[str] = None\n", "13.0"),
    ],
)
def test_what_torch_was_built_for_is_read_without_importing_it(tmp_path, monkeypatch, version: str, cuda: str) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "version.py").write_text(f"__version__ = '2.11'\n{version}")
    monkeypatch.setattr(
        registry.importlib.util,
        "find_spec",
        lambda name: type("Spec", (), {"origin": str(package / "__init__.py")}) if name == "torch" else None,
    )
    monkeypatch.setattr(memory, "visible_devices", lambda: 1)
    assert registry.torch_cuda() == cuda
    missing = {backend.name: backend.missing() for backend in registry._own()}
    assert missing["nccl"] == missing["cuda"]
    assert ("has no CUDA" in missing["nccl"]) == (not cuda)
    assert "nvshmem4py is not installed" in missing["nvshmem"]
    assert f"nvshmem4py-cu{(cuda or '13').partition('.')[0]} " in missing["nvshmem"]


def test_what_the_registry_says_of_a_service_is_what_it_says_of_itself() -> None:
    from refitd.copy_services import cuda, nccl, nvshmem

    said = {backend.name: backend.capabilities for backend in registry._own()}
    for service in (nccl.NcclService, nvshmem.NvshmemService, cuda.CudaCopyService):
        assert said[service.name] == service.capabilities


# --- The daemon's accounts of GPU arenas, and their display: mappings, copies and refusals. -------------


MIB = 1 << 20


def told(out: list[Instruction], kind: type) -> list[tuple[int, int]]:
    """Return (worker, arena) of every message of this kind, and clear all messages."""
    found = [(i.worker, i.message.arena) for i in out if isinstance(i, ToWorker) and isinstance(i.message, kind)]
    out.clear()
    return found


def test_an_arena_on_a_gpu_goes_to_one_worker_and_to_another_when_that_needs_it() -> None:
    out = Effects(0.0)
    maps = WorkerArenas(2, ("GPU-a", "GPU-b"))
    maps.add(out, 1, 100, "", write=False)
    maps.add(out, 2, 100, "GPU-a", write=True)
    maps.add(out, 3, 100, "GPU-b", write=False)
    maps.add(out, 4, 100, "GPU-a", write=True)
    maps.add(out, 5, 100, "GPU-c", write=True)
    assert told(out, sidecar.MapArena) == [(0, 1), (1, 1), (0, 2), (1, 3), (0, 4), (0, 5)]
    assert maps.homes({1, 2, 3, 5, 99}) == {2: 0, 3: 1, 5: 0}
    maps.need(out, 0, {1, 2, 3})
    assert told(out, sidecar.MapArena) == [(0, 3)]
    maps.need(out, 0, {1, 2, 3})
    assert out == []
    # a new process gets its own arenas, and others when it needs them
    maps.renewed(out, 0)
    assert told(out, sidecar.MapArena) == [(0, 1), (0, 2), (0, 4), (0, 5)]
    maps.need(out, 0, {3})
    assert told(out, sidecar.MapArena) == [(0, 3)]
    maps.remove(out, 3)
    maps.remove(out, 2)
    assert told(out, local.FreeArena) == [(0, 3), (1, 3), (0, 2), (1, 2)]


def test_a_worker_that_mapped_one_of_two_arenas_maps_the_other_before_they_are_exchanged() -> None:
    out = Effects(0.0)
    maps = WorkerArenas(3, ("GPU-a",))
    maps.add(out, 1, 100, "GPU-a", write=True)
    maps.add(out, 2, 100, "GPU-a", write=True)
    maps.need(out, 1, {2})  # a lane writes there
    out.clear()
    maps.pair(out, 1, 2)
    assert told(out, sidecar.MapArena) == [(1, 1)]
    assert maps.exchange(out, 1, 2) == []
    assert [effect.worker for effect in out if isinstance(effect, ToWorker)] == [0, 1]


def test_what_could_not_be_sent_is_sent_again_when_it_is_needed_as_it_was() -> None:
    out = Effects(0.0)
    maps = WorkerArenas(1)
    maps.add(out, 7, 100, "", write=True)
    first = out[:]
    told(out, sidecar.MapArena)
    maps.doubt(0, 7)
    maps.need(out, 0, {7})
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


def test_bytes_that_differ_after_they_were_written_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The destination of the second copy changes as soon as it has been written."""
    gpus = fake_cuda.install(monkeypatch, 64 * MIB, visible="0")
    fds = [cuda.create(MIB, label, 0) for label in "ab"]
    arenas = {number: cuda.MappedDeviceArena(fd, MIB, 0, write=True) for number, fd in enumerate(fds, 1)}
    for fd in fds:
        os.close(fd)
    noted = [(LocalTensor(1, at, (100,), (4,)), LocalTensor(2, at, (100,), (4,)), 4) for at in (0, 4096, 8192)]
    make = registry.installed().find("cuda").on_device
    assert make is not None
    service = make(0)
    job = service.prepare(copies_of(noted), arenas)
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
    cuda.release_dropped()
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
