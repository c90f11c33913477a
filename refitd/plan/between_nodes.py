"""Send each byte to a node once: bundle the needs of its ranks, choose one sender, collect its jobs as a delivery.

Bundles are what destination classes need. One holder sends all of a bundle. With fine bundles one holder sends what
several ranks of a node need in common, and it crosses once. Coarse bundles are fewer, and so are the rows and the pairs
of ranks:

    class 0 of node n0   needs pieces a, b, norm      coarse: one bundle        fine: (a, b), (norm)
    class 1 of node n0   needs pieces c, d, norm      coarse: one bundle        fine: (c, d), (norm)

Ranks of one node that hold the same pieces send the same ones to all other nodes: a piece that several nodes need then
leaves this node once, and they pass it on (relays.py). Several senders on one node would not be faster, because they
share its cable. A destination then receives from more ranks, so this is done only where nodes send more than any of
them receives:

    n0: ranks 0 and 1 hold w and v        rank 0 sends w to n1 and to n2, rank 1 sends v to n1 and to n2

A delivery is all that one source rank sends to one other node:

    jobs         rank 3 -> 40: rows A    3 -> 41: rows A    5 -> 44: rows A    5 -> 45: rows A
    deliveries   3 -> node of 40, 41     5 -> node of 44, 45
    pattern      both (A, A)             the first A's rows cross; the second A's rows are copied onward from there

Thousands of ranks of few kinds make few patterns, and all work on rows is done once a pattern.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from refitd.plan.coalesce import Rows
from refitd.plan.columns import (
    Bools,
    Ints,
    Memo,
    distinct,
    find,
    hashed,
    in_order,
    mixed,
    numbered,
    numbered_lists,
    offsets_of,
    range_values,
    ranges,
)
from refitd.plan.layouts import Layouts
from refitd.plan.match import Match
from refitd.plan.shared import SharedPlan
from refitd.plan.table import CopyTable

# fine bundles are used if less than this of the bytes crosses with them
ONCE = 0.975


@dataclass(frozen=True, eq=False)
class Bundles:
    """All pieces, in bundles: each is of one destination class and one set.

    Attributes:
        dst_class: [bundles], ascending.
        set: [bundles].
        start: [bundles + 1] into the match's pieces.
        content: [bundles] equal for bundles with the same pieces in one order.
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
    """Bundles of a match, computed at the first use, and the bytes that cross to each kind of node with either."""

    coarse: Bundles | None = None
    fine: Bundles | None = None
    set_bytes: tuple[Ints, Ints] | None = None
    costs: dict[tuple[bytes, bytes], tuple[int, int]] = field(default_factory=dict)


