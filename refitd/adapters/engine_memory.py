"""An engine's weights in one arena of refitd: versions flip under them instead of being copied into them."""

from __future__ import annotations

import torch

import refitd


def adopt(client: refitd.Client, weights: dict[str, torch.Tensor], timeout: float) -> str:
    """Move what is to be registered, and nothing else: a flip exchanges everything that its arena holds.

    Nobody may compute with the weights meanwhile. The tensor objects stay; their addresses change.

    Args:
        client: registers them afterwards.
        weights: {name: tensor}, parameters and buffers of the engine themselves, no views of them.
        timeout: seconds for the memory.

    Returns:
        Why they stay where they are, and versions are copied; "" if all of them lie in arenas of the client now.
    """
    if not all(tensor.is_cpu for tensor in weights.values()):
        return "not all of them lie in main memory (captured graphs of GPUs keep addresses)"
    module = torch.nn.Module()
    for name, tensor in weights.items():  # not register_parameter, which takes no names with dots
        if isinstance(tensor, torch.nn.Parameter):
            module._parameters[name] = tensor
        else:
            module._buffers[name] = tensor
    try:
        client.adopt(module, timeout=timeout)
    except (refitd.RefusedError, refitd.ArenaError, refitd.DeadlineExceeded) as exc:
        return str(exc)
    return ""
