"""Checks of arenas on one GPU: between processes, digests, and a CUDA graph over tensors that are swapped."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from refitd.buffers import cuda as memory
from refitd.buffers.layout import packed_offsets, row_major_strides
from tests.gpu.device import GPU
from tests.gpu.outcomes import CHECKS_FILE, MIB, Outcome


def arena(seconds: float) -> Outcome:
    from refitd.buffers import handoff

    nbytes = GPU.scaled(64 * MIB) + 12345
    fd = memory.create(nbytes, "gpu-check")
    here = memory.MappedDeviceArena(fd, nbytes, write=True)
    pattern = torch.arange(nbytes, device=GPU.device).remainder(251).to(torch.uint8)
    here.tensor.copy_(pattern)
    GPU.synchronize()
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
        pattern = torch.arange(nbytes, device=GPU.device).remainder(251).to(torch.uint8)
        with memory.MappedDeviceArena(fd, nbytes, write=False) as reading:
            assert torch.equal(reading.tensor, pattern), "the arena holds something else in another process"
        writing = memory.MappedDeviceArena(fd, nbytes, write=True)
        os.close(fd)
        writing.tensor.add_(1)
        GPU.synchronize()
        handoff.send(there, b"written")
        handoff.receive(there)
        assert torch.equal(writing.tensor, pattern + 1), "the arena went with the process that had made it"
        writing.close()
        handoff.send(there, b"still there")


def digest(seconds: float) -> Outcome:
    from refitd.copy_services.digests import DeviceDigests

    data = torch.randint(0, 256, (33 * MIB + 7,), dtype=torch.uint8)
    there, device, host = data.to(GPU.device), DeviceDigests(GPU.device), DeviceDigests(torch.device("cpu"))
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

    rate, copied = len(whole) / GPU.seconds(once) / 1e9, GPU.copy_rate()
    # a copy reads and writes each byte, a digest only reads it
    return Outcome({"device copy GB/s": copied, "GB/s": rate, "of device copy": rate / copied})


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


def copy_all(source: Shard, target: Shard, verify: bool = True) -> Any:
    from refitd.copy_services.cuda import CudaCopyService
    from tests.support.places import copies_of

    copies = copies_of([(source.place(name), target.place(name), 2) for name in source.shapes])
    job = CudaCopyService().prepare(copies, {shard.number: shard.arena for shard in (source, target)})
    return job.run(verify=verify, on_progress=lambda done: None, timeout=60)


def graph(seconds: float) -> Outcome:
    layers, shapes = 4, mlp_shapes(512, 4)
    source, live = Shard.make(1, shapes), Shard.make(2, shapes)
    for tensor in live.tensors().values():
        tensor.normal_(0, 0.05)
    tensors = live.tensors()
    x = torch.randn(16, 512, device=GPU.device, dtype=torch.bfloat16)
    replay, y = GPU.capture(lambda: run_mlp(tensors, x, layers))
    pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    for version in range(3):
        for tensor in source.tensors().values():
            tensor.normal_(0, 0.05)
        GPU.synchronize()
        copy_all(source, live)
        replay()
        GPU.synchronize()
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in source.tensors().items())
        assert torch.equal(y, run_mlp(tensors, x, layers)), f"version {version}: the replay differs from eager"
    assert pointers == {name: tensor.data_ptr() for name, tensor in live.tensors().items()}
    return Outcome({"versions": 3})
