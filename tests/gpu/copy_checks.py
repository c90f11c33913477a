"""Checks of copies on one GPU: right bytes, and their rate beside the physical limit, measured in the same run."""

from __future__ import annotations

import os
from typing import Any

import torch

from refitd.addressing.copies import cut
from refitd.addressing.places import LocalTensor
from refitd.buffers.layout import row_major_strides
from refitd.copy_services.cuda import CudaCopyService
from tests.gpu.device import GPU
from tests.gpu.memory_checks import Shard
from tests.gpu.outcomes import MIB, Outcome
from tests.support.places import copies_of

AIM = 0.9  # of the plain copy's bandwidth
COLUMNS = 16384


def rows() -> int:
    """Return the rows of COLUMNS of bfloat16 that fill 4 GiB, or an eighth of the free memory."""
    return max(64, min(GPU.scaled(131072), GPU.memory()[0] // 8 // (2 * COLUMNS)) // 64 * 64)


def judged(figures: dict[str, object]) -> Outcome:
    slow = [
        key
        for key, value in figures.items()
        if key.endswith("of plain") and isinstance(value, float) and value < AIM and not GPU.is_emulated
    ]
    return Outcome(figures, f"below the aim of {AIM}: {'; '.join(slow)}" if slow else "")


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    # as integers: random bits may be no numbers
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def copies(seconds: float) -> Outcome:
    columns, height = COLUMNS, rows()
    source, target = Shard.make(1, {"w": (height, columns)}), Shard.make(2, {"w": (height, columns)})
    a, b = source.tensors()["w"], target.tensors()["w"]
    a.view(torch.int16).random_()
    nbytes = a.numel() * 2
    service = CudaCopyService()
    arenas = {1: source.arena, 2: target.arena}
    limit, plain = GPU.copy_rate(), GPU.seconds(lambda: b.copy_(a))
    figures: dict[str, object] = {"MiB": nbytes // MIB, "device copy GB/s": limit, "plain GB/s": nbytes / plain / 1e9}

    half = columns // 2  # copy a rank's half of the columns from the whole tensor into a separate one
    ends = LocalTensor(1, 2 * half, (height, half), (2 * columns, 2)), LocalTensor(2, 0, (height, half), (2 * half, 2))
    packed = b.view(-1)[: height * half].view(height, half)
    strided = GPU.seconds(lambda: packed.copy_(a[:, half:]))
    figures["plain strided GB/s"] = nbytes / 2 / strided / 1e9
    for name, pair, (read, written), reference, size in (
        ("whole", (source.place("w"), target.place("w")), (a, b), plain, nbytes),
        ("columns", ends, (a[:, half:], packed), strided, nbytes // 2),
    ):
        job = service.prepare(cut(copies_of([(*pair, 2)]))[0], arenas)
        for verify in (False, True):
            b.zero_()
            GPU.synchronize()
            way = job.run(verify=verify, on_progress=lambda done: None, timeout=60).paths
            assert same(read, written), f"{name}: the copy differs"
            taken = GPU.seconds(lambda job=job, verify=verify: job.run(verify=verify, on_progress=lambda done: None))
            called = f"{name}{' proven' if verify else ''}, {' '.join(way)}"
            figures[f"{called}, GB/s"] = size / taken / 1e9
            figures[f"{called}, of device copy"] = size / taken / 1e9 / limit
            figures[f"{called}, of plain"] = reference / taken
    return judged(figures)


def host_copies(seconds: float) -> Outcome:
    """Check both directions between a file of main memory and an arena, beside torch's copies of pinned memory."""
    from refitd.buffers.arena import MappedArena
    from refitd.buffers.arena import create as create_in_main_memory

    height = max(64, rows() // 8)
    shape = (height, COLUMNS)
    nbytes = 2 * height * COLUMNS
    there = Shard.make(1, {"w": shape})
    tensor = there.tensors()["w"]
    fd = create_in_main_memory(nbytes, "gpu-check")
    here = MappedArena(fd, nbytes, write=True)
    os.close(fd)
    host = torch.from_numpy(here.bytes).view(torch.bfloat16).view(shape)
    host.view(torch.int16).random_()
    place = LocalTensor(2, 0, shape, row_major_strides(shape, 2))
    service, arenas = CudaCopyService(), {1: there.arena, 2: here}
    engine: Any = service._engine(0)
    pin = engine.pin
    pinned: Any = torch.empty_like(host) if GPU.is_emulated else torch.empty_like(host, pin_memory=True)
    figures: dict[str, object] = {"MiB": nbytes // MIB, "device copy GB/s": GPU.copy_rate()}
    for name, ends, (read, written), plain in (
        ("to the GPU", (place, there.place("w")), (host, tensor), lambda: tensor.copy_(pinned, non_blocking=True)),
        ("from the GPU", (there.place("w"), place), (tensor, host), lambda: pinned.copy_(tensor, non_blocking=True)),
    ):
        reference = GPU.seconds(plain)
        written.zero_()
        read.view(torch.int16).random_()
        GPU.synchronize()
        job = service.prepare(cut(copies_of([(*ends, 2)]))[0], arenas)
        figures[f"plain pinned {name} GB/s"] = nbytes / reference / 1e9
        for is_pinned, verify in ((True, False), (True, True), (False, False), (False, True)):
            engine.pin = pin if is_pinned else lambda arena: False
            written.zero_()
            GPU.synchronize()
            way = job.run(verify=verify, on_progress=lambda done: None, timeout=60).paths
            assert same(read.cpu(), written.cpu()), f"{name}: the copy differs"
            taken = GPU.seconds(lambda job=job, verify=verify: job.run(verify=verify, on_progress=lambda done: None))
            called = f"{name}{' proven' if verify else ''}, {' '.join(way)}"
            figures[f"{called}, GB/s"] = nbytes / taken / 1e9
            figures[f"{called}, of plain pinned"] = reference / taken
    service.close()
    return Outcome(figures)
