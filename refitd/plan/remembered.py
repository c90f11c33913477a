"""What planning has found of descriptions, for the next plan of the same descriptions on other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from refitd.describe.metadata import ParameterMetadata
from refitd.describe.roster import Roster
from refitd.plan.bundles import KnownBundles
from refitd.plan.coalesce import Rows
from refitd.plan.columns import Ints
from refitd.plan.kept import Kept
from refitd.plan.layouts import Layouts
from refitd.plan.match import Match
from refitd.plan.read_rosters import MAX_RANK, SIDES, label_of, nodes_of
from refitd.plan.regions import HeldByClasses
from refitd.plan.validate import CoverageProof

# How many fleets' descriptions are remembered: a replica that joins is planned for alone, then with all others.
KEPT = 2


@dataclass(frozen=True, eq=False)
class Found:
    """Layouts without problems, their match, and what several source ranks hold.

    `rows` and `proof` are of the last plan: of these descriptions, whatever ranks they were of.
    """

    layouts: Layouts
    match: Match
    held: HeldByClasses
    bundles: KnownBundles = field(default_factory=KnownBundles)
    rows: Kept[Rows] = field(default_factory=Kept)
    proof: CoverageProof = field(default_factory=CoverageProof)


@dataclass(frozen=True, eq=False)
class _Last:
    """`lists` are the distinct descriptions of each side, by first rank; `classes` the class of each, by its id."""

    lists: tuple[tuple[Sequence[ParameterMetadata], ...], ...]  # kept, so that no other list gets their ids
    classes: tuple[dict[int, int], ...]
    found: Found


class Remembered:
    """Remembers the last plans' descriptions: of the whole fleet, and of who joins it. Owned by whoever plans again.

    A rank that joins, leaves or moves and is described like others changes neither layouts nor what is matched, only
    which ranks are of which class. This holds for descriptions that several ranks share and that name no ranks, unless
    a source becomes the second of its class, or the only one: then other cells are held by several.
    """

    def __init__(self) -> None:
        self._kept: list[_Last] = []  # the one used last comes last

    def again(self, rosters: Sequence[Roster]) -> Found | None:
        """Return what was found of these descriptions, with these ranks; None if it must be found."""
        ordered = _ordered(rosters)
        if ordered is None:
            return None
        for kept in reversed(self._kept):
            if (found := self._again(ordered, kept)) is not None:
                self._kept.remove(kept)
                self._kept.append(kept)
                return found
        return None

    @staticmethod
    def _again(ordered: Sequence[Roster], kept: _Last) -> Found | None:
        sides: list[Ints] = []
        for side, lists, classes in zip(SIDES, kept.lists, kept.classes, strict=True):
            ids = [*map(id, map(attrgetter(side), ordered))]
            if [*dict.fromkeys(ids)] != [*map(id, lists)]:
                return None
            sides.append(np.array([*map(classes.__getitem__, ids)], np.int64))
        layouts = kept.found.layouts
        if not np.array_equal(_is_repeated(sides[0]), _is_repeated(layouts.source.rank_class)):
            return None
        return replace(
            kept.found,
            layouts=replace(
                layouts,
                ranks=np.array([roster.rank for roster in ordered], np.int64),
                labels=tuple(map(label_of, ordered)),
                nodes=nodes_of(ordered),
                source=replace(layouts.source, rank_class=sides[0]),
                destination=replace(layouts.destination, rank_class=sides[1]),
            ),
        )

    def keep(self, rosters: Sequence[Roster], found: Found) -> None:
        """Remember what was found, if it depends on the descriptions alone."""
        ordered = _ordered(rosters)
        if ordered is None:
            return
        lists, classes = [], []
        for side, columns in zip(SIDES, (found.layouts.source, found.layouts.destination), strict=True):
            held = {id(each): each for each in (getattr(roster, side) for roster in ordered)}
            if not all(_names_no_rank(each) for each in held.values()):
                return
            of: dict[int, int] = {}
            for roster, number in zip(ordered, columns.rank_class.tolist(), strict=True):
                if of.setdefault(id(getattr(roster, side)), number) != number:
                    return
            lists.append(tuple(held.values()))
            classes.append(of)
        self._kept = [*self._kept, _Last(tuple(lists), tuple(classes), found)][-KEPT:]


def _ordered(rosters: Sequence[Roster]) -> list[Roster] | None:
    """Return the rosters sorted by rank; None if a rank is invalid or repeated."""
    ranks = [roster.rank for roster in rosters]
    if not all(isinstance(rank, int) for rank in ranks) or len(set(ranks)) != len(ranks):
        return None
    if ranks and not (min(ranks) >= 0 and max(ranks) <= MAX_RANK):
        return None
    return sorted(rosters, key=attrgetter("rank"))


def _is_repeated(rank_class: Ints) -> npt.NDArray[np.bool_]:
    """Return whether each class has several ranks."""
    found: npt.NDArray[np.bool_] = np.bincount(rank_class[rank_class >= 0]) > 1
    return found


def _names_no_rank(described: Sequence[ParameterMetadata]) -> bool:
    # a list might be changed afterwards
    return isinstance(described, tuple) and all(
        m.owner_rank is None and not (m.is_tp and m.tiles is None and m.tensor_parallel_group_ranks) for m in described
    )
