"""Turn rosters into one exact plan.

    rosters -> layouts      names, geometries and layout classes as columns        (read_rosters.py, layouts.py)
            -> families     tensors that are alike are planned as one              (families.py)
            -> match        pieces of each destination class, and their holders    (match.py, boxes.py)
            -> regions      elements that several source ranks hold, to compare    (shared.py)
            -> shares       the sender of each piece                               (replicas.py, between_nodes.py)
            -> shared plan  pieces joined into rows, rows shared by ranks          (coalesce.py, shared.py)
            -> table        one row per copy                                       (table.py)

Up to the last step, the work grows with the number of different layouts, not with the number of ranks. The results of
all steps before the shares depend on descriptions only; `Remembered` reuses them for the same descriptions on other
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from refitd.describe.metadata import Alike, ParameterMetadata, Roster
from refitd.errors import PlanError
from refitd.plan.between_nodes import KnownBundles, Shares, bundles_for, set_bytes_of
from refitd.plan.coalesce import Rows, joined_alike
from refitd.plan.columns import Ints, Memo, find, first_alike, hashed, in_order, mixed, numbered, offsets_of, ranges
from refitd.plan.completion import SIDES
from refitd.plan.cost import EQUAL, Cables, Floats
from refitd.plan.families import joined, unlike, whole
from refitd.plan.layouts import Layouts, Side
from refitd.plan.match import Match, match
from refitd.plan.ops import ReshardPlan, reshard_plans
from refitd.plan.read_rosters import MAX_RANK, label_of, nodes_of, read_rosters
from refitd.plan.replicas import Demands, choose_sources
from refitd.plan.shared import GlobalPlan, HeldByClasses, SharedPlan, held_by_classes, shared_fills
from refitd.plan.validate import Proof, shared_violations

# How many fleets' descriptions are remembered: a replica that joins is planned for alone, then with all others.
KEPT = 2


@dataclass(frozen=True, eq=False)
class Found:
    """Layouts without problems, their match, and the elements that several source ranks hold.

    `rows` and `proof` are of the last plan for these descriptions; its ranks may have been others.
    """

    layouts: Layouts
    match: Match
    held: HeldByClasses
    bundles: KnownBundles = field(default_factory=KnownBundles)
    rows: Memo[Rows] = field(default_factory=Memo)
    proof: Memo[Proof] = field(default_factory=Memo)


@dataclass(frozen=True, eq=False)
class _Last:
    """`lists` are the distinct descriptions of each side, by first rank; `classes` the class of each, by its id."""

    lists: tuple[tuple[Sequence[ParameterMetadata], ...], ...]  # referenced here, so their ids are not reused
    classes: tuple[dict[int, int], ...]
    found: Found


class Remembered:
    """Reuses results for the descriptions of the last plans: of the whole fleet, and of a joining replica alone.

    If a rank that joins, leaves or moves is described like others, layouts and match stay; only the classes of ranks
    change. This holds for descriptions that several ranks share and that name no ranks, unless a source becomes the
    second of its class, or the only one: then the cells that several ranks hold change.
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
    return isinstance(described, Alike) or (
        isinstance(described, tuple)
        and all(
            m.owner_rank is None and not (m.is_tp and m.tiles is None and m.tensor_parallel_group_ranks)
            for m in described
        )
    )


__all__ = ["GlobalPlan", "plan_copies", "plan_reshard"]


def plan_copies(rosters: Sequence[Roster], remembered: Remembered | None = None, cables: Cables = EQUAL) -> GlobalPlan:
    """Plan the copies that write every destination element exactly once, each from one chosen source.

    The result depends only on the rosters' content and the cables' speeds, never on the rosters' order. Results
    `remembered` from earlier plans are reused; they do not depend on the speeds.

    Raises:
        PlanError: lists every problem; there are no partial plans.
    """
    return _planned(rosters, remembered or Remembered(), cables)[0]


def plan_reshard(rosters: Sequence[Roster]) -> dict[int, ReshardPlan]:
    """Plan as `plan_copies` does, and return every rank's sends and receives.

    Raises:
        PlanError: lists every problem.
    """
    plan, layouts = _planned(rosters, Remembered(), EQUAL)
    return reshard_plans(plan.shared, whole(layouts))


def _planned(rosters: Sequence[Roster], remembered: Remembered, cables: Cables) -> tuple[GlobalPlan, Layouts]:
    known = remembered.again(rosters)
    if known is None:
        known = _found(rosters)
        remembered.keep(rosters, known)
    layouts, found = known.layouts, known.match
    shared = _shared_plan(layouts, found, _shares(layouts, found, _speeds(rosters, cables), known.bundles), known.rows)
    if wrong := shared_violations(shared, layouts, known.proof):
        raise PlanError(wrong)
    is_lcm = found.is_lcm if layouts.families is None else layouts.families.spread(found.is_lcm)
    return GlobalPlan(shared, found.unused, is_lcm, shared.digest(), known.held.of_ranks(layouts)), layouts


def _found(rosters: Sequence[Roster]) -> Found:
    layouts, problems = read_rosters(rosters)
    few = layouts if problems else joined(layouts)
    found, unmatched = match(few)
    if unmatched and few is not layouts:
        unmatched = match(layouts)[1]  # of every tensor
    if problems or unmatched:
        raise PlanError(problems + unmatched)
    if wrong := unlike(few, layouts):
        raise PlanError(wrong)
    layouts = few
    held = match(layouts.with_ties_merged())[0].shared if layouts.has_ties else found.shared
    return Found(layouts, found, held_by_classes(layouts, held))


