"""Operations on columns of keys, against numpy's."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from refitd.plan import columns

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


def test_only_the_last_value_is_remembered_by_its_inputs() -> None:
    memo, one, other = columns.Memo[int](), object(), object()
    assert memo.of([np.array([1, 2]), one]) is None
    assert memo.keep([np.array([1, 2]), one], 5) == 5
    assert memo.of([np.array([1, 2]), one]) == 5
    for inputs in ([np.array([1, 3]), one], [np.array([1, 2]), other], [np.array([1, 2])]):
        assert memo.of(inputs) is None
    memo.keep([other], 6)
    assert memo.of([other]) == 6
    assert memo.of([np.array([1, 2]), one]) is None
