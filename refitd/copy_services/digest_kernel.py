"""The sums of `digests` on a GPU: one kernel that reads every byte of a buffer once.

A program holds the keys of TILE words in registers, and loops over the blocks of a buffer; it adds two numbers per
block to the sums. Keys are therefore read once for BLOCKS_PER_PROGRAM blocks. The buffer may begin at any address and
at any position of a word. The kernel then joins words from two loads, of which the second one finds its bytes in the
cache. The first and last tile of a buffer are read with a mask.

It has never run on a GPU. `tests/unit/test_kernels.py` compiles every variant; docs/gpu.md has the state of each part.
"""

# no `from __future__ import annotations`: triton then reads every annotation as text, and `tl.constexpr` is one

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

TILE = 1024  # words per program and block
BLOCKS_PER_PROGRAM = 16
_VECTOR_BYTES = 16
_NAMES = ("buffer", "keys", "sums", "nbytes", "lead", "tile", "blocks", "skew")


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of the kernel: how the words of the digest are placed in memory."""

    is_aligned: bool  # a tile begins at a multiple of 16 bytes
    is_whole: bool  # a word begins at a multiple of 4 bytes

    def constants(self, block_words: int) -> dict[str, Any]:
        """Return the kernel's compile-time arguments for a number of words per block."""
        return {
            "IS_ALIGNED": self.is_aligned,
            "IS_WHOLE": self.is_whole,
            "BLOCK_WORDS": block_words,
            "TILE": min(TILE, block_words),
            "STEPS": BLOCKS_PER_PROGRAM,
        }

    def signature(self, block_words: int) -> dict[str, str]:
        """Return the types of all arguments, for a compilation without tensors."""
        types = ("*u8", "*i64", "*i64", "i64", "i32", "i32", "i32", "i32")
        return dict(zip(_NAMES, types, strict=True)) | dict.fromkeys(self.constants(block_words), "constexpr")


def variants() -> Iterator[Variant]:
    """Yield every variant that `add` starts."""
    yield from (Variant(True, True), Variant(False, True), Variant(False, False))


def add(buffer: "torch.Tensor", keys: "torch.Tensor", sums: "torch.Tensor", offset: int) -> None:
    """Add a buffer to the sums of the blocks that it touches, in the current stream.

    Args:
        buffer: uint8, contiguous, not empty.
        keys: int64, [2, words per block]; the words per block are a power of two.
        sums: int64, [blocks, 2], contiguous: those of the block in which the buffer begins, and of all that follow.
        offset: the buffer's first byte, relative to the first block.
    """
    block_words, nbytes = keys.shape[1], buffer.numel()
    tile_words = min(TILE, block_words)
    skew = (buffer.data_ptr() - offset) % 4
    is_aligned = (buffer.data_ptr() - offset) % _VECTOR_BYTES == 0
    variant = Variant(is_aligned, skew == 0)
    last = (offset + nbytes - 1) // 4
    blocks = last // block_words + 1
    first_tile = offset // 4 // tile_words if blocks == 1 else 0
    end_tile = last // tile_words + 1 if blocks == 1 else block_words // tile_words
    grid = (end_tile - first_tile, triton.cdiv(blocks, BLOCKS_PER_PROGRAM))
    digest_kernel[grid](buffer, keys, sums, nbytes, offset, first_tile, blocks, skew, **variant.constants(block_words))


@triton.jit(do_not_specialize=_NAMES)  # type: ignore[untyped-decorator]  # `Variant` is the only choice of variants
def digest_kernel(  # type: ignore[no-untyped-def]  # triton reads annotations, and refuses all but its own
    buffer,
    keys,
    sums,
    nbytes,
    lead,
    tile,
    blocks,
    skew,
    IS_ALIGNED: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Add the words of one tile of STEPS blocks; the buffer's first byte is byte `lead` of the first block."""
    start = (tile + tl.program_id(0)) * TILE
    at = tl.arange(0, TILE)
    keys = tl.multiple_of(keys + start, 16)
    key = tl.load(keys + at)
    other_key = tl.load(keys + BLOCK_WORDS + at)
    end = lead + tl.cast(nbytes, tl.int64)
    first = tl.program_id(1) * STEPS
    for block in range(first, tl.minimum(first + STEPS, blocks)):
        # the tile's first byte in the digest's stream; `place` is the address of the first word that is loaded
        begin = (tl.cast(block, tl.int64) * BLOCK_WORDS + start) * 4
        place = buffer + (begin - lead - skew)
        if IS_ALIGNED:
            place = tl.multiple_of(place, 16)
        if (begin < end) & (begin + TILE * 4 > lead):
            words = place.to(tl.pointer_type(tl.int32), bitcast=True)
            if (begin >= lead) & (begin + TILE * 4 <= end):
                word = tl.load(words + at)
                if not IS_WHOLE:
                    upper = tl.load(words + at + 1)
                    word = joined(word, upper, skew)
            else:
                # relative to the tile, at most TILE * 4: bytes before `low` and from `high` on are not of the buffer
                low = tl.cast(tl.maximum(lead - begin, 0), tl.int32)
                high = tl.minimum(end - begin, TILE * 4).to(tl.int32)
                byte = at * 4 - skew
                word = tl.load(words + at, mask=(byte + 3 >= low) & (byte < high), other=0)
                if not IS_WHOLE:
                    upper = tl.load(words + at + 1, mask=(byte + 7 >= low) & (byte + 4 < high), other=0)
                    word = joined(word, upper, skew)
                before = tl.minimum(tl.maximum(low - at * 4, 0), 4)
                after = tl.minimum(tl.maximum(at * 4 + 4 - high, 0), 4)
                # in 64 bits, because a shift by 32 is not defined for 32
                kept = (0xFFFFFFFF >> (after * 8).to(tl.int64)) & (0xFFFFFFFF << (before * 8).to(tl.int64))
                word = word & kept.to(tl.int32)
            word = word.to(tl.int64)
            tl.atomic_add(sums + block * 2, tl.sum(word * key, axis=0))
            tl.atomic_add(sums + block * 2 + 1, tl.sum(word * other_key, axis=0))


@triton.jit
def joined(word, upper, skew):  # type: ignore[no-untyped-def]
    """Return the four bytes that begin `skew` bytes, 1 to 3, after those of `word`."""
    low = word.to(tl.uint32, bitcast=True) >> (skew * 8)
    high = upper.to(tl.uint32, bitcast=True) << (32 - skew * 8)
    return (low | high).to(tl.int32, bitcast=True)
