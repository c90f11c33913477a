"""Flat slices: contiguous runs of a tensor's elements in row-major order, as tiles."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from refitd.describe.tiles import Tile

if TYPE_CHECKING:
    from torch import nn


def flat_tiles(tensor: str, shape: Sequence[int], start: int, stop: int, local_offset: int = 0) -> tuple[Tile, ...]:
    """Return elements [start, stop) of a row-major tensor as boxes, in the order in which they lie locally.

        [3, 4], elements 2 to 9:   row 0 columns 2:4, row 1 whole, row 2 column 0

    FSDP1 and DeepSpeed ZeRO-3 cut parameters in this way. There are at most 2 * len(shape) - 1 boxes.

    Args:
        tensor: canonical name.
        shape: of the whole tensor.
        start: first element.
        stop: the element after the last one.
        local_offset: element of the local tensor at which the run begins.

    Raises:
        ValueError: the run leaves the tensor.
    """
    whole = tuple(shape)
    if not 0 <= start <= stop <= prod(whole):
        raise ValueError(f"{tensor}: elements {start}..{stop} are not all of a tensor of shape {list(whole)}")
    tiles: list[Tile] = []
    while start < stop:
        # the largest box that begins here: whole inner dimensions, as many rows of the outer one as remain in the run
        dim, inner = len(whole), 1
        while dim and start % (inner * whole[dim - 1]) == 0 and inner * whole[dim - 1] <= stop - start:
            dim -= 1
            inner *= whole[dim]
        offset, rest = [], start
        for n in range(len(whole)):
            step = prod(whole[n + 1 :])
            offset.append(rest // step)
            rest %= step
        size = [1] * dim + list(whole[dim:])
        if dim:
            size[dim - 1] = min((stop - start) // inner, whole[dim - 1] - offset[dim - 1])
        strides = tuple(prod(size[n + 1 :]) for n in range(len(size)))
        tiles.append(Tile(tensor, tuple(offset), tuple(size), local_offset, strides))
        count = prod(size)
        start, local_offset = start + count, local_offset + count
    return tuple(tiles)


def flattened_problem(module: nn.Module) -> str:
    """Return which framework has flattened a module's parameters and cut them anywhere, and what to do; "" if none."""
    for path, unit in module.named_modules():
        is_fsdp1 = any(
            kind.__name__ == "FullyShardedDataParallel" and kind.__module__.startswith("torch.")
            for kind in type(unit).__mro__
        )
        if is_fsdp1 and getattr(getattr(unit, "_handle", None), "uses_sharded_strategy", False):
            return (
                f"{path or 'the module'}: FSDP1 has flattened its parameters and holds runs of their elements; "
                "register what refitd.adapters.fsdp1.fsdp1_tensors(model, rank) returns"
            )
    for name, param in module.named_parameters():
        if hasattr(param, "ds_tensor"):
            return (
                f"{name}: DeepSpeed ZeRO-3 has partitioned it and holds a run of its elements; register what "
                "refitd.adapters.fsdp1.zero3_tensors(engine.module, rank) returns"
            )
    return ""
