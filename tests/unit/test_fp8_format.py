"""FP8 in tiles of 128 x 128, compared with torch's arithmetic, tile by tile."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from refitd.mxfp8.format import dequantize_tiles, quantize_tiles, tiles_shape
from tests.support.mxfp8 import words_of


def oracle(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return elements and scales as the models' code computes them: in float32, for one tile after the other."""
    data = torch.empty(values.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(tiles_shape(tuple(values.shape)))
    for i, rows in enumerate(values.float().split(128)):
        for j, tile in enumerate(rows.split(128, 1)):
            scales[i, j] = tile.abs().max().clamp(1e-4) / 448.0
            data[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] = (tile / scales[i, j]).to(torch.float8_e4m3fn)
    return data, scales


def quantized(values: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    data, scales = np.empty(values.shape, np.uint8), np.empty(tiles_shape(tuple(values.shape)), np.float32)
    quantize_tiles(words_of(values), data, scales)
    return data, scales


@pytest.mark.parametrize("shape", [(128, 128), (576, 1153), (1, 1), (127, 2049), (256, 1024)])
@pytest.mark.parametrize("spread", [0, 4, 40])
def test_tiles_equal_torch_bit_for_bit(shape: tuple[int, int], spread: int) -> None:
    generator = torch.Generator().manual_seed(spread)
    powers = torch.randint(-spread, spread + 1, shape, generator=generator)
    values = (torch.randn(shape, generator=generator) * 0.02 * torch.exp2(powers.float())).bfloat16()
    data, scales = quantized(values)
    want_data, want_scales = oracle(values)
    np.testing.assert_array_equal(scales.view(np.uint32), want_scales.numpy().view(np.uint32))
    np.testing.assert_array_equal(data, want_data.view(torch.uint8).numpy())
    np.testing.assert_array_equal(
        dequantize_tiles(data, scales),
        want_data.float().numpy() * np.repeat(np.repeat(scales, 128, 0), 128, 1)[: shape[0], : shape[1]],
    )


def test_every_bfloat16_equals_torch() -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).clone()
    every[~every.isfinite()] = 0.0
    ordered = every.sort(stable=True).values.reshape(512, 128)  # tiles of like magnitude, down to subnormal numbers
    for values in (every.reshape(512, 128), ordered):
        data, scales = quantized(values)
        want_data, want_scales = oracle(values)
        np.testing.assert_array_equal(scales, want_scales.numpy())
        np.testing.assert_array_equal(data, want_data.view(torch.uint8).numpy())


@pytest.mark.parametrize(("odd", "is_nan"), [(float("nan"), 128 * 128), (float("inf"), 1), (0.0, 0)])
def test_tiles_of_zeros_infinities_and_nan(odd: float, is_nan: int) -> None:
    values = torch.zeros(128, 256, dtype=torch.bfloat16)
    values[5, 7], values[0, 200] = odd, 1.0
    data, scales = quantized(values)
    assert scales[0, 0] == pytest.approx(abs(odd) / 448 or 1e-4 / 448, nan_ok=True) and scales[0, 1] == 1 / np.float32(
        448
    )
    assert int((data[:, :128] & 0x7F == 0x7F).sum()) == is_nan and data[0, 200] == 0x7E
    assert not data[:, 128:200].any()
