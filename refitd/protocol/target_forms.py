"""Targets whose held tensors differ from the arriving ones: conversions, and the staging arena's layout.

    arrives (the shard)        w  [256, 512] bfloat16
    holds                      w's data [256, 512], w's scale [256, 16]
    conversion                 quantize: from w, to (data, scale), rounded up

The staging arena holds the arriving tensors, then the converted ones. An unconverted tensor is stored once. The staging
arena of a target that flips is laid out like its live one; what is converted arrives in another one, the landing arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from refitd.buffers.layout import packed_offsets
from refitd.dtypes import ELEMENT_SIZES
from refitd.mxfp8 import Rounding
from refitd.protocol.base import Name, Small, Value
from refitd.protocol.shards import Shape, Shard, WireTensor


class HeldTensor(Value, frozen=True, omit_defaults=True):
    """One live tensor of a target; `wire` is its index in the shard, None if a conversion makes it."""

    name: Name
    shape: Shape
    dtype: Name
    wire: Small | None = None


class Conversion(Value, frozen=True, omit_defaults=True):
    """How workers make held tensors from an arrived one, once everything has arrived.

    quantize: `wire` in bfloat16 becomes `held` (data, scale), row-major or `swizzled`.
    swizzle:  `wire`, row-major scales, becomes `held` (scale), swizzled.
    """

    kind: Literal["quantize", "swizzle"]
    wire: Small
    held: tuple[Small, ...]
    rounding: Rounding = Rounding.RCEIL
    swizzled: bool = False


class DerivedTensor(Value, frozen=True):
    """A tensor that a target computes from weights (a workspace, a fused copy). Stale unless a hook refreshes it."""

    name: Name
    sources: tuple[Name, ...]
    is_refreshed: bool


@dataclass(frozen=True, slots=True)
class Staged:
    """Offsets in a staging arena, and the arena's size."""

    wire: tuple[int, ...]
    held: tuple[int, ...]
    nbytes: int


def held_bytes(held: HeldTensor | WireTensor) -> int:
    """Return the bytes of a live tensor."""
    return prod(held.shape) * ELEMENT_SIZES[held.dtype]


def staged(shard: Shard, held: Sequence[HeldTensor]) -> Staged:
    """Lay out a staging arena. Without `held`, everything is held as it arrives.

    All dtypes must be known, and every `wire` an index into the shard.
    """
    sizes = [prod(t.shape) * ELEMENT_SIZES[t.dtype] for t in shard.tensors]
    made = [i for i, tensor in enumerate(held) if tensor.wire is None]
    offsets, nbytes = packed_offsets(sizes + [held_bytes(held[i]) for i in made])
    wire, rest = offsets[: len(sizes)], dict(zip(made, offsets[len(sizes) :], strict=True))
    if not held:
        return Staged(tuple(wire), tuple(wire), nbytes)
    lies = [rest[i] if tensor.wire is None else wire[tensor.wire] for i, tensor in enumerate(held)]
    return Staged(tuple(wire), tuple(lies), nbytes)


def landed(shard: Shard, conversions: Sequence[Conversion]) -> tuple[dict[int, int], int]:
    """Lay out the landing arena of a target that flips: {index in the shard: offset} of what is converted; its bytes.

    Its staging arena is laid out like its live one, so that only what is held has a place there.
    """
    wires = [conversion.wire for conversion in conversions]
    tensors = [shard.tensors[wire] for wire in wires]
    offsets, nbytes = packed_offsets([prod(t.shape) * ELEMENT_SIZES[t.dtype] for t in tensors])
    return dict(zip(wires, offsets, strict=True)), nbytes if wires else 0


def converted_bytes(shard: Shard, conversions: Sequence[Conversion]) -> int:
    """Return the bytes that conversions read."""
    tensors = [shard.tensors[conversion.wire] for conversion in conversions]
    return sum(prod(t.shape) * ELEMENT_SIZES[t.dtype] for t in tensors)
