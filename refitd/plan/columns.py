"""Tables as columns, operations on columns (expand ranges, hash rows, number equal keys), and a memo by columns."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]
# Keys below this many times their count are numbered by a table of all numbers, which is faster than sorting them.
TABLE = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, eq=False)
class Columns:
    """A table of n rows with one box each, stored as columns: arrays of shape [n], or [n, D] for boxes.

    A subclass's fields that are not arrays apply to all rows.
    """

    size: Ints  # [n, D] elements

    def __len__(self) -> int:
        return len(self.size)

    def select(self, rows: npt.NDArray[Any] | slice) -> Self:
        """Return only the given rows (a boolean mask, indices or a slice)."""
        picked = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in picked.items():
            if isinstance(value, np.ndarray):
                picked[name] = value[rows]
        return type(self)(**picked)

    @classmethod
    def concatenated(cls, parts: Sequence[Self]) -> Self:
        """Concatenate tables. All fields must be arrays, and all boxes must have the same number of dimensions."""
        return cls(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)})


def ranges(starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Expand ranges: [7, 3], [2, 1] -> owners [0, 0, 1], values [7, 8, 3]."""
    owners = np.repeat(np.arange(len(counts)), counts)
    return owners, range_values(starts, counts)


def range_values(starts: Ints, counts: Ints) -> Ints:
    """Return only the values of `ranges`."""
    values = np.repeat(starts - (np.cumsum(counts) - counts), counts)
    values += np.arange(len(values))
    return values


def offsets_of(sorted_keys: Ints, size: int) -> Ints:
    """Return where each key 0..size-1 begins in a sorted column, and the end: shape [size + 1]."""
    return np.searchsorted(sorted_keys, np.arange(size + 1))


def mixed(values: npt.NDArray[Any]) -> Hashes:
    """Hash each integer to 64 bits (the finaliser of splitmix64)."""
    x = values.astype(np.uint64)
    x += _GOLDEN
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def hashed(columns: Sequence[npt.NDArray[Any]]) -> Hashes:
    """Hash each row of the columns to 64 bits; a column of shape [n, D] counts as D columns."""
    result = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        for values in column.T if column.ndim > 1 else (column,):
            result = mixed(result ^ values.astype(np.uint64))
    return result


@functools.lru_cache(maxsize=8)
def name_hashes(names: tuple[str, ...]) -> Hashes:
    """Hash each name to 64 bits, equally in any process. The returned array is shared and read-only."""
    found = np.array([xxhash.xxh3_64_intdigest(name.encode()) for name in names], np.uint64)
    found.flags.writeable = False
    return found


def below(keys: npt.NDArray[Any]) -> int:
    """Return a number above all keys if a table of that size is quicker than sorting them; 0 if not."""
    if not len(keys) or keys.dtype.kind != "i" or keys.min() < 0:
        return 0
    bound = 1 + int(keys.max())
    return bound if bound <= TABLE * len(keys) else 0


def in_order(*keys: Ints) -> Ints:
    """Return the stable order of rows by several keys that are not negative, the most important one first."""
    if not len(keys[0]):
        return np.zeros(0, np.int64)
    bounds = [1 + int(key.max()) for key in keys]
    if math.prod(bounds) > np.iinfo(np.int64).max:
        return np.lexsort(keys[::-1])
    together = keys[0].astype(np.int64)
    for key, bound in zip(keys[1:], bounds[1:], strict=True):
        together = together * bound + key
    # numbers of 16 bits are sorted by radix
    return np.argsort(together.astype(np.uint16) if math.prod(bounds) <= 1 << 16 else together, kind="stable")


def first_alike(keys: npt.NDArray[Any]) -> Ints:
    """Return, for each row, the first row with the same key."""
    rows = np.arange(len(keys), dtype=np.int32 if len(keys) < 1 << 31 else np.int64)
    if bound := below(keys):
        slot = keys
    else:
        bits = max(1, 2 * len(keys) - 1).bit_length()
        slot = ((keys.astype(np.uint64) * _GOLDEN) >> np.uint64(64 - bits)).astype(np.int64)
        bound = 1 << bits
    first = np.empty(bound, rows.dtype)
    first[slot[::-1]] = rows[::-1]
    found: Ints = first[slot].astype(np.int64)
    if slot is not keys and len(others := np.flatnonzero(keys[found] != keys)):  # keys that share another one's slot
        _, example, number = np.unique(keys[others], return_index=True, return_inverse=True)
        found[others] = others[example[number]]
    return found


