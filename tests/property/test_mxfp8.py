"""MXFP8 on any values: rational numbers say what scales and elements must be."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from refitd.mxfp8 import format as fmt
from refitd.mxfp8.format import Rounding
from tests.support.mxfp8 import E4M3, element_of, scale_of

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
NEAR = st.builds(lambda x, k: float(np.float32(x * 2.0**k)), st.floats(1, 2, width=32), st.integers(-16, 8))
BLOCKS = st.one_of(st.lists(FINITE, min_size=32, max_size=32), st.lists(NEAR | FINITE, min_size=32, max_size=32))


@settings(deadline=None, max_examples=150)
@given(values=st.lists(NEAR, min_size=32, max_size=32) | BLOCKS, rounding=st.sampled_from(Rounding))
def test_a_block_of_float32_is_rounded_as_rational_numbers_are(values: list[float], rounding: Rounding) -> None:
    words = np.array([values], np.float32).view(np.uint32)
    data, scales = np.empty((1, 32), np.uint8), np.empty((1, 1), np.uint8)
    fmt.quantize(words, data, scales, rounding)
    assert scales[0, 0] == scale_of(values, rounding)
    if scales[0, 0]:
        assert data[0].tolist() == [element_of(value, int(scales[0, 0])) for value in values]
    np.testing.assert_array_equal(data, fmt.elements(words, scales[0], rounding))


@settings(deadline=None, max_examples=100)
@given(words=st.lists(st.integers(0, 0xFFFF), min_size=64, max_size=64), rounding=st.sampled_from(Rounding))
def test_what_has_been_converted_converts_to_itself(words: list[int], rounding: Rounding) -> None:
    """Values converted from MXFP8 are exact in it: a second conversion does not change them."""
    found = np.array([words], np.uint16)
    codes, scales, back, again = (np.empty(shape, kind) for shape, kind in (
        ((1, 64), np.uint8), ((1, 2), np.uint8), ((1, 64), np.uint16), ((1, 64), np.uint16),
    ))  # fmt: skip
    fmt.quantize(found, codes, scales, rounding)
    fmt.dequantize(codes, scales, back)
    is_odd = np.repeat((scales < 12) | (scales > 246), 32, axis=1)  # where results leave bfloat16, or scales E8M0
    fmt.quantize(back, codes, scales, rounding)
    fmt.dequantize(codes, scales, again)
    np.testing.assert_array_equal(again[~is_odd], back[~is_odd])


def test_the_oracle_s_elements_are_torch_s() -> None:
    import torch

    found = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float64).tolist()
    assert found == [float(value) for value in E4M3]
