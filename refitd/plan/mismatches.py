"""Find tensors that ranks describe with different shapes, dtypes or dimensions."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from refitd.plan.columns import Ints
from refitd.plan.conversions import Offered
from refitd.plan.layouts import NO_PADDING, Layouts

# names of embeddings and output layers in Megatron-Core and Hugging Face models
_VOCABULARY = re.compile(r"embed|vocab|output_layer|lm_head|\bwte\b")


def mismatches_of(layouts: Layouts, offered: Mapping[str, Offered]) -> dict[str, list[str]]:
    """Return the disagreements between ranks' descriptions, by canonical name; `offered` are the rounded tensors."""
    geometries = layouts.geometries
    tensor = np.concatenate([layouts.source.entry_tensor, layouts.destination.entry_tensor])
    geometry = np.concatenate([layouts.source.entry_geometry, layouts.destination.entry_geometry])
    # a destination's cast declares the dtype that its sources must hold
    dtype = np.concatenate(
        [
            geometries.dtype[layouts.source.entry_geometry],
            geometries.held_dtype[layouts.destination.entry_geometry],
        ]
    )
    found: dict[str, list[str]] = defaultdict(list)
    checks: list[tuple[str, Ints, Sequence[Any], str]] = [
        ("global shape", geometries.global_shape[geometry], geometries.shapes, ""),
        ("dtype", dtype, geometries.dtypes, "convert one side, or declare cast_from at the destination"),
        ("number of dimensions", geometries.dims[geometry], range(16), "check the tiles"),
    ]
    for what, value, words, advice in checks:
        known = value >= 0
        first = np.full(len(layouts.tensors), -1, np.int64)
        first[tensor[known][::-1]] = value[known][::-1]
        wrong = np.unique(tensor[known & (value != first[tensor])])
        for number in wrong.tolist():
            if layouts.tensors[number] in found:
                continue
            rows = np.flatnonzero((tensor == number) & known)
            said = []
            for each in dict.fromkeys(value[rows].tolist()):
                row = int(rows[value[rows] == each][0])
                said.append(f"{words[each]} on {_entry_ranks(layouts, row)}")
            one = offered.get(layouts.tensors[number])
            if what == "dtype" and one is not None and one.exact in {words[each] for each in value[rows].tolist()}:
                found[layouts.tensors[number]].append(
                    f"{layouts.tensors[number]}: dtype is {', '.join(said)}: its source has rounded these versions "
                    f"from {one.exact} to {one.dtype} (cast=), before it knew of a rank that needs {one.exact}; "
                    "publish a newer version, which is not rounded here (all source ranks need the same cast); "
                    f"cast={{NAME: '{one.exact}', '*': '{one.dtype}'}} never rounds a tensor"
                )
                continue
            do = advice or _shape_advice(layouts, number, geometry[rows])
            found[layouts.tensors[number]].append(
                f"{layouts.tensors[number]}: {what} is {', '.join(said)}; it must be the same everywhere, {do}"
            )
    return found


def _shape_advice(layouts: Layouts, tensor: int, geometry: Ints) -> str:
    """Return what to do about a tensor whose global shape differs between these geometries."""
    geometries, name = layouts.geometries, layouts.tensors[tensor]
    shapes = {geometries.shapes[number] for number in geometries.global_shape[geometry].tolist()}
    if len({shape[1:] for shape in shapes}) > 1 or not all(shapes):
        return "check the parallel groups"
    least, most = min(shape[0] for shape in shapes), max(shape[0] for shape in shapes)
    if not _VOCABULARY.search(name):
        return (
            "check the parallel groups; if a tensor is only some rows of this one, say which with names= "
            f"({{its name: Part({name!r}, rows=..., first=..., whole={most})}})"
        )
    is_stated = geometries.padding[geometry] != NO_PADDING
    stated = {geometries.shapes[number][0] for number in geometries.global_shape[geometry[is_stated]].tolist()}
    if stated == {least}:
        rows, where = str(least), f"which has {most}: {least} rows are real, as the padded ranks of the other side say"
    else:
        rows, where = "N", f"whose padding is not described; N is the tokenizer's size, at most {least}"
    return (
        f"and looks like a vocabulary padded to {most} rows on one side and {least} on the other: give "
        f"names={{{name!r}: Padded({name!r}, rows={rows}), '{{rest}}': '{{rest}}'}} (refitd.names) to each side {where}"
    )


def _entry_ranks(layouts: Layouts, row: int) -> str:
    """Return text for the ranks of an entry; `row` counts through the source's, then the destination's entries."""
    sources = len(layouts.source.entry_tensor)
    if row < sources:
        return f"{layouts.members(layouts.source, int(layouts.source.entry_class[row]))} (source)"
    row -= sources
    ranks = layouts.members(layouts.destination, int(layouts.destination.entry_class[row]))
    geometry = layouts.destination.entry_geometry[row]
    wanted = layouts.geometries.dtypes[int(layouts.geometries.dtype[geometry])]
    cast = f", cast to {wanted}" if layouts.geometries.cast[geometry] else ""
    return f"{ranks} (destination{cast})"
