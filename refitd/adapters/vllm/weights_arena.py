"""An engine's weights in one arena of refitd: versions flip under them instead of being copied into them."""

from __future__ import annotations

import torch

import refitd


class WeightsArena:
    """Moves weights into an arena of a client; after its daemon is lost, into one of the next client."""

    def __init__(self) -> None:
        self._client: refitd.Client | None = None  # whose arena the weights lie in

    def move(self, client: refitd.Client, weights: dict[str, torch.Tensor], timeout: float) -> str:
        """Move what is to be registered, and nothing else: a flip exchanges everything that an arena holds.

        Nobody may compute with the weights meanwhile. The tensor objects stay, their addresses change.

        Args:
            client: registers them afterwards.
            weights: {name: tensor}, parameters and buffers of the engine themselves, no views of them.
            timeout: seconds for the memory.

        Returns:
            Why they could not be moved and versions are copied; "" if they lie in one arena now.
        """
        if not all(tensor.is_cpu for tensor in weights.values()):
            return "they lie on a GPU, where captured graphs keep addresses"
        if self._client is not None and self._client is not client:
            _take_out(weights)
            self._client = None
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
        self._client = client
        return ""


def _take_out(weights: dict[str, torch.Tensor]) -> None:
    """Give weights memory of their own again; those that share memory still do."""
    copies: dict[int, torch.UntypedStorage] = {}
    for tensor in {id(tensor): tensor for tensor in weights.values()}.values():
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in copies:
            copies[storage.data_ptr()] = storage.clone()
        with torch.inference_mode(tensor.is_inference()):
            own = torch.empty(0, dtype=tensor.dtype)
            own.set_(copies[storage.data_ptr()], tensor.storage_offset(), tensor.shape, tensor.stride())
            tensor.data = own
