"""Prove that tiles and fills together write every element of every destination's local tensor exactly once.

Tiles share no place (`coordinates.doubly_placed`). So it is enough that the fills of a local tensor lie inside it, that
they overlap neither tiles nor each other, and that they have as many elements as the tiles leave out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from refitd.plan.columns import Ints, find
from refitd.plan.fills import SharedFills, fill_patterns
from refitd.plan.layouts import Layouts
from refitd.plan.runs import Box, share_a_place


@dataclass(frozen=True, eq=False)
class _Locals:
    """The destinations' local tensors by class: tensor i has entries first[i]:end[i] and `owed[i]` elements to fill."""

    first: Ints
    end: Ints
    owed: Ints
    key: Ints  # class * names + local, sorted
    row: Ints  # index into `first` for each key


def fill_violations(fills: SharedFills, local: Ints, layouts: Layouts) -> list[str]:
    """Return a message for each local tensor that is filled wrongly; `local` numbers the fills' names as in layouts."""
    side, names = layouts.destination, len(layouts.locals)
    tensors = _locals(layouts)
    at = find(layouts.ranks, fills.rank)
    receives = at >= 0
    receives[receives] = side.rank_class[at[receives]] >= 0
    if not receives.all() or len(np.unique(fills.rank)) < len(fills.rank):
        strangers = np.unique(fills.rank[~receives]).tolist()
        return [f"rank {rank}: the plan says it fills, and wants nothing" for rank in strangers] or [
            "plan: the fills of a rank are listed twice"
        ]
    kind_of_rank = np.full(len(layouts.ranks), -1, np.int64)
    kind_of_rank[at] = fills.kind
    padded = np.unique(side.entry_class[tensors.first[tensors.owed > 0]])
    concerned = np.flatnonzero((kind_of_rank >= 0) | (np.isin(side.rank_class, padded)))
    pairs, example = np.unique(
        np.stack([side.rank_class[concerned], kind_of_rank[concerned]], axis=1), axis=0, return_index=True
    )
    found: dict[str, str] = {}
    checked: dict[tuple[bytes, ...], str] = {}
    for (number, kind), rank in zip(pairs.tolist(), concerned[example].tolist(), strict=True):
        low, high = (int(fills.row_start[kind]), int(fills.row_start[kind + 1])) if kind >= 0 else (0, 0)
        rows = np.arange(low, high)
        wanted = tensors.first[tensors.owed > 0]
        wanted = side.entry_local[wanted[side.entry_class[wanted] == number]]
        for name in np.union1d(wanted, local[rows]).tolist():
            row = int(find(tensors.key, np.array([number * names + name]))[0]) if name >= 0 else -1
            if row < 0:
                found.setdefault("", f"plan: {layouts.labels[rank]} would fill a tensor that it does not have")
                continue
            wrong = _wrong(layouts, tensors, int(tensors.row[row]), fills, rows[local[rows] == name], checked)
            if wrong:
                subject = layouts.locals[name]
                found.setdefault(subject, f"{subject}: {layouts.labels[rank]} {wrong}")
    return list(found.values())


def _locals(layouts: Layouts) -> _Locals:
    side, geometries = layouts.destination, layouts.geometries
    boxes = np.concatenate([[0], np.cumsum(np.prod(geometries.box_size, axis=1)[geometries.tile_box])])
    in_tiles = boxes[geometries.tile_start[1:]] - boxes[geometries.tile_start[:-1]]
    total = np.array([int(np.prod(shape, dtype=object)) for shape in geometries.shapes], np.int64)
    # the entries of one local tensor are consecutive rows of its class
    opens = np.ones(len(side.entry_class), bool)
    opens[1:] = (np.diff(side.entry_class) != 0) | (np.diff(side.entry_local) != 0)
    first = np.flatnonzero(opens)
    inside = np.add.reduceat(in_tiles[side.entry_geometry], first) if len(first) else first
    owed = total[geometries.local_shape[side.entry_geometry[first]]] - inside
    key = side.entry_class[first] * len(layouts.locals) + side.entry_local[first]
    order = np.argsort(key, kind="stable")
    return _Locals(first, np.append(first[1:], len(opens)), owed, key[order], order)


def _wrong(
    layouts: Layouts, tensors: _Locals, row: int, fills: SharedFills, rows: Ints, checked: dict[tuple[bytes, ...], str]
) -> str:
    """Return what is wrong with these rows as the fill of one local tensor, or ""."""
    entries = np.arange(tensors.first[row], tensors.end[row])
    geometry = layouts.destination.entry_geometry[entries]
    columns = (fills.pattern, fills.element_size, fills.offset, fills.size, fills.stride)
    key = (geometry.tobytes(), *(column[rows].tobytes() for column in columns))
    if key not in checked:
        checked[key] = _problem(layouts, geometry, int(tensors.owed[row]), fills, rows)
    return checked[key]


def _problem(layouts: Layouts, geometry: Ints, owed: int, fills: SharedFills, rows: Ints) -> str:
    geometries = layouts.geometries
    shape = geometries.shapes[int(geometries.local_shape[geometry[0]])]
    filled = int(np.prod(fills.size[rows], axis=1).sum())
    if filled != max(owed, 0):
        return f"would fill {filled} elements of its local tensor {shape}, and {owed} belong to no tile"
    if owed <= 0:  # negative if tiles overlap, which is reported elsewhere
        return ""
    if (geometries.fill[geometry[:1]] < 0).any():
        return "would fill elements, and no value is declared for them"
    declared = fill_patterns(layouts, geometry[:1])[0]
    if (fills.pattern[rows] != declared).any() or (
        fills.element_size[rows] != geometries.element_size[geometry[0]]
    ).any():
        return f"would fill with other bits than those of {geometries.fills[int(geometries.fill[geometry[0]])]!r}"
    last = fills.offset[rows] + ((fills.size[rows] - 1) * fills.stride[rows]).sum(axis=1)
    if int(last.max()) >= int(np.prod(shape, dtype=object)) or int(fills.offset[rows].min()) < 0:
        return f"would fill elements outside its local tensor {shape}"
    boxes: list[Box] = list(
        zip(fills.offset[rows].tolist(), fills.size[rows].tolist(), fills.stride[rows].tolist(), strict=True)
    )
    for number in geometry.tolist():
        tiles = slice(int(geometries.tile_start[number]), int(geometries.tile_start[number + 1]))
        boxes += zip(
            geometries.tile_offset[tiles].tolist(),
            geometries.box_size[geometries.tile_box[tiles]].tolist(),
            geometries.tile_stride[tiles].tolist(),
            strict=True,
        )
    return "would fill elements that belong to a tile, or one twice" if share_a_place(boxes) else ""
