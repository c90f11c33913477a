"""Where a plan's copies run: within a node, between nodes, or onward from what has crossed. Each in parts.

Single copies are never listed: a part has the rows that several ranks share, and each further rank is one more use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from refitd.plan.between_nodes import Deliveries, Patterns, deliveries_of
from refitd.plan.build import KEPT
from refitd.plan.coalesce import Rows
from refitd.plan.columns import Bools, Ints, Memo, distinct, find, numbered, offsets_of, range_values, ranges
from refitd.plan.cost import EQUAL, Cables
from refitd.plan.relays import LEAST_BYTES, Moves, Relays, direct, relayed
from refitd.plan.shared import SharedPlan
from refitd.plan.table import CopyTable, CrossingTable, FillTable, Int32, Parted, PartRows, PlanTable

T = TypeVar("T", bound=PlanTable)


@dataclass(frozen=True, eq=False, slots=True)
class RoutedTable(Generic[T]):
    """A table in parts, and where each use begins and ends: numbers of nodes."""

    table: Parted[T]
    src: Ints  # [uses]
    dst: Ints  # [uses]


@dataclass(frozen=True, eq=False, slots=True)
class Links:
    """Bytes that cross between nodes in one swap: move i brings nbytes[i] from node names[src[i]] to names[dst[i]].

    Plans do not need the sums; they are computed on request.
    """

    names: list[str]
    src: Int32
    dst: Int32
    nbytes: Ints

    def __bool__(self) -> bool:
        return bool(len(self.nbytes))

    def nodes(self) -> set[str]:
        """Return the nodes that send or receive."""
        return {self.names[node] for column in (self.src, self.dst) for node in distinct(column).tolist()}

    def into(self, node: str) -> dict[str, int]:
        """Return the bytes that come to a node from each other one, in order."""
        here = self.dst == self.names.index(node)
        return {src: nbytes for (src, _), nbytes in self._summed(self.src[here], self.dst[here], self.nbytes[here])}

    def neighbours(self) -> dict[str, set[str]]:
        """Return the nodes that each node exchanges with."""
        found: dict[str, set[str]] = {name: set() for name in self.names}
        for pair in distinct(self.src.astype(np.int64) * len(self.names) + self.dst).tolist():
            src, dst = (self.names[end] for end in divmod(pair, len(self.names)))
            found[src].add(dst)
            found[dst].add(src)
        return found

    def by_nodes(self) -> dict[tuple[str, str], int]:
        """Return bytes by (source node, target node), in order."""
        return dict(self._summed(self.src, self.dst, self.nbytes))

    def _summed(self, src: Int32, dst: Int32, nbytes: Ints) -> Iterator[tuple[tuple[str, str], int]]:
        first, which = numbered(src.astype(np.int64) * len(self.names) + dst)
        total = np.zeros(len(first), np.int64)
        np.add.at(total, which, nbytes)
        for source, target, summed in zip(src[first].tolist(), dst[first].tolist(), total.tolist(), strict=True):
            yield (self.names[source], self.names[target]), summed


@dataclass(frozen=True, eq=False, slots=True)
class Routes:
    """A plan's copies and fills by where they run.

    Attributes:
        nodes: the nodes' names, by number.
        relays: how relaying was decided.
        links: bytes that cross between nodes.
        inner: copies within a node.
        crossing: copies between nodes.
        onward: copies within a node of elements that have crossed to it.
        fills: constants to write.
    """

    nodes: list[str]
    relays: Relays
    links: Links
    inner: RoutedTable[CopyTable]
    crossing: RoutedTable[CrossingTable]
    onward: RoutedTable[CopyTable]
    fills: RoutedTable[FillTable]


@dataclass(frozen=True, eq=False, slots=True)
class _CrossingParts:
    """The parts of crossing copies. The ranks of a part are its slots: the ranks before it, then its own."""

    parts: PartRows[CrossingTable]
    nbytes: Ints  # [parts]
    slot_start: Ints  # [parts + 1]
    before: Ints  # [parts] how many of a part's slots are of ranks before
    member: Int32  # [slots] the number of a rank among the destinations of its delivery; 0 for a source


@dataclass(frozen=True, eq=False, slots=True)
class _OnwardParts:
    """The parts of onward copies: part p goes from destination src[p] of a delivery to destination dst[p]."""

    parts: PartRows[CopyTable]
    of_pattern: Ints  # [patterns + 1] into the parts
    src: Ints
    dst: Ints


@dataclass(frozen=True, eq=False, slots=True)
class _OfRows:
    """Results computed from the rows of one plan, for reuse by other plans with these rows."""

    rows: Rows
    tensors: tuple[str, ...]
    locals: tuple[str, ...]
    patterns: Memo[Patterns] = field(default_factory=Memo)
    inner: Memo[PartRows[CopyTable]] = field(default_factory=Memo)
    crossing: Memo[_CrossingParts] = field(default_factory=Memo)
    onward: Memo[_OnwardParts] = field(default_factory=Memo)

    def is_of(self, plan: SharedPlan) -> bool:
        """Return whether a plan has these rows and tensors."""
        return self.rows is plan.rows and self.tensors == plan.tensors and self.locals == plan.locals


class KnownRoutes:
    """Reuses results computed from the rows of the last plans, as many as `Remembered` keeps; its owner plans again."""

    def __init__(self) -> None:
        self._kept: list[_OfRows] = []  # the one used last comes last

    def of(self, plan: SharedPlan) -> _OfRows:
        """Return what is known of the plan's rows."""
        found = next((kept for kept in self._kept if kept.is_of(plan)), None)
        found = found or _OfRows(plan.rows, plan.tensors, plan.locals)
        self._kept = [*(kept for kept in self._kept if kept is not found), found][-KEPT:]
        return found


