"""Element types by name, without torch: the bit patterns of their values, and the conversions between them.

A value that a type cannot represent exactly is refused: 1.5 as bfloat16 -> 0x3fc0, 0.1 as float16 -> refused.

Each copy of a plan carries the number of its conversion; 0 copies bytes unchanged. A number is never given to another
conversion, because plans travel between releases.

A source that holds float32 and may offer bfloat16 is described in one of two ways:

    rounded      dtype bfloat16, cast_from float32   it rounds when it publishes
    unrounded    dtype float32, cast_to bfloat16     the workers round for destinations that hold bfloat16

A destination declares its own dtype, and possibly the dtype that it is cast from:

    destination               from a rounded source        from an unrounded one
    bfloat16                  copied                       rounded by the workers
    bfloat16 from float32     copied: rounded already      rounded by the workers
    float32                   refused                      copied
    float16 from float32      refused                      rounded by the workers
    float32 from bfloat16     widened, as it declares      copied

`converted` performs a conversion with numpy alone, rounded as in torch. float32 -> bfloat16 keeps the upper half and
rounds to nearest, ties to even:

    0x3f808000  half way between 0x3f80 and 0x3f81  ->  0x3f80
    0x3f818000  half way between 0x3f81 and 0x3f82  ->  0x3f82
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

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


# --- conversions ------------------------------------------------------------------------------------------

# number -> (dtype at the source, dtype at the destination)
CASTS: dict[int, tuple[str, str]] = {
    1: ("float32", "bfloat16"),
    2: ("bfloat16", "float32"),
    3: ("float32", "float16"),
    4: ("float16", "float32"),
}
# the same for blocks of elements, which refitd.mxfp8.parts converts
BLOCK_CASTS: dict[int, tuple[str, str]] = {
    5: ("bfloat16[32]", "fp8.rceil.data"),
    6: ("bfloat16[32]", "fp8.rceil.scale"),
    7: ("bfloat16[32]", "fp8.floor.data"),
    8: ("bfloat16[32]", "fp8.floor.scale"),
    9: ("float32[32]", "fp8.rceil.data"),
    10: ("float32[32]", "fp8.rceil.scale"),
    11: ("float32[32]", "fp8.floor.data"),
    12: ("float32[32]", "fp8.floor.scale"),
    13: ("bfloat16[128x128]", "fp8.tiles.data"),
    14: ("bfloat16[128x128]", "fp8.tiles.scale"),
    15: ("float32[128x128]", "fp8.tiles.data"),
    16: ("float32[128x128]", "fp8.tiles.scale"),
}
PAIRS = ", ".join(f"{held} to {wanted}" for held, wanted in CASTS.values())
# the types that can be cast
FLOATING = frozenset(name for pair in CASTS.values() for name in pair)
_ALL = CASTS | BLOCK_CASTS
# bytes per element or block, indexed by conversion number; index 0 (no conversion) holds 0
SOURCE_SIZES = (0, *(element_size(held) for held, _ in _ALL.values()))
DESTINATION_SIZES = (0, *(element_size(wanted) for _, wanted in _ALL.values()))


def cast_number(held: str, wanted: str) -> int | None:
    """Return the number of the conversion from one dtype to another: 0 if they are equal, None if it is unsupported."""
    if held == wanted:
        return 0
    return next((number for number, pair in _ALL.items() if pair == (held, wanted)), None)


def cast_problem(cast_from: object, dtype: object) -> str:
    """Return what is wrong with a declared cast to `dtype`, or ""."""
    wanted = dtype_name(str(dtype))
    if isinstance(cast_from, str) and cast_number(dtype_name(cast_from), wanted) is not None:
        return ""
    return f"is {cast_from!r} for a tensor of {wanted}, expected one of the casts that there are: {PAIRS}"


@dataclass(frozen=True, slots=True)
class Offered:
    """The dtype of an offered tensor, and the other dtype that the offer names.

    Attributes:
        dtype: of the elements that can be read.
        exact: the dtype that was rounded to `dtype`; None if it is not rounded.
        may: the dtype that it may be converted to; None if none is named.
    """

    dtype: str
    exact: str | None = None
    may: str | None = None

    def read_as(self, holds: str, cast_from: str | None) -> str:
        """Return the dtype that a destination reads: `dtype` if it can be read so, else what it declares.

        Args:
            holds: the destination's own dtype.
            cast_from: the dtype that it declares to be cast from, None if it declares none.
        """
        wanted = cast_from or holds
        is_made = self.exact is not None and holds == self.dtype and wanted == self.exact
        is_allowed = self.may is not None and (
            self.may == holds == wanted or (holds == self.dtype and wanted == self.may)
        )
        return self.dtype if is_made or is_allowed else wanted

    def lacks(self, holds: str, cast_from: str | None) -> bool:
        """Return whether a destination needs the elements unrounded, and can be given them so."""
        wanted = self.read_as(holds, cast_from)
        return wanted == self.exact != self.dtype and cast_number(wanted, holds) is not None


# By canonical name: each (dtype, declared cast) of targets that hold the tensor.
Held = Mapping[str, Iterable[tuple[str, str | None]]]


def unrounded(offered: Mapping[str, Offered], held: Held) -> set[str]:
    """Return the canonical tensors that some destination needs unrounded and that are offered rounded."""
    return {name for name, one in offered.items() if any(one.lacks(holds, cast) for holds, cast in held.get(name, ()))}


Words = npt.NDArray[Any]  # elements as unsigned integers of equal size


def converted(cast: int, words: Words) -> Words:
    """Return the elements after the conversion with this number, in an array of equal shape; blocks are excluded.

    As in torch, numbers beyond float16's range become infinite, and NaN stays NaN.
    """
    return _BY_NUMBER[cast](np.atleast_1d(words)).reshape(words.shape)


def _float32_to_bfloat16(words: Words) -> Words:
    rounded = words >> np.uint32(16)  # one temporary, which every further step overwrites
    rounded &= np.uint32(1)
    rounded += words
    rounded += np.uint32(0x7FFF)
    rounded >>= np.uint32(16)
    result: Words = rounded.astype(np.uint16)
    numbers = words.view(np.float32)
    is_nan = numbers != numbers  # noqa: PLR0124
    if is_nan.any():  # rounding could turn a NaN into an infinity
        result[is_nan] = ((words[is_nan] >> 16) | np.uint32(0x40)).astype(np.uint16)
    return result


def _bfloat16_to_float32(words: Words) -> Words:
    return words.astype(np.uint32) << np.uint32(16)


def _float32_to_float16(words: Words) -> Words:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return words.view(np.float32).astype(np.float16).view(np.uint16)


def _float16_to_float32(words: Words) -> Words:
    with np.errstate(invalid="ignore"):
        return words.view(np.float16).astype(np.float32).view(np.uint32)


_BY_NUMBER: dict[int, Callable[[Words], Words]] = {
    1: _float32_to_bfloat16,
    2: _bfloat16_to_float32,
    3: _float32_to_float16,
    4: _float16_to_float32,
}
