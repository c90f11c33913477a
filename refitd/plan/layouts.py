"""All rosters as columns, each name, geometry and layout class once; and the problems between rosters.

geometry   the boxes of a canonical tensor that one local tensor holds, without any name
entry      (local name, canonical name, geometry)
class      all entries of one side of a rank; ranks with equal entries share a class

Ranks may disagree on shapes, dtypes, dimensions or padding. Names may be aliases of one weight (tied tensors). Either
end may declare them; an alias is used only for a tensor that no source has:

    source: embedding, aliases (output,)     destination: embedding and output           both from embedding
    source: embedding                        destination: output, aliases (embedding,)   both from embedding
    source: embedding and output             each from its own; a destination that ties them is refused, unless a
                                             source also declares them tied
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from refitd.describe.layout import canonical_name
from refitd.describe.metadata import ParameterMetadata
from refitd.dtypes import Offered, cast_number
from refitd.plan.columns import Ints, numbered, ranges
from refitd.plan.table import Families
from refitd.text import named


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
    """All rosters as columns. Names and ranks are sorted, so plans do not depend on roster order."""

    ranks: Ints
    labels: tuple[str, ...]
    nodes: Ints  # [ranks] number of the rank's node, by order of first rank; -1 if not given
    tensors: tuple[str, ...]
    locals: tuple[str, ...]
    source: Side
    destination: Side
    geometries: Geometries
    tied: Ints  # [tensors] the first tensor that each is tied to; itself if it is not tied
    families: Families | None = None  # the members of tensors and local tensors, if they have several (families.py)

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
        """Return the layouts with one tensor for each tied weight."""
        sides = [replace(side, entry_tensor=self.tied[side.entry_tensor]) for side in (self.source, self.destination)]
        return replace(self, source=sides[0], destination=sides[1])

    def offered(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return (shape, dtype name) of every canonical tensor that the source ranks hold, by name.

        If a source rounds a tensor, this is the dtype before rounding, because a destination may get it unrounded. If
        no rank declares a tensor's shape, it is the extent of the held parts.
        """
        g, source = self.geometries, self.source
        found: dict[str, tuple[tuple[int, ...], str]] = {}
        for tensor in np.unique(source.entry_tensor).tolist():
            geometries = source.entry_geometry[source.entry_tensor == tensor]
            said = g.global_shape[geometries]
            if (said >= 0).any():
                shape = g.shapes[int(said.max())]
            else:
                tiles = np.concatenate([np.arange(g.tile_start[i], g.tile_start[i + 1]) for i in np.unique(geometries)])
                ends = (g.box_offset + g.box_size)[g.tile_box[tiles]].max(axis=0)
                shape = tuple(ends[len(ends) - int(g.dims[geometries[0]]) :].tolist())
            # of a source's description, `held_dtype` is the dtype that it rounds from
            found[self.tensors[tensor]] = shape, g.dtypes[int(g.held_dtype[geometries[0]])]
        return found

    def members(self, side: Side, number: int) -> str:
        """Return text for the ranks of a class: the first rank's label and the number of others."""
        return named([self.labels[i] for i in np.flatnonzero(side.rank_class == number).tolist()])


# A vocabulary may be padded further on one side. A rule's key is the name that the tensor has on its own side.
_SHAPES = (
    "check the parallel groups; if only some rows are real (a padded vocabulary), say on both sides how many, with "
    "names= (refitd.names): {{its name: Padded({name!r}, rows=N), '{{rest}}': '{{rest}}'}}; if a tensor is some rows "
    "of it, Part({name!r}, rows=, first=, whole=)"
)


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
        ("global shape", geometries.global_shape[geometry], geometries.shapes, _SHAPES),
        (
            "dtype",
            dtype,
            geometries.dtypes,
            "convert one side, or let the destination receive it converted: register_target(cast=True)",
        ),
        ("number of dimensions", geometries.dims[geometry], range(16), "check the tiles"),
    ]
    for what, value, words, advice in checks:
        known = value >= 0
        first = np.full(len(layouts.tensors), -1, np.int64)
        first[tensor[known][::-1]] = value[known][::-1]
        for number in np.unique(tensor[known & (value != first[tensor])]).tolist():
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
            do = advice.format(name=layouts.tensors[number])
            if what == "dtype":
                do = _wrong_cast(layouts, number) or do
            found[layouts.tensors[number]].append(
                f"{layouts.tensors[number]}: {what} is {', '.join(said)}; it must be the same everywhere, {do}"
            )
    return found