@dataclass(frozen=True, eq=False)
class _Allotted:
    """Rank `src` sends pieces low:high to rank `dst`; ranks are positions in the sorted ranks."""

    src: Ints
    dst: Ints
    low: Ints
    high: Ints


def _speeds(rosters: Sequence[Roster], cables: Cables) -> Floats | None:
    """Return what each rank can send to other nodes: source ranks of one node share its cable. None if unknown."""
    if not cables.are_known:
        return None
    ordered = sorted(rosters, key=lambda roster: roster.rank)
    sharing: dict[str, int] = {}
    for roster in ordered:
        if roster.source and roster.node:
            sharing[roster.node] = sharing.get(roster.node, 0) + 1
    shared_by = np.array([sharing.get(roster.node, 1) for roster in ordered])
    speeds: Floats = cables.sends([roster.node for roster in ordered]) / shared_by
    return speeds


def _shares(layouts: Layouts, found: Match, speed: Floats | None, known: KnownBundles) -> _Allotted:
    """Choose a holder for every piece of every destination rank."""
    pieces, sets = found.pieces, max(1, len(found.set_start) - 1)
    bundles = bundles_for(layouts, found, known)
    by_class = offsets_of(bundles.dst_class, layouts.destination.classes)
    receivers = np.flatnonzero(layouts.destination.rank_class >= 0)
    classes = layouts.destination.rank_class[receivers]
    owner, bundle = ranges(by_class[classes], by_class[classes + 1] - by_class[classes])
    demands = Demands(receivers[owner], bundles.set[bundle], bundle)
    start, members = _members(layouts.source)
    of, holder = ranges(start[found.set_class], start[found.set_class + 1] - start[found.set_class])
    set_of = np.repeat(np.arange(sets), np.diff(found.set_start))[of] if len(of) else of
    shares: Shares = choose_sources(
        demands,
        set_of,
        members[holder],
        layouts.nodes,
        bundles.start,
        pieces.nbytes,
        bundles.content if bundles.is_fine else np.arange(len(bundles.set)),
        *set_bytes_of(found, known),
        speed,
    )
    return _Allotted(shares.holder, demands.rank[shares.demand], shares.low, shares.high)


def _members(side: Side) -> tuple[Ints, Ints]:
    """Return (where each class's ranks begin, the ranks of all classes end to end)."""
    order = np.argsort(side.rank_class, kind="stable")
    order = order[np.searchsorted(side.rank_class[order], 0) :]
    return offsets_of(side.rank_class[order], side.classes), order


def _shared_plan(layouts: Layouts, found: Match, allotted: _Allotted, known: Memo[Rows]) -> SharedPlan:
    """Join the pieces that each pair of ranks exchanges into rows; pairs with equal copies share their rows.

    If the pieces equal the last plan's, its rows are reused (`known`).
    """
    pieces = found.pieces
    order = in_order(allotted.dst, allotted.src, allotted.low)
    src, dst, low, high = (column[order] for column in (allotted.src, allotted.dst, allotted.low, allotted.high))
    # a job is everything that one rank sends to another; pieces determine the destination's class, so jobs with equal
    # runs of pieces and one source class copy equal rows
    run = low * (len(pieces.spot) + 1) + high
    opens = np.concatenate([[True], (np.diff(src) != 0) | (np.diff(dst) != 0)])[: len(src)]
    job_start = np.flatnonzero(opens)
    job_class = layouts.source.rank_class[src[job_start]]
    content = np.add.reduceat(mixed(run), job_start) if len(run) else np.zeros(0, np.uint64)
    # kinds are in the order of their first jobs, which depends on ranks alone
    first = first_alike(hashed([content, job_class]))
    example, kind = numbered(first)

    run_count = np.diff(np.append(job_start, len(src)))[example]
    owner, at = ranges(job_start[example], run_count)
    runs = (owner, low[at], high[at], job_class[example])
    if (rows := known.of(runs)) is None:
        rows = known.keep(runs, _rows(layouts, found, *runs))
    return SharedPlan(
        tensors=layouts.tensors,
        locals=layouts.locals,
        rows=rows,
        row_start=offsets_of(rows.owner, len(example)),
        job_rows=kind,
        job_src=layouts.ranks[src[job_start]],
        job_dst=layouts.ranks[dst[job_start]],
        fills=shared_fills(layouts),
        families=layouts.families,
    )


def _rows(layouts: Layouts, found: Match, owner: Ints, low: Ints, high: Ints, source_class: Ints) -> Rows:
    """Return the rows of runs of pieces low:high; owner o reads the tensors of a class.

    Pieces are joined only as all their receivers can join them, so equal needs of ranks of a node are equal boxes.
    """
    pieces, holdings, classes = found.pieces, found.holdings, max(1, layouts.source.classes)
    inner, piece = ranges(low, high - low)
    owner = owner[inner]
    holding = find(holdings.key, pieces.spot[piece] * classes + source_class[owner])
    stride = holdings.stride[holding]
    rows = Rows(
        owner=owner,
        tensor=pieces.tensor[piece],
        src_local=holdings.local[holding],
        dst_local=pieces.local[piece],
        element_size=pieces.element_size[piece],
        cast=pieces.cast[piece],
        origin=pieces.origin[piece],
        size=pieces.size[piece],
        src_offset=holdings.offset[holding] + (pieces.shift[piece] * stride).sum(axis=1),
        src_stride=stride,
        dst_offset=pieces.offset[piece],
        dst_stride=pieces.stride[piece],
    )
    bundle = hashed([owner, pieces.needers[piece], pieces.again[piece]])
    several = np.bincount(pieces.box)[pieces.box[piece]] > 1
    return joined_alike(rows, bundle, hashed([pieces.box[piece], source_class[owner]]), several)