def routes_of(
    plan: SharedPlan,
    node_of: Mapping[int, str],
    known: KnownRoutes | None = None,
    *,
    may_relay: bool = True,
    least_bytes: int = LEAST_BYTES,
    last: Collection[str] = (),
    cables: Cables = EQUAL,
) -> Routes:
    """Return a plan's copies by where they run.

    Args:
        plan: the plan.
        node_of: rank -> node, of every rank of the plan.
        known: results for the rows of earlier plans.
        may_relay: whether nodes may pass on what they have received.
        least_bytes: the least that is worth a path (refitd.plan.relays).
        last: nodes that pass on after all others.
        cables: the speeds of their cables.
    """
    of_rows = (known or KnownRoutes()).of(plan)
    names = sorted(set(node_of.values()))
    number = {name: i for i, name in enumerate(names)}
    at = np.zeros(1 + max(node_of, default=0), np.int64)
    at[list(node_of)] = [number[name] for name in node_of.values()]
    is_near = at[plan.job_src] == at[plan.job_dst]
    found = deliveries_of(plan, np.flatnonzero(~is_near), at, of_rows.patterns)
    moves, relays = direct(found), Relays()
    if may_relay:
        moves, relays = relayed(found, at, names, least_bytes, last, cables)
    crossing, nbytes = _crossing(plan, found, moves, at, of_rows.crossing)
    return Routes(
        nodes=names,
        relays=relays,
        links=Links(names, crossing.src.astype(np.int32), crossing.dst.astype(np.int32), nbytes),
        inner=_inner(plan, np.flatnonzero(is_near), at, of_rows.inner),
        crossing=crossing,
        onward=_onward(plan, found, of_rows.onward),
        fills=_fills(plan, at),
    )


def _inner(plan: SharedPlan, jobs: Ints, at: Ints, known: Memo[PartRows[CopyTable]]) -> RoutedTable[CopyTable]:
    """Return the jobs of ranks of one node: rows of one kind are a part."""
    kinds, src, dst = distinct(plan.job_rows[jobs]), plan.job_src[jobs], plan.job_dst[jobs]
    if (parts := known.of([kinds])) is None:
        parts = known.keep([kinds], _inner_parts(plan, kinds))
    part, none = np.searchsorted(kinds, plan.job_rows[jobs]), np.zeros(len(jobs), np.int64)
    parted = Parted.of(parts, part, none + 2, np.column_stack([src, dst]).reshape(-1), none, none)
    return RoutedTable(parted, at[src], at[dst])


