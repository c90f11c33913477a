"""All rosters as columns: every name, geometry and layout class once, whatever the number of ranks.

geometry   how one local tensor is made of boxes of a canonical tensor, without any name
entry      (local name, canonical name, geometry)
class      all entries of one side of a rank; ranks that say the same are of the same class
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from refitd.plan.columns import Hashes, Ints, hashed, name_hashes, numbered, ranges


@dataclass(frozen=True, eq=False)
class Paddings:
    """What tiles leave of local tensors, as boxes: those of padding p are rows start[p]:start[p + 1]."""

    start: Ints
    offset: Ints  # elements into the local tensor
    size: Ints  # [boxes, D]
    stride: Ints  # [boxes, D]

    def elements(self) -> Ints:
        """Return the number of elements of each padding."""
        running = np.concatenate([[0], np.cumsum(np.prod(self.size, axis=1))])
        elements: Ints = running[self.start[1:]] - running[self.start[:-1]]
        return elements


# as a geometry's padding
NO_PADDING = -1
UNCLEAR_PADDING = -2  # there is some, too finely interleaved to be listed


@dataclass(frozen=True, eq=False)
class Geometries:
    """Geometries as tiles: those of geometry g are rows tile_start[g]:tile_start[g + 1].

    The geometries of one local tensor, one for each canonical tensor in it, have its padding in common.
    """

    tile_start: Ints
    tile_box: Ints
    tile_offset: Ints  # elements into the local tensor
    tile_stride: Ints  # [tiles, D]
    box_offset: Ints  # [boxes, D], padded in front to D dimensions
    box_size: Ints  # [boxes, D]
    element_size: Ints
    local_shape: Ints  # index into `shapes`
    global_shape: Ints  # index into `shapes`, -1 where it is not declared
    dims: Ints
    dtype: Ints  # index into `dtypes`
    held_dtype: Ints  # of its sources, where it is a destination's: another one where a cast is declared
    cast: Ints  # number of that cast, 0 for none
    padding: Ints  # index into `paddings`, NO_PADDING or UNCLEAR_PADDING
    fill: Ints  # index into `fills`, -1 where none is declared
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    paddings: Paddings
    fills: tuple[float, ...]

    def hashes(self) -> Hashes:
        """Return a hash of each geometry's content, whatever numbers its parts have here."""
        box = hashed([self.box_offset, self.box_size])
        tile = hashed([box[self.tile_box], self.tile_offset, self.tile_stride])
        running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(tile, dtype=np.uint64)])
        shape = name_hashes([repr(shape) for shape in (*self.shapes, None)])
        fill = name_hashes([repr(value) for value in (*self.fills, None)])
        return hashed(
            [
                running[self.tile_start[1:]] - running[self.tile_start[:-1]],
                shape[self.local_shape],
                shape[self.global_shape],
                name_hashes(self.dtypes)[self.dtype],
                self.cast,
                fill[self.fill],
            ]
        )


@dataclass(frozen=True, eq=False)
class Side:
    """What all ranks say on one side. Rows of the entry columns are sorted by class."""

    rank_class: Ints  # [ranks], -1 for a rank that has nothing on this side
    class_start: Ints  # [classes + 1] into the entry columns
    entry_class: Ints
    entry_local: Ints
    entry_tensor: Ints
    entry_geometry: Ints

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.class_start) - 1

    def tiles(self, geometries: Geometries) -> tuple[Ints, Ints]:
        """Expand entries to tiles: (entry, row of the geometry's tile columns) of each."""
        starts = geometries.tile_start[self.entry_geometry]
        return ranges(starts, geometries.tile_start[self.entry_geometry + 1] - starts)


@dataclass(frozen=True, eq=False)
class Layouts:
    """All rosters as columns. Names are sorted, ranks are sorted, so that nothing depends on roster order."""

    ranks: Ints
    labels: tuple[str, ...]
    nodes: Ints  # [ranks] number of the rank's node, in order of first ranks; -1 where it is not given
    tensors: tuple[str, ...]
    locals: tuple[str, ...]
    source: Side
    destination: Side
    geometries: Geometries

    def digest(self) -> str:
        """Return a digest of everything here but labels."""
        geometries = self.geometries.hashes()
        tensors, names = name_hashes(self.tensors), name_hashes(self.locals)
        result = xxhash.xxh3_128()
        result.update(self.ranks.tobytes())
        result.update(self.nodes.tobytes())
        for side in (self.source, self.destination):
            entry = hashed([tensors[side.entry_tensor], names[side.entry_local], geometries[side.entry_geometry]])
            classes = [
                xxhash.xxh3_128_digest(np.sort(entry[low:high]).tobytes())
                for low, high in itertools.pairwise(side.class_start.tolist())
            ]
            for number in side.rank_class.tolist():
                result.update(classes[number] if number >= 0 else bytes(16))
        return result.hexdigest()

    def padded(self, side: Side) -> Ints:
        """Return the rows of a side's entry columns whose local tensors have padding, one for each of them."""
        rows = np.flatnonzero(self.geometries.padding[side.entry_geometry] != NO_PADDING)
        first, _ = numbered(side.entry_class[rows] * len(self.locals) + side.entry_local[rows])
        return rows[first]

    def members(self, side: Side, number: int) -> str:
        """Name the ranks of a class for a message: the first one's label and how many more there are."""
        return named([self.labels[i] for i in np.flatnonzero(side.rank_class == number).tolist()])


def named(labels: Sequence[str]) -> str:
    """Return "a", or "a and 3 more like it"."""
    return labels[0] + (f" and {len(labels) - 1} more like it" if len(labels) > 1 else "")
