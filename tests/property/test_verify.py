"""Every change to a live tensor is found, in the slice that is named: daemon, worker and client without sockets.

The daemon's Proofs, a worker's digests and a client's checks are the real ones; the test delivers messages.
"""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from refitd.buffers import layout
from tests.support.proofs import DTYPES, Node, Shapes


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink blocks, to give tensors of some hundred bytes several blocks, runs and chunks."""
    monkeypatch.setattr(layout, "MIN_BLOCK_BYTES", 64)
    monkeypatch.setattr(layout, "CHUNK_BYTES", 24)
    monkeypatch.setattr("refitd.daemon.digest_work.RUN_BYTES", 300)


@st.composite
def shapes(draw: st.DrawFn) -> Shapes:
    shape = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
    long = st.tuples(st.integers(40, 700))
    return draw(st.lists(st.tuples(shape | long, st.sampled_from(list(DTYPES))), min_size=1, max_size=4))


def _changed(data: st.DataObject, was: np.ndarray) -> np.ndarray:
    """Elements of a tensor after random damage of any size, anywhere."""
    count = len(was)
    first = data.draw(st.integers(0, count - 1), "first")
    size = data.draw(st.integers(1, count - first), "size")
    to = data.draw(st.integers(0, count - size), "to")
    new, part = was.copy(), was[first : first + size].copy()
    match data.draw(st.sampled_from(["flip", "zero", "swap", "shift", "stale"]), "what"):
        case "flip":
            at = data.draw(st.integers(0, size * was.shape[1] - 1), "byte")
            new[first : first + size].reshape(-1)[at] ^= 1 << data.draw(st.integers(0, 7), "bit")
        case "zero":
            new[first : first + size] = 0
        case "swap" if count > 1:  # two parts of one size, often of one block
            size = data.draw(st.integers(1, count // 2), "exchanged")
            one = data.draw(st.integers(0, count - 2 * size), "one")
            other = one + size + data.draw(st.integers(0, min(8, count - one - 2 * size)), "apart")
            new[one : one + size], new[other : other + size] = was[other : other + size], was[one : one + size]
        case "shift":
            new[to : to + size] = part
        case "stale":  # another version's elements
            new[first : first + size] = np.random.default_rng(99).integers(0, 256, part.shape, np.uint8)
    return new


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.data(), shapes(), st.sampled_from(["packed", "private", "arena", "in-place"]), st.integers(0, 5), st.booleans()
)
def test_whatever_is_changed_is_found_and_the_slice_holds_it(
    data: st.DataObject, wanted: Shapes, way: str, seed: int, is_staged: bool
) -> None:
    is_staged &= way != "in-place"  # there is no staging arena to compare with
    node = Node(wanted, way, seed)
    proven = node.check()
    assert (proven.state, proven.version, proven.differences) == ("proven", 7, ())
    which = data.draw(st.integers(0, len(wanted) - 1), "tensor")
    was = node.staged(which)
    new = _changed(data, was)
    differ = np.flatnonzero((was != new).any(axis=1))
    node.write(which, new)
    if not is_staged:  # the staging arena has been written to since
        node.becomes(holds=None)
        node.staging.bytes[:] = 0
    found = node.check()
    if not len(differ):
        assert found.state == "proven"
        return
    assert found.state == "differs" and found.digest == proven.digest
    assert {d.parameter for d in found.differences} == {node.names[which]}
    ranges = [range(d.first, d.last + 1) for d in found.differences]
    if found.blocks == len(ranges):  # all are listed
        assert all(any(int(i) in r for r in ranges) for i in differ)
    shape = wanted[which][0]
    for d in found.differences:
        inside = [i for i in differ.tolist() if d.first <= i <= d.last]
        assert inside and d.shape == shape
        if is_staged:
            assert (d.first, d.last, d.differing) == (inside[0], inside[-1], len(inside))
        else:
            assert d.differing == 0
        box = np.zeros(shape, bool)
        box[eval(f"np.s_{d.slice}")] = True  # the slice is written as an index
        assert all(box.reshape(-1)[i] for i in inside)
    node.write(which, was)
    if is_staged:
        assert node.check().state == "proven"


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes(), st.sampled_from(["private", "arena", "in-place"]), st.integers(0, 5))
def test_tensors_that_were_exchanged_are_found(wanted: Shapes, way: str, seed: int) -> None:
    node = Node([wanted[0], wanted[0]], way, seed)
    first, second = node.staged(0), node.staged(1)
    assert node.check().state == "proven"
    node.write(0, second)
    node.write(1, first)
    found = node.check()
    assert found.state == ("proven" if (first == second).all() else "differs")


@given(st.lists(st.integers(1, 6), min_size=0, max_size=4), st.data())
def test_a_slice_is_the_box_of_its_ends(shape: list[int], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, prod(shape) - 1))
    last = data.draw(st.integers(first, prod(shape) - 1))
    box = np.zeros(shape, bool)
    box[eval(f"np.s_{layout.slice_text(shape, first, last)}") if shape else ()] = True
    assert box.reshape(-1)[first : last + 1].all()
    ends = np.zeros(shape, bool)
    ends.reshape(-1)[[first, last]] = True
    if first == last:
        assert (box == ends).all()
