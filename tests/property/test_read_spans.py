"""Spans of an arena have the digests of their packed elements, for any layout and cut."""

from __future__ import annotations

import os
from unittest import mock

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from refitd.buffers import arena as memory
from refitd.buffers import layout
from refitd.buffers.arena import MappedArena
from refitd.buffers.layout import digest
from refitd.protocol import sidecar
from refitd.worker import host_jobs


@st.composite
def boxes(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """An array, a view of it with dimensions in any order and some steps, and the bytes of an element."""
    element = draw(st.sampled_from([1, 2, 4, 8, 16]))
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    steps = [draw(st.integers(1, 2)) for _ in shape]
    whole = [size * step for size, step in zip(shape, steps, strict=True)]
    data = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, int(np.prod(whole)) * element, np.uint8)
    view = data.view(f"V{element}").reshape(whole)[tuple(slice(None, None, step) for step in steps)]
    return data, view.transpose(draw(st.permutations(range(len(shape))))), element


def holding(data: np.ndarray) -> MappedArena:
    """Return a new arena that begins with these bytes."""
    fd = memory.create(4096 * (1 + len(data) // 4096), "test")
    arena = MappedArena(fd, os.fstat(fd).st_size, write=True)
    os.close(fd)
    arena.bytes[: len(data)] = data
    return arena


@settings(deadline=None)
@given(box=boxes(), cut=st.tuples(st.floats(0, 1), st.floats(0, 1)), chunk=st.sampled_from([16, 64, 1 << 20]))
def test_a_span_of_an_arena_has_the_digest_of_its_elements(
    box: tuple[np.ndarray, np.ndarray, int], cut: tuple[float, float], chunk: int
) -> None:
    data, view, element = box
    arena = holding(data)
    first = int(min(cut) * (view.size - 1))
    count = max(1, int(max(cut) * view.size) - first)
    span = sidecar.Span(1, 0, view.shape, view.strides, element, first, count)
    with mock.patch.object(layout, "CHUNK_BYTES", chunk):
        answer = host_jobs.taken(sidecar.ReadSpans(run=1, spans=(span,)), {1: arena})
    packed = np.ascontiguousarray(view).reshape(-1)[first : first + count]
    assert not answer.reason and answer.digests == digest([packed])


def test_memory_that_is_not_there_and_elements_that_are_not_there_are_the_reason() -> None:
    arena = holding(np.zeros(8, np.uint8))
    beyond = sidecar.Span(1, 0, (8,), (1,), 1, 4, 5)
    outside = sidecar.Span(1, arena.nbytes - 4, (8,), (1,), 1, 0, 8)
    nowhere = sidecar.Span(2, 8, (8,), (1,), 1, 0, 8)
    for span, words in ((beyond, "leave arena 1"), (outside, "leave arena 1"), (nowhere, "arena 2 is not mapped")):
        answer = host_jobs.taken(sidecar.ReadSpans(run=1, spans=(span,)), {1: arena})
        assert not answer.digests and words in answer.reason
