"""Arenas as torch sees them: their devices, tensors in them, and copies between tensors and arenas."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from refitd.buffers.arena import MappedArena
from refitd.buffers.cuda import MappedDeviceArena
from refitd.buffers.layout import packed_offsets
from refitd.buffers.windows import WindowedArena
from refitd.describe.memory import HOST, gpu_of
from refitd.errors import RefusedError
from refitd.protocol.shards import Place
from refitd.text import shown

Arena = MappedArena | MappedDeviceArena
Home = Arena | WindowedArena  # memory that can contain registered tensors


def settle(gpu: int) -> None:
    """Wait until a GPU has finished this process's work; HOST needs no wait."""
    if gpu != HOST:
        torch.cuda.synchronize(gpu)


def number_of(device: str | torch.device) -> int:
    """Return the number of a GPU by its torch name ("cuda:0"; "cuda" is the current one), HOST for "cpu".

    Raises:
        RefusedError: the device is neither a GPU nor the CPU.
    """
    try:
        found = torch.device(device)
    except Exception as exc:  # a number that is too large raises ValueError; a foreign object may raise anything
        said = (str(exc).splitlines() or [type(exc).__name__])[0]
        raise RefusedError(f"device {shown(device)}: {said}; expected 'cpu' or 'cuda:N'") from exc
    if found.type == "cpu":
        return HOST
    if found.type != "cuda":
        raise RefusedError(f"device {shown(device)}: arenas lie in main memory ('cpu') or on a GPU ('cuda:N')")
    return int(found.index) if found.index is not None else int(torch.cuda.current_device())


