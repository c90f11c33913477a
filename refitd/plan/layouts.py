"""All rosters as columns: every name, geometry and layout class once, whatever the number of ranks.

geometry   the boxes of a canonical tensor that one local tensor holds, without any name
entry      (local name, canonical name, geometry)
class      all entries of one side of a rank; ranks with equal entries share a class
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from refitd.plan.columns import Ints, numbered, ranges


@dataclass(frozen=True, eq=False)
class Paddings:
    """The parts of local tensors outside all tiles, as boxes: padding p has rows start[p]:start[p + 1]."""

    start: Ints
    offset: Ints  # elements into the local tensor
    size: Ints  # [boxes, D]
    stride: Ints  # [boxes, D]

    def elements(self) -> Ints:
        """Return the number of elements of each padding."""
        running = np.concatenate([[0], np.cumsum(np.prod(self.size, axis=1))])
        elements: Ints = running[self.start[1:]] - running[self.start[:-1]]
        return elements


# special values of a geometry's padding
NO_PADDING = -1
UNCLEAR_PADDING = -2  # padding that is interleaved too finely to be listed


@dataclass(frozen=True, eq=False)
class Geometries:
    """Geometries as tiles: geometry g has rows tile_start[g]:tile_start[g + 1].

    A local tensor has one geometry for each canonical tensor in it; they share its padding.
    """

    tile_start: Ints
    tile_box: Ints
    tile_offset: Ints  # elements into the local tensor
    tile_stride: Ints  # [tiles, D]
    box_offset: Ints  # [boxes, D], padded in front to D dimensions
    box_size: Ints  # [boxes, D]
    element_size: Ints
    local_shape: Ints  # index into `shapes`
    global_shape: Ints  # index into `shapes`, -1 if not declared
    dims: Ints
    dtype: Ints  # index into `dtypes`
    held_dtype: Ints  # index into `dtypes`: the dtype that sources must hold; differs from `dtype` only with a cast
    cast: Ints  # number of that cast, 0 for none
    padding: Ints  # index into `paddings`, NO_PADDING or UNCLEAR_PADDING
    fill: Ints  # index into `fills`, -1 if none is declared
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    paddings: Paddings
    fills: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Side:
    """All ranks' entries on one side. Rows of the entry columns are sorted by class."""

    rank_class: Ints  # [ranks], -1 for a rank without entries on this side
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
        """Expand entries to tiles; returns (entry, row in the geometries' tile columns) for each tile."""
        starts = geometries.tile_start[self.entry_geometry]
        return ranges(starts, geometries.tile_start[self.entry_geometry + 1] - starts)


@dataclass(frozen=True, eq=False)
class Layouts:
    """All rosters as columns. Names and ranks are sorted, so that nothing depends on roster order."""

    ranks: Ints
    labels: tuple[str, ...]
    nodes: Ints  # [ranks] number of the rank's node, by order of first rank; -1 if not given
    tensors: tuple[str, ...]
    locals: tuple[str, ...]
    source: Side
    destination: Side
    geometries: Geometries
    tied: Ints  # [tensors] the first tensor that each is tied to; itself if it is not tied

    def padded(self, side: Side) -> Ints:
        """Return one row of a side's entry columns for each local tensor that has padding."""
        rows = np.flatnonzero(self.geometries.padding[side.entry_geometry] != NO_PADDING)
        first, _ = numbered(side.entry_class[rows] * len(self.locals) + side.entry_local[rows])
        return rows[first]

    @property
    def has_ties(self) -> bool:
        """Whether any tensors are tied."""
        return bool((self.tied != np.arange(len(self.tied))).any())

    def with_ties_merged(self) -> Layouts:
        """Return the layouts with one tensor for each tied weight, whatever its holders call it."""
        sides = [replace(side, entry_tensor=self.tied[side.entry_tensor]) for side in (self.source, self.destination)]
        return replace(self, source=sides[0], destination=sides[1])

    def members(self, side: Side, number: int) -> str:
        """Return text for the ranks of a class: the first rank's label and the number of others."""
        return named([self.labels[i] for i in np.flatnonzero(side.rank_class == number).tolist()])


def named(labels: Sequence[str]) -> str:
    """Return "a", or "a and 3 more like it"."""
    return labels[0] + (f" and {len(labels) - 1} more like it" if len(labels) > 1 else "")
