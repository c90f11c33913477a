from __future__ import annotations

import pytest

from tests.spmd.pool import Pool

PAIRS, AT_ONCE, QUICK = 72, 18, 18


@pytest.mark.parametrize(
    "first",
    [pytest.param(n, marks=() if n < QUICK else pytest.mark.slow) for n in range(0, PAIRS, AT_ONCE)],
)
def test_any_layout_in_either_mode_writes_the_bytes_of_one_conversion(pool: Pool, first: int) -> None:
    found = pool.run("mxfp8_cases:random_refits", range(first, first + AT_ONCE), timeout=240)

    assert sum(count for count, _ in found) > 100  # the random cases did convert tensors
    assert sum(cut for _, cut in found) > 0  # and blocks were joined


def test_strided_and_uneven_sources(pool: Pool) -> None:
    pool.run("mxfp8_cases:odd_sources")


def test_float32_and_modules_that_hold_the_elements(pool: Pool) -> None:
    pool.run("mxfp8_cases:wide_sources")


def test_quantized_sources_travel_as_they_are_or_are_dequantized_if_that_is_asked_for(pool: Pool) -> None:
    for said in pool.run("mxfp8_cases:quantized_sources"):
        assert "w: the source holds it in MXFP8" in said and "dequantize=True" in said


def test_data_and_scale_travel_to_other_ranks_and_to_this_one_in_half_the_bytes(pool: Pool) -> None:
    for as_bfloat16, converted in pool.run("mxfp8_cases:two_tensors_per_transfer_stay_apart"):
        assert as_bfloat16 == 64 * 128 * 2
        assert converted == 64 * 128 + 64 * 4


def test_ends_that_do_not_fit_are_refused_by_name_before_anything_moves(pool: Pool) -> None:
    found = pool.agreed("mxfp8_cases:refusals")

    for case in ("only senders", "only receivers", "modes differ"):
        assert "w: dtype is" in found[case] and "float8_e4m3fn" in found[case] and "bfloat16" in found[case], case
    assert "rank 4: w: its persistent buffer has shape [8, 32], expected [8, 64]" in found["shape"]
    assert "w: no persistent buffer is called 'w', there are: decoder.w" in found["no buffer"]
    assert "w: dtype is float32" in found["float32 arrives"] and "bfloat16" in found["float32 arrives"]
    assert "rank 0: w: it is float16 on cpu" in found["float16 source"]
