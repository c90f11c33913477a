"""Checks of arenas on one GPU: between processes, digests, swaps, copies, and CUDA graphs over them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from refitd.buffers import cuda as memory
from refitd.buffers.layout import packed_offsets, row_major_strides
from tests.gpu.outcomes import CHECKS_FILE, DEVICE, MIB, Outcome, timed

AIM = 0.9  # of the plain copy's bandwidth


def arena(seconds: float) -> Outcome:
    from refitd.buffers import handoff

    nbytes = 64 * MIB + 12345
    fd = memory.create(nbytes, "gpu-check")
    here = memory.MappedDeviceArena(fd, nbytes, write=True)
    pattern = torch.arange(nbytes, device=DEVICE).remainder(251).to(torch.uint8)
    here.tensor.copy_(pattern)
    torch.cuda.synchronize()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        child = subprocess.Popen(
            [sys.executable, CHECKS_FILE, "arena", str(seconds), str(theirs.fileno()), str(nbytes)],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        ours.settimeout(seconds)
        handoff.send(ours, b"arena", (fd,))
        os.close(fd)
        said, _ = handoff.receive(ours)
        assert said == b"written", said
        assert torch.equal(here.tensor, pattern + 1), "what the other process wrote is not seen here"
        here.close()
        handoff.send(ours, b"closed")
        said, _ = handoff.receive(ours)
        assert said == b"still there", said
        assert child.wait(seconds) == 0
    return Outcome({"MiB": nbytes / MIB})


def arena_child(connection: int, nbytes: int) -> None:
    from refitd.buffers import handoff

    with socket.socket(fileno=connection) as there:
        _, (fd,) = handoff.receive(there)
        pattern = torch.arange(nbytes, device=DEVICE).remainder(251).to(torch.uint8)
        with memory.MappedDeviceArena(fd, nbytes, write=False) as reading:
            assert torch.equal(reading.tensor, pattern), "the arena holds something else in another process"
        writing = memory.MappedDeviceArena(fd, nbytes, write=True)
        os.close(fd)
        writing.tensor.add_(1)
        torch.cuda.synchronize()
        handoff.send(there, b"written")
        handoff.receive(there)
        assert torch.equal(writing.tensor, pattern + 1), "the arena went with the process that had made it"
        writing.close()
        handoff.send(there, b"still there")


def digest(seconds: float) -> Outcome:
    from refitd.copy_services.digests import DeviceDigests

    data = torch.randint(0, 256, (33 * MIB + 7,), dtype=torch.uint8)
    there, device, host = data.to(DEVICE), DeviceDigests(DEVICE), DeviceDigests(torch.device("cpu"))
    for start, end in ((0, len(data)), (0, 0), (5, 6), (3, 9 * MIB), (4, 4 * MIB + 4)):
        found, expected = device.new(), host.new()
        found.update(there[start:end])
        for at in range(start, end, 5 * MIB + 1):
            expected.update(data[at : min(end, at + 5 * MIB + 1)])
        assert found.digest() == expected.digest(), (start, end)
    whole = there[: 32 * MIB]

    def once() -> None:
        made = device.new()
        made.update(whole)
        made.sums()

    return Outcome({"GB/s": len(whole) / timed(once) / 1e9})


@dataclass
class Shard:
    """Tensors in a separate arena."""

    number: int
    arena: memory.MappedDeviceArena
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def make(cls, number: int, shapes: Mapping[str, tuple[int, ...]]) -> Shard:
        _, total = packed_offsets([2 * torch.Size(shape).numel() for shape in shapes.values()])
        fd = memory.create(total, f"shard {number}")
        made = memory.MappedDeviceArena(fd, total, write=True)
        os.close(fd)
        return cls(number, made, shapes)

    def offsets(self) -> dict[str, int]:
        offsets, _ = packed_offsets([2 * torch.Size(shape).numel() for shape in self.shapes.values()])
        return dict(zip(self.shapes, offsets, strict=True))

    def tensors(self) -> dict[str, torch.Tensor]:
        whole, offsets = self.arena.tensor, self.offsets()
        return {
            name: whole[offsets[name] : offsets[name] + 2 * torch.Size(shape).numel()].view(torch.bfloat16).view(shape)
            for name, shape in self.shapes.items()
        }

    def place(self, name: str) -> Any:
        from refitd.addressing.places import LocalTensor

        shape = self.shapes[name]
        return LocalTensor(self.number, self.offsets()[name], shape, row_major_strides(shape, 2))


def mlp_shapes(width: int, layers: int) -> dict[str, tuple[int, ...]]:
    return {f"{i}.{kind}": shape for i in range(layers) for kind, shape in (("w", (width, width)), ("b", (width,)))}


def run_mlp(tensors: Mapping[str, torch.Tensor], x: torch.Tensor, layers: int) -> torch.Tensor:
    for i in range(layers):
        x = torch.nn.functional.gelu(torch.nn.functional.linear(x, tensors[f"{i}.w"], tensors[f"{i}.b"]))
    return x


def capture_mlp(
    tensors: Mapping[str, torch.Tensor], x: torch.Tensor, layers: int
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Capture `run_mlp` as a graph, warmed up first as torch asks; return it and the tensor that a replay writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run_mlp(tensors, x, layers)
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        y = run_mlp(tensors, x, layers)
    return captured, y


def copy_all(source: Shard, target: Shard, verify: bool = True) -> Any:
    from refitd.copy_services.cuda import CudaCopyService
    from tests.support.places import copies_of

    copies = copies_of([(source.place(name), target.place(name), 2) for name in source.shapes])
    job = CudaCopyService().prepare(copies, {shard.number: shard.arena for shard in (source, target)})
    return job.run(verify=verify, on_progress=lambda done: None, timeout=60)


def swap(seconds: float) -> Outcome:
    shapes = mlp_shapes(1024, 4)
    source, live = Shard.make(1, shapes), Shard.make(2, shapes)
    tensors = live.tensors()
    pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    for version in range(3):
        for tensor in source.tensors().values():
            tensor.normal_(version)
        torch.cuda.synchronize()
        copy_all(source, live)
        for name, tensor in source.tensors().items():
            assert torch.equal(tensor, tensors[name]), f"version {version}: {name} differs"
    assert pointers == {name: tensor.data_ptr() for name, tensor in tensors.items()}
    assert pointers == {name: tensor.data_ptr() for name, tensor in live.tensors().items()}
    return Outcome({"tensors": len(shapes), "versions": 3})


def copies(seconds: float) -> Outcome:
    from refitd.addressing.copies import cut
    from refitd.addressing.places import LocalTensor
    from refitd.copy_services.cuda import CudaCopyService
    from tests.support.places import copies_of

    free, _ = torch.cuda.mem_get_info()
    columns = 16384
    rows = max(64, min(131072, free // 8 // (2 * columns)) // 64 * 64)
    source, target = Shard.make(1, {"w": (rows, columns)}), Shard.make(2, {"w": (rows, columns)})
    a, b = source.tensors()["w"], target.tensors()["w"]
    a.view(torch.int16).random_()
    nbytes = a.numel() * 2
    service = CudaCopyService()
    arenas = {1: source.arena, 2: target.arena}
    plain = timed(lambda: b.copy_(a))
    figures: dict[str, object] = {"MiB": nbytes // MIB, "plain GB/s": nbytes / plain / 1e9}

    half = columns // 2  # copy a rank's half of the columns from the whole tensor into a separate one
    ends = LocalTensor(1, 2 * half, (rows, half), (2 * columns, 2)), LocalTensor(2, 0, (rows, half), (2 * half, 2))
    packed = b.view(-1)[: rows * half].view(rows, half)
    strided = timed(lambda: packed.copy_(a[:, half:]))
    figures["plain strided GB/s"] = nbytes / 2 / strided / 1e9
    for name, pair, expected, reference in (
        ("whole", (source.place("w"), target.place("w")), lambda: (a, b), plain),
        ("columns", ends, lambda: (a[:, half:], packed), strided),
    ):
        job = service.prepare(cut(copies_of([(*pair, 2)]))[0], arenas)
        for verify in (False, True):
            b.zero_()
            torch.cuda.synchronize()
            job.run(verify=verify, on_progress=lambda done: None, timeout=60)
            read, written = expected()
            # as integers: random bits may be no numbers
            assert torch.equal(read.view(torch.int16), written.view(torch.int16)), f"{name}: the copy differs"
            taken = timed(lambda job=job, verify=verify: job.run(verify=verify, on_progress=lambda done: None))
            figures[f"{name}{' proven' if verify else ''}, of plain"] = reference / taken
    slow = [
        key for key, value in figures.items() if key.endswith("of plain") and isinstance(value, float) and value < AIM
    ]
    return Outcome(figures, f"below the aim of {AIM}: {'; '.join(slow)}" if slow else "")


def graph(seconds: float) -> Outcome:
    layers, shapes = 4, mlp_shapes(512, 4)
    source, live = Shard.make(1, shapes), Shard.make(2, shapes)
    for tensor in live.tensors().values():
        tensor.normal_(0, 0.05)
    tensors = live.tensors()
    x = torch.randn(16, 512, device=DEVICE, dtype=torch.bfloat16)
    captured, y = capture_mlp(tensors, x, layers)
    for version in range(3):
        for tensor in source.tensors().values():
            tensor.normal_(0, 0.05)
        torch.cuda.synchronize()
        copy_all(source, live)
        captured.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in source.tensors().items())
        assert torch.equal(y, run_mlp(tensors, x, layers)), f"version {version}: the replay differs from eager"
    return Outcome({"versions": 3})


def flip(seconds: float) -> Outcome:
    """Check that a graph captured over one arena reads the other arena's weights after each exchange."""
    layers, shapes = 4, mlp_shapes(512, 4)
    live, staging = Shard.make(1, shapes), Shard.make(2, shapes)
    tensors, x = live.tensors(), torch.randn(16, 512, device=DEVICE, dtype=torch.bfloat16)
    for tensor in tensors.values():
        tensor.normal_(0, 0.05)
    captured, y = capture_mlp(tensors, x, layers)
    pauses = []
    for version in range(5):
        staged = {name: tensor.normal_(0, 0.05).clone() for name, tensor in staging.tensors().items()}
        torch.cuda.synchronize()
        began = time.perf_counter()
        live.arena.exchange(staging.arena)
        pauses.append(time.perf_counter() - began)
        captured.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in staged.items()), f"version {version}"
        assert torch.equal(y, run_mlp(staged, x, layers)), f"version {version}: the replay reads other weights"
    return Outcome({"versions": 5, "exchange us": sorted(pauses)[2] * 1e6})
