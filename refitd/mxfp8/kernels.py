"""MXFP8 on the device: one kernel that reads bfloat16 and writes elements and scales, without intermediate tensors.

It uses the integer arithmetic of `format`. A program converts a group of blocks, a thread the elements of a vector.
The tensors choose the variant (`Variant`):

    vector     elements that begin at a multiple of their size in every row: 8 gives loads of 16 bytes and stores of 8;
               1 is for tensors at any address and with any stride. A scale needs a whole block, and blocks begin where
               the tensor does, so a misaligned tensor has no aligned body: it takes the largest vector that fits
    is_wide    whether offsets within a program need 64 bits: only with strides of 2**25 elements and more, and then the
               vector is 1
    has_sums   whether the same pass adds up the digest of what it writes, as `copy_services.digests` defines it; the
               digest of the memory proves later that the writes arrived. The tensors are then contiguous

It has never run on a GPU. `tests/unit/test_kernels.py` compiles every variant; docs/gpu.md has the state of each part.
"""

# no `from __future__ import annotations`: triton then reads every annotation as text, and `tl.constexpr` is one

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from refitd.mxfp8.format import BLOCK, Rounding

if TYPE_CHECKING:
    import torch

GROUP = 64  # blocks per program; half as many without vectors, which need more registers
VECTORS = (8, 2, 1)
_INT32_MAX = 2**31 - 1
_NAMES = ("words", "data", "scales", "count", "blocks", "words_step", "data_step", "scales_step", "keys", "sums")


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of the kernel."""

    rounding: Rounding
    vector: int
    is_wide: bool
    has_sums: bool = False

    @property
    def group(self) -> int:
        """Blocks per program."""
        return GROUP // 2 if self.vector == 1 else GROUP

    def constants(self, block_words: int = 0) -> dict[str, Any]:
        """Return the kernel's compile-time arguments for a number of words per block of the digest."""
        return {
            "IS_FLOOR": self.rounding is Rounding.FLOOR,
            "VECTOR": self.vector,
            "IS_WIDE": self.is_wide,
            "HAS_SUMS": self.has_sums,
            "BLOCK_WORDS": block_words,
            "GROUP": self.group,
        }

    @property
    def signature(self) -> dict[str, str]:
        """The types of all arguments, for a compilation without tensors."""
        step = "i64" if self.is_wide else "i32"
        types = ("*i16", "*u8", "*u8", "i32", "i32", step, step, step, "*i64", "*i64")
        return dict(zip(_NAMES, types, strict=True)) | dict.fromkeys(self.constants(), "constexpr")


def variants() -> Iterator[Variant]:
    """Yield every variant that `quantize` starts."""
    for rounding in Rounding:
        yield from (Variant(rounding, vector, is_wide=False) for vector in VECTORS)
        yield Variant(rounding, 1, is_wide=True)
        yield from (Variant(rounding, vector, is_wide=False, has_sums=True) for vector in (8, 1))


def quantize(
    words: "torch.Tensor",
    data: "torch.Tensor",
    scales: "torch.Tensor",
    rounding: Rounding,
    keys: "torch.Tensor | None" = None,
) -> "tuple[torch.Tensor, ...]":
    """Convert rows on their device, in the current stream.

    Args:
        words: [rows, columns] of bfloat16 as int16; rows may be strided.
        data: [rows, columns], uint8; rows may be strided.
        scales: [rows, columns / 32], uint8.
        rounding: how scales are rounded.
        keys: int64, [2, words per block] of `digests`, if the digests of data and scales are wanted. Both are then
            contiguous, and there are fewer than 2**31 blocks of 32 elements.

    Returns:
        With keys, the digests' sums of data and of scales, each [blocks of the digest, 2].
    """
    blocks = words.shape[1] // BLOCK
    if keys is not None:
        return _quantize_and_digest(words, data, scales, rounding, keys)
    if not words.shape[0] * blocks:
        return ()
    variant = _variant(words, data, scales, rounding)
    steps = words.stride(0) // variant.vector, data.stride(0) // variant.vector, scales.stride(0)
    rows = max(1, (_INT32_MAX - GROUP) // blocks)  # the number of blocks in one launch fits 32 bits
    for at in range(0, words.shape[0], rows):
        here = slice(at, at + rows)
        count = words[here].shape[0] * blocks
        grid = (triton.cdiv(count, variant.group),)
        ends = words[here], data[here], scales[here]
        quantize_kernel[grid](*ends, count, blocks, *steps, scales, scales, **variant.constants())  # sums are unused
    return ()


def _quantize_and_digest(
    words: "torch.Tensor", data: "torch.Tensor", scales: "torch.Tensor", rounding: Rounding, keys: "torch.Tensor"
) -> "tuple[torch.Tensor, torch.Tensor]":
    block_words, blocks = keys.shape[1], words.shape[1] // BLOCK
    assert data.is_contiguous() and scales.is_contiguous() and block_words % (GROUP * BLOCK // 4) == 0
    found = _variant(words, data, scales, rounding)
    variant = replace(found, vector=found.vector if found.vector == 8 else 1, has_sums=True)
    assert not variant.is_wide and scales.numel() < _INT32_MAX - GROUP
    digested = triton.cdiv(data.numel(), 4 * block_words)
    sums = keys.new_zeros(digested + triton.cdiv(scales.numel(), 4 * block_words), 2)
    if scales.numel():
        steps = words.stride(0) // variant.vector, data.stride(0) // variant.vector, scales.stride(0)
        grid = (triton.cdiv(scales.numel(), variant.group),)
        parts = words, data, scales, scales.numel(), blocks, *steps, keys, sums
        quantize_kernel[grid](*parts, **variant.constants(block_words))
    return sums[:digested], sums[digested:]


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
    keys,
    sums,
    IS_FLOOR: tl.constexpr,
    VECTOR: tl.constexpr,
    IS_WIDE: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
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
    if HAS_SUMS:
        code = tl.where(is_there[:, None], code, 0)
        scale = tl.where(is_there, scale, 0)
        blocks_of_data = tl.cdiv(count * 8, BLOCK_WORDS)
        _add(tl.reshape(code, (GROUP * 8, 4)), first * 8, keys, sums, BLOCK_WORDS, GROUP * 8)
        _add(tl.reshape(scale, (GROUP // 4, 4)), first // 4, keys, sums + blocks_of_data * 2, BLOCK_WORDS, GROUP // 4)


@triton.jit  # type: ignore[untyped-decorator]
def _add(values, at, keys, sums, BLOCK_WORDS: tl.constexpr, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add bytes, [WORDS, 4], to the sums of the digest's block that has them; the first one is byte 4 * `at`."""
    word = tl.sum(values << (tl.arange(0, 4)[None, :] * 8), axis=1).to(tl.int64)
    block = at // BLOCK_WORDS
    key = tl.multiple_of(keys + (at - block * BLOCK_WORDS), 16) + tl.arange(0, WORDS)
    tl.atomic_add(sums + block * 2, tl.sum(word * tl.load(key), axis=0))
    tl.atomic_add(sums + block * 2 + 1, tl.sum(word * tl.load(key + BLOCK_WORDS), axis=0))
