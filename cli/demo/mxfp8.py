"""The demo engine that holds its projections in MXFP8, and the bytes it must hold at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from refitd.mxfp8.format import BLOCK, quantize
from refitd_cli.demo.layout import Array, BlockSplit, RankPosition, indices

if TYPE_CHECKING:
    import torch

    from refitd_cli.demo.model import DemoModel

PATTERN = "decoder.layers.*.linear_*.weight"


def is_converted(name: str) -> bool:
    """Whether this tensor of the model, by its local or its whole name, is held in MXFP8."""
    return name.startswith("decoder.layers.") and ".linear_" in name and name.endswith(".weight")


def parts(whole: Array) -> dict[str, Array]:
    """Return data and scales of a whole tensor (bfloat16 as integers of its bits), converted once."""
    data = np.empty(whole.shape, np.uint8)
    scale = np.empty((whole.shape[0], whole.shape[1] // BLOCK), np.uint8)
    quantize(np.ascontiguousarray(whole).view(np.uint16), data, scale)
    return {"data": data, "scale": scale}


def shard_of_part(which: str, part: Array, cut: BlockSplit | None, layout: RankPosition) -> Array:
    """Return what one rank holds of the data or the scales of a whole tensor."""
    if cut is None:
        return part
    held = indices(cut, layout.tp_rank, layout.tp_size)
    if which == "scale" and cut.dim == part.ndim - 1:
        held = [index // BLOCK for index in held[::BLOCK]]
    return part.take(held, axis=cut.dim)


class Quantized:
    """A model whose projections are held in MXFP8.

    Processors without MXFP8 cannot multiply with them: the layers keep a bfloat16 copy, which every commit derives
    again from the MXFP8 values. An engine on a GPU that can has no such copies.
    """

    def __init__(self, model: DemoModel) -> None:
        from refitd import Derived, MXFP8Buffer
        from refitd_cli.demo.model import tensors_of

        self.tensors: dict[str, Any] = dict(tensors_of(model))
        self.derived: dict[str, Derived] = {}
        for name, tensor in list(self.tensors.items()):
            if is_converted(name):
                buffer = MXFP8Buffer.empty(tuple(tensor.shape))
                self.tensors[name] = buffer
                self.derived[f"{name} in bfloat16"] = Derived(tensor, (name,), _Refresh(buffer))

    def arrays(self) -> dict[str, torch.Tensor]:
        """Return all held arrays by name; an MXFP8 tensor as data and scales."""
        found: dict[str, torch.Tensor] = {}
        for name, value in self.tensors.items():
            if is_converted(name):
                found |= {f"{name}.data": value.data, f"{name}.scale": value.scale}
            else:
                found[name] = value
        return found


class _Refresh:
    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def __call__(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self._buffer.dequantize())
