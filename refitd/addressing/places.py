"""The places of one rank's tensors, and elements of plans that are tiles.

Places are stored in columns: models have very many tensors of few shapes.

A tile is 128 rows of 128 elements, apart in memory. Where a list has such elements, all of its boxes get a last
dimension of size 1. For a row with tiles, its stride is the pitch: the bytes from one row of a tile to the next.

    [256, 512] of 2 bytes, in tiles    size [2, 4, 1], stride [128 * 1024, 256, 1024]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from refitd.buffers.layout import extent
from refitd.dtypes import TILE_ITEMS
from refitd.mxfp8.format import TILE
from refitd.mxfp8.parts import MARK
from refitd.plan.table import CopyTable, CrossingTable, RegionTable

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """Location of a local tensor: `offset` bytes into `arena`."""

    arena: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes


@dataclass(frozen=True, slots=True)
class ShapeAndStrides:
    """The shape and the strides (in bytes) that several tensors share."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Places:
    """The places of a rank's tensors, one per row. `rows` maps a tensor's name in plans to its row."""

    rows: Mapping[str, int]
    forms: tuple[ShapeAndStrides, ...]
    form: Int64  # index into `forms`
    arena: Int64  # [n] arena id
    offset: Int64  # [n]

    def __len__(self) -> int:
        return len(self.form)

    def __getitem__(self, row: int) -> LocalTensor:
        form = self.forms[int(self.form[row])]
        return LocalTensor(int(self.arena[row]), int(self.offset[row]), form.shape, form.strides)

    def in_arena(self, arena: int) -> Places:
        """Return the same places in another arena."""
        return replace(self, arena=np.full(len(self), arena, np.int64))

    def in_arenas(self, *arenas: int) -> Places:
        """Return the same places in other arenas: each number is an index into `arenas`."""
        return replace(self, arena=np.array(arenas, np.int64)[self.arena])

    def at_offsets(self, offsets: Sequence[int]) -> Places:
        """Return the same places at other offsets of their arenas."""
        return replace(self, offset=np.array(offsets, np.int64))

    def arenas(self) -> set[int]:
        """Return the ids of the arenas."""
        return set(np.unique(self.arena).tolist())


def places_of(tensors: Iterable[LocalTensor], rows: Mapping[str, int] | None = None) -> Places:
    """Put places into columns. This takes a microsecond for each place: do it once per registration, not per swap."""
    found = list(tensors)
    numbers: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    form = [numbers.setdefault((t.shape, t.strides), len(numbers)) for t in found]
    return Places(
        rows=rows or {},
        forms=tuple(ShapeAndStrides(shape, strides) for shape, strides in numbers),
        form=np.array(form, np.int64),
        arena=np.array([t.arena for t in found], np.int64),
        offset=np.array([t.offset for t in found], np.int64),
    )


@dataclass(frozen=True, eq=False, slots=True)
class Chosen:
    """Places of tensors of several ranks, one per row."""

    forms: tuple[ShapeAndStrides, ...]
    form: Int64
    arena: Int64
    offset: Int64


def choose(places: Mapping[int, Places], ranks: Int64, names: Sequence[str]) -> Chosen:
    """Return the place of each tensor by rank and name; `ranks` must be ascending.

    Raises:
        KeyError: a tensor has no place; the key is (rank, name).
    """
    columns: dict[str, list[Int64]] = {name: [] for name in ("form", "arena", "offset")}
    forms: list[ShapeAndStrides] = []
    found, first = np.unique(ranks, return_index=True)
    for rank, begin, end in zip(found.tolist(), first.tolist(), np.append(first, len(ranks))[1:].tolist(), strict=True):
        held = places.get(rank)
        rows = list(map(held.rows.get, names[begin:end])) if held is not None else [None]
        if held is not None and None in rows:  # parts that senders convert are in their tensor
            rows = [
                held.rows.get(name.partition(MARK)[0]) if row is None else row
                for row, name in zip(rows, names[begin:end], strict=True)
            ]
        if held is None or None in rows:
            raise KeyError((rank, names[begin + rows.index(None)]))
        at = np.array(cast("list[int]", rows), np.int64)
        columns["form"].append(held.form[at] + len(forms))
        forms += held.forms
        for name in ("arena", "offset"):
            columns[name].append(getattr(held, name)[at])
    joined = {name: np.concatenate([np.empty(0, np.int64), *parts]) for name, parts in columns.items()}
    return Chosen(tuple(forms), **joined)


# --- tiles ------------------------------------------------------------------------------------------------

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
