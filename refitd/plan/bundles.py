"""Bundle what destination classes need, as what ranks of one node need alike is worth.

    class 0 of node n0   needs pieces a, b, norm      coarse: one bundle        fine: (a, b), (norm)
    class 1 of node n0   needs pieces c, d, norm      coarse: one bundle        fine: (c, d), (norm)

Whoever has a bundle sends all of it. With fine bundles one holder sends what several ranks of a node need alike, and it
crosses once. Coarse bundles are fewer, and so are the rows and the pairs of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from refitd.plan.columns import Ints, distinct, find, numbered, numbered_lists, offsets_of, ranges
from refitd.plan.layouts import Layouts
from refitd.plan.match import Match

# fine bundles are used if less than this of the bytes crosses with them
ONCE = 0.975


@dataclass(frozen=True, eq=False)
class Bundles:
    """All pieces, in bundles: each is of one destination class and one set.

    Attributes:
        dst_class: [bundles], ascending.
        set: [bundles].
        start: [bundles + 1] into the match's pieces.
        content: [bundles] equal for bundles of the same pieces in one order.
        nbytes: [bundles].
        is_fine: whether all classes that need a piece of a bundle need all of it, and each of them has it once.
    """

    dst_class: Ints
    set: Ints
    start: Ints
    content: Ints
    nbytes: Ints
    is_fine: bool


@dataclass(eq=False)
class KnownBundles:
    """Bundles of a match, made when they are first wanted, and what each kind of node costs with either."""

    coarse: Bundles | None = None
    fine: Bundles | None = None
    set_bytes: tuple[Ints, Ints] | None = None
    costs: dict[tuple[bytes, bytes], tuple[int, int]] = field(default_factory=dict)


def bundles_for(layouts: Layouts, found: Match, known: KnownBundles) -> Bundles:
    """Return the bundles with which these ranks' needs are met best."""
    if known.coarse is None or known.fine is None:
        known.coarse, known.fine = _bundles(found, is_fine=False), _bundles(found, is_fine=True)
    coarse = fine = 0
    for (wanting, holding), count in _node_kinds(layouts, found):
        key = wanting.tobytes(), holding.tobytes()
        if key not in known.costs:
            known.costs[key] = _costs(layouts, found, known.coarse, wanting, holding)
        with_coarse, with_fine = known.costs[key]
        coarse += count * with_coarse
        fine += count * with_fine
    return known.fine if fine < ONCE * coarse else known.coarse


def set_bytes_of(found: Match, known: KnownBundles) -> tuple[Ints, Ints]:
    """Return ([pieces] bytes of the piece's set in tensors before its own, [sets] bytes of each set).

    Elements that several destination classes want count once.
    """
    if known.set_bytes is None:
        pieces = found.pieces
        first, box = numbered(pieces.box)
        tensors = 1 + int(pieces.tensor.max(initial=-1))
        key, place = np.unique((pieces.set * tensors + pieces.tensor)[first], return_inverse=True)
        nbytes = np.zeros(len(key), np.int64)
        np.add.at(nbytes, place, _piece_bytes(found)[first])
        start = np.append(0, np.cumsum(nbytes))
        of_set = start[offsets_of(key // max(1, tensors), max(1, len(found.set_start) - 1))]
        known.set_bytes = start[place[box]] - of_set[pieces.set], np.diff(of_set)
    return known.set_bytes


def _bundles(found: Match, is_fine: bool) -> Bundles:
    pieces = found.pieces
    columns = [pieces.dst_class, pieces.set, *([pieces.needers, pieces.again] if is_fine else [])]
    opens = np.append(True, np.any([np.diff(column) != 0 for column in columns], axis=0))[: len(pieces.set)]
    begin = np.flatnonzero(opens)
    total = np.append(0, np.cumsum(_piece_bytes(found)))
    start = np.append(begin, len(pieces.set))
    return Bundles(
        dst_class=pieces.dst_class[begin],
        set=pieces.set[begin],
        start=start,
        content=numbered_lists(pieces.box, begin)[1],
        nbytes=np.diff(total[start]),
        is_fine=is_fine,
    )


def _piece_bytes(found: Match) -> Ints:
    nbytes: Ints = np.prod(found.pieces.size, axis=1) * found.pieces.element_size
    return nbytes


def _node_kinds(layouts: Layouts, found: Match) -> list[tuple[tuple[Ints, Ints], int]]:
    """Return ((destination classes, source classes), number of nodes) for nodes with the same classes.

    Nodes with one destination class, which needs nothing twice, are left out.
    """
    needs_twice = distinct(found.pieces.dst_class[found.pieces.again > 0])
    classes, seen = [], []
    for side in (layouts.destination, layouts.source):
        there = np.flatnonzero((side.rank_class >= 0) & (layouts.nodes >= 0))
        keys = distinct(layouts.nodes[there] * max(1, side.classes) + side.rank_class[there])
        nodes = keys // max(1, side.classes)
        classes.append(keys % max(1, side.classes))
        seen.append(offsets_of(nodes, 1 + int(layouts.nodes.max(initial=-1))))
    count: dict[tuple[bytes, bytes], int] = {}
    kinds: dict[tuple[bytes, bytes], tuple[Ints, Ints]] = {}
    for node in np.flatnonzero(np.diff(seen[0])).tolist():
        wanting, holding = (of[at[node] : at[node + 1]] for of, at in zip(classes, seen, strict=True))
        if len(wanting) == 1 and find(needs_twice, wanting)[0] < 0:
            continue
        key = wanting.tobytes(), holding.tobytes()
        kinds[key] = wanting, holding
        count[key] = count.get(key, 0) + 1
    return [(kinds[key], count[key]) for key in kinds]


def _costs(layouts: Layouts, found: Match, coarse: Bundles, wanting: Ints, holding: Ints) -> tuple[int, int]:
    """Return the bytes that cross to a node with ranks of these classes, with coarse and with fine bundles."""
    of_class = offsets_of(coarse.dst_class, layouts.destination.classes)
    _, bundle = ranges(of_class[wanting], np.diff(of_class)[wanting])
    set_of = np.repeat(np.arange(len(found.set_start) - 1), np.diff(found.set_start))
    near = distinct(set_of[find(holding, found.set_class) >= 0])
    bundle = bundle[find(near, coarse.set[bundle]) < 0]
    # what a single rank holds comes from it in any case
    source = layouts.source.rank_class
    ranks = np.bincount(source[source >= 0], minlength=layouts.source.classes)
    holders = np.bincount(set_of, weights=ranks[found.set_class], minlength=len(found.set_start) - 1)
    is_single = holders[coarse.set[bundle]] == 1
    several = bundle[~is_single]
    fine, single = (_distinct_bytes(found, coarse, which) for which in (bundle, bundle[is_single]))
    return single + int(coarse.nbytes[several].sum()), fine


def _distinct_bytes(found: Match, coarse: Bundles, bundle: Ints) -> int:
    """Return the bytes of the distinct pieces of bundles."""
    _, piece = ranges(coarse.start[bundle], np.diff(coarse.start)[bundle])
    first, _ = numbered(found.pieces.box[piece])
    return int(_piece_bytes(found)[piece[first]].sum())
