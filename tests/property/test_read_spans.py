"""Spans of a process's memory have the digests of the same elements packed, however they lie and are cut."""

from __future__ import annotations

import os
from unittest import mock

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from refitd.buffers.blocks import digest
from refitd.protocol import sidecar
from refitd.worker import digests


@st.composite
def boxes(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """A view of an array: dimensions in any order, some of them stepped over; and its bytes an element."""
    element = draw(st.sampled_from([1, 2, 4, 8, 16]))
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    steps = [draw(st.integers(1, 2)) for _ in shape]
    whole = [size * step for size, step in zip(shape, steps, strict=True)]
    data = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, int(np.prod(whole)) * element, np.uint8)
    view = data.view(f"V{element}").reshape(whole)[tuple(slice(None, None, step) for step in steps)]
    return view.transpose(draw(st.permutations(range(len(shape))))), element


@settings(deadline=None)
@given(box=boxes(), cut=st.tuples(st.floats(0, 1), st.floats(0, 1)), chunk=st.sampled_from([16, 64, 1 << 20]))
def test_a_span_of_a_process_has_the_digest_of_its_elements(
    box: tuple[np.ndarray, int], cut: tuple[float, float], chunk: int
) -> None:
    view, element = box
    first = int(min(cut) * (view.size - 1))
    count = max(1, int(max(cut) * view.size) - first)
    address = view.__array_interface__["data"][0]
    span = sidecar.Span(0, address, view.shape, view.strides, element, first, count, os.getpid())
    with mock.patch.object(digests, "CHUNK_BYTES", chunk):
        answer = digests.taken(sidecar.TakeDigests(run=1, spans=(span,)), {})
    packed = np.ascontiguousarray(view).reshape(-1)[first : first + count]
    assert not answer.reason and answer.digests == digest([packed])


def test_memory_that_is_not_there_and_elements_that_are_not_there_are_the_reason() -> None:
    data = np.zeros(8, np.uint8)
    address = data.__array_interface__["data"][0]
    beyond = sidecar.Span(0, address, (8,), (1,), 1, 4, 5, os.getpid())
    nowhere = sidecar.Span(0, 8, (8,), (1,), 1, 0, 8, os.getpid())
    for span, words in ((beyond, "are not all of"), (nowhere, "process")):
        answer = digests.taken(sidecar.TakeDigests(run=1, spans=(span,)), {})
        assert not answer.digests and words in answer.reason
