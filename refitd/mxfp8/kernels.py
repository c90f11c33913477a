"""MXFP8 on the device: one kernel that reads bfloat16 and writes elements and scales, without intermediate tensors.

It uses the integer arithmetic of `format`, one block per row. It has never run on a GPU: see docs/reliability.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from refitd.mxfp8.format import BLOCK, Rounding

if TYPE_CHECKING:
    import torch

GROUP = 64  # blocks per program


def quantize(words: torch.Tensor, data: torch.Tensor, scales: torch.Tensor, rounding: Rounding) -> None:
    """Convert rows on their device, in the current stream.

    Args:
        words: [rows, columns] of bfloat16 as int16; rows may be strided.
        data: [rows, columns], uint8; rows may be strided.
        scales: [rows, columns / 32], uint8.
        rounding: how scales are rounded.
    """
    rows, blocks = words.shape[0], words.shape[1] // BLOCK
    if not rows * blocks:
        return
    _quantize[(triton.cdiv(rows * blocks, GROUP),)](
        words,
        data,
        scales,
        rows * blocks,
        blocks,
        words.stride(0),
        data.stride(0),
        scales.stride(0),
        IS_FLOOR=rounding is Rounding.FLOOR,
        GROUP=GROUP,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _quantize(
    words: Any,
    data: Any,
    scales: Any,
    count: Any,
    blocks: Any,
    words_step: Any,
    data_step: Any,
    scales_step: Any,
    IS_FLOOR: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    is_there = at < count
    row = at // blocks
    block = at % blocks
    element = tl.arange(0, 32)[None, :]
    word = tl.load(words + (row * words_step + block * 32)[:, None] + element, mask=is_there[:, None], other=0)
    word = word.to(tl.int32) & 0xFFFF
    magnitude = word & 0x7FFF

    amax = tl.max(magnitude, axis=1)
    if IS_FLOOR:
        scale = tl.maximum((amax >> 7) - 8, 0)
        divisor = tl.maximum(scale, 1)
    else:
        scale = tl.maximum(((amax + 0x1F) >> 7) - 8, 0)
        scale = tl.where(amax == 0x7F80, 254, scale)
        divisor = tl.where(scale == 0, 127, scale)
    scale = tl.where(amax > 0x7F80, 255, scale)

    # subnormal inputs are m * 2**-133: m as a float is normal, and bfloat16 represents it exactly
    whole = magnitude.to(tl.float32).to(tl.int32, bitcast=True) >> 16
    normal = tl.where(magnitude < 128, whole - 133 * 128, magnitude)
    t = normal + (7 - divisor)[:, None] * 128
    code = tl.minimum((t + 7 + ((t >> 4) & 1)) >> 4, 0x7E)
    value = (t & 127) | 128
    dropped = tl.minimum(tl.maximum(5 - (t >> 7), 1), 9)
    steps = (value + (1 << (dropped - 1)) - 1 + ((value >> dropped) & 1)) >> dropped
    code = tl.where(t < 128, steps, code)
    code = tl.where(magnitude == 0x7F80, 0x7E, code) | ((word >> 8) & 0x80)
    code = tl.where((scale == 255)[:, None], 0x7F, code)

    tl.store(data + (row * data_step + block * 32)[:, None] + element, code.to(tl.uint8), mask=is_there[:, None])
    tl.store(scales + row * scales_step + block, scale.to(tl.uint8), mask=is_there)
