"""Elements of plans that are tiles: 128 rows of 128 elements, apart in memory.

Where a list has such elements, all of its boxes get a last dimension of size 1. For a row with tiles, its stride is the
pitch: the bytes from one row of a tile to the next.

    [256, 512] of 2 bytes, in tiles    size [2, 4, 1], stride [128 * 1024, 256, 1024]
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from refitd.buffers.layout import extent
from refitd.dtypes import TILE_ITEMS
from refitd.mxfp8.fp8 import TILE
from refitd.plan.table import CopyTable, CrossingTable, RegionTable

Table = TypeVar("Table", CopyTable, CrossingTable, RegionTable)
Box = tuple[list[int], list[int]]  # sizes, strides in bytes


def with_pitches(table: Table) -> Table:
    """Return a table whose boxes have the last dimension, if any of its elements are tiles."""
    sizes = [table.element_size, *([table.src_element_size] if isinstance(table, CopyTable) else ())]
    if not np.isin(np.concatenate(sizes), list(TILE_ITEMS)).any():
        return table
    column = np.zeros((len(table), 1), np.int64)
    names = ("src_stride", "dst_stride") if isinstance(table, CopyTable) else ("stride",)
    strides: dict[str, Any] = {name: np.concatenate([getattr(table, name), column], axis=1) for name in names}
    return replace(table, size=np.concatenate([table.size, column + 1], axis=1), **strides)


def of_items(size: list[int], stride: list[int], element: int) -> tuple[Box, Box, int]:
    """Return (box of elements, box within an element, bytes of an item); other elements have no box within.

    size [2, 4, 1], stride [131072, 256, 1024] of 32768 bytes  ->  ([2, 4], [131072, 256]), ([128, 128], [1024, 2]), 2
    """
    item = TILE_ITEMS.get(element)
    if item is None:
        return (size, stride), ([], []), element
    return (size[:-1], stride[:-1]), ([TILE, TILE], [stride[-1], item]), item


def extent_of(size: list[int], stride: list[int], element: int) -> int:
    """Return the bytes from a box's first byte to its last one."""
    outer, inner, item = of_items(size, stride, element)
    return extent(outer[0] + inner[0], outer[1] + inner[1], item)
