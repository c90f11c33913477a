"""Have ranks of one node that hold the same send the same to all other nodes.

Ranks of a node share its cable, so it does not matter to other nodes which of them sends a piece. It has to be the same
one for all, though: then what several nodes need leaves this one once, and they pass it on (relays.py).

    n0: ranks 0 and 1 hold w and v        rank 0 sends w to n1 and to n2, rank 1 sends v to n1 and to n2

A destination then receives from more ranks, so this is done only where nodes send more than any of them receives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from refitd.plan.columns import Bools, Ints, find, in_order, mixed, numbered, ranges

# Nodes send too much if the busiest one receives less than this of what the busiest one sends.
WORTH = 0.9


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
    """Return whether cables are busier with sending than with receiving, so that relays would help.

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
    return bool(far.any() and received.max() < WORTH * sent.max())


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
