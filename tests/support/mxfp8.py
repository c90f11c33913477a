"""MXFP8 by its definition, in rational numbers and loops: the reference for all converters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch

from refitd.mxfp8 import format as fmt
from refitd.mxfp8.format import Rounding

# E4M3, magnitudes in order of their codes 0 to 126: 448 is the largest
E4M3 = [Fraction(8 * (code > 7) + code % 8) * Fraction(2) ** (max(code >> 3, 1) - 10) for code in range(127)]


def words_of(values: torch.Tensor) -> np.ndarray:
    """Return bfloat16 or float32 values as unsigned words."""
    if values.dtype == torch.bfloat16:
        return values.contiguous().view(torch.int16).numpy().view(np.uint16)
    return values.contiguous().view(torch.int32).numpy().view(np.uint32)


def quantized_once(
    values: torch.Tensor, rounding: Rounding, *, is_swizzled: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return data and scale of a whole tensor, converted in one go."""
    words = words_of(values).reshape(-1, values.shape[-1])
    data, scale = np.empty(words.shape, np.uint8), np.empty((len(words), words.shape[1] // 32), np.uint8)
    fmt.quantize(words, data, scale, rounding)
    if is_swizzled:
        return torch.from_numpy(data), torch.from_numpy(swizzled(scale))
    return torch.from_numpy(data), torch.from_numpy(scale)


def swizzled(scale: np.ndarray) -> np.ndarray:
    """Lay out scales as cuBLAS describes: tiles of 128 x 4, each as 32 x 16, one by one."""
    rows, blocks = scale.shape
    tiles_across = math.ceil(blocks / 4)
    out = np.zeros(math.ceil(rows / 128) * tiles_across * 512, np.uint8)
    for outer in range(rows):
        for inner in range(blocks):
            tile = (outer // 128) * tiles_across + inner // 4
            offset = (outer % 32) * 16 + ((outer % 128) // 32) * 4 + (inner % 4)
            out[tile * 512 + offset] = scale[outer, inner]
    return out


def scale_of(values: Sequence[float], rounding: Rounding) -> int:
    """Return the E8M0 byte of finite values, from exact quotients."""
    amax = max(abs(Fraction(value)) for value in values)
    if not amax:
        return 0
    # the least power of two with amax / 448 <= it; or the greatest that amax / 2**8 reaches
    exponent = -400
    if rounding is Rounding.RCEIL:
        while Fraction(2) ** exponent * 448 < amax:
            exponent += 1
    else:
        while Fraction(2) ** (exponent + 1) * 256 <= amax:
            exponent += 1
    return max(exponent + 127, 0)


def element_of(value: float, scale: int) -> int:
    """Return the E4M3 byte nearest to value / 2**(scale - 127), ties to even, saturating; for scales above 0."""
    magnitude = abs(Fraction(value)) / Fraction(2) ** (scale - 127)
    code = min(range(127), key=lambda code: (abs(E4M3[code] - magnitude), code % 2))
    return code | (0x80 if math.copysign(1, value) < 0 else 0)


def every_amax() -> torch.Tensor:
    """Return a block for every finite bfloat16 magnitude, which is the largest in it."""
    magnitudes = torch.arange(0, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    parts = (torch.rand(len(magnitudes), 32, generator=generator) * 2 - 1).double() * magnitudes[:, None].double()
    found = parts.to(torch.bfloat16)
    signs = 1 - 2 * (torch.arange(len(magnitudes)) % 2)
    found[torch.arange(len(magnitudes)), torch.arange(len(magnitudes)) % 32] = magnitudes * signs
    return found


def random_values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(192, 1024, generator=generator)
    exponents = torch.randint(-140, 127, normal.shape, generator=generator).float()
    return {
        "weights": (normal * 0.02).to(torch.bfloat16),
        "any bits": torch.randint(-(1 << 15), 1 << 15, (64, 4096), generator=generator, dtype=torch.int16).view(
            torch.bfloat16
        ),
        "any exponents": (normal * torch.exp2(exponents)).to(torch.bfloat16),
        "few exponents": (normal * torch.exp2((exponents / 12).round())).to(torch.bfloat16),
        "sparse": (normal * (normal > 2)).to(torch.bfloat16),
    }
