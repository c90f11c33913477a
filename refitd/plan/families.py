"""Plan equal tensors as one: the same ranks hold equal parts of them, on both sides.

    61 layers x 16 experts of one rank, each cut over 32 ranks of an engine:  976 tensors, 1 family, 32 pieces

A tensor of a family has an exclusive local tensor on each rank, without padding, and is not tied. The planner sees
the first tensor, and counts the bytes of all (`Families.count`). Rows for each tensor are made where a plan is sent or
listed. A family that several source ranks hold is divided: they share its bytes evenly.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from refitd.describe.layout import elements
from refitd.plan.columns import Bools, Ints, hashed, in_order, numbered, numbered_lists, offsets_of
from refitd.plan.layouts import NO_PADDING, Layouts, Side
from refitd.plan.table import Families

# A family that several ranks can send is divided into this many, at most.
DIVIDED = 64


def joined(layouts: Layouts) -> Layouts:
    """Return the layouts with one tensor for each family, the first by name; `whole` undoes this."""
    family = _families(layouts)
    first = np.flatnonzero(family == np.arange(len(family)))
    if len(first) == len(family):
        return layouts
    number = np.searchsorted(first, family)
    by_family = np.argsort(number, kind="stable")
    start = offsets_of(number[by_family], len(first))
    nth = np.empty(len(number), np.int64)
    nth[by_family] = np.arange(len(number)) - start[number[by_family]]
    lists: list[Ints] = []
    begins: list[Ints] = []
    kept: list[Ints] = []
    for side in (layouts.source, layouts.destination):
        order = in_order(side.entry_class, number[side.entry_tensor], nth[side.entry_tensor])
        begin = np.flatnonzero(nth[side.entry_tensor[order]] == 0)
        begins.append(begin + sum(len(each) for each in lists))
        lists.append(side.entry_local[order])
        kept.append(order[begin])
    local, begin = np.concatenate(lists), np.concatenate(begins)
    example, alike = numbered_lists(local, begin)
    count = np.diff(np.append(begin, len(local)))[example]
    order = np.lexsort((count, local[begin[example]]))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    example, count, alike = example[order], count[order], place[alike]
    locals_start = np.append(0, np.cumsum(count))
    at = np.repeat(begin[example] - locals_start[:-1], count) + np.arange(int(count.sum()))
    sides = [
        _of_entries(side, rows, local=of, tensor=number[side.entry_tensor[rows]])
        for side, rows, of in zip(
            (layouts.source, layouts.destination), kept, np.split(alike, [len(kept[0])]), strict=True
        )
    ]
    return replace(
        layouts,
        tensors=tuple(layouts.tensors[i] for i in first.tolist()),
        locals=tuple(layouts.locals[i] for i in local[begin[example]].tolist()),
        source=sides[0],
        destination=sides[1],
        tied=number[layouts.tied[first]],
        families=Families(layouts.tensors, layouts.locals, start, by_family, locals_start, local[at]),
    )


def _of_entries(side: Side, rows: Ints, local: Ints, tensor: Ints) -> Side:
    """Return a side with some of its entries, in their order there."""
    order = np.argsort(rows, kind="stable")
    rows = rows[order]
    return Side(
        rank_class=side.rank_class,
        class_start=offsets_of(side.entry_class[rows], side.classes),
        entry_class=side.entry_class[rows],
        entry_local=local[order],
        entry_tensor=tensor[order],
        entry_geometry=side.entry_geometry[rows],
    )


def whole(layouts: Layouts) -> Layouts:
    """Return the layouts with all tensors of the families."""
    if (families := layouts.families) is None:
        return layouts
    sides = []
    for side in (layouts.source, layouts.destination):
        row, tensor, local = families.members(side.entry_tensor, side.entry_local)
        classes = side.entry_class[row]
        start = offsets_of(classes, side.classes)
        sides.append(Side(side.rank_class, start, classes, local, tensor, side.entry_geometry[row]))
    tied = np.arange(len(families.tensors))
    firsts = families.tensor[families.tensor_start[:-1]]
    tied[firsts] = firsts[layouts.tied]
    return replace(
        layouts,
        tensors=families.tensors,
        locals=families.locals,
        source=sides[0],
        destination=sides[1],
        tied=tied,
        families=None,
    )


def unlike(few: Layouts, layouts: Layouts) -> list[str]:
    """Prove that layouts with families mean the layouts of all tensors, or say that they do not.

    Then a plan of the families is right for all tensors: the members of a row are at equal places of tensors that are
    held and wanted alike, each of which is named once.
    """
    if (families := few.families) is None:
        return [] if few is layouts else ["plan: its layouts are not those of its ranks"]
    count, all_of = families.count, whole(few)
    is_same = all_of.tensors == layouts.tensors and all_of.locals == layouts.locals
    for joint, full, side in (
        (few.source, layouts.source, all_of.source),
        (few.destination, layouts.destination, all_of.destination),
    ):
        is_same &= bool((np.diff(families.local_start)[joint.entry_local] == count[joint.entry_tensor]).all())
        columns = ("entry_class", "entry_local", "entry_tensor", "entry_geometry")
        found, stated = ([getattr(each, column) for column in columns] for each in (side, full))
        orders = in_order(*found), in_order(*stated)
        is_same &= len(orders[0]) == len(orders[1]) and all(
            np.array_equal(one[orders[0]], other[orders[1]]) for one, other in zip(found, stated, strict=True)
        )
        is_same &= np.array_equal(joint.rank_class, full.rank_class)
    return [] if is_same else ["plan: tensors that are not alike were planned as one; report this"]


def _families(layouts: Layouts) -> Ints:
    """Return, for each tensor, the first tensor of its family; itself if it is alone."""
    count = len(layouts.tensors)
    is_alone: Bools = np.bincount(layouts.tied, minlength=count)[layouts.tied] > 1
    content, sides = np.zeros(count, np.uint64), np.zeros(count, np.int64)
    for bit, side in ((1, layouts.source), (2, layouts.destination)):
        tensor, classes, local = side.entry_tensor, side.entry_class, side.entry_local
        same = (np.diff(classes) == 0) & (np.diff(local) == 0)  # entries of one local tensor are consecutive
        is_alone[tensor[(np.append(same, False) | np.append(False, same))[: len(tensor)]]] = True
        is_alone[tensor[layouts.geometries.padding[side.entry_geometry] != NO_PADDING]] = True
        order = in_order(tensor, classes)
        twice = (np.diff(tensor[order]) == 0) & (np.diff(classes[order]) == 0)
        is_alone[tensor[order][1:][twice]] = True
        np.add.at(content, tensor, hashed([np.full(len(tensor), bit), classes, side.entry_geometry]))
        sides[tensor] |= bit
    family = np.arange(count)
    some = np.flatnonzero(~is_alone & (sides == 3))
    _, number = numbered(content[some])
    order = np.argsort(number, kind="stable")
    some, number = some[order], number[order]
    begin = offsets_of(number, 1 + int(number.max(initial=-1)))
    size = np.diff(begin)[number]
    divided = np.where(_is_held_twice(layouts)[some], -(-size // DIVIDED), size)
    nth = np.arange(len(some)) - begin[number]
    family[some] = some[begin[number] + nth // divided * divided]
    return family


def _is_held_twice(layouts: Layouts) -> Bools:
    """Return whether several source ranks hold some elements of each tensor.

    It depends on the classes, and on which of them have several ranks: as long as `Remembered` reuses a match.
    """
    source, geometries = layouts.source, layouts.geometries
    before = np.append(0.0, np.cumsum(np.prod(geometries.box_size, axis=1)[geometries.tile_box]))
    held = np.diff(before[geometries.tile_start])[source.entry_geometry]
    sizes = np.array([*map(elements, geometries.shapes), 0], np.float64)  # the last one: not declared
    together, size = np.zeros(len(layouts.tensors)), np.zeros(len(layouts.tensors))
    np.add.at(together, source.entry_tensor, held)
    size[source.entry_tensor] = sizes[geometries.global_shape[source.entry_geometry]]
    found: Bools = together > size
    ranks = np.bincount(source.rank_class[source.rank_class >= 0], minlength=source.classes)
    found[source.entry_tensor[ranks[source.entry_class] > 1]] = True
    return found
