"""The choice between pulling and copying private tensors, and what it is measured on."""

from __future__ import annotations

import os

import numpy as np
import pytest

from refitd.copy_services import measure
from refitd.copy_services.measure import SAMPLE_BYTES, Span
from refitd.errors import PeerLost, RefitdError

QUARTER = SAMPLE_BYTES // 4


def test_the_largest_tensors_are_sampled_a_quarter_each() -> None:
    tensors: list[Span] = [(100, 1, 64), (200, 4096, 8192), (300, 1024, 16384), (400, 1, 3 * QUARTER), (500, 0, 8)]
    assert measure.sample(tensors) == (
        (200, QUARTER // 8192, 8192),
        (300, QUARTER // 16384, 16384),
        (400, 1, QUARTER),
        (100, 1, 64),
    )


def test_of_short_rows_some_thousands_are_enough() -> None:
    assert measure.sample([(0, 1 << 30, 2)]) == ((0, measure.MAX_ROWS, 2),)
    assert measure.sample([]) == ()


@pytest.mark.parametrize("span", [(0, 3, 7), (0, 1, 1), (0, 1000, 600), (0, 3, 5 << 18), (0, 1, (1 << 20) + 2)])
def test_chunks_hold_the_first_half_of_every_row_once(span: Span) -> None:
    _, rows, row = span
    seen = np.zeros((rows, row), np.uint8)
    for first, count, at, nbytes in measure._chunks(rows, row):
        assert count * nbytes <= 256 << 10
        seen[first : first + count, at : at + nbytes] += 1
    half = max(1, row // 2)
    assert (seen[:, :half] == 1).all() and not seen[:, half:].any()
    assert seen.sum() == measure.payload([span])


def test_pulling_is_chosen_until_it_is_clearly_slower() -> None:
    spans: list[Span] = [(0, 2, 1 << 30)]
    assert measure.choose(spans, 0.2, 0.1) == measure.Choice("pulled", "pulled at 5.4 GB/s, copied at 10.7 GB/s")
    assert measure.choose(spans, 0.21, 0.1).mode == "copied"


def test_both_ways_are_measured_between_two_processes() -> None:
    choice = measure.measure_here()
    assert choice.mode in ("pulled", "copied")
    assert choice.reason.startswith("pulled at ") and ", copied at " in choice.reason


def test_copying_reads_the_rows_that_are_there() -> None:
    data = np.arange(3 * 1000, dtype=np.uint8)
    assert measure.copy_seconds([(data.ctypes.data, 3, 1000)]) > 0


def test_a_process_that_is_gone_and_memory_that_is_not_there_are_told_apart() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(PeerLost, match=f"process {pid}"):
        measure.pull_seconds(pid, [(4096, 1, 4096)])
    with pytest.raises(RefitdError, match="Bad address"):
        measure.pull_seconds(os.getpid(), [(4096, 1, 4096)])
