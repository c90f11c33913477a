"""Tensors on GPUs that are memory files, in arenas or private, for tests of daemons."""

from __future__ import annotations

import torch

import refitd
from refitd.testing import Daemon
from tests.support.fake_torch.device_shim import put_on_gpu

MIB = 1 << 20
GPU_BYTES = 256 * MIB
# workers import torch with their first arena on a GPU
DEADLINES = "[deadlines]\nplan_s = 60.0\nstage_s = 60.0\ncommit_s = 20.0\n"
Tensors = dict[str, torch.Tensor]


def allocated(client: refitd.Client, like: Tensors, device: str) -> Tensors:
    found = client.allocate({name: (tuple(t.shape), t.dtype) for name, t in like.items()}, device=device)
    for tensor in found.values():
        tensor.zero_()
    return found


def copy_into(tensors: Tensors, values: Tensors) -> None:
    for name, tensor in tensors.items():
        tensor.copy_(values[name])


def private(like: Tensors, gpu: int) -> Tensors:
    return {name: put_on_gpu(torch.zeros_like(t), gpu) for name, t in like.items()}


def device_bytes(daemon: Daemon, node: str = "") -> dict[str, int]:
    found = daemon.node_of(node) if node else daemon.node()
    return {gpu.device: gpu.arenas for gpu in found.gpus}
