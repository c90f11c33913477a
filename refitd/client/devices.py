"""GPUs as a client has them: which one a tensor lies on, and where refitd's arenas for its tensors go."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from refitd.buffers.arena import MappedArena
from refitd.buffers.cuda import MappedDeviceArena
from refitd.describe.memory import HOST, gpu_of
from refitd.errors import RefusedError
from refitd.text import shown

Arena = MappedArena | MappedDeviceArena


def settle(gpu: int) -> None:
    """Return once a GPU has done everything this process gave it; HOST has nothing to do."""
    if gpu != HOST:
        torch.cuda.synchronize(gpu)


def number_of(device: str | torch.device) -> int:
    """Return the number of a GPU named as torch does ("cuda:0"; "cuda" is the current one), HOST for "cpu".

    Raises:
        RefusedError: it is neither.
    """
    try:
        found = torch.device(device)
    except Exception as exc:  # a number that is too large is a ValueError; what shows itself may raise anything
        said = (str(exc).splitlines() or [type(exc).__name__])[0]
        raise RefusedError(f"device {shown(device)}: {said}; expected 'cpu' or 'cuda:N'") from exc
    if found.type == "cpu":
        return HOST
    if found.type != "cuda":
        raise RefusedError(f"device {shown(device)}: arenas lie in main memory ('cpu') or on a GPU ('cuda:N')")
    return int(found.index) if found.index is not None else int(torch.cuda.current_device())


def common_gpu(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> int:
    """Return where all tensors lie, by number; HOST where none has elements.

    Raises:
        RefusedError: they lie in several places; names one of each.
    """
    found: dict[int, str] = {}
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.numel():  # one without elements lies nowhere
            found.setdefault(gpu_of(tensor), name)
    if len(found) > 1:
        where = {gpu: "in main memory" if gpu == HOST else f"on GPU {gpu}" for gpu in found}
        places = ", ".join(f"{name} {where[gpu]}" for gpu, name in found.items())
        raise RefusedError(
            f"tensors of one registration lie in several places ({places}); bring them to one, or register with "
            "device='cpu', which copies all of them through main memory"
        )
    return next(iter(found), HOST)
