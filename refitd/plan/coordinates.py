"""Map places in local tensors back to canonical coordinates, for the validator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refitd.plan.coalesce import Rows
from refitd.plan.columns import Columns, Ints, distinct, ranges
from refitd.plan.layouts import Layouts, Side
from refitd.plan.runs import share_a_place


@dataclass(frozen=True, eq=False)
class Spans(Columns):
    """Each row's box of canonical coordinates on one side, inside one tile.

    A row that starts in no tile has tile -1. A row that leaves its tile is not whole: cut it along `cut_dim` after
    `cut_at` elements and map both parts again.
    """

    owner: Ints
    tile: Ints
    offset: Ints  # [n, D] canonical
    along: Ints  # [n, row dims] canonical dimension that each dimension of the row follows, -1 for none
    cut_dim: Ints  # -1 if whole
    cut_at: Ints

    @property
    def is_whole(self) -> npt.NDArray[np.bool_]:
        """Whether each row is one box of one tile."""
        return self.cut_dim < 0


class TileIndex:
    """All tiles of all classes of one side, indexed by (class, local tensor, canonical tensor)."""

    def __init__(self, layouts: Layouts, side: Side) -> None:
        geometries = layouts.geometries
        entry, row = side.tiles(geometries)
        key = self._key(layouts, side.entry_class[entry], side.entry_local[entry], side.entry_tensor[entry])
        order = np.lexsort((geometries.tile_offset[row], key))
        entry, row = entry[order], row[order]
        self._layouts = layouts
        self.key = key[order]
        self.number = np.arange(len(row))
        self.layout_class = side.entry_class[entry]
        self.local = side.entry_local[entry]
        self.tensor = side.entry_tensor[entry]
        geometry = side.entry_geometry[entry]
        self.element_size = geometries.element_size[geometry]
        self.cast = geometries.cast[geometry]
        self.offset = geometries.box_offset[geometries.tile_box[row]]
        self.size = geometries.box_size[geometries.tile_box[row]]
        self.local_offset = geometries.tile_offset[row]
        # the stride of a dimension of one element is meaningless
        self.stride = np.where(self.size > 1, geometries.tile_stride[row], 0)
        self.local_end = self.local_offset + ((self.size - 1) * self.stride).sum(axis=1) + 1

    @staticmethod
    def _key(layouts: Layouts, layout_class: Ints, local: Ints, tensor: Ints) -> Ints:
        key = (layout_class * len(layouts.locals) + local) * len(layouts.tensors) + tensor
        return np.where((local >= 0) & (tensor >= 0), key, -1)

    def spans(self, layout_class: Ints, rows: Rows, *, is_source: bool) -> Spans:
        """Return the spans of the rows on this side."""
        local = rows.src_local if is_source else rows.dst_local
        start = rows.src_offset if is_source else rows.dst_offset
        stride = rows.src_stride if is_source else rows.dst_stride
        key = self._key(self._layouts, layout_class, local, rows.tensor)
        row, tile = ranges(*self._near(key, start))
        coordinates, inside = self._coordinates(start[row], tile)
        row, tile, coordinates = row[inside], tile[inside], coordinates[inside]
        chosen = np.full(len(key), -1, np.int64)
        chosen[row[::-1]] = tile[::-1]
        begin = np.zeros((len(key), self.offset.shape[1]), np.int64)
        begin[row[::-1]] = coordinates[::-1]
        return self._extended(rows, chosen, begin, stride)

    def _near(self, key: Ints, start: Ints) -> tuple[Ints, Ints]:
        """Return the first tile, and the number of tiles, among which is each place's if it has one.

        A tensor may have thousands of tiles (every other column is one of its own): only those are looked at that
        begin at or before the place, after the last whose predecessors all end before it.
        """
        places = distinct(np.concatenate([self.local_offset, self.local_end, start]))
        keys = distinct(np.concatenate([self.key, key]))

        def numbered(of: Ints, place: Ints) -> Ints:
            # numbers, because key and place do not fit into 64 bits together
            return np.searchsorted(keys, of) * len(places) + np.searchsorted(places, place)

        last = np.searchsorted(numbered(self.key, self.local_offset), numbered(key, start), side="right")
        ends = np.maximum.accumulate(numbered(self.key, self.local_end)) if len(self.key) else last[:0]
        first = np.searchsorted(ends, numbered(key, start), side="right")
        return first, np.maximum(last - first, 0)

    def _coordinates(self, start: Ints, tile: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Return each place's coordinates in its tile, and whether the place belongs to the tile."""
        rest = start - self.local_offset[tile]
        inside = rest >= 0
        result = np.zeros((len(tile), self.size.shape[1]), np.int64)
        stride = self.stride[tile]
        # strides are nested (describe/layout.py checks it), so divide by the largest first
        order = np.argsort(-stride, axis=1, kind="stable")
        index = np.arange(len(tile))
        for k in range(order.shape[1]):
            dim = order[:, k]
            step = stride[index, dim]
            steps = np.where(step > 0, rest // np.maximum(step, 1), 0)
            rest = rest - steps * step
            result[index, dim] = steps
        return result, inside & (rest == 0) & (result < self.size[tile]).all(axis=1)

    def _extended(self, rows: Rows, tile: Ints, begin: Ints, stride: Ints) -> Spans:
        """Follow each dimension of the rows through their tiles."""
        n, dims = rows.size.shape
        found = tile >= 0
        if not len(self.key):
            none = np.full(n, -1, np.int64)
            return Spans(begin, rows.owner, none, begin, np.full((n, dims), -1), none, none)
        size = np.ones_like(begin)
        along = np.full((n, dims), -1, np.int64)
        cut_dim, cut_at = np.full(n, -1, np.int64), np.ones(n, np.int64)
        tile_stride, tile_size = self.stride[tile], self.size[tile]
        index = np.arange(n)
        for j in reversed(range(dims)):
            long = found & (rows.size[:, j] > 1)
            fits = (tile_stride == stride[:, j, None]) & (tile_size > 1) & (size == 1)
            matched = long & fits.any(axis=1)
            dim = np.argmax(fits, axis=1)
            room = tile_size[index, dim] - begin[index, dim]
            extent = np.where(matched, rows.size[:, j], 1)
            over = matched & (extent > room)
            along[matched, j] = dim[matched]
            size[index[matched], dim[matched]] = extent[matched]
            stuck = long & ~matched
            cut_dim[over | stuck] = j
            cut_at[over] = room[over]
            cut_at[stuck] = rows.size[stuck, j] // 2
        return Spans(size, rows.owner, tile, self.offset[tile] + begin, along, cut_dim, cut_at)


def doubly_placed(layouts: Layouts, places: TileIndex, side: Side) -> list[str]:
    """Return a message for each local tensor of a side in which two tiles share a place."""
    low = places.local_offset
    high = low + ((places.size - 1) * places.stride).sum(axis=1)
    where = places.layout_class * len(layouts.locals) + places.local
    order = np.lexsort((low, where))
    # if any two intervals overlap, then so do two that are adjacent in this order
    near = (where[order][1:] == where[order][:-1]) & (low[order][1:] <= high[order][:-1])
    found: dict[str, str] = {}
    for group in np.unique(where[order][1:][near]).tolist():
        tiles = np.flatnonzero(where == group).tolist()
        boxes = zip(
            places.local_offset[tiles].tolist(), places.size[tiles].tolist(), places.stride[tiles].tolist(), strict=True
        )
        if share_a_place(boxes):
            name = layouts.locals[places.local[tiles[0]]]
            ranks = layouts.members(side, int(places.layout_class[tiles[0]]))
            found.setdefault(
                name,
                f"{name}: two of its tiles on {ranks} share a place; each element of a local tensor must belong to "
                "one tile at most",
            )
    return list(found.values())
