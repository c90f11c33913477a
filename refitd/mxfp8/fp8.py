"""FP8 with a float32 scale for each tile of 128 x 128, as DeepSeek-V3 and Kimi-K2 store weights, with numpy only.

    weight             [n, k]                                float8_e4m3fn
    weight_scale_inv   [ceil(n / 128), ceil(k / 128)]        float32

    scale = max(amax, 1e-4) / 448        value = element * scale        element = value / scale, ties to even

The division, in float32, is that of the models' published code (`inference/kernel.py`: 448 is the largest element). The
bound of 1e-4, which DeepGEMM has too, keeps tiles of zeros from dividing by zero. A tile with a NaN has the scale NaN
and only NaN elements. A tile with an infinity has an infinite scale: its finite elements become 0, its infinities NaN.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from refitd.mxfp8.format import VALUES

TILE: Final = 128
_LARGEST: Final = np.float32(448)
_SMALLEST_AMAX: Final = np.float32(1e-4)
# columns converted in one step: 128 rows of them in float32 fit into a second-level cache
_COLUMNS = 1024
Words = npt.NDArray[Any]  # bfloat16 as uint16
Bytes = npt.NDArray[np.uint8]
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
            np.divide(np.maximum(amax, _SMALLEST_AMAX), _LARGEST, out=tiles)
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
