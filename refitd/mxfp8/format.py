"""MXFP8 in integer arithmetic, with numpy only: 32 E4M3 elements share one power of two, E8M0. FP8 follows it.

The "OCP Microscaling Formats (MX) Specification", version 1.0, defines the format; its section 6.3 rounds scales down
(FLOOR). RCEIL is the rounding of Transformer Engine and cuBLAS (torchao: `ScaleCalculationMode.RCEIL`).

    value = element * 2 ** (scale byte - 127)         scale byte 255: every value of the block is NaN

The scale byte comes from the block's largest magnitude, amax. Its exponent field (equal in float32 and bfloat16) is e:

    FLOOR  e - 8                           amax's power of two over 2**8 (448 = 1.75 * 2**8); above 448 saturates
    RCEIL  e - 8, or e - 7 above 1.75      the least power of two that amax / 448 does not exceed; no value saturates

An element keeps its own exponent and mantissa, shifted by the scale and rounded to three bits, ties to even:

    bfloat16   s eeeeeeee mmmmmmm   ->   t = dddd mmmmmmm, d = e - scale + 7   ->   s dddd mmm     (d >= 1)

Edge cases follow Transformer Engine and torchao's `to_mx` on bfloat16 (the oracle of the tests):

    NaN in a block        scale 255, all elements NaN
    infinity, RCEIL       scale 254 (2**127); infinities become 448, which decodes to infinity
    infinity, FLOOR       scale 247; infinities become 448, which decodes to infinity
    all zeros             scale 0, zeros that keep their signs
    scale byte 0, RCEIL   (amax up to 1.75 * 2**-119) the elements are divided by 1, not by 2**-127: all become zeros
    scale byte 0, FLOOR   (amax below 2**-118) the elements are divided by 2**-126: they decode to half their value
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

BLOCK: Final = 32  # elements of the last dimension that share a scale
TILE_ROWS: Final = 128
TILE_BLOCKS: Final = 4


class Rounding(StrEnum):
    """How a block's scale is rounded from its largest magnitude."""

    RCEIL = "rceil"  # up, and no value saturates: cuBLAS, Transformer Engine, Megatron-Core
    FLOOR = "floor"  # down: OCP MX 1.0, section 6.3


ROUNDINGS = tuple(Rounding)  # jobs store a rounding as its index here


