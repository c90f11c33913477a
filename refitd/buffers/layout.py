"""The layout of arenas whose tensors are placed by refitd; the blocks of a tensor, with digests; written bytes.

A tensor's elements are cut, in row-major order and independent of their strides, into [0:step], [step:2*step], ... A
tensor has one digest for each block, in this order. A digest covers a block's content; the list covers its position.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod

import numpy as np
import numpy.typing as npt
import xxhash

# Tensors start on a cache-line pair: neighbours that two workers write never share a line.
ALIGNMENT = 256
PAGE = 4096


def packed_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return (offset of each tensor, size of the arena) for tensors of these sizes in bytes, in order.

    sizes [100, 300] -> offsets [0, 256], arena 4096
    """
    offsets: list[int] = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, max(PAGE, -(-end // PAGE) * PAGE)


def row_major_strides(shape: Sequence[int], element_size: int) -> tuple[int, ...]:
    """Return the strides, in bytes, of a contiguous tensor.

    shape (2, 3), 4 bytes -> (12, 4)
    """
    return _row_major_strides(tuple(shape), element_size)


@lru_cache(maxsize=4096)  # models have many tensors of few shapes
def _row_major_strides(shape: tuple[int, ...], element_size: int) -> tuple[int, ...]:
    strides = [element_size] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(1, shape[dim + 1])
    return tuple(strides)


def extent(shape: Sequence[int], strides: Sequence[int], element_size: int) -> int:
    """Return the bytes from the start of the first element to the end of the last; 0 for an empty tensor."""
    if 0 in shape:
        return 0
    return sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + element_size


# --- blocks -----------------------------------------------------------------------------------------------

MIN_BLOCK_BYTES = 1 << 20
MAX_BLOCKS = 64  # of one tensor
DIGEST_BYTES = 8
# bytes that are gathered, hashed or compared in one step; they stay in cache
CHUNK_BYTES = 256 << 10

Elements = npt.NDArray[np.void]


def block_steps(elements: npt.NDArray[np.int64], element_size: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the number of elements in each tensor's blocks; the last block may have fewer.

    524,288 elements of 2 bytes, 1 MiB -> 524,288; 256 MiB -> 2,097,152, in 64 blocks
    """
    nbytes = np.maximum(MIN_BLOCK_BYTES, -(-elements * element_size // MAX_BLOCKS))
    steps: npt.NDArray[np.int64] = -(-nbytes // element_size)
    return steps


def blocks_of(elements: int, step: int) -> list[tuple[int, int]]:
    """Return (first element, number of elements) of every block; an empty tensor has no block."""
    return [(first, min(step, elements - first)) for first in range(0, elements, step)]


def packed(array: Elements, first: int, count: int) -> Iterator[Elements]:
    """Yield elements [first : first + count], in row-major order, as contiguous pieces of at most about CHUNK_BYTES."""
    if array.flags.c_contiguous or array.ndim == 1:
        flat = array.reshape(-1) if array.flags.c_contiguous else array
        step = max(1, CHUNK_BYTES // array.itemsize)
        for at in range(first, first + count, step):
            yield np.ascontiguousarray(flat[at : min(at + step, first + count)])
        return
    inner = prod(array.shape[1:])
    rows = max(1, CHUNK_BYTES // (inner * array.itemsize))
    end = first + count
    while first < end:
        row, skip = divmod(first, inner)
        whole = min(rows, (end - first) // inner)
        if skip or not whole or whole * inner * array.itemsize > CHUNK_BYTES:
            part = min(inner - skip, end - first)
            yield from packed(array[row], skip, part)
        else:
            part = whole * inner
            yield np.ascontiguousarray(array[row : row + whole]).reshape(-1)
        first += part


def digest(parts: Iterator[Elements]) -> bytes:
    """Return the digest of the concatenated pieces; it depends on the position of every byte."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part.view(np.uint8).data)
    return state.digest()


def compare(live: Iterator[Elements], expected: Iterator[Elements], first: int) -> tuple[int, int, int]:
    """Return (first, last, number) of the elements that differ; number 0: none differ.

    Both sides begin at index `first` and yield the same total number of elements, but may cut them differently.
    """
    found, lowest, highest, at = 0, 0, 0, first
    for one, other in zip(_evenly(live), _evenly(expected), strict=True):
        a, b = (part.view(np.uint8).reshape(len(part), part.itemsize) for part in (one, other))
        rows = np.flatnonzero((a != b).any(axis=1))
        if len(rows):
            lowest = lowest if found else at + int(rows[0])
            highest = at + int(rows[-1])
            found += len(rows)
        at += len(one)
    return lowest, highest, found


def _evenly(parts: Iterator[Elements]) -> Iterator[Elements]:
    """Cut the concatenated pieces into equal steps: two sides with different pieces can then be compared."""
    kept: list[Elements] = []
    held = 0
    for part in parts:
        step, rest = max(1, CHUNK_BYTES // part.itemsize), part
        while held + len(rest) >= step:
            head, rest = rest[: step - held], rest[step - held :]
            yield np.concatenate([*kept, head]) if kept else head
            kept, held = [], 0
        if len(rest):
            kept.append(rest)
            held += len(rest)
    if kept:
        yield np.concatenate(kept)


def slice_text(shape: Sequence[int], first: int, last: int) -> str:
    """Return the smallest box that contains elements `first` to `last` of a tensor, written as an index.

    shape (4, 8): 10..13 -> "[1, 2:6]"; 10..17 -> "[1:3, :]"
    """
    if not shape:
        return "[]"
    words: list[str] = []
    for dim, size in enumerate(shape):
        inner = prod(shape[dim + 1 :])
        low, high = first // inner % size, last // inner % size
        if low == high:
            words.append(str(low))
            continue
        words.append(f"{low}:{high + 1}")
        words += [":"] * (len(shape) - dim - 1)
        break
    return f"[{', '.join(words)}]"


WHOLE = 1 << 62  # behind every byte of a slot

Spans = tuple[tuple[int, int], ...]  # (first byte, byte behind the last) of each


class Written:
    """The bytes of a slot that its client has written so far: disjoint ranges, ascending."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, begin: int, end: int) -> None:
        """Add a range; it may touch or overlap others."""
        first, last = bisect_left(self._ends, begin), bisect_right(self._begins, end)
        if first < last:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
        self._begins[first:last], self._ends[first:last] = [begin], [end]

    def holds(self, begin: int, end: int) -> bool:
        """Return whether every byte of a range is written."""
        at = bisect_right(self._begins, begin) - 1
        return begin >= end or (at >= 0 and end <= self._ends[at])

    def spans(self) -> Spans:
        """Return the ranges."""
        return tuple(zip(self._begins, self._ends, strict=True))
