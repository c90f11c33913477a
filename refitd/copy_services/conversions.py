"""Conversion of elements between dtypes with numpy alone, rounded as in torch.

float32 -> bfloat16 keeps the upper half and rounds to nearest, ties to even:

    0x3f808000  half way between 0x3f80 and 0x3f81  ->  0x3f80
    0x3f818000  half way between 0x3f81 and 0x3f82  ->  0x3f82
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[Any]  # elements as unsigned integers of the same size


def converted(cast: int, words: Words) -> Words:
    """Return the elements after this cast (a number of refitd.describe.casts), in the same shape.

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