def swizzled_bytes(rows: int, blocks: int) -> int:
    """Return the bytes of the swizzled scales of [rows, blocks]: whole tiles of 128 x 4, padded with zeros."""
    return -(-rows // TILE_ROWS) * -(-blocks // TILE_BLOCKS) * TILE_ROWS * TILE_BLOCKS


NAN_SCALE: Final = 255
_LARGEST = 0x7E  # 448
# elements converted in one step: with the scratch memory they fit into a core's second-level cache
CHUNK = 1 << 17
# in blocks with a smaller scale than this, subnormal inputs may become nonzero
_PLAIN_SCALE = 12
_HANDFUL = 128
Words = npt.NDArray[Any]  # bfloat16 as uint16, float32 as uint32
Bytes = npt.NDArray[np.uint8]


def quantize(
    words: Words, data: Bytes, scales: Bytes, rounding: Rounding = Rounding.RCEIL, scratch: Scratch | None = None
) -> None:
    """Convert rows, writing E4M3 bytes to `data` and E8M0 bytes to `scales`, row-major.

    Args:
        words: [rows, columns], columns a multiple of 32: bfloat16 as uint16 or float32 as uint32. Rows may be strided.
        data: [rows, columns].
        scales: [rows, columns / 32].
        rounding: how scales are rounded.
        scratch: memory to reuse between calls of one thread.
    """
    rows, columns = words.shape
    if words.dtype not in (np.uint16, np.uint32) or columns % BLOCK or data.shape != words.shape:
        raise ValueError(
            f"{words.dtype}{list(words.shape)} into {list(data.shape)}: expected words in blocks of {BLOCK}"
        )
    if scales.shape != (rows, columns // BLOCK):
        raise ValueError(f"scales have shape {list(scales.shape)}, expected {[rows, columns // BLOCK]}")
    scratch = Scratch.of(words.dtype) if scratch is None or scratch.rounded.dtype != words.dtype else scratch
    if words.flags.c_contiguous and data.flags.c_contiguous and scales.flags.c_contiguous:
        words, data, scales = words.reshape(1, -1), data.reshape(1, -1), scales.reshape(1, -1)
    for row, block in _chunks(scales.shape):
        column = slice(block.start * BLOCK, block.stop * BLOCK)
        _quantize_chunk(words[row, column], data[row, column], scales[row, block], rounding, scratch)


def scales_of(words: Words, rounding: Rounding = Rounding.RCEIL, scratch: Scratch | None = None) -> Bytes:
    """Return the E8M0 bytes that `quantize` writes for contiguous words, one per block, 1-D."""
    layout = _BFLOAT16 if words.dtype == np.uint16 else _FLOAT32
    scratch = Scratch.of(words.dtype) if scratch is None else scratch
    flat, found = words.reshape(-1), np.empty(words.size // BLOCK, np.uint8)
    for start in range(0, flat.size, CHUNK):
        part = flat[start : start + CHUNK]
        magnitudes = scratch.moved[: part.size]
        np.bitwise_and(part, layout.magnitude, out=magnitudes)
        end = start + part.size
        found[start // BLOCK : end // BLOCK] = _scales(_largest(magnitudes, layout, scratch), layout, rounding)[0]
    return found


def dequantize(data: Bytes, scales: Bytes, words: Words) -> None:
    """Convert back: E4M3 `data` and row-major E8M0 `scales` to bfloat16 `words` (uint16); shapes as in `quantize`.

    Exact where bfloat16 can represent the value: beyond its range it becomes infinite, below its normal numbers it is
    rounded.
    """
    values = np.empty(CHUNK, np.float32)
    for row, block in _chunks(scales.shape):
        column = slice(block.start * BLOCK, block.stop * BLOCK)
        code, scale = data[row, column], scales[row, block]
        found = values[: code.size].reshape(*scale.shape, BLOCK)
        np.take(VALUES, code.reshape(found.shape), out=found, mode="clip")
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            found *= _POWERS[scale][..., None]
        bits = found.view(np.uint32).reshape(code.shape)
        is_nan = np.isnan(found).reshape(code.shape)
        bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        bits >>= np.uint32(16)
        words[row, column] = bits
        if is_nan.any():
            words[row, column][is_nan] = 0x7FC0


def swizzle(scales: Bytes, out: Bytes) -> None:
    """Swizzle row-major scales into `out` (1-D, of `swizzled_bytes`), the layout that tensor cores read.

    It is cuBLAS's "1D block scaling factors layout" and torchao's `to_blocked`.

    Tiles of 128 rows and 4 blocks, 512 bytes each, are in row-major order. Within a tile, the scale of row r and block
    c is at (r % 32) * 16 + (r // 32) * 4 + c: four groups of 32 rows side by side.
    """
    rows, blocks = scales.shape
    whole = _tiles(out, rows, blocks)
    padded = np.zeros((TILE_ROWS, whole.shape[1] * TILE_BLOCKS), np.uint8)
    for tile, first in enumerate(range(0, rows, TILE_ROWS)):
        part = scales[first : first + TILE_ROWS]
        padded[: len(part), :blocks] = part
        padded[len(part) :] = 0
        whole[tile] = padded.reshape(4, 32, -1, TILE_BLOCKS).transpose(2, 1, 0, 3)


def unswizzle(swizzled: Bytes, out: Bytes) -> None:
    """Undo `swizzle`: write the row-major scales to `out`, [rows, blocks]."""
    rows, blocks = out.shape
    whole = _tiles(swizzled, rows, blocks)
    for tile, first in enumerate(range(0, rows, TILE_ROWS)):
        padded = whole[tile].transpose(2, 1, 0, 3).reshape(TILE_ROWS, -1)
        part = out[first : first + TILE_ROWS]
        part[:] = padded[: len(part), :blocks]


def _tiles(flat: Bytes, rows: int, blocks: int) -> Bytes:
    """Return a view of swizzled scales as [row tile, block tile, row % 32, row // 32 % 4, block % 4]."""
    size = swizzled_bytes(rows, blocks)
    if flat.shape != (size,):
        raise ValueError(f"swizzled scales of [{rows}, {blocks}] have shape {list(flat.shape)}, expected [{size}]")
    return flat.reshape(-(-rows // TILE_ROWS), -(-blocks // TILE_BLOCKS), 32, 4, TILE_BLOCKS)


@dataclass(frozen=True, slots=True)
class _Layout:
    """The bit layout of a float type."""

    dtype: type[np.unsignedinteger[Any]]
    signed: type[np.signedinteger[Any]]
    four: type[np.generic]  # a type as large as four words, used only for copies
    bits: int
    mantissa: int

    @property
    def dropped(self) -> int:
        """The number of mantissa bits that E4M3 lacks."""
        return self.mantissa - 3

    @property
    def magnitude(self) -> np.unsignedinteger[Any]:
        """The mask of all bits but the sign."""
        return self.dtype((1 << (self.bits - 1)) - 1)

    @property
    def half(self) -> int:
        """The rounding term: adding it and the last kept bit before dropping bits rounds ties to even."""
        return (1 << (self.dropped - 1)) - 1


_BFLOAT16 = _Layout(np.uint16, np.int16, np.uint64, 16, 7)
_FLOAT32 = _Layout(np.uint32, np.int32, np.complex128, 32, 23)


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory for one chunk of words of one type, kept between calls."""

    moved: Words
    rounded: Words
    turned: Words
    marks: bytearray
    # t + half of the largest element, as an array: minimum() with an array is five times as fast as with a number
    largest: Words

    @classmethod
    def of(cls, dtype: npt.DTypeLike) -> Scratch:
        """Return scratch for bfloat16 (uint16) or float32 (uint32)."""
        layout = _BFLOAT16 if dtype == np.uint16 else _FLOAT32
        return cls(
            moved=np.empty(CHUNK, layout.dtype),
            rounded=np.empty(CHUNK, layout.dtype),
            turned=np.empty(CHUNK, layout.dtype),
            marks=bytearray(CHUNK),
            largest=np.full(CHUNK, (_LARGEST << layout.dropped) + layout.half, layout.signed),
        )


def _chunks(shape: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Yield (rows, blocks) of at most CHUNK elements: several whole rows, or a part of one."""
    rows, blocks = shape
    if not rows or not blocks:
        return
    wide = min(blocks, CHUNK // BLOCK)
    high = max(1, CHUNK // BLOCK // blocks)
    for row in range(0, rows, high):
        for block in range(0, blocks, wide):
            yield slice(row, row + high), slice(block, min(blocks, block + wide))


def _quantize_chunk(words: Words, data: Bytes, scales: Bytes, rounding: Rounding, scratch: Scratch) -> None:
    layout = _BFLOAT16 if words.dtype == np.uint16 else _FLOAT32
    word, signed = layout.dtype, layout.signed
    count, shape = words.size, words.shape
    moved = scratch.moved[:count].reshape(shape)
    np.bitwise_and(words, layout.magnitude, out=moved)
    amax = _largest(moved, layout, scratch)
    scale, by, is_odd = _scales(amax, layout, rounding)
    scales[...] = scale.reshape(scales.shape)

    # turn magnitudes into t + half
    blocks = moved.reshape(-1, BLOCK)
    np.add(blocks, by[:, None], out=blocks)
    t = moved.view(signed)
    if rounding is Rounding.FLOOR:
        np.minimum(t, scratch.largest[:count].reshape(shape), out=t)

    # add the last kept bit, and put the sign where the shift moves it to bit 7
    rounded = scratch.rounded[:count].reshape(shape)
    np.right_shift(words, word(layout.dropped), out=rounded)
    if layout is _BFLOAT16:
        rounded &= word(0x801)
        rounded += moved
        rounded >>= word(layout.dropped)
    else:
        rounded &= word(1)
        rounded += moved
        rounded >>= word(layout.dropped)
        sign = np.right_shift(words, word(24), out=scratch.turned[:count].reshape(shape))
        sign &= word(0x80)
        rounded |= sign
    np.copyto(data, rounded, casting="unsafe")

    # elements below the normal numbers of E4M3: few in a chunk of weights
    is_small = np.frombuffer(scratch.marks, np.bool_, count).reshape(shape)
    np.less(t, signed((1 << layout.mantissa) + layout.half), out=is_small)
    places = _few(scratch.marks, count)
    if places is None:
        sign = np.right_shift(words, word(layout.bits - 8), out=rounded)
        sign &= word(0x80)
        wanted = _subnormal(moved, layout)
        wanted |= sign.astype(np.uint8)
        # apply the difference through a mask; copyto(where=) is ten times as slow
        wanted ^= data
        wanted &= np.negative(is_small.view(np.uint8), out=is_small.view(np.uint8))
        np.bitwise_xor(data, wanted, out=data)
    elif len(places):
        row, column = np.divmod(places, shape[1])
        sign = (words[row, column] >> word(layout.bits - 8)) & word(0x80)
        data[row, column] = sign | _subnormal(moved.reshape(-1)[places], layout)
    if is_odd is not None:
        row, block = np.divmod(np.flatnonzero(is_odd), scales.shape[1])
        found = words.reshape(*scales.shape, BLOCK)[row, block]
        data.reshape(*scales.shape, BLOCK)[row, block] = elements(found, scales[row, block], rounding)


def _few(marks: bytearray, count: int) -> npt.NDArray[np.intp] | None:
    """Return the places where the first `count` marks are 1, or None if these are more than one in 16.

    Finding a handful one by one is five times as fast as flatnonzero.
    """
    found: list[int] = []
    at = marks.find(1, 0, count)
    while at >= 0 and len(found) < _HANDFUL:
        found.append(at)
        at = marks.find(1, at + 1, count)
    if at < 0:
        return np.array(found, np.intp)
    mask = np.frombuffer(marks, np.bool_, count)
    return None if np.count_nonzero(mask) > count // 16 else np.flatnonzero(mask)


def _largest(magnitudes: Words, layout: _Layout, scratch: Scratch) -> Words:
    """Return the largest word of each block.

    Reducing rows of 32 one by one is slow. Instead, groups of four words are transposed from [blocks, 8] to [8, blocks]
    and reduced along long rows; that leaves four words per block.
    """
    four = magnitudes.reshape(-1).view(layout.four).reshape(-1, BLOCK // 4)
    turned = scratch.turned[: magnitudes.size].view(layout.four).reshape(BLOCK // 4, -1)
    np.copyto(turned, four.T)
    left = np.maximum.reduce(turned.view(layout.dtype), axis=0)
    left = np.maximum(left[0::2], left[1::2])
    found: Words = np.maximum(left[0::2], left[1::2])
    return found


def _scales(amax: Words, layout: _Layout, rounding: Rounding) -> tuple[Bytes, Words, npt.NDArray[np.bool_] | None]:
    """Return (scale bytes, the term that turns magnitudes into t + half, mask of the blocks for `elements` or None)."""
    word = layout.dtype
    one, infinite = 1 << layout.mantissa, word(255 << layout.mantissa)
    above = one // 4 - 1 if rounding is Rounding.RCEIL else 0  # carries into the exponent for mantissas above 1.75
    raised = amax + word(above)
    scale = ((raised >> word(layout.mantissa)) - word(8)).astype(np.uint8)
    by = word(15 * one + layout.half) - (raised & ~word(one - 1))
    # one unsigned comparison for both bounds: values below `first` wrap around
    first = word((_PLAIN_SCALE + 8) << layout.mantissa)
    is_odd = (amax - first) >= infinite - first
    if not is_odd.any():
        return scale, by, None
    scale[raised < word(8 * one)] = 0
    scale[amax > infinite] = NAN_SCALE
    if rounding is Rounding.RCEIL:
        scale[amax == infinite] = 254
    is_zero = amax == 0
    by[is_zero] = word(3 << (layout.bits - 2))  # makes t far below zero
    is_odd &= ~is_zero
    return scale, by, is_odd if is_odd.any() else None


def _subnormal(moved: Words, layout: _Layout) -> Bytes:
    """Return the codes 0 to 8 of magnitudes below 2**-6, given t + half."""
    if layout is _FLOAT32:
        # fold the bits that bfloat16 lacks into one sticky bit, which only decides ties
        t = moved - layout.dtype(layout.half)
        rest = (t & layout.dtype(0xFFFF)) != 0
        moved = ((t >> layout.dtype(16)).astype(np.uint16) | rest) + np.uint16(_BFLOAT16.half)
    found: Bytes = np.take(_SUBNORMALS, moved, mode="clip")
    return found


def elements(words: Words, scales: Bytes, rounding: Rounding) -> Bytes:
    """Return the E4M3 bytes of blocks, [n, 32], for given scales: the definition in float64, edge cases included.

    It is slow and takes memory; it is for the few blocks that the fast path skips, and for tests.
    """
    wide = words if words.dtype == np.uint32 else words.astype(np.uint32) << np.uint32(16)
    power = 127 - scales.astype(np.int32)
    power[scales == 0] = 0 if rounding is Rounding.RCEIL else 126
    with np.errstate(invalid="ignore"):
        found = np.clip(np.abs(wide.view(np.float32).astype(np.float64)) * np.ldexp(1.0, power)[:, None], 0, 448)
    found[scales == NAN_SCALE] = 0
    # 2**exponent <= found; values below 2**-6 (subnormal) use the step of the smallest normal numbers
    exponent = np.where(found < 2.0**-6, -6, np.frexp(found)[1] - 1)
    code: Bytes = (np.rint(np.ldexp(found, 3 - exponent)) + 8 * (exponent + 6)).astype(np.uint8)
    code |= (wide >> np.uint32(24)).astype(np.uint8) & np.uint8(0x80)
    code[scales == NAN_SCALE] = 0x7F
    return code


def _values() -> npt.NDArray[np.float32]:
    """Return the values of the 256 E4M3 bytes."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.ldexp(mantissa + 8.0 * (exponent > 0), np.maximum(exponent, 1) - 10)
    value[(code & 0x7F) == 0x7F] = np.nan
    found: npt.NDArray[np.float32] = np.copysign(value, np.where(code & 0x80, -1, 1)).astype(np.float32)
    return found


def _powers() -> npt.NDArray[np.float32]:
    """Return the values of the 256 E8M0 bytes."""
    value = np.ldexp(1.0, np.arange(256) - 127)
    value[NAN_SCALE] = np.nan
    with np.errstate(over="ignore"):
        return value.astype(np.float32)


def _subnormals() -> Bytes:
    """Return a table from t + half to the code of a magnitude below 2**-6, in steps of 2**-9.

    d = 0 is 1.mmmmmmm * 2**-7, four steps or more; each lower d halves that.
    """
    t = np.arange(1 << 16).astype(np.uint16).view(np.int16).astype(np.int32) - _BFLOAT16.half
    steps = np.rint(np.ldexp(128.0 + (t & 127), (t >> 7) - 5))
    return np.where(t < 128, steps, 0).astype(np.uint8)


_SUBNORMALS: Final = _subnormals()
VALUES: Final = _values()  # of the 256 E4M3 bytes
_POWERS: Final = _powers()


# --- FP8 with a float32 scale for each tile of 128 x 128, as DeepSeek-V3 and Kimi-K2 store weights ------------
#
#     weight             [n, k]                                float8_e4m3fn
#     weight_scale_inv   [ceil(n / 128), ceil(k / 128)]        float32
#
#     scale = max(amax, 1e-4) / 448        value = element * scale        element = value / scale, ties to even
#
# The division, in float32, is that of the models' published code (`inference/kernel.py`: 448 is the largest element).
# The bound of 1e-4, which DeepGEMM has too, keeps tiles of zeros from dividing by zero. A tile with a NaN has the scale
# NaN and only NaN elements. A tile with an infinity has an infinite scale: its finite elements become 0, its infinities
# NaN.

TILE: Final = 128
_LARGEST_TILE: Final = np.float32(448)
_SMALLEST_AMAX: Final = np.float32(1e-4)
# columns converted in one step: 128 rows of them in float32 fit into a second-level cache
_COLUMNS = 1024
Scales = npt.NDArray[np.float32]


def tiles_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor with at least two dimensions."""
    return *shape[:-2], -(-shape[-2] // TILE), -(-shape[-1] // TILE)


def quantize_tiles(words: Words, data: Bytes, scales: Scales) -> None:
    """Convert a matrix, writing E4M3 bytes to `data` and one number per tile to `scales`.

    Args:
        words: [rows, columns], bfloat16 as uint16. Rows may be strided.
        data: [rows, columns].
        scales: [ceil(rows / 128), ceil(columns / 128)].
    """
    rows, columns = words.shape
    if words.dtype != np.uint16 or data.shape != words.shape or scales.shape != tiles_shape(words.shape):
        raise ValueError(
            f"{words.dtype}{list(words.shape)} into {list(data.shape)} and {list(scales.shape)}: expected uint16, "
            f"equal shapes, and {list(tiles_shape(words.shape))} scales"
        )
    for row in range(0, rows, TILE):
        for column in range(0, columns, _COLUMNS):
            part = slice(row, row + TILE), slice(column, column + _COLUMNS)
            tiles = scales[row // TILE, column // TILE : -(-(column + _COLUMNS) // TILE)]
            values = (words[part].astype(np.uint32) << np.uint32(16)).view(np.float32)
            starts = np.arange(0, values.shape[1], TILE)
            amax = np.maximum.reduceat(np.abs(values).max(axis=0), starts)
            np.divide(np.maximum(amax, _SMALLEST_AMAX), _LARGEST_TILE, out=tiles)
            with np.errstate(invalid="ignore"):
                values /= np.repeat(tiles, TILE)[: values.shape[1]]
            data[part] = _elements(values)


def dequantize_tiles(data: Bytes, scales: Scales) -> npt.NDArray[np.float32]:
    """Return the values of a matrix."""
    wide = np.repeat(np.repeat(scales, TILE, axis=0), TILE, axis=1)[: data.shape[0], : data.shape[1]]
    values: npt.NDArray[np.float32] = VALUES[data] * wide
    return values


def _elements(values: npt.NDArray[np.float32]) -> Bytes:
    """Return the E4M3 bytes of values that do not exceed 448 after rounding, ties to even."""
    bits = values.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    # keep three bits of the mantissa; an exponent of E4M3 is 120 less
    code = magnitude + (np.uint32(0x7FFFF) + ((magnitude >> np.uint32(20)) & np.uint32(1)) - np.uint32(120 << 23))
    code >>= np.uint32(20)
    is_small = magnitude < np.uint32(121 << 23)  # below 2**-6: steps of 2**-9
    if is_small.any():
        code[is_small] = np.rint(np.abs(values[is_small]) * np.float32(512)).astype(np.uint32)
    code[magnitude > np.uint32(255 << 23)] = 0x7F
    code |= (bits >> np.uint32(24)) & np.uint32(0x80)
    return code.astype(np.uint8)