def _inner_parts(plan: SharedPlan, kinds: Ints) -> PartRows[CopyTable]:
    count = np.diff(plan.row_start)[kinds]
    row = range_values(plan.row_start[kinds], count)
    table = CopyTable(**_columns(plan, row, np.zeros(len(row), np.int64), np.ones(len(row), np.int64)))
    return PartRows(table, np.append(0, np.cumsum(count)), plan.families)


def _crossing(
    plan: SharedPlan, found: Deliveries, moves: Moves, at: Ints, known: Memo[_CrossingParts]
) -> tuple[RoutedTable[CrossingTable], Ints]:
    """Return the moves, and the bytes of each. Moves with equal lots of equal patterns are uses of one part."""
    patterns, is_passed = found.patterns, moves.before >= 0
    here = found.pattern[moves.delivery]
    before = np.where(is_passed, found.pattern[moves.before], -1)
    count = len(patterns.start)
    example, part = numbered((moves.lots * count + before + 1) * count + here)
    inputs = (patterns, here[example], before[example], moves.lots[example], moves.set_start, moves.set_lots)
    if (parts := known.of(inputs)) is None:
        parts = known.keep(inputs, _crossing_parts(plan, *inputs))
    # the ranks of a move, as positions among all destinations and sources: the slots before, then those of this move
    slots_of = np.diff(parts.slot_start)[part]
    of_source = len(found.dst) + moves.delivery
    begin = np.column_stack([np.where(is_passed, found.start[moves.before], of_source), found.start[moves.delivery]])
    slots = np.column_stack([parts.before[part], slots_of - parts.before[part]])
    place = np.repeat(begin.reshape(-1), slots.reshape(-1))
    del of_source, begin, slots
    place += parts.member[range_values(parts.slot_start[part], slots_of)]
    ranks = np.concatenate([found.dst, found.src], dtype=np.int32)[place]
    del place
    parted = Parted.of(parts.parts, part, slots_of, ranks, moves.path, moves.hop)
    source = np.where(is_passed, found.node[moves.before], at[found.src[moves.delivery]])
    return RoutedTable(parted, source, found.node[moves.delivery]), parts.nbytes[part]


