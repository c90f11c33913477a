"""Operations on columns of keys, against numpy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refitd.plan import columns
from refitd.plan.kept import Kept

INTS = st.lists(st.integers(-(2**62), 2**62) | st.integers(0, 9), max_size=60)
HASHES = st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 3), max_size=60)
# keys that fall into one slot whatever the size of the table: multiples of the inverse of the factor, and a few bits
CLASHING = st.lists(st.integers(0, 7).map(lambda n: n * pow(0x9E3779B97F4A7C15, -1, 2**64) % 2**64), max_size=60)


def arrays() -> st.SearchStrategy[np.ndarray]:
    ints = INTS.map(lambda keys: np.array(keys, np.int64))
    return ints | (HASHES | CLASHING).map(lambda keys: np.array(keys, np.uint64))


@given(arrays())
def test_keys_are_numbered_as_numpy_numbers_them(keys: np.ndarray) -> None:
    _, first, number = np.unique(keys, return_index=True, return_inverse=True)
    found = columns.numbered(keys)
    assert found[0].tolist() == first.tolist() and found[1].tolist() == number.tolist()
    assert columns.first_alike(keys).tolist() == first[number].tolist()


@given(INTS, INTS)
def test_a_key_is_among_others_or_not(some: list[int], keys: list[int]) -> None:
    found = columns.among(np.array(some, np.int64), np.array(keys, np.int64))
    assert found.tolist() == [key in some for key in keys]


def test_what_is_made_of_the_same_is_made_once() -> None:
    kept, made = Kept[int](), iter(range(9))

    def of(*parts: object) -> int:
        return kept.made_of(parts, lambda: next(made))

    one, other = object(), object()
    assert of(np.array([1, 2]), one) == of(np.array([1, 2]), one) == 0
    assert of(np.array([1, 3]), one) == 1
    assert of(np.array([1, 3]), other) == 2
    assert of(np.array([1, 3])) == 3
    assert of(np.array([1, 2]), one) == 4, "only the last one is kept"

    def fails() -> int:
        raise MemoryError

    with pytest.raises(MemoryError):
        kept.made_of((other,), fails)
    assert of(np.array([1, 2]), one) == 4
