"""Check padding, the elements of local tensors in no tile, and the fills declared for it."""

from __future__ import annotations

import numpy as np

from refitd.plan.columns import Ints
from refitd.plan.layouts import NO_PADDING, UNCLEAR_PADDING, Layouts


def padding_problems(layouts: Layouts) -> dict[str, list[str]]:
    """Return, by canonical name, padding whose fill is undeclared or differs between the two ends."""
    if not (layouts.geometries.padding != NO_PADDING).any():
        return {}
    found: dict[str, list[str]] = {}
    for tensor, line in [*_undeclared(layouts), *_contradictions(layouts)]:
        found.setdefault(layouts.tensors[tensor], []).append(line)
    return found


def _undeclared(layouts: Layouts) -> list[tuple[int, str]]:
    """Return (tensor, problem) for destinations that do not declare their padding's value."""
    side, geometries = layouts.destination, layouts.geometries
    found: dict[str, tuple[int, str]] = {}
    sizes = geometries.paddings.elements()
    for row in layouts.padded(side).tolist():
        geometry, name = int(side.entry_geometry[row]), layouts.locals[int(side.entry_local[row])]
        padding = int(geometries.padding[geometry])
        who = f"{name}: {layouts.members(side, int(side.entry_class[row]))}"
        if padding == UNCLEAR_PADDING:
            what = "has elements that belong to no tile, interleaved too finely to be filled; check the tiles"
        elif geometries.fill[geometry] < 0:
            shape = geometries.shapes[int(geometries.local_shape[geometry])]
            first = int(geometries.paddings.offset[geometries.paddings.start[padding]])
            what = (
                f"has {int(sizes[padding])} of the {int(np.prod(shape))} elements of its local tensor {shape} in no "
                f"tile, the first at element {first}; expected every element to be written: declare what padding "
                "holds (fill=...), or check the tiles"
            )
        else:
            continue
        found.setdefault(name, (int(side.entry_tensor[row]), f"{who} {what}"))
    return list(found.values())


def _contradictions(layouts: Layouts) -> list[tuple[int, str]]:
    """Return (tensor, problem) for tensors that a source pads with one value and a destination with another."""
    geometries = layouts.geometries
    declared: list[tuple[Ints, Ints, Ints]] = []  # tensor, fill, class
    for side in (layouts.source, layouts.destination):
        fill = geometries.fill[side.entry_geometry]
        rows = np.flatnonzero((geometries.padding[side.entry_geometry] != NO_PADDING) & (fill >= 0))
        declared.append((side.entry_tensor[rows], fill[rows], side.entry_class[rows]))
    (src_tensor, src_fill, src_class), (dst_tensor, dst_fill, dst_class) = declared
    found = []
    for tensor in np.intersect1d(src_tensor, dst_tensor).tolist():
        held = {int(src_fill[i]): int(src_class[i]) for i in np.flatnonzero(src_tensor == tensor)[::-1].tolist()}
        wanted = {int(dst_fill[i]): int(dst_class[i]) for i in np.flatnonzero(dst_tensor == tensor)[::-1].tolist()}
        differing = [(h, w) for h in held for w in wanted if h != w]
        if not differing:
            continue
        (h, w) = differing[0]
        found.append(
            (
                tensor,
                f"{layouts.tensors[tensor]}: {layouts.members(layouts.source, held[h])} (source) pads it with "
                f"{geometries.fills[h]!r}, {layouts.members(layouts.destination, wanted[w])} (destination) with "
                f"{geometries.fills[w]!r}; both must hold the same: correct one of them, or leave it undeclared at "
                "the source",
            )
        )
    return found
