"""All rosters as columns: every name, geometry and layout class once, whatever the number of ranks.

geometry   how one local tensor is made of boxes of a canonical tensor, without any name
entry      (local name, canonical name, geometry)
class      all entries of one side of a rank; ranks that say the same are of the same class
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from refitd.plan.columns import Ints, numbered, ranges


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
    tied: Ints  # [tensors] the first of the tensors that each is tied to; itself where it is tied to none

    def padded(self, side: Side) -> Ints:
        """Return the rows of a side's entry columns whose local tensors have padding, one for each of them."""
        rows = np.flatnonzero(self.geometries.padding[side.entry_geometry] != NO_PADDING)
        first, _ = numbered(side.entry_class[rows] * len(self.locals) + side.entry_local[rows])
        return rows[first]

    @property
    def has_ties(self) -> bool:
        """Whether any tensors are tied."""
        return bool((self.tied != np.arange(len(self.tied))).any())

    def with_ties_merged(self) -> Layouts:
        """Return the layouts with one tensor for each tied weight, whatever names its holders have for it."""
        sides = [replace(side, entry_tensor=self.tied[side.entry_tensor]) for side in (self.source, self.destination)]
        return replace(self, source=sides[0], destination=sides[1])

    def members(self, side: Side, number: int) -> str:
        """Name the ranks of a class for a message: the first one's label and how many more there are."""
        return named([self.labels[i] for i in np.flatnonzero(side.rank_class == number).tolist()])


def named(labels: Sequence[str]) -> str:
    """Return "a", or "a and 3 more like it"."""
    return labels[0] + (f" and {len(labels) - 1} more like it" if len(labels) > 1 else "")
