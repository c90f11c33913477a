"""What crosses from rank to rank in each phase of a refit: directly, or from replica to replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refitd.describe.roster import Roster
from refitd.plan.columns import Hashes, Ints, hashed, mixed, ranges
from refitd.plan.shared import SharedPlan

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Hops:
    """Bytes from rank to rank (by index), and how many elements they are."""

    src: Ints
    dst: Ints
    nbytes: Ints
    elements: Ints
    is_relay: Mask  # the sender has received them in this swap


@dataclass(frozen=True, eq=False)
class Staging:
    """The two phases of staging, and over how many nodes the longest relay chain goes (1: no relay)."""

    arriving: Hops
    onward: Hops  # once everything has arrived on a node
    chain: int


class Ranks:
    """The ranks of a plan: index, node, and place within the node."""

    def __init__(self, rosters: Sequence[Roster]) -> None:
        self.rosters = sorted(rosters, key=lambda roster: roster.rank)
        self.index = {roster.rank: index for index, roster in enumerate(self.rosters)}
        names = [roster.node or f"rank {roster.rank}" for roster in self.rosters]
        self.nodes = list(dict.fromkeys(names))  # in order of their first rank
        numbers = {name: number for number, name in enumerate(self.nodes)}
        self.node: Ints = np.array([numbers[name] for name in names], np.int64)
        counts = np.bincount(self.node)
        order = np.argsort(self.node, kind="stable")
        place = np.empty(len(names), np.int64)
        place[order] = np.arange(len(names)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.place = place  # [ranks] number within the node
        self.count: Ints = counts  # [nodes] ranks

    def __len__(self) -> int:
        return len(self.rosters)


def staging_of(plan: SharedPlan, ranks: Ranks, *, relayed: bool, order: Ints | None = None) -> Staging:
    """Return the hops of staging.

    As in refitd.plan.deliveries, what several ranks of a node need of one source box crosses to the first of them, and
    the others copy it there. With `relayed`, nodes that need the same, however they are cut, form chains: the
    first gets it from the sources, each other one from the one before it, in this order of nodes (None: by number).
    """
    job, row = ranges(plan.row_start[plan.job_rows], np.diff(plan.row_start)[plan.job_rows])
    most = max(ranks.index, default=-1) + 1
    index = np.full(most, -1, np.int64)
    index[list(ranks.index)] = list(ranks.index.values())
    src, dst = index[plan.job_src][job], index[plan.job_dst][job]
    rows = plan.rows
    count = np.prod(rows.size, axis=1, dtype=np.int64)
    elements, nbytes = count[row], (count * rows.element_size)[row]
    near = ranks.node[src] == ranks.node[dst]
    box = hashed([rows.src_local, rows.src_offset, rows.element_size, rows.cast, rows.size, rows.src_stride])[row]
    giver = _givers(box, src, dst, ~near, ranks)
    crosses = ~near & (giver == dst)
    copied = ~near & ~crosses
    chain = 1
    if relayed:
        content = hashed([rows.tensor, rows.origin, rows.size, rows.element_size, rows.cast])[row]
        sender, chain = _relays(
            content, src, dst, crosses, ranks, np.arange(len(ranks.nodes)) if order is None else order
        )
    else:
        sender = src
    moved, passed_on = near | crosses, sender != src
    return Staging(
        arriving=_summed(sender, dst, nbytes, elements, passed_on, moved, len(ranks)),
        onward=_summed(giver, dst, nbytes, elements, passed_on, copied, len(ranks)),
        chain=chain,
    )


def _givers(box: Hashes, src: Ints, dst: Ints, far: Mask, ranks: Ranks) -> Ints:
    """Return, for each row that crosses, the first rank of its node that needs the same box of the same source."""
    giver = dst.copy()
    at = np.flatnonzero(far)
    if len(at):
        key = mixed(box[at] ^ mixed(src[at] * np.int64(len(ranks.nodes)) + ranks.node[dst[at]]))
        _, which = np.unique(key, return_inverse=True)
        first = np.full(int(which.max()) + 1, len(ranks), np.int64)
        np.minimum.at(first, which, dst[at])
        giver[at] = first[which]
    return giver


def _relays(content: Hashes, src: Ints, dst: Ints, crosses: Mask, ranks: Ranks, order: Ints) -> tuple[Ints, int]:
    """Return the source of each row when all nodes that need a content form a chain, and the nodes of the longest one.

    A node passes on what its first rank of that content has received, whichever rank the next node needs it at.
    """
    at = np.flatnonzero(crosses)
    if not len(at):
        return src, 1
    turn = np.empty(len(ranks.nodes), np.int64)
    turn[order] = np.arange(len(order))
    node = turn[ranks.node[dst[at]]]
    at = at[np.lexsort((dst[at], node, content[at]))]
    node, what = turn[ranks.node[dst[at]]], content[at]
    is_first = np.append(True, (what[1:] != what[:-1]) | (node[1:] != node[:-1]))  # of its content on its node
    first = np.flatnonzero(is_first)
    follows = np.append(False, what[first[1:]] == what[first[:-1]])  # another node has that content before
    before = np.where(follows, np.roll(dst[at[first]], 1), -1)[np.cumsum(is_first) - 1]
    source = src.copy()
    source[at[before >= 0]] = before[before >= 0]
    return source, int(np.diff(np.append(np.flatnonzero(~follows), len(first))).max())


def _summed(src: Ints, dst: Ints, nbytes: Ints, elements: Ints, is_relay: Mask, wanted: Mask, count: int) -> Hops:
    """Add up the wanted rows of each pair of ranks."""
    key = (src[wanted] * count + dst[wanted]) * 2 + is_relay[wanted]
    pairs, which = np.unique(key, return_inverse=True)
    total, number = np.zeros(len(pairs), np.int64), np.zeros(len(pairs), np.int64)
    np.add.at(total, which, nbytes[wanted])
    np.add.at(number, which, elements[wanted])
    pair = pairs // 2
    return Hops(pair // max(1, count), pair % max(1, count), total, number, pairs % 2 == 1)
