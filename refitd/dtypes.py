"""Element types by name, without torch, and the bit patterns of their values.

A value that a type cannot represent exactly is refused: 1.5 as bfloat16 -> 0x3fc0, 0.1 as float16 -> refused.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# bytes per element, by the name torch uses without its "torch." prefix
ELEMENT_SIZES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
# Blocks of elements, which senders convert to MXFP8 or FP8 (refitd.mxfp8.parts). A plan has one element for each.
BLOCK_SIZES: dict[str, int] = {
    "bfloat16[32]": 64,
    "float32[32]": 128,
    "fp8.rceil.data": 32,
    "fp8.rceil.scale": 1,
    "fp8.floor.data": 32,
    "fp8.floor.scale": 1,
    "bfloat16[128x128]": 1 << 15,
    "float32[128x128]": 1 << 16,
    "fp8.tiles.data": 1 << 14,
    "fp8.tiles.scale": 4,
}
# A block of these bytes is a tile: 128 rows of 128 elements, which have so many bytes each.
TILE_ITEMS = {1 << 14: 1, 1 << 15: 2, 1 << 16: 4}


def dtype_name(dtype: torch.dtype | str) -> str:
    """Return the name of a torch dtype (or of a name) without the "torch." prefix."""
    return str(dtype).removeprefix("torch.")


def element_size(dtype: torch.dtype | str) -> int:
    """Return the bytes per element, or per block; raises ValueError for an unknown dtype."""
    name = dtype_name(dtype)
    if name in BLOCK_SIZES:
        return BLOCK_SIZES[name]
    if name not in ELEMENT_SIZES:
        raise ValueError(f"unknown dtype {name!r}; known: {', '.join(ELEMENT_SIZES)}")
    return ELEMENT_SIZES[name]


_INTEGERS = {"uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"}
_FLOATS = {"float16": "<e", "float32": "<f", "float64": "<d"}
# (mantissa bits, exponent of the smallest normal number, bit pattern of the NaN that torch writes)
_FLOAT8 = {
    "float8_e4m3fn": (3, -6, 0x7F),
    "float8_e5m2": (2, -14, 0x7F),
    "float8_e4m3fnuz": (3, -7, 0x80),
    "float8_e5m2fnuz": (2, -15, 0x80),
}


def fill_pattern(value: float, dtype: str) -> int:
    """Return the bits of `value` in this dtype, as an unsigned integer.

    A complex number's imaginary part is zero, so at most the lower 64 bits are set.

    Raises:
        ValueError: the dtype cannot represent the value exactly.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"is {value!r}, expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if number != value and not math.isnan(number):
        raise ValueError(f"is {value!r}, which no 64 bit float is")
    pattern = _pattern(number, dtype)
    if pattern is None:
        raise ValueError(f"is {number!r}, which is not exactly an element of dtype {dtype}")
    return pattern


def _pattern(value: float, dtype: str) -> int | None:
    if dtype == "bool":
        return int(value) if value in (0.0, 1.0) else None
    if dtype in _INTEGERS:
        return _integer(value, dtype)
    if dtype in _FLOATS:
        return _packed(value, _FLOATS[dtype])
    if dtype == "bfloat16":
        wide = _packed(value, "<f")
        return None if wide is None or wide & 0xFFFF else wide >> 16
    if dtype in _FLOAT8:
        return _float8(value, *_FLOAT8[dtype], dtype)
    if dtype == "float8_e8m0fnu":
        if math.isnan(value):
            return 0xFF
        mantissa, exponent = math.frexp(value)
        return exponent + 126 if mantissa == 0.5 and 0 <= exponent + 126 < 255 else None
    if dtype in ("complex64", "complex128"):
        return _packed(value, "<f" if dtype == "complex64" else "<d")
    return None


def _integer(value: float, dtype: str) -> int | None:
    bits = 8 * ELEMENT_SIZES[dtype]
    if not math.isfinite(value) or value != int(value):
        return None
    low, high = (0, 2**bits) if dtype.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    return int(value) % 2**bits if low <= value < high else None


def _packed(value: float, form: str) -> int | None:
    if math.isnan(value):  # always the NaN with a positive sign
        value = math.nan
    try:
        data = struct.pack(form, value)
    except OverflowError:
        return None
    (back,) = struct.unpack(form, data)
    return int.from_bytes(data, "little") if back == value or math.isnan(value) else None


def _float8(value: float, mantissa_bits: int, smallest: int, nan: int, dtype: str) -> int | None:
    if math.isnan(value):
        return nan
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    if math.isinf(value):
        return sign | 0x7C if dtype == "float8_e5m2" else None
    if value == 0.0:
        return None if sign and nan == 0x80 else sign  # these types have no negative zero
    _, exponent = math.frexp(abs(value))
    exponent = max(exponent - 1, smallest)
    steps = math.ldexp(abs(value), mantissa_bits - exponent)  # in units in the last place (ulp)
    if steps != int(steps):
        return None
    code = int(steps) + ((exponent - smallest) << mantissa_bits)
    largest = {"float8_e4m3fn": 0x7E, "float8_e5m2": 0x7B}.get(dtype, 0x7F)
    return sign | code if code <= largest else None


def fill_problem(value: Any, dtype: str) -> str:
    """Return what is wrong with a declared fill, or ""."""
    try:
        fill_pattern(value, dtype)
    except ValueError as error:
        return str(error)
    return ""