def common_gpu(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> int:
    """Return the number of the device that holds all tensors; HOST if none has elements.

    Raises:
        RefusedError: the tensors are on several devices; the error names one tensor per device.
    """
    found: dict[int, str] = {}
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.numel():  # an empty tensor has no memory
            found.setdefault(gpu_of(tensor), name)
    if len(found) > 1:
        where = {gpu: "in main memory" if gpu == HOST else f"on GPU {gpu}" for gpu in found}
        places = ", ".join(f"{name} {where[gpu]}" for gpu, name in found.items())
        raise RefusedError(
            f"tensors of one registration lie in several places ({places}); bring them to one, or register with "
            "device='cpu', which copies all of them through main memory"
        )
    return next(iter(found), HOST)


_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


# Parts of a long copy about which `Wrote` is called.
STEP_BYTES = 32 << 20

# Called after a part of an arena was written, or queued to be, with its offset and bytes.
Wrote = Callable[[int, int], object] | None


class ArenaCopies:
    """Precomputed copies between tensors and an arena. The tensors must stay at their addresses."""

    def __init__(self, tensors: Sequence[torch.Tensor], offsets: Sequence[int]) -> None:
        self._all = list(zip(tensors, offsets, strict=True))
        plain = [tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors]
        self._rest = [pair for pair, is_plain in zip(self._all, plain, strict=True) if not is_plain]
        spans = [
            (tensor.data_ptr(), offset, tensor.numel() * tensor.element_size())
            for (tensor, offset), is_plain in zip(self._all, plain, strict=True)
            if is_plain
        ]
        columns = np.array([span for span in spans if span[2]], np.uint64).reshape(-1, 3)
        here, there, size = columns.T
        # merge spans that are adjacent at both ends into one copy
        joins = (here[1:] == here[:-1] + size[:-1]) & (there[1:] == there[:-1] + size[:-1])
        first = np.flatnonzero(np.append(True, ~joins)[: len(columns)])
        sizes = np.add.reduceat(size, first) if len(first) else size
        self._runs = list(zip(here[first].tolist(), there[first].tolist(), sizes.tolist(), strict=True))

    def perform(self, arena: Arena, *, into_arena: bool, wrote: Wrote = None) -> None:
        """Copy all tensors into an arena, or out of it. `wrote` is called with the offset and bytes of each part."""
        if arena.device != HOST:
            for tensor, offset in self._all:
                _copy(tensor, arena, offset, into_arena=into_arena)
                if wrote is not None:
                    wrote(offset, tensor.numel() * tensor.element_size())
            return
        # one memmove for each run; torch would wake OpenMP threads
        memmove, base = ctypes.memmove, arena.address
        if into_arena:
            for here, there, nbytes in self._runs:
                for at in range(0, nbytes, nbytes if wrote is None else STEP_BYTES):
                    size = min(nbytes - at, STEP_BYTES) if wrote is not None else nbytes
                    memmove(base + there + at, here + at, size)
                    if wrote is not None:
                        wrote(there + at, size)
        else:
            for here, there, nbytes in self._runs:
                memmove(here, base + there, nbytes)
        for tensor, offset in self._rest:
            _copy(tensor, arena, offset, into_arena=into_arena)
            if wrote is not None:
                wrote(offset, tensor.numel() * tensor.element_size())


def same_bytes(tensor: torch.Tensor, arena: Arena, offset: int) -> bool:
    """Return whether a tensor's bytes, in row-major order, equal those at `offset` of an arena."""
    if not tensor.numel():
        return True
    held = view_of(arena, offset, tensor.shape, tensor.dtype)
    if tensor.device.type == "cpu" and arena.device == HOST and tensor.is_contiguous():
        size = tensor.numel() * tensor.element_size()
        differs: int = _libc.memcmp(tensor.data_ptr(), held.data_ptr(), size)
        return not differs
    # compare bytes, because a NaN does not equal itself
    mine, theirs = (
        (t.view(torch.uint8) if t.dtype == torch.bool else t).detach().contiguous().view(-1).view(torch.uint8)
        for t in (tensor, held)
    )
    return torch.equal(mine, theirs.to(mine.device))


def tensors_in(arena: Arena, wanted: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> dict[str, torch.Tensor]:
    """Return tensors of these shapes and dtypes laid out in a writable arena."""
    offsets, _ = packed_offsets([prod(shape) * dtype.itemsize for shape, dtype in wanted.values()])
    return {
        name: view_of(arena, offset, shape, dtype)
        for offset, (name, (shape, dtype)) in zip(offsets, wanted.items(), strict=True)
    }


def arena_of(name: str, tensor: Any, arenas: Mapping[int, Home]) -> int | None:
    """Return the number of the arena that holds a tensor; None for a tensor without elements.

    Raises:
        RefusedError: the value is not a tensor, or is in none of the arenas.
    """
    if not isinstance(tensor, torch.Tensor):
        raise RefusedError(f"{name} is {shown(tensor)}, expected a tensor of client.allocate()")
    if not tensor.numel():
        return None
    place = place_of(tensor, arenas)
    if place is None:
        raise RefusedError(
            f"{name}: it lies in no arena that this client has allocated, or that is free already; give back what "
            "client.allocate() gave"
        )
    return place.arena


def packed_bytes(wanted: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> int:
    """Return the size in bytes of an arena for these tensors."""
    return packed_offsets([prod(shape) * dtype.itemsize for shape, dtype in wanted.values()])[1]


def view_of(arena: Arena, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over the bytes of an arena from `offset` on."""
    if prod(shape) == 0:
        where = arena.tensor.device if isinstance(arena, MappedDeviceArena) else None
        return torch.empty(tuple(shape), dtype=dtype, device=where)
    if isinstance(arena, MappedDeviceArena):  # make a new storage, like in main memory
        return arena.tensor_at(offset, prod(shape) * dtype.itemsize).view(dtype).view(tuple(shape))
    with warnings.catch_warnings():
        # a staging arena is mapped read-only, and we only read it
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(arena.bytes, dtype=dtype, count=prod(shape), offset=offset)
    return flat.view(tuple(shape))


def _copy(tensor: torch.Tensor, arena: Arena, offset: int, *, into_arena: bool) -> None:
    staged = view_of(arena, offset, tensor.shape, tensor.dtype)
    if into_arena:
        copy_bytes(staged, tensor)
    else:
        copy_bytes(tensor, staged)


def copy_bytes(to: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy `tensor` into `to`, byte for byte; both have the same shape and dtype."""
    if to.device.type == tensor.device.type == "cpu" and to.is_contiguous() and tensor.is_contiguous():
        ctypes.memmove(to.data_ptr(), tensor.data_ptr(), to.numel() * to.element_size())  # without waking OpenMP
        return
    # no_grad is not enough: an engine's tensors may be inference tensors, which are writable only in inference mode
    with torch.inference_mode():
        # torch normalises every nonzero byte of a bool to 1, and cannot copy e8m0
        if tensor.dtype in (torch.bool, torch.float8_e8m0fnu):
            to, tensor = to.view(torch.uint8), tensor.view(torch.uint8)
        to.copy_(tensor)


def place_of(tensor: torch.Tensor, arenas: Mapping[int, Home]) -> Place | None:
    """Return the tensor's place in the arena that holds it; None if no arena does."""
    if tensor.device.type not in ("cpu", "cuda") or any(stride < 0 for stride in tensor.stride()):
        return None
    es = tensor.element_size()
    span = (sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1) * es
    for number, arena in arenas.items():
        if arena.device != gpu_of(tensor):
            continue
        offset = arena.offset_of(tensor.data_ptr(), span)
        if offset is not None:
            return Place(number, offset, byte_strides(tensor))
    return None


def byte_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's strides in bytes."""
    return tuple(stride * tensor.element_size() for stride in tensor.stride())
