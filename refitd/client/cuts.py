"""Read from a tensor how it is split: Megatron's attributes, and the chunks of a DTensor."""

from __future__ import annotations

from typing import Any

import torch

# types that are never DTensors; most tensors have one of these
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
# attributes of a parameter that determine its description
CUT_ATTRIBUTES = (
    "tensor_model_parallel",
    "partition_dim",
    "partition_stride",
    "partition_sizes",
    "allreduce",
    "shared_embedding",
    "shared",
)


def cut_of(value: Any) -> tuple[Any, ...]:
    """Return a tensor's CUT_ATTRIBUTES and, last, its DTensor chunks; () for a plain tensor without attributes."""
    if type(value) in PLAIN_TYPES:
        said = value.__dict__
        return tuple(map(said.get, CUT_ATTRIBUTES)) if said else ()
    return (*(getattr(value, name, None) for name in CUT_ATTRIBUTES), chunks_of(value))


def chunks_of(value: Any) -> Any:
    """Return the boxes (offsets, sizes) that a DTensor's local tensor lists; None if it lists none."""
    say = getattr(getattr(value, "_local_tensor", None), "__create_chunk_list__", None)
    if say is None:
        return None
    try:
        return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in say()]
    except Exception as exc:
        return f"unreadable ({type(exc).__name__})"


def copied_cut(cut: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a cut with its lists copied, so that later changes to the originals do not show."""
    return tuple(list(each) if isinstance(each, list) else each for each in cut) if cut else cut


def laid_out(spec: Any) -> str:
    """Return a DTensor's spec as text for an error message."""
    return "no DTensor" if spec is None else f"{tuple(spec.placements)} on a mesh of {tuple(spec.mesh.shape)}"
