"""Numbers of GPUs in a client process, and which device the tensors of a registration lie on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from refitd.buffers.arena import MappedArena
from refitd.buffers.cuda import MappedDeviceArena
from refitd.buffers.windows import WindowedArena
from refitd.describe.memory import HOST, gpu_of
from refitd.errors import RefusedError
from refitd.text import shown

Arena = MappedArena | MappedDeviceArena
Home = Arena | WindowedArena  # what tensors may lie in


def settle(gpu: int) -> None:
    """Wait until a GPU has finished this process's work; HOST returns at once."""
    if gpu != HOST:
        torch.cuda.synchronize(gpu)


def number_of(device: str | torch.device) -> int:
    """Return the number of a GPU by its torch name ("cuda:0"; "cuda" is the current one), HOST for "cpu".

    Raises:
        RefusedError: the device is neither.
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
        RefusedError: the tensors lie on several devices; the error names one tensor of each.
    """
    found: dict[int, str] = {}
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.numel():  # an empty tensor lies nowhere
            found.setdefault(gpu_of(tensor), name)
    if len(found) > 1:
        where = {gpu: "in main memory" if gpu == HOST else f"on GPU {gpu}" for gpu in found}
        places = ", ".join(f"{name} {where[gpu]}" for gpu, name in found.items())
        raise RefusedError(
            f"tensors of one registration lie in several places ({places}); bring them to one, or register with "
            "device='cpu', which copies all of them through main memory"
        )
    return next(iter(found), HOST)
