"""MXFP8 on the device: one kernel that reads bfloat16 and writes elements and scales, without intermediate tensors.

It uses the integer arithmetic of `format`. A program converts GROUP blocks, and a thread the elements of one vector.
Two properties of the tensors choose the variant (`Variant`):

    vector     elements that begin at a multiple of their size in every row: 8 gives loads of 16 bytes and stores of 8;
               1 is for tensors at any address and with any stride
    is_wide    whether offsets within a program need 64 bits: only with strides of 2**25 elements and more, and then the
               vector is 1

It has never run on a GPU. `tests/unit/test_kernels.py` compiles every variant; docs/gpu.md has the state of each part.
"""

# no `from __future__ import annotations`: triton then reads every annotation as text, and `tl.constexpr` is one

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from refitd.mxfp8.format import BLOCK, Rounding

if TYPE_CHECKING:
    import torch

GROUP = 64  # blocks per program
VECTORS = (8, 1)
_INT32_MAX = 2**31 - 1
_NAMES = ("words", "data", "scales", "count", "blocks", "words_step", "data_step", "scales_step")


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of the kernel."""

    rounding: Rounding
    vector: int
    is_wide: bool

    @property
    def constants(self) -> dict[str, Any]:
        """The kernel's compile-time arguments."""
        is_floor = self.rounding is Rounding.FLOOR
        return {"IS_FLOOR": is_floor, "VECTOR": self.vector, "IS_WIDE": self.is_wide, "GROUP": GROUP}

    @property
    def signature(self) -> dict[str, str]:
        """The types of all arguments, for a compilation without tensors."""
        step = "i64" if self.is_wide else "i32"
        types = ("*i16", "*u8", "*u8", "i32", "i32", step, step, step)
        return dict(zip(_NAMES, types, strict=True)) | dict.fromkeys(self.constants, "constexpr")


def variants() -> Iterator[Variant]:
    """Yield every variant that `quantize` starts."""
    for rounding in Rounding:
        yield from (Variant(rounding, vector, is_wide=False) for vector in VECTORS)
        yield Variant(rounding, 1, is_wide=True)


def quantize(words: "torch.Tensor", data: "torch.Tensor", scales: "torch.Tensor", rounding: Rounding) -> None:
    """Convert rows on their device, in the current stream.

    Args:
        words: [rows, columns] of bfloat16 as int16; rows may be strided.
        data: [rows, columns], uint8; rows may be strided.
        scales: [rows, columns / 32], uint8.
        rounding: how scales are rounded.
    """
    blocks = words.shape[1] // BLOCK
    if not words.shape[0] * blocks:
        return
    variant = _variant(words, data, scales, rounding)
    steps = words.stride(0) // variant.vector, data.stride(0) // variant.vector, scales.stride(0)
    rows = max(1, (_INT32_MAX - GROUP) // blocks)  # the number of blocks in one launch fits 32 bits
    for at in range(0, words.shape[0], rows):
        here = slice(at, at + rows)
        count = words[here].shape[0] * blocks
        grid = (triton.cdiv(count, GROUP),)
        quantize_kernel[grid](words[here], data[here], scales[here], count, blocks, *steps, **variant.constants)


def _variant(words: "torch.Tensor", data: "torch.Tensor", scales: "torch.Tensor", rounding: Rounding) -> Variant:
    """Return the variant for these tensors."""
    if (GROUP + 1) * max(words.stride(0), data.stride(0), scales.stride(0)) > _INT32_MAX:
        return Variant(rounding, 1, is_wide=True)
    vector = next(
        vector
        for vector in VECTORS
        if not words.data_ptr() % (2 * vector)
        and not any(place % vector for place in (words.stride(0), data.data_ptr(), data.stride(0)))
    )
    return Variant(rounding, vector, is_wide=False)


@triton.jit(do_not_specialize=_NAMES)  # type: ignore[untyped-decorator]  # `Variant` is the only choice of variants
def quantize_kernel(  # type: ignore[no-untyped-def]  # triton reads annotations, and refuses all but its own
    words,
    data,
    scales,
    count,
    blocks,
    words_step,
    data_step,
    scales_step,
    IS_FLOOR: tl.constexpr,
    VECTOR: tl.constexpr,
    IS_WIDE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Convert GROUP of `count` blocks, of which every row has `blocks`; steps of words and data count vectors."""
    # the program's first row has a scalar offset of 64 bits, and all others are relative to it
    first = tl.program_id(0) * GROUP
    top = first // blocks
    at = first - top * blocks + tl.arange(0, GROUP)
    is_there = tl.arange(0, GROUP) < count - first
    row = at // blocks
    column = (at - row * blocks) * 32
    element = tl.arange(0, 32)[None, :]
    words = tl.multiple_of(words + top.to(tl.int64) * words_step * VECTOR, 2 * VECTOR)
    data = tl.multiple_of(data + top.to(tl.int64) * data_step * VECTOR, VECTOR)
    scales += top.to(tl.int64) * scales_step
    if IS_WIDE:
        row = row.to(tl.int64)

    read = (row * words_step * VECTOR + column)[:, None] + element
    word = tl.load(words + read, mask=is_there[:, None], other=0)
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

    written = (row * data_step * VECTOR + column)[:, None] + element
    tl.store(data + written, code.to(tl.uint8), mask=is_there[:, None])
    tl.store(scales + (row * scales_step + column // 32), scale.to(tl.uint8), mask=is_there)
