"""Checks of flips by size: the pause while two arenas exchange their memory, alone and under a captured graph."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from refitd.buffers import cuda as memory
from refitd.buffers.layout import packed_offsets
from tests.gpu.device import GPU
from tests.gpu.memory_checks import mlp_shapes, run_mlp
from tests.gpu.outcomes import MIB, Outcome, Skip

GIB = 1 << 30
ROUNDS = 5
LAYERS, WIDTH = 4, 512
SPARE = 1 << 30  # for torch, graphs and comparisons


def flip_of(gib: int) -> Callable[[float], Outcome]:
    """Return the check of arenas of so many GiB."""
    return lambda seconds: flip(gib)


def flip(gib: int) -> Outcome:
    """Exchange two arenas ROUNDS times each way; compare all bytes, and the replays of a graph over the first one.

    The graph reads weights at both ends of the arena, so that it depends on the first and the last page.
    """
    nbytes = GPU.scaled(gib * GIB)
    free, needed = GPU.memory()[0], 2 * nbytes + GPU.scaled(SPARE)
    if free < needed:
        raise Skip(
            f"needs {needed // MIB} MiB of free GPU memory for two arenas of {nbytes // MIB} MiB, has {free // MIB}"
        )
    live, staging = (made(nbytes, label) for label in ("live", "staging"))
    figures: dict[str, object] = {"MiB": nbytes // MIB}
    figures["pause us"], figures["longest us"] = pauses(live, staging, nbytes, lambda: None)

    tensors, x = weights(live, nbytes), torch.randn(16, WIDTH, device=GPU.device, dtype=torch.bfloat16)
    for tensor in tensors.values():
        tensor.normal_(0, 0.05)
    replay, y = GPU.capture(lambda: run_mlp(tensors, x, LAYERS))
    pointers = [tensor.data_ptr() for tensor in tensors.values()]
    staged: dict[str, torch.Tensor] = {}

    def stage() -> None:
        staged.update({name: t.normal_(0, 0.05).clone() for name, t in weights(staging, nbytes).items()})

    def check() -> None:
        replay()
        GPU.synchronize()
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in staged.items()), "eager reads other weights"
        assert torch.equal(y, run_mlp(staged, x, LAYERS)), "the replay reads other weights"

    found = pauses(live, staging, nbytes, check, stage)
    figures["pause us, with a graph"], figures["longest us, with a graph"] = found
    assert pointers == [tensor.data_ptr() for tensor in tensors.values()]
    return Outcome(figures)


def made(nbytes: int, label: str) -> memory.MappedDeviceArena:
    fd = memory.create(nbytes, label)
    arena = memory.MappedDeviceArena(fd, nbytes, write=True)
    os.close(fd)
    return arena


def weights(arena: memory.MappedDeviceArena, nbytes: int) -> dict[str, torch.Tensor]:
    """Return the tensors of an MLP in an arena: the first half at its start, the others at its end."""
    shapes, whole, found = mlp_shapes(WIDTH, LAYERS), arena.tensor, {}
    sizes = [2 * torch.Size(shape).numel() for shape in shapes.values()]
    offsets, total = packed_offsets(sizes)
    for i, (name, shape) in enumerate(shapes.items()):
        at = offsets[i] if i < len(shapes) // 2 else nbytes - total + offsets[i]
        found[name] = whole[at : at + sizes[i]].view(torch.bfloat16).view(shape)
    return found


def pauses(
    live: memory.MappedDeviceArena,
    staging: memory.MappedDeviceArena,
    nbytes: int,
    check: Callable[[], None],
    stage: Callable[[], None] = lambda: None,
) -> tuple[float, float]:
    """Exchange ROUNDS times; return the median and the longest pause in microseconds."""
    taken = []
    live.tensor.fill_(0)
    for number in range(1, ROUNDS + 1):
        staging.tensor.fill_(number)
        stage()
        GPU.synchronize()
        began = time.perf_counter()
        live.exchange(staging)
        taken.append((time.perf_counter() - began) * 1e6)
        check()
        middle = live.tensor[nbytes // 8 * 3 : nbytes // 8 * 5]  # between the weights
        for chunk in middle.split(256 * MIB):
            low, high = torch.aminmax(chunk)
            assert int(low) == int(high) == number, f"exchange {number}: the live arena has other bytes"
    return sorted(taken)[ROUNDS // 2], max(taken)
