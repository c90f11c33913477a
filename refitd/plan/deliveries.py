"""Deliveries: all that one source rank sends to one other node. A byte that several ranks there need crosses once.

    jobs         rank 3 -> 40: rows A    3 -> 41: rows A    5 -> 44: rows A    5 -> 45: rows A
    deliveries   3 -> node of 40, 41     5 -> node of 44, 45
    pattern      both (A, A)             rows of the first A cross; those of the second are copied onward from there

Thousands of ranks of few kinds make few patterns, and all work on rows is done once a pattern.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from refitd.plan.coalesce import Rows
from refitd.plan.columns import (
    Bools,
    Ints,
    distinct,
    find,
    hashed,
    in_order,
    numbered,
    numbered_lists,
    offsets_of,
    range_values,
    ranges,
)
from refitd.plan.kept import Kept
from refitd.plan.shared import SharedPlan
from refitd.plan.table import CopyTable


@dataclass(frozen=True, eq=False)
class Patterns:
    """What deliveries consist of but for their ranks: lines, sorted by (pattern, destination, row).

    Boxes that are always needed together are one lot. Lots are numbered from 0, and have no box in common.
    """

    start: Ints  # [patterns + 1] into the lines
    member: Ints  # [lines] number of the destination among those of the delivery
    row: Ints  # [lines] row of the shared plan
    box: Ints  # [lines] source box (source_boxes)
    giver: Ints  # [lines] the line that crosses and has the box: this one, or the first one
    lot: Ints  # [lines] lot of the box
    lot_bytes: Ints  # [lots]
    lot_start: Ints  # [patterns + 1] into `lots`
    lots: Ints  # lots of all patterns, end to end, those of each ascending

    @property
    def crosses(self) -> Bools:
        """Whether each line crosses: the others are copied onward."""
        crosses: Bools = self.giver == np.arange(len(self.giver))
        return crosses

    @property
    def of_line(self) -> Ints:
        """The pattern of each line."""
        return np.repeat(np.arange(len(self.start) - 1), np.diff(self.start))


@dataclass(frozen=True, eq=False)
class Deliveries:
    """Deliveries, sorted by (source rank, node)."""

    src: Ints  # [n] rank
    node: Ints  # [n] number of the destinations' node
    nodes: int  # how many nodes there are
    pattern: Ints  # [n]
    start: Ints  # [n + 1] into `dst`
    dst: Ints  # the destinations of all deliveries, end to end, those of each ascending
    patterns: Patterns

    def __len__(self) -> int:
        return len(self.src)

    def find(self, src: Ints, node: Ints) -> Ints:
        """Return the deliveries of these sources to these nodes; -1 where there is none."""
        return find(self.src * self.nodes + self.node, src * self.nodes + node)


def deliveries_of(plan: SharedPlan, jobs: Ints, at: Ints, known: Kept[Patterns]) -> Deliveries:
    """Return the deliveries of jobs that cross between nodes.

    Args:
        plan: the plan.
        jobs: its jobs whose ranks are on different nodes.
        at: number of each rank's node.
        known: the patterns that were made last of the plan's rows.
    """
    src, dst, kind = plan.job_src[jobs], plan.job_dst[jobs], plan.job_rows[jobs]
    order = in_order(src, at[dst], dst)
    src, dst, kind = src[order], dst[order], kind[order]
    node = at[dst]
    begin = np.flatnonzero(np.append(True, (np.diff(src) != 0) | (np.diff(node) != 0))[: len(src)])
    start = np.append(begin, len(src))
    example, pattern = numbered_lists(kind, begin)
    count = np.diff(start)[example]
    kinds = kind[range_values(start[example], count)]
    patterns = known.made_of((kinds, count), lambda: _patterns(plan, kinds, count))
    nodes = 1 + int(at.max(initial=-1))
    return Deliveries(src[begin], node[begin], nodes, pattern, start, dst, patterns)


def _patterns(plan: SharedPlan, kind: Ints, count: Ints) -> Patterns:
    """Return the patterns of jobs of these kinds: the first `count[0]` are the first pattern's, and so on."""
    of_job, nth = ranges(np.zeros(len(count), np.int64), count)
    of_line, row = ranges(plan.row_start[kind], np.diff(plan.row_start)[kind])
    pattern, member = of_job[of_line], nth[of_line]
    box = source_boxes(plan.rows)[row]
    boxes = 1 + int(box.max(initial=-1))
    first, number = numbered(pattern * boxes + box)  # the first line of each, whose destination comes first
    giver = first[number]
    crossing = np.flatnonzero(giver == np.arange(len(giver)))
    crossing = crossing[np.argsort(box[crossing], kind="stable")]  # by (box, pattern)
    opens = np.append(True, np.diff(box[crossing]) != 0)[: len(crossing)]
    lots, lot = numbered_lists(pattern[crossing], np.flatnonzero(opens))
    of_box = np.zeros(boxes, np.int64)
    of_box[box[crossing[opens]]] = lot
    rows = plan.rows
    nbytes = np.prod(rows.size, axis=1) * rows.element_size
    lot_bytes = np.zeros(len(lots), np.int64)
    np.add.at(lot_bytes, lot, nbytes[row[crossing[opens]]])
    pairs = distinct(pattern * max(1, len(lots)) + of_box[box])
    of_pattern = pairs // max(1, len(lots))
    return Patterns(
        start=offsets_of(pattern, len(count)),
        member=member,
        row=row,
        box=box,
        giver=giver,
        lot=of_box[box],
        lot_bytes=lot_bytes,
        lot_start=offsets_of(of_pattern, len(count)),
        lots=pairs - of_pattern * len(lots),
    )


def source_boxes(rows: Rows | CopyTable) -> Ints:
    """Number the distinct source boxes of any rank, shape [n]: elements in one order, wanted as one dtype.

    Numbers are in the order of places at the source, whatever the order of rows.
    """
    stride = np.where(rows.size > 1, rows.src_stride, 0)
    keys = np.column_stack([rows.src_local, rows.src_offset, rows.cast, rows.element_size, rows.size, stride])
    content = hashed([keys])  # sorting whole rows takes seconds for a million of them
    first, number = numbered(content)
    if (keys != keys[first[number]]).any():  # two boxes of one hash: as if no box were wanted twice
        return np.arange(len(keys))
    place = np.empty(len(first), np.int64)
    place[np.lexsort((content[first], rows.src_offset[first], rows.src_local[first]))] = np.arange(len(first))
    return place[number]
