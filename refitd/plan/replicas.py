"""Choose which replica feeds which destination.

A demand is everything that one destination rank needs from one set of interchangeable holders. Each demand goes, in
this order of preference, to

    itself            the destination rank is one of the holders: a local copy, no bytes are sent
    its own node      the holders on the destination's node, in turn
    any node          all holders, in turn; holders on one node divide the pieces among them (between_nodes.py)

Turns follow the order of ranks, so an appended destination takes the next turn and changes no other. If the loads
are then uneven (three destinations for eight holders, sets that overlap), whole pieces of demands move from overloaded
senders to others until the bytes are even. Only ranks and bytes decide, so the choice does not depend on roster order.

If the holders' cables are known to differ in speed, pieces from other nodes come from holders chosen by speed. Each
piece then has one origin, whichever node needs it, so it leaves the sources' nodes once. The holders of one bundle
share it evenly: a rank receives from them message by message in turn (copy_services/windows.py), at the pace of the
slowest. A slow holder shares only if that ends earlier:

    n0 sends 4 GB/s, n1 3 GB/s, n2 1 GB/s, all hold 6 GB      n0 and n1 send 3 GB each, in 1 s
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refitd.plan.between_nodes import Shares, one_sender_each, send_more_than_they_receive
from refitd.plan.columns import Bools, Ints, among, distinct, first_alike, in_order, numbered, offsets_of, ranges

Floats = npt.NDArray[np.float64]
# a load counts as even if it is above the mean of the other possible senders by at most this share: only the busiest
# sender determines the time
TOLERANCE = 0.02
MAX_PASSES = 30


@dataclass(frozen=True, eq=False)
class Demands:
    """Each row: a rank needs a bundle of pieces from a set. Ranks are positions in the sorted ranks, ascending."""

    rank: Ints
    set: Ints
    bundle: Ints  # bundle b needs the pieces (rows of piece_bytes) bundle_start[b]:bundle_start[b + 1]


@dataclass(frozen=True, eq=False)
class _Turns:
    """Groups of demands with the same candidates; turn t has candidates holders[start[t] : start[t] + count[t]]."""

    holders: Ints
    start: Ints  # [turns]
    count: Ints  # [turns]
    turn: Ints  # [demands] -1 for a local copy
    position: Ints  # [demands] index of the chosen candidate

    def candidates(self) -> list[Ints]:
        """Return the candidates of each turn."""
        return [self.holders[s : s + c] for s, c in zip(self.start.tolist(), self.count.tolist(), strict=True)]


def choose_sources(
    demands: Demands,
    set_of: Ints,
    holder_of: Ints,
    nodes: Ints,
    bundle_start: Ints,
    piece_bytes: Ints,
    content: Ints,
    before: Ints,
    set_bytes: Ints,
    speed: Floats | None = None,
) -> Shares:
    """Choose the holders that serve each demand.

    Args:
        demands: the demands.
        set_of: [holdings] set of each (set, rank) pair, in any order.
        holder_of: [holdings] rank of each pair.
        nodes: [ranks] number of each rank's node, -1 if unknown.
        bundle_start: [bundles + 1] into `piece_bytes`.
        piece_bytes: bytes of each piece.
        content: [bundles] equal for bundles with the same pieces in one order, if their ranks must have one holder.
        before: [pieces] bytes of the piece's set in tensors before its own.
        set_bytes: [sets].
        speed: [ranks] bytes per second that each can send to other nodes; None: equal speeds.
    """
    places = 1 + int(nodes.max(initial=-1))
    # whether a holder is on the demand's node; places begin at 1, and 0 means an unknown node
    is_near = among(set_of * (places + 1) + nodes[holder_of] + 1, demands.set * (places + 1) + nodes[demands.rank] + 1)
    is_near &= nodes[demands.rank] >= 0
    first, which = _needed_once(demands, nodes, content, is_near)
    some = Demands(demands.rank[first], demands.set[first], demands.bundle[first])
    shares = _chosen(some, set_of, holder_of, nodes, is_near[first], bundle_start, piece_bytes, speed)
    if send_more_than_they_receive(shares, some.rank, nodes, piece_bytes):
        shares = one_sender_each(shares, some.rank, some.set, set_of, holder_of, nodes, before, set_bytes)
    if len(first) == len(which):
        return shares
    order = np.argsort(shares.demand, kind="stable")
    begin = offsets_of(shares.demand[order], len(first))
    demand, at = ranges(begin[which], np.diff(begin)[which])
    at = order[at]
    # the same places of another rank's bundle
    shift = bundle_start[demands.bundle[demand]] - bundle_start[some.bundle[shares.demand[at]]]
    return Shares(demand, shares.low[at] + shift, shares.high[at] + shift, shares.holder[at])


def _needed_once(demands: Demands, nodes: Ints, content: Ints, is_near: Bools) -> tuple[Ints, Ints]:
    """Return (demands to choose holders for, the number among these of each demand that it is served like).

    Equal needs of several ranks of one node come from one holder on another node, so they cross once.
    """
    node, places = nodes[demands.rank], 1 + int(nodes.max(initial=-1))
    far = np.flatnonzero((node >= 0) & ~is_near)
    first = np.arange(len(node))
    first[far] = far[first_alike(content[demands.bundle[far]] * places + node[far])]
    chosen = np.flatnonzero(first == np.arange(len(node)))
    position = np.zeros(len(node), np.int64)
    position[chosen] = np.arange(len(chosen))
    return chosen, position[first]


def _chosen(
    demands: Demands,
    set_of: Ints,
    holder_of: Ints,
    nodes: Ints,
    is_near: Bools,
    bundle_start: Ints,
    piece_bytes: Ints,
    speed: Floats | None,
) -> Shares:
    """Choose the holders that serve each demand; the arguments are described in `choose_sources`."""
    turns = _take_turns(demands, set_of, holder_of, nodes, is_near)
    low, high = bundle_start[demands.bundle], bundle_start[demands.bundle + 1]
    local = turns.turn < 0
    at = turns.start[turns.turn] + turns.position if len(turns.start) else turns.position
    holder = np.where(local, demands.rank, turns.holders[at] if len(turns.holders) else demands.rank)
    shares = Shares(np.arange(len(holder)), low, high, holder)
    if speed is not None and len(turns.holders) and np.ptp(speed[turns.holders]):
        return _by_speed(shares, demands, turns, nodes, bundle_start, piece_bytes, speed)
    total = np.concatenate([np.zeros(1, np.int64), np.cumsum(piece_bytes)])
    load = np.zeros(len(nodes), np.int64)
    sent = total[high] - total[low]
    np.add.at(load, holder[~local], sent[~local])
    if not _uneven(turns, load):
        return shares
    return _even_out(shares, turns, sent, load, total)


def _by_speed(
    shares: Shares,
    demands: Demands,
    turns: _Turns,
    nodes: Ints,
    bundle_start: Ints,
    piece_bytes: Ints,
    speed: Floats,
) -> Shares:
    """Return the shares with holders chosen by speed for all pieces from other nodes."""
    far = (turns.turn >= 0) & ((nodes[demands.rank] < 0) | (nodes[demands.rank] != nodes[shares.holder]))
    which, rest = np.flatnonzero(far), np.flatnonzero(~far)
    if not len(which):
        return shares
    demand, low, high, holder = origins_by_speed(
        turns.turn[which], demands.bundle[which], turns.candidates(), bundle_start, piece_bytes, speed
    )
    kept = [rest, shares.low[rest], shares.high[rest], shares.holder[rest]]
    return Shares(*np.concatenate([kept, [which[demand], low, high, holder]], axis=1))


def _take_turns(demands: Demands, set_of: Ints, holder_of: Ints, nodes: Ints, is_near: Bools) -> _Turns:
    ranks, node_count = len(nodes), int(nodes.max(initial=-1)) + 1
    order = np.lexsort((holder_of, nodes[holder_of], set_of))
    set_of, holders = set_of[order], holder_of[order]
    is_holder = np.zeros(ranks, bool)
    is_holder[holders] = True
    local = is_holder[demands.rank]
    local[local] = among(set_of * ranks + holders, demands.set[local] * ranks + demands.rank[local])
    begins = offsets_of(set_of, 1 + int(demands.set.max(initial=-1)))
    start, set_count = begins[demands.set], np.diff(begins)[demands.set]
    count = set_count.copy()
    # holders of a demand's own node are next to each other
    places = set_of * (node_count + 1) + nodes[holders] + 1
    near = demands.set[is_near] * (node_count + 1) + nodes[demands.rank[is_near]] + 1
    start[is_near], end = (np.searchsorted(places, near, side=side) for side in ("left", "right"))
    count[is_near] = end - start[is_near]
    remote = np.flatnonzero(~local)
    # of the groups that begin with one holder, one is the whole set
    first, number = numbered(2 * start[remote] + (count == set_count)[remote])
    turn = np.full(len(local), -1, np.int64)
    turn[remote] = number
    # a demand's position within its turn, in the order of ranks, picks the candidate
    by_turn = in_order(number)
    begin = offsets_of(number[by_turn], len(first))
    nth = np.empty(len(remote), np.int64)
    nth[by_turn] = np.arange(len(remote)) - begin[number[by_turn]]
    position = np.zeros(len(local), np.int64)
    position[remote] = nth % count[remote]
    return _Turns(holders, start[remote][first], count[remote][first], turn, position)


def _uneven(turns: _Turns, load: Ints) -> bool:
    """Return whether any turn has a candidate whose load is above the mean of them by more than TOLERANCE."""
    if not len(turns.start):
        return False
    _, at = ranges(turns.start, turns.count)
    begin = np.cumsum(turns.count) - turns.count
    loads = load[turns.holders[at]]
    above = np.maximum.reduceat(loads, begin) - np.add.reduceat(loads, begin) / turns.count
    return bool((above > TOLERANCE * _mean(turns, load)).any())


def _mean(turns: _Turns, load: Ints) -> float:
    """Return the mean load of all candidates in bytes."""
    _, at = ranges(turns.start, turns.count)
    return float(load.sum()) / max(1, len(distinct(turns.holders[at])))


def _even_out(shares: Shares, turns: _Turns, sent: Ints, load: Ints, total: Ints) -> Shares:
    """Move pieces between the candidates of each turn until senders are even.

    First compute target loads in bytes: repeatedly redistribute each turn over its candidates up to one level, on top
    of their load from other turns. This converges to the most even distribution. Then move pieces to meet the targets.
    """
    candidates = turns.candidates()
    by_turn = np.argsort(turns.turn, kind="stable")
    begin = np.searchsorted(turns.turn[by_turn], np.arange(len(candidates) + 1))
    current: list[Floats] = []
    target: list[Floats] = []
    for number, who in enumerate(candidates):
        mine = by_turn[begin[number] : begin[number + 1]]
        bytes_each = np.zeros(len(who))
        np.add.at(bytes_each, turns.position[mine], sent[mine])
        current.append(bytes_each)
        target.append(bytes_each)
    level = load.astype(np.float64)
    enough = 0.1 * TOLERANCE * _mean(turns, load)
    for _ in range(MAX_PASSES):
        moved = 0.0
        for number, who in enumerate(candidates):
            base = level[who] - target[number]
            poured = _poured(base, float(target[number].sum()))
            moved = max(moved, float(np.abs(poured - target[number]).max()))
            target[number] = poured
            level[who] = base + poured
        if moved <= enough:
            break
    middles = (total[:-1] + total[1:]) / 2
    untouched = turns.turn < 0
    found: list[Ints] = []
    for number, who in enumerate(candidates):
        mine = by_turn[begin[number] : begin[number + 1]]
        if np.abs(target[number] - current[number]).max() <= enough:
            untouched[mine] = True
        else:
            found.append(_moved(shares, mine, turns.position[mine], who, target[number], total, middles))
    rest = np.flatnonzero(untouched)
    columns = np.concatenate([*found, [rest, shares.low[rest], shares.high[rest], shares.holder[rest]]], axis=1)
    return Shares(*columns)


def _poured(base: Floats, amount: float) -> Floats:
    """Return how much each vessel (filled to `base`) takes when `amount` is poured in and finds one level."""
    order = np.argsort(base, kind="stable")
    heights = base[order]
    # filling the k lowest vessels to the height of the next takes this much
    needed = heights * np.arange(1, len(base) + 1) - np.cumsum(heights)
    k = int(np.searchsorted(needed, amount, side="right"))
    level = (amount + heights[:k].sum()) / k
    taken: Floats = np.maximum(level - base, 0.0)
    return taken


def _moved(shares: Shares, mine: Ints, position: Ints, who: Ints, target: Floats, total: Ints, middles: Floats) -> Ints:
    """Return a turn's shares, shape [4, shares], after candidates above their target have given to those below it.

    Each giver keeps its first pieces. The other pieces go to takers in one sequence, which gives destinations few
    additional senders. A piece goes where at least half of it fits.
    """
    mine = mine[np.argsort(position, kind="stable")]  # sorted by (candidate, demand)
    position = np.sort(position, kind="stable")
    low, high = shares.low[mine], shares.high[mine]
    nbytes = total[high] - total[low]
    before = np.cumsum(nbytes) - nbytes
    first = np.searchsorted(position, position)
    room = target[position] - (before - before[first])
    cut = np.clip(np.searchsorted(middles, total[low] + room, side="right"), low, high)
    left = target - np.bincount(position, weights=total[cut] - total[low], minlength=len(who))

    given = np.flatnonzero(cut < high)
    given = given[np.argsort(mine[given], kind="stable")]
    start, end = cut[given], high[given]
    amount = total[end] - total[start]
    reached = np.cumsum(amount)
    takers = np.argsort(-left, kind="stable")
    takers = takers[: max(1, int((left > 0).sum()))]
    # the sequence is divided where a taker is full
    full = np.cumsum(left[takers])[:-1]
    full = full[full < reached[-1]] if len(given) else full[:0]
    at = np.searchsorted(reached, full, side="right")
    divided = np.searchsorted(middles, total[start[at]] + full - (reached - amount)[at], side="right")
    divided = np.clip(divided, start[at], end[at])
    part = np.concatenate([np.arange(len(given)), at])
    begin = np.concatenate([start, divided])
    opens = np.repeat([0, 1], [len(given), len(at)])  # a part that begins with another taker than the one before
    order = np.lexsort((opens, begin, part))
    part, begin, taker = part[order], begin[order], takers[np.cumsum(opens[order])]
    stop = np.where(np.append(part[1:], -1) == part, np.append(begin[1:], 0), end[part])
    kept, handed_on = cut > low, stop > begin
    return np.concatenate(
        [
            [mine[kept], low[kept], cut[kept], who[position[kept]]],
            [mine[given[part]][handed_on], begin[handed_on], stop[handed_on], who[taker[handed_on]]],
        ],
        axis=1,
    )


# Senders of one bundle: each is one more that a destination waits for.
MOST_ORIGINS = 8


def origins_by_speed(
    turn: Ints, bundle: Ints, candidates: list[Ints], bundle_start: Ints, piece_bytes: Ints, speed: Floats
) -> tuple[Ints, Ints, Ints, Ints]:
    """Return (demand, low, high, holder) of every share: pieces low:high of a demand come from a holder.

    Args:
        turn: [demands] index into `candidates`.
        bundle: [demands] what is needed: pieces bundle_start[b] : bundle_start[b + 1].
        candidates: the ranks that hold what the demands of one turn need, ascending.
        bundle_start: [bundles + 1] into `piece_bytes`.
        piece_bytes: bytes of each piece.
        speed: [ranks] bytes per second that a rank can send.
    """
    total = np.concatenate([np.zeros(1, np.int64), np.cumsum(piece_bytes)])
    middles = (total[:-1] + total[1:]) / 2
    first, group = numbered(turn * len(bundle_start) + bundle)
    by_group = np.argsort(group, kind="stable")
    begin = np.searchsorted(group[by_group], np.arange(len(first) + 1))
    nbytes = total[bundle_start[bundle[first] + 1]] - total[bundle_start[bundle[first]]]
    load = np.zeros(len(speed))
    found: list[Ints] = []
    for number in np.lexsort((first, -nbytes)).tolist():
        demands, one = by_group[begin[number] : begin[number + 1]], int(first[number])
        low, high = int(bundle_start[bundle[one]]), int(bundle_start[bundle[one] + 1])
        who = candidates[int(turn[one])]
        who = _sharing(who, load[who], speed[who], float(nbytes[number]))
        shares = np.arange(1, len(who) + 1) * (float(nbytes[number]) / len(who))
        cut = low + np.searchsorted(middles[low:high], total[low] + shares[:-1], side="right")
        cut = np.concatenate([[low], cut, [high]])
        load[who] += total[cut[1:]] - total[cut[:-1]]
        for holder, start, end in zip(who.tolist(), cut[:-1].tolist(), cut[1:].tolist(), strict=True):
            if end > start:
                same = np.ones_like(demands)
                found.append(np.stack([demands, start * same, end * same, holder * same]))
    demand, lows, highs, holders = np.concatenate(found, axis=1)
    return demand, lows, highs, holders


def _sharing(who: Ints, load: Floats, speed: Floats, amount: float) -> Ints:
    """Return the holders that end earliest if they share an amount evenly; of equal choices, the fewest holders."""
    best, chosen = np.inf, who[:1]
    for count in range(1, min(MOST_ORIGINS, len(who)) + 1):
        ends = (load + amount / count) / speed
        order = np.lexsort((who, ends))[:count]
        if ends[order[-1]] < best:
            best, chosen = float(ends[order[-1]]), np.sort(who[order])
    return chosen