def _crossing_parts(
    plan: SharedPlan, patterns: Patterns, here: Ints, before: Ints, lots: Ints, set_start: Ints, set_lots: Ints
) -> _CrossingParts:
    """Return the parts of moves of sets of lots, from one pattern (-1: from a source) to another."""
    crossing = _CrossingLines(patterns, set_start, set_lots)
    of, line = crossing.of(here, lots)
    given = np.flatnonzero(before >= 0)
    _, giver = crossing.of(before[given], lots[given])
    # lines of a part are in the order of their boxes, which are the same before and here
    by_giver = before[of] >= 0
    src, row, giver_row = np.zeros(len(line), np.int64), patterns.row[line], np.full(len(line), -1)
    src[by_giver], giver_row[by_giver] = patterns.member[giver], patterns.row[giver]
    members = 1 + int(patterns.member.max(initial=0))
    keys = np.concatenate([of * 2 * members + src, (of * 2 + 1) * members + patterns.member[line]])
    slots = distinct(keys)
    half = offsets_of(slots // members, 2 * len(here))
    slot_start = half[::2]
    src, dst = np.split(np.searchsorted(slots, keys) - slot_start[np.concatenate([of, of])], 2)
    none = np.zeros(len(row), np.int32)
    table = CrossingTable(**_columns(plan, row, src, dst, giver_row), path=none, hop=none)
    nbytes = np.zeros(len(here), np.int64)
    np.add.at(nbytes, of, plan.row_bytes[row])
    parts = PartRows(table, offsets_of(of, len(here)), plan.families)
    return _CrossingParts(parts, nbytes, slot_start, half[1::2] - slot_start[:-1], (slots % members).astype(np.int32))


class _CrossingLines:
    """Finds the lines of patterns that cross and are of given lots, in the order of their boxes."""

    def __init__(self, patterns: Patterns, set_start: Ints, set_lots: Ints) -> None:
        crossing, of_line = np.flatnonzero(patterns.crosses), patterns.of_line
        self._lines = crossing[np.lexsort((patterns.box[crossing], of_line[crossing]))]
        self._start = offsets_of(of_line[self._lines], len(patterns.start) - 1)
        self._lot, self._lots = patterns.lot, max(1, len(patterns.lot_bytes))
        sets = np.repeat(np.arange(len(set_start) - 1), np.diff(set_start))
        self._wanted = sets * self._lots + set_lots

    def of(self, pattern: Ints, lots: Ints) -> tuple[Ints, Ints]:
        """Return (which of the questions, line) of each line of these patterns whose lot is in these sets."""
        of, at = ranges(self._start[pattern], np.diff(self._start)[pattern])
        line = self._lines[at]
        wanted: Bools = find(self._wanted, lots[of] * self._lots + self._lot[line]) >= 0
        return of[wanted], line[wanted]


def _onward(plan: SharedPlan, found: Deliveries, known: Memo[_OnwardParts]) -> RoutedTable[CopyTable]:
    """Return the onward copies. All copies from one destination of a pattern to another are a part."""
    if (parts := known.of([found.patterns])) is None:
        parts = known.keep([found.patterns], _onward_parts(plan, found.patterns))
    delivery, part = ranges(parts.of_pattern[found.pattern], np.diff(parts.of_pattern)[found.pattern])
    begin, none = found.start[delivery], np.zeros(len(part), np.int64)
    ranks = np.column_stack([found.dst[begin + parts.src[part]], found.dst[begin + parts.dst[part]]]).reshape(-1)
    node = found.node[delivery]
    return RoutedTable(Parted.of(parts.parts, part, none + 2, ranks, none, none), node, node)


def _onward_parts(plan: SharedPlan, patterns: Patterns) -> _OnwardParts:
    line = np.flatnonzero(~patterns.crosses)
    giver, pattern = patterns.giver[line], patterns.of_line[line]
    order = np.lexsort((line, patterns.member[giver], patterns.member[line], pattern))
    line, giver, pattern = line[order], giver[order], pattern[order]
    src, dst = patterns.member[giver], patterns.member[line]
    differs = (np.diff(pattern) != 0) | (np.diff(dst) != 0) | (np.diff(src) != 0)
    first = np.flatnonzero(np.append(True, differs)[: len(line)])
    row = patterns.row[line]
    columns = _columns(plan, row, np.zeros(len(row), np.int64), np.ones(len(row), np.int64), patterns.row[giver])
    return _OnwardParts(
        parts=PartRows(CopyTable(**columns), np.append(first, len(line)), plan.families),
        of_pattern=offsets_of(pattern[first], len(patterns.start) - 1),
        src=src[first],
        dst=dst[first],
    )


def _fills(plan: SharedPlan, at: Ints) -> RoutedTable[FillTable]:
    """Return the fills; the fills of one kind are a part."""
    fills = plan.fills
    table = FillTable(
        locals=plan.locals,
        rank=np.zeros(len(fills.local), np.int32),
        local=fills.local.astype(np.int32),
        element_size=fills.element_size.astype(np.int32),
        pattern=fills.pattern,
        size=fills.size,
        offset=fills.offset,
        stride=fills.stride,
    )
    none, node = np.zeros(len(fills.rank), np.int64), at[fills.rank]
    parts = PartRows(table, fills.row_start)
    return RoutedTable(Parted.of(parts, fills.kind, none + 1, fills.rank, none, none), node, node)


def _columns(plan: SharedPlan, row: Ints, src: Ints, dst: Ints, giver: Ints | None = None) -> dict[str, Any]:
    """Return the columns of a table of the plan's rows between these ranks.

    `giver` is the row that wrote the elements which a row reads; -1: the row reads its source.
    """
    columns = plan.columns(row, src, dst) | {"task_id": plan.places[row]}
    if giver is not None:
        passed = giver >= 0
        for name in ("local", "offset", "stride"):
            columns[f"src_{name}"][passed] = getattr(plan.rows, f"dst_{name}")[giver[passed]]
        columns["cast"][passed] = 0
    return columns