def bundles_for(layouts: Layouts, found: Match, known: KnownBundles) -> Bundles:
    """Return coarse bundles, or fine ones if clearly fewer bytes cross with them."""
    if known.coarse is None or known.fine is None:
        known.coarse, known.fine = _bundles(found, is_fine=False), _bundles(found, is_fine=True)
    coarse = fine = 0
    for (wanting, holding), count in _node_kinds(layouts, found):
        key = wanting.tobytes(), holding.tobytes()
        if key not in known.costs:
            known.costs[key] = _crossing_bytes(layouts, found, known.coarse, wanting, holding)
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
        np.add.at(nbytes, place, found.pieces.nbytes[first])
        start = np.append(0, np.cumsum(nbytes))
        of_set = start[offsets_of(key // max(1, tensors), max(1, len(found.set_start) - 1))]
        known.set_bytes = start[place[box]] - of_set[pieces.set], np.diff(of_set)
    return known.set_bytes


def _bundles(found: Match, is_fine: bool) -> Bundles:
    pieces = found.pieces
    columns = [pieces.dst_class, pieces.set, *([pieces.needers, pieces.again] if is_fine else [])]
    opens = np.append(True, np.any([np.diff(column) != 0 for column in columns], axis=0))[: len(pieces.set)]
    begin = np.flatnonzero(opens)
    total = np.append(0, np.cumsum(found.pieces.nbytes))
    start = np.append(begin, len(pieces.set))
    return Bundles(
        dst_class=pieces.dst_class[begin],
        set=pieces.set[begin],
        start=start,
        content=numbered_lists(pieces.box, begin)[1],
        nbytes=np.diff(total[start]),
        is_fine=is_fine,
    )


def _node_kinds(layouts: Layouts, found: Match) -> list[tuple[tuple[Ints, Ints], int]]:
    """Return ((destination classes, source classes), number of nodes) for nodes with the same classes.

    Nodes with one destination class that needs each element once are skipped: both kinds of bundles are equal there.
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


def _crossing_bytes(layouts: Layouts, found: Match, coarse: Bundles, wanting: Ints, holding: Ints) -> tuple[int, int]:
    """Return the bytes that cross to a node with ranks of these classes, with coarse and with fine bundles."""
    of_class = offsets_of(coarse.dst_class, layouts.destination.classes)
    _, bundle = ranges(of_class[wanting], np.diff(of_class)[wanting])
    set_of = np.repeat(np.arange(len(found.set_start) - 1), np.diff(found.set_start))
    near = distinct(set_of[find(holding, found.set_class) >= 0])
    bundle = bundle[find(near, coarse.set[bundle]) < 0]
    # a set with a single holder comes from it in any case
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
    return int(found.pieces.nbytes[piece[first]].sum())


# Nodes send too much if the busiest receiver receives less than this share of the busiest sender's bytes.
BUSY = 0.9


@dataclass(frozen=True, eq=False)
class Shares:
    """Each row: pieces low:high (rows of piece_bytes) of a demand's bundle come from a holder."""

    demand: Ints
    low: Ints
    high: Ints
    holder: Ints

    def select(self, rows: Ints | Bools) -> Shares:
        """Return only the given rows."""
        return Shares(self.demand[rows], self.low[rows], self.high[rows], self.holder[rows])


@dataclass(frozen=True, eq=False)
class _Holders:
    """The ranks of one node that hold one set, if they are several: pair p has holders[start[p] : start[p] + count[p]].

    Nodes' ranks that hold the same sets divide the bytes of these sets evenly, in the order of sets and tensors: set
    byte b of pair p is sent by the holder at (base[p] + b) * count[p] // total[p].
    """

    key: Ints  # [pairs] set * places + node, ascending
    holders: Ints
    start: Ints
    count: Ints
    base: Ints
    total: Ints

    def sender(self, pair: Ints, byte: Ints) -> Ints:
        """Return the rank that sends a byte of each pair's set."""
        place = (self.base[pair] + byte) * self.count[pair] // self.total[pair]
        rank: Ints = self.holders[self.start[pair] + np.minimum(place, self.count[pair] - 1)]
        return rank


def send_more_than_they_receive(shares: Shares, rank: Ints, nodes: Ints, piece_bytes: Ints) -> bool:
    """Return whether cables are busier with sending than with receiving; then relays help.

    Args:
        shares: the shares.
        rank: [demands] the receiver of each.
        nodes: [ranks] number of each rank's node, -1 if unknown.
        piece_bytes: bytes of each piece.
    """
    here, there = nodes[shares.holder], nodes[rank[shares.demand]]
    far = (here >= 0) & (there >= 0) & (here != there)
    total = np.append(0, np.cumsum(piece_bytes))
    nbytes = (total[shares.high] - total[shares.low])[far]
    sent, received = (np.bincount(at[far], weights=nbytes) for at in (here, there))
    return bool(far.any() and received.max() < BUSY * sent.max())


def one_sender_each(
    shares: Shares, rank: Ints, set_: Ints, set_of: Ints, holder_of: Ints, nodes: Ints, before: Ints, set_bytes: Ints
) -> Shares:
    """Return the shares with one sender of a node for each piece that it sends to other nodes.

    Args:
        shares: the shares.
        rank: [demands] the receiver of each.
        set_: [demands] the set that holds what it needs.
        set_of: [holdings] set of each (set, rank) pair, in any order.
        holder_of: [holdings] rank of each pair.
        nodes: [ranks] number of each rank's node, -1 if unknown.
        before: [pieces] bytes of the piece's set in tensors before its own.
        set_bytes: [sets].
    """
    places = 1 + int(nodes.max(initial=-1))
    found = _holders(set_of, holder_of, nodes, set_bytes, places)
    if not len(found.key):
        return shares
    here, there = nodes[shares.holder], nodes[rank[shares.demand]]
    pair = find(found.key, set_[shares.demand] * places + here)
    pair[(here < 0) | (there < 0) | (here == there)] = -1
    holder = shares.holder.copy()
    last = np.maximum(set_bytes - 1, 0)[found.key // places]
    every = np.arange(len(found.key))
    only = np.where(found.sender(every, last * 0) == found.sender(every, last), found.sender(every, last), -1)
    is_whole = (pair >= 0) & (only[pair] >= 0)
    holder[is_whole] = only[pair[is_whole]]
    shares = Shares(shares.demand, shares.low, shares.high, holder)
    cut = (pair >= 0) & ~is_whole
    if not cut.any():
        return shares
    divided = shares.select(cut)
    of, piece = ranges(divided.low, divided.high - divided.low)
    sender = found.sender(pair[cut][of], before[piece])
    begin = np.flatnonzero(np.append(True, (np.diff(of) != 0) | (np.diff(sender) != 0))[: len(of)])
    parts = (divided.demand[of[begin]], piece[begin], piece[np.append(begin[1:], len(of)) - 1] + 1, sender[begin])
    kept = shares.select(~cut)
    whole = (kept.demand, kept.low, kept.high, kept.holder)
    return Shares(*(np.concatenate(columns) for columns in zip(whole, parts, strict=True)))


def _holders(set_of: Ints, holder_of: Ints, nodes: Ints, set_bytes: Ints, places: int) -> _Holders:
    known = np.flatnonzero(nodes[holder_of] >= 0)
    order = known[in_order(set_of[known], nodes[holder_of[known]], holder_of[known])]
    key, holders = set_of[order] * places + nodes[holder_of[order]], holder_of[order]
    start = np.flatnonzero(np.append(True, np.diff(key) != 0)[: len(key)])
    count = np.diff(np.append(start, len(key)))
    several = np.flatnonzero(count > 1)
    # sets that the same ranks hold
    _, group = numbered(np.add.reduceat(mixed(holders), start)[several] if len(several) else several)
    key, start, count = key[start[several]], start[several], count[several]
    nbytes = set_bytes[key // max(1, places)]
    total = np.zeros(1 + int(group.max(initial=-1)), np.int64)
    np.add.at(total, group, nbytes)
    by_group = in_order(group)  # sets ascend within each
    base = np.empty(len(key), np.int64)
    base[by_group] = np.cumsum(nbytes[by_group]) - nbytes[by_group] - (np.cumsum(total) - total)[group[by_group]]
    return _Holders(key, holders, start, count, base, np.maximum(total, 1)[group])


@dataclass(frozen=True, eq=False)
class Patterns:
    """The content of deliveries without their ranks: lines, sorted by (pattern, destination, row).

    Boxes that are always needed together are one lot. Lots are numbered from 0, and have no box in common.
    """

    start: Ints  # [patterns + 1] into the lines
    member: Ints  # [lines] number of the destination within its delivery
    row: Ints  # [lines] row of the shared plan
    box: Ints  # [lines] source box (source_boxes)
    giver: Ints  # [lines] the line that crosses and has the box: this one, or the first one
    lot: Ints  # [lines] lot of the box
    lot_bytes: Ints  # [lots]
    lot_start: Ints  # [patterns + 1] into `lots`
    lots: Ints  # lots of all patterns, end to end, ascending in each

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
    dst: Ints  # the destinations of all deliveries, end to end, ascending in each
    patterns: Patterns

    def __len__(self) -> int:
        return len(self.src)

    def find(self, src: Ints, node: Ints) -> Ints:
        """Return the delivery from each source to its node; -1 if it does not exist."""
        return find(self.src * self.nodes + self.node, src * self.nodes + node)


def deliveries_of(plan: SharedPlan, jobs: Ints, at: Ints, known: Memo[Patterns]) -> Deliveries:
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
    if (patterns := known.of((kinds, count))) is None:
        patterns = known.keep((kinds, count), _patterns(plan, kinds, count))
    nodes = 1 + int(at.max(initial=-1))
    return Deliveries(src[begin], node[begin], nodes, pattern, start, dst, patterns)


def _patterns(plan: SharedPlan, kind: Ints, count: Ints) -> Patterns:
    """Return the patterns of jobs of these kinds: the first `count[0]` are the first pattern's, and so on."""
    of_job, nth = ranges(np.zeros(len(count), np.int64), count)
    of_line, row = ranges(plan.row_start[kind], np.diff(plan.row_start)[kind])
    pattern, member = of_job[of_line], nth[of_line]
    box = source_boxes(plan.rows)[row]
    boxes = 1 + int(box.max(initial=-1))
    first, number = numbered(pattern * boxes + box)  # the first line of each box has its first destination
    giver = first[number]
    crossing = np.flatnonzero(giver == np.arange(len(giver)))
    crossing = crossing[np.argsort(box[crossing], kind="stable")]  # by (box, pattern)
    opens = np.append(True, np.diff(box[crossing]) != 0)[: len(crossing)]
    lots, lot = numbered_lists(pattern[crossing], np.flatnonzero(opens))
    of_box = np.zeros(boxes, np.int64)
    of_box[box[crossing[opens]]] = lot
    nbytes = plan.row_bytes
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

    Numbers are in the order of places at the source; the order of rows does not matter.
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