def numbered(keys: npt.NDArray[Any]) -> tuple[Ints, Ints]:
    """Number distinct keys: returns (index of the first row of each distinct key, number of each row's key)."""
    if bound := below(keys):
        first, number = np.full(bound, -1), np.empty(bound, np.int64)
        first[keys[::-1]] = np.arange(len(keys))[::-1]
        there = np.flatnonzero(first >= 0)
        number[there] = np.arange(len(there))
        return first[there], number[keys]
    alike, number = first_alike(keys), np.empty(len(keys), np.int64)
    there = np.flatnonzero(alike == np.arange(len(keys)))
    there = there[np.argsort(keys[there])]
    number[there] = np.arange(len(there))
    return there, number[alike]


def numbered_lists(values: Ints, start: Ints) -> tuple[Ints, Ints]:
    """Number distinct lists, none of them empty: list i is values[start[i] : start[i + 1]]; the last one is the rest.

    Returns (index of one list per distinct one, number of each list), as `numbered` does.
    """
    if not len(start):
        return start, start
    count = np.diff(np.append(start, len(values)))
    nth = np.arange(len(values)) - np.repeat(start, count)
    example, number = numbered(np.add.reduceat(hashed([values, nth]), start))
    alike = example[number]
    if (count == count[alike]).all() and (values == values[np.repeat(start[alike], count) + nth]).all():
        return example, number
    return np.arange(len(start)), np.arange(len(start))  # two lists of one hash: as if no two were equal


def distinct(keys: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the distinct keys, sorted. np.unique hashes integers, which takes several times as long."""
    if bound := below(keys):
        there = np.zeros(bound, bool)
        there[keys] = True
        return np.flatnonzero(there).astype(keys.dtype, copy=False)
    found = np.sort(keys)
    opens: npt.NDArray[np.bool_] = np.concatenate([[True], found[1:] != found[:-1]])[: len(found)]
    different: npt.NDArray[Any] = found[opens]
    return different


def find(sorted_keys: npt.NDArray[Any], keys: npt.NDArray[Any]) -> Ints:
    """Return the position of each key in a sorted column without repeats, -1 for a missing key."""
    if not len(sorted_keys):
        return np.full(len(keys), -1, np.int64)
    at = np.searchsorted(sorted_keys, keys)
    at[at == len(sorted_keys)] = 0
    return np.where(sorted_keys[at] == keys, at, -1)


def among(some: npt.NDArray[Any], keys: npt.NDArray[Any]) -> Bools:
    """Return whether each key is one of some, which may be in any order and repeated."""
    bound = 1 + max(int(some.max(initial=0)), int(keys.max(initial=0)))
    if bound > TABLE * (len(some) + len(keys)) or min(some.min(initial=0), keys.min(initial=0)) < 0:
        sought: Bools = find(distinct(some), keys) >= 0
        return sought
    there = np.zeros(bound, bool)
    there[some] = True
    found: Bools = there[keys]
    return found


def sorted_names(numbers: dict[str, int]) -> tuple[tuple[str, ...], Ints]:
    """Return the names sorted, and the new number of each old number."""
    names = sorted(numbers)
    moved = np.empty(len(names), np.int64)
    moved[[numbers[name] for name in names]] = np.arange(len(names))
    return tuple(names), moved


def padded(rows: Sequence[Sequence[int]], dims: int, fill: int) -> Ints:
    """Return rows of numbers as columns, padded in front to `dims` numbers."""
    found = [[fill] * (dims - len(row)) + list(row) for row in rows]
    return np.array(found, np.int64).reshape(len(found), dims)


V = TypeVar("V")


class Memo(Generic[V]):
    """Memoizes the last value by its inputs: columns and other objects. Do not change inputs or value afterwards."""

    def __init__(self) -> None:
        self._last: tuple[tuple[object, ...], V] | None = None

    def of(self, inputs: Sequence[object]) -> V | None:
        """Return the value if these inputs are equal columns and the same other objects."""
        if self._last is None or len(inputs) != len(self._last[0]) or not all(map(_is_same, self._last[0], inputs)):
            return None
        return self._last[1]

    def keep(self, inputs: Sequence[object], value: V) -> V:
        """Remember and return the value instead of the last one."""
        self._last = tuple(inputs), value
        return value


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return one is other
