"""Where a plan's copies run: within a node, between nodes, or onward from what has crossed. Each in parts.

No copy is looked at for itself: parts are made of rows that ranks share, and every further rank is one more use.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from refitd.plan.cables import EQUAL, Cables
from refitd.plan.columns import Bools, Ints, distinct, find, numbered, offsets_of, range_values, ranges
from refitd.plan.deliveries import Deliveries, Patterns, deliveries_of
from refitd.plan.fills import FillTable
from refitd.plan.parts import Parted
from refitd.plan.relays import LEAST_BYTES, Moves, Relays, direct, relayed
from refitd.plan.shared import SharedPlan
from refitd.plan.table import CopyTable, CrossingTable, PlanTable

T = TypeVar("T", bound=PlanTable)


@dataclass(frozen=True, eq=False, slots=True)
class RoutedTable(Generic[T]):
    """A table in parts, and where each use begins and ends: numbers of nodes."""

    table: Parted[T]
    src: Ints  # [uses]
    dst: Ints  # [uses]


@dataclass(frozen=True, eq=False, slots=True)
class Routes:
    """A plan's copies and fills by where they run.

    Attributes:
        nodes: the nodes' names, by number.
        relays: how relaying was decided.
        links: bytes that cross between nodes in one swap, by (source node, target node).
        inner: copies within a node; likewise
        crossing: between nodes,
        onward: within a node, of what has crossed,
        fills: constants.
    """

    nodes: list[str]
    relays: Relays
    links: dict[tuple[str, str], int]
    inner: RoutedTable[CopyTable]
    crossing: RoutedTable[CrossingTable]
    onward: RoutedTable[CopyTable]
    fills: RoutedTable[FillTable]


def routes_of(
    plan: SharedPlan,
    node_of: Mapping[int, str],
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
        may_relay: whether nodes may pass on what they have received.
        least_bytes: the least that is worth a path (refitd.plan.relays).
        last: nodes that pass on after all others.
        cables: the speeds of their cables.
    """
    names = sorted(set(node_of.values()))
    number = {name: i for i, name in enumerate(names)}
    at = np.zeros(1 + max(node_of, default=0), np.int64)
    at[list(node_of)] = [number[name] for name in node_of.values()]
    is_near = at[plan.job_src] == at[plan.job_dst]
    found = deliveries_of(plan, np.flatnonzero(~is_near), at)
    moves, relays = direct(found), Relays()
    if may_relay:
        moves, relays = relayed(found, at, names, least_bytes, last, cables)
    crossing, nbytes = _crossing(plan, found, moves, at)
    link = crossing.src * len(names) + crossing.dst
    first, which = numbered(link)
    moved = np.zeros(len(first), np.int64)
    np.add.at(moved, which, nbytes)
    between = [(names[key // len(names)], names[key % len(names)]) for key in link[first].tolist()]
    links = dict(zip(between, moved.tolist(), strict=True))
    inner = _inner(plan, np.flatnonzero(is_near), at)
    return Routes(names, relays, links, inner, crossing, _onward(plan, found), _fills(plan, at))


def _inner(plan: SharedPlan, jobs: Ints, at: Ints) -> RoutedTable[CopyTable]:
    """Return the jobs of ranks of one node: rows of one kind are a part."""
    kinds, src, dst = distinct(plan.job_rows[jobs]), plan.job_src[jobs], plan.job_dst[jobs]
    count = np.diff(plan.row_start)[kinds]
    row = range_values(plan.row_start[kinds], count)
    table = CopyTable(**_columns(plan, row, np.zeros(len(row), np.int64), np.ones(len(row), np.int64)))
    start, part = np.append(0, np.cumsum(count)), np.searchsorted(kinds, plan.job_rows[jobs])
    none = np.zeros(len(jobs), np.int64)
    parted = Parted.of(table, start, part, none + 2, np.column_stack([src, dst]).reshape(-1), none, none)
    return RoutedTable(parted, at[src], at[dst])


def _crossing(plan: SharedPlan, found: Deliveries, moves: Moves, at: Ints) -> tuple[RoutedTable[CrossingTable], Ints]:
    """Return the moves, and the bytes of each. Those with the same lots of the same patterns are uses of one part."""
    patterns, is_passed = found.patterns, moves.before >= 0
    here = found.pattern[moves.delivery]
    before = np.where(is_passed, found.pattern[moves.before], -1)
    count = len(patterns.start)
    example, part = numbered((moves.lots * count + before + 1) * count + here)
    here, before, lots = here[example], before[example], moves.lots[example]
    crossing = _CrossingLines(patterns, moves)
    of, line = crossing.of(here, lots)
    given = np.flatnonzero(before >= 0)
    _, giver = crossing.of(before[given], lots[given])
    # lines of a part are in the order of their boxes, which are the same before and here
    by_giver = before[of] >= 0
    src, row, giver_row = np.zeros(len(line), np.int64), patterns.row[line], np.full(len(line), -1)
    src[by_giver], giver_row[by_giver] = patterns.member[giver], patterns.row[giver]
    # the ranks of a part: those before, then those here
    members = 1 + int(patterns.member.max(initial=0))
    keys = np.concatenate([of * 2 * members + src, (of * 2 + 1) * members + patterns.member[line]])
    slots = distinct(keys)
    slot_start = offsets_of(slots // (2 * members), len(example))
    src, dst = np.split(np.searchsorted(slots, keys) - slot_start[np.concatenate([of, of])], 2)
    table = CrossingTable(**_columns(plan, row, src, dst, giver_row))
    slots_of = np.diff(slot_start)[part]
    move, slot = ranges(slot_start[part], slots_of)
    is_here, member = slots[slot] // members % 2 == 1, slots[slot] % members
    delivery = np.where(is_here, moves.delivery[move], moves.before[move])
    at_source = delivery < 0
    ranks = found.dst[np.where(at_source, 0, found.start[delivery] + member)]
    ranks = np.where(at_source, found.src[moves.delivery[move]], ranks)
    parted = Parted.of(table, offsets_of(of, len(example)), part, slots_of, ranks, moves.path, moves.hop)
    nbytes = np.zeros(len(example), np.int64)
    np.add.at(nbytes, of, table.row_bytes)
    source = np.where(is_passed, found.node[moves.before], at[found.src[moves.delivery]])
    return RoutedTable(parted, source, found.node[moves.delivery]), nbytes[part]


class _CrossingLines:
    """Finds the lines of patterns that cross and are of given lots, in the order of their boxes."""

    def __init__(self, patterns: Patterns, moves: Moves) -> None:
        crossing, of_line = np.flatnonzero(patterns.crosses), patterns.of_line
        self._lines = crossing[np.lexsort((patterns.box[crossing], of_line[crossing]))]
        self._start = offsets_of(of_line[self._lines], len(patterns.start) - 1)
        self._lot, self._lots = patterns.lot, max(1, len(patterns.lot_bytes))
        sets = np.repeat(np.arange(len(moves.set_start) - 1), np.diff(moves.set_start))
        self._wanted = sets * self._lots + moves.set_lots

    def of(self, pattern: Ints, lots: Ints) -> tuple[Ints, Ints]:
        """Return (which of the questions, line) of each line of these patterns whose lot is in these sets."""
        of, at = ranges(self._start[pattern], np.diff(self._start)[pattern])
        line = self._lines[at]
        wanted: Bools = find(self._wanted, lots[of] * self._lots + self._lot[line]) >= 0
        return of[wanted], line[wanted]


def _onward(plan: SharedPlan, found: Deliveries) -> RoutedTable[CopyTable]:
    """Return the copies of what has crossed. What one destination of a pattern gives to another is a part."""
    patterns = found.patterns
    line = np.flatnonzero(~patterns.crosses)
    giver, pattern = patterns.giver[line], patterns.of_line[line]
    order = np.lexsort((line, patterns.member[giver], patterns.member[line], pattern))
    line, giver, pattern = line[order], giver[order], pattern[order]
    src, dst = patterns.member[giver], patterns.member[line]
    differs = (np.diff(pattern) != 0) | (np.diff(dst) != 0) | (np.diff(src) != 0)
    first = np.flatnonzero(np.append(True, differs)[: len(line)])
    row = patterns.row[line]
    columns = _columns(plan, row, np.zeros(len(row), np.int64), np.ones(len(row), np.int64), patterns.row[giver])
    of_pattern = offsets_of(pattern[first], len(patterns.start) - 1)
    delivery, part = ranges(of_pattern[found.pattern], np.diff(of_pattern)[found.pattern])
    begin, none = found.start[delivery], np.zeros(len(part), np.int64)
    ranks = np.column_stack([found.dst[begin + src[first][part]], found.dst[begin + dst[first][part]]]).reshape(-1)
    parted = Parted.of(CopyTable(**columns), np.append(first, len(line)), part, none + 2, ranks, none, none)
    node = found.node[delivery]
    return RoutedTable(parted, node, node)


def _fills(plan: SharedPlan, at: Ints) -> RoutedTable[FillTable]:
    """Return the fills: those of one kind are a part."""
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
    return RoutedTable(Parted.of(table, fills.row_start, fills.kind, none + 1, fills.rank, none, none), node, node)


def _columns(plan: SharedPlan, row: Ints, src: Ints, dst: Ints, giver: Ints | None = None) -> dict[str, Any]:
    """Return the columns of a table of rows of the plan, with ranks as given.

    `giver` are the rows that have received what these ones copy from there, -1 where it is the source that has it.
    """
    rows = plan.rows
    source = {name: getattr(rows, f"src_{name}")[row] for name in ("local", "offset", "stride")}
    cast = rows.cast[row]
    if giver is not None:
        passed = giver >= 0
        for name, column in source.items():
            column[passed] = getattr(rows, f"dst_{name}")[giver[passed]]
        cast[passed] = 0
    return {
        "tensors": plan.tensors,
        "locals": plan.locals,
        "tensor": rows.tensor[row].astype(np.int32),
        "src_rank": src.astype(np.int32),
        "dst_rank": dst.astype(np.int32),
        "src_local": source["local"].astype(np.int32),
        "dst_local": rows.dst_local[row].astype(np.int32),
        "element_size": rows.element_size[row].astype(np.int32),
        "task_id": plan.places[row],
        "size": rows.size[row],
        "src_offset": source["offset"],
        "src_stride": source["stride"],
        "dst_offset": rows.dst_offset[row],
        "dst_stride": rows.dst_stride[row],
        "cast": cast.astype(np.int32),
    }
