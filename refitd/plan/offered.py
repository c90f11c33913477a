"""List the canonical tensors that source ranks offer together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from refitd.describe.roster import Roster
from refitd.errors import PlanError
from refitd.plan.read_rosters import read_rosters


def offered_tensors(rosters: Sequence[Roster]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return (shape, dtype name) of every canonical tensor that these source ranks hold parts of, by name.

    The dtype of a tensor that its source rounds is the one before rounding: a destination may have it so.
    If no rank declares a tensor's shape, it is the extent of the parts that are held.

    Raises:
        PlanError: the ranks' descriptions contradict each other.
    """
    layouts, wrong = read_rosters(rosters)
    if wrong:
        raise PlanError(f"{len(wrong)} problems: " + "; ".join(wrong[:5]))
    g = layouts.geometries
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for tensor in np.unique(layouts.source.entry_tensor).tolist():
        geometries = layouts.source.entry_geometry[layouts.source.entry_tensor == tensor]
        said = g.global_shape[geometries]
        if (said >= 0).any():
            shape = g.shapes[int(said.max())]
        else:
            tiles = np.concatenate([np.arange(g.tile_start[i], g.tile_start[i + 1]) for i in np.unique(geometries)])
            ends = (g.box_offset + g.box_size)[g.tile_box[tiles]].max(axis=0)
            shape = tuple(ends[len(ends) - int(g.dims[geometries[0]]) :].tolist())
        # of a source's description, `held_dtype` is the dtype that it rounds from
        found[layouts.tensors[tensor]] = shape, g.dtypes[int(g.held_dtype[geometries[0]])]
    return found
