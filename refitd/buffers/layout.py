"""The layout of arenas whose tensors are placed by refitd."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

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