def _wrong_cast(layouts: Layouts, tensor: int) -> str:
    """Return the advice for a destination whose cast states another dtype than sources hold and needs none; else ""."""
    geometries = layouts.geometries
    held, wanted = (side.entry_geometry[side.entry_tensor == tensor] for side in (layouts.source, layouts.destination))
    offered = set(geometries.dtype[held].tolist())
    casts = wanted[(geometries.cast[wanted] > 0) & ~np.isin(geometries.held_dtype[wanted], list(offered))]
    if len(offered) != 1 or not len(casts):
        return ""
    (number,) = offered
    source, stated = geometries.dtypes[number], geometries.dtypes[int(geometries.held_dtype[casts[0]])]
    holds = geometries.dtypes[int(geometries.dtype[casts[0]])]
    if cast_number(source, holds) is None:
        return ""
    other = "leave it out" if source == holds else f"state {source}"
    return f"and the cast of this destination says that sources hold {stated}: {other}, or register with cast=True"


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


Ties = Mapping[tuple[str, ...], str]  # (tensor, *aliases) -> the first to declare it


def alias_problem(meta: ParameterMetadata) -> str:
    """Return what is wrong with a tensor's aliases, or ""."""
    name = tied_name(meta)
    if not isinstance(meta.aliases, tuple) or not all(isinstance(alias, str) and alias for alias in meta.aliases):
        return f"{meta.name}: aliases are {meta.aliases!r}, expected a tuple of canonical names"
    if len({tile.tensor for tile in meta.tiles or ()}) > 1:
        return (
            f"{meta.name}: it has aliases {meta.aliases} and holds several canonical tensors; register the tied one "
            "on its own"
        )
    if name in meta.aliases:
        return f"{name}: it is declared an alias of itself; its aliases are the other names of the same weight"
    return ""


def tied_name(meta: ParameterMetadata) -> str:
    """Return the canonical name of the tensor that has the aliases."""
    return meta.tiles[0].tensor if meta.tiles else canonical_name(meta)


def resolve_aliases(ties: Ties, held: set[str], wanted: Iterable[str]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return {wanted tensor that no source holds: tied tensor that feeds it}, and problems by the tensor's name.

    If sources hold several tied tensors, the first by name is taken: they are declared equal.
    """
    found: dict[str, str] = {}
    problems: dict[str, list[str]] = {}
    groups = _groups(ties)
    for group in {id(group): group for group in groups.values()}.values():
        said = [names for names in ties if names[0] in group]
        if not any(set(names) == group for names in said):
            problems[said[0][0]] = [_chained(said, ties)]
    for name in sorted(set(wanted) - held):
        group = groups.get(name, set())
        known = sorted(group & held)
        if known:
            found[name] = known[0]
        elif group:
            others = ", ".join(sorted(group - {name}))
            who = next(who for names, who in ties.items() if name in names)
            problems.setdefault(name, []).append(
                f"{name}: no source has it, nor {others}, which {who} declares to be the same weight; check the names, "
                "or which source ranks have registered"
            )
    return found, problems


def untied_sources(ties: Ties, by_sources: Iterable[tuple[str, ...]], held: set[str]) -> dict[str, list[str]]:
    """Return problems, by tensor, of weights that destinations tie but sources hold separately and do not tie.

    Args:
        ties: all declarations.
        by_sources: the declarations made by sources.
        held: the tensors that sources hold.
    """
    problems: dict[str, list[str]] = {}
    same = _groups(dict.fromkeys(by_sources, ""))
    for names, who in ties.items():
        apart = sorted(held.intersection(names))
        if len(apart) > 1 and not same.get(apart[0], set()).issuperset(apart):
            problems.setdefault(apart[0], [
                f"{apart[0]}: {who} holds it and {', '.join(apart[1:])} as one weight (tied), and the sources hold "
                "weights of their own under these names, whose values may differ; tie both ends or neither: declare "
                "the aliases at the source, or register an untied model"
            ])  # fmt: skip
    return problems


def _groups(ties: Ties) -> dict[str, set[str]]:
    """Return, for each name, all names tied to it, directly or indirectly, and itself."""
    groups: dict[str, set[str]] = {}
    for names in ties:
        merged = set(names).union(*(groups.get(name, set()) for name in names))
        for name in merged:
            groups[name] = merged
    return groups


def _chained(said: list[tuple[str, ...]], ties: Ties) -> str:
    links = "; ".join(f"{ties[names]} ties {names[0]} to {', '.join(names[1:])}" for names in said)
    every = sorted(set().union(*said))
    return (
        f"{said[0][0]}: its aliases form a chain or a cycle ({links}); expected one declaration with all of "
        f"{', '.join(every)}; declare all others as aliases of one of them"
    )


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


class RosterProblems:
    """Collects problems; a problem that many ranks have is reported once."""

    def __init__(self) -> None:
        self._who: dict[str, list[str]] = {}

    def add(self, who: str, what: str) -> None:
        """Add problem `what` of `who` (a roster's label and side)."""
        self._who.setdefault(what, []).append(who)

    def messages(self) -> list[str]:
        """Return one message per distinct problem, in the order of `add`."""
        return [f"{named(who)}: {what}" if any(who) else what for what, who in self._who.items()]
