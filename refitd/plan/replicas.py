"""Choose which replica feeds which destination.

A demand is everything that one destination rank needs from one set of interchangeable holders. Each demand goes, in
this order of preference, to

    itself            the destination rank is one of the holders: a local copy, no bytes are sent
    its own node      the holders on the destination's node, in turn
    anyone            all holders, in turn

Turns follow the order of ranks, so that an appended destination takes the next turn and changes no other. If the loads
are then uneven (three destinations for eight holders, sets that overlap), whole pieces of demands move from overloaded
senders to others until the bytes are even. Only ranks and bytes decide, so the choice does not depend on roster order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refitd.describe.layout import canonical_name
from refitd.describe.metadata import ParameterMetadata
from refitd.errors import PlanError
from refitd.plan.columns import Ints, find, numbered, offsets_of, ranges

Floats = npt.NDArray[np.float64]

# senders whose loads differ by at most this share of the mean count as even
TOLERANCE = 0.02
MAX_PASSES = 30


@dataclass(frozen=True, eq=False)
class Demands:
    """Each row: a rank needs a bundle of pieces from a set. Ranks are positions in the sorted ranks, ascending."""

    rank: Ints
    set: Ints
    bundle: Ints  # bundle b needs the pieces (rows of piece_bytes) bundle_start[b]:bundle_start[b + 1]


@dataclass(frozen=True, eq=False)
class Shares:
    """Each row: pieces low:high (rows of piece_bytes) of a demand's bundle come from a holder."""

    demand: Ints
    low: Ints
    high: Ints
    holder: Ints


@dataclass(frozen=True, eq=False)
class _Turns:
    """Groups of demands with the same candidates; turn t has candidates holders[start[t] : start[t] + count[t]]."""

    holders: Ints
    start: Ints  # [turns]
    count: Ints  # [turns]
    turn: Ints  # [demands] -1 for a local copy
    position: Ints  # [demands] index of the chosen candidate


def choose_sources(
    demands: Demands,
    set_of: Ints,
    holder_of: Ints,
    nodes: Ints,
    bundle_start: Ints,
    piece_bytes: Ints,
) -> Shares:
    """Choose the holders that serve each demand.

    Args:
        demands: the demands.
        set_of: [holdings] set of each (set, rank) pair, in any order.
        holder_of: [holdings] rank of each pair.
        nodes: [ranks] number of each rank's node, -1 if unknown.
        bundle_start: [bundles + 1] into `piece_bytes`.
        piece_bytes: bytes of each piece.
    """
    turns = _take_turns(demands, set_of, holder_of, nodes)
    low, high = bundle_start[demands.bundle], bundle_start[demands.bundle + 1]
    local = turns.turn < 0
    at = turns.start[turns.turn] + turns.position if len(turns.start) else turns.position
    holder = np.where(local, demands.rank, turns.holders[at] if len(turns.holders) else demands.rank)
    shares = Shares(np.arange(len(holder)), low, high, holder)
    total = np.concatenate([np.zeros(1, np.int64), np.cumsum(piece_bytes)])
    load = np.zeros(len(nodes), np.int64)
    sent = total[high] - total[low]
    np.add.at(load, holder[~local], sent[~local])
    if not _uneven(turns, load):
        return shares
    return _even_out(shares, turns, sent, load, total)


def _take_turns(demands: Demands, set_of: Ints, holder_of: Ints, nodes: Ints) -> _Turns:
    ranks, node_count = len(nodes), int(nodes.max(initial=-1)) + 1
    order = np.lexsort((holder_of, nodes[holder_of], set_of))
    set_of, holders = set_of[order], holder_of[order]
    local = find(np.sort(set_of * ranks + holders), demands.set * ranks + demands.rank) >= 0
    places = set_of * (node_count + 1) + nodes[holders] + 1
    near = demands.set * (node_count + 1) + nodes[demands.rank] + 1
    near_start = np.searchsorted(places, near, side="left")
    near_count = np.searchsorted(places, near, side="right") - near_start
    known = (nodes[demands.rank] >= 0) & (near_count > 0)
    set_start = np.searchsorted(set_of, demands.set, side="left")
    set_count = np.searchsorted(set_of, demands.set, side="right") - set_start
    start, count = np.where(known, near_start, set_start), np.where(known, near_count, set_count)
    remote = np.flatnonzero(~local)
    first, number = numbered(start[remote] * (len(holders) + 1) + count[remote])
    turn = np.full(len(local), -1, np.int64)
    turn[remote] = number
    # a demand's position within its turn, in the order of ranks, picks the candidate
    by_turn = np.argsort(number, kind="stable")
    begin = offsets_of(number[by_turn], len(first))
    nth = np.empty(len(remote), np.int64)
    nth[by_turn] = np.arange(len(remote)) - begin[number[by_turn]]
    position = np.zeros(len(local), np.int64)
    position[remote] = nth % count[remote]
    return _Turns(holders, start[remote][first], count[remote][first], turn, position)


def _uneven(turns: _Turns, load: Ints) -> bool:
    """Return whether the loads of any turn's candidates differ by more than TOLERANCE."""
    if not len(turns.start):
        return False
    _, at = ranges(turns.start, turns.count)
    begin = np.cumsum(turns.count) - turns.count
    loads = load[turns.holders[at]]
    spread = np.maximum.reduceat(loads, begin) - np.minimum.reduceat(loads, begin)
    return bool((spread > TOLERANCE * _mean(turns, load)).any())


def _mean(turns: _Turns, load: Ints) -> float:
    """Return the mean load of all candidates in bytes."""
    _, at = ranges(turns.start, turns.count)
    return float(load.sum()) / max(1, len(np.unique(turns.holders[at])))


def _even_out(shares: Shares, turns: _Turns, sent: Ints, load: Ints, total: Ints) -> Shares:
    """Move pieces between the candidates of each turn until senders are even.

    First compute target loads in bytes: repeatedly redistribute each turn over its candidates up to one level, on top
    of their load from other turns. This converges to the most even distribution. Then move pieces to meet the targets.
    """
    candidates = [turns.holders[s : s + c] for s, c in zip(turns.start.tolist(), turns.count.tolist(), strict=True)]
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
    rows: list[tuple[int, int, int, int]] = []
    for number, who in enumerate(candidates):
        mine = by_turn[begin[number] : begin[number + 1]]
        if np.abs(target[number] - current[number]).max() <= enough:
            rows += zip(
                mine.tolist(), shares.low[mine].tolist(), shares.high[mine].tolist(), shares.holder[mine].tolist(),
                strict=True,
            )  # fmt: skip
        else:
            rows += _moved(shares, mine, turns.position[mine], who, target[number], total)
    local = np.flatnonzero(turns.turn < 0)
    columns = np.array(rows, np.int64).reshape(-1, 4).T
    return Shares(
        demand=np.concatenate([columns[0], local]),
        low=np.concatenate([columns[1], shares.low[local]]),
        high=np.concatenate([columns[2], shares.high[local]]),
        holder=np.concatenate([columns[3], shares.holder[local]]),
    )


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


def _moved(
    shares: Shares,
    mine: Ints,
    position: Ints,
    who: Ints,
    target: Floats,
    total: Ints,
) -> list[tuple[int, int, int, int]]:
    """Return a turn's shares after candidates above their target have given pieces to those below it.

    Each giver keeps its first demands. The pieces given away are handed on in one sequence, so that destinations get
    few additional senders.
    """
    kept: list[tuple[int, int, int, int]] = []
    given: list[tuple[int, int, int]] = []
    room = target.copy()
    for demand, place in sorted(zip(mine.tolist(), position.tolist(), strict=True)):
        low, high = int(shares.low[demand]), int(shares.high[demand])
        cut = low + _fitting(total, low, high, room[place])
        room[place] -= total[cut] - total[low]
        if cut > low:
            kept.append((demand, low, cut, int(who[place])))
        if cut < high:
            given.append((demand, cut, high))
    takers = np.argsort(-room, kind="stable").tolist()
    for demand, start, end in given:
        low = start
        while low < end:
            place = takers[0]
            last = len(takers) == 1
            cut = end if last else low + _fitting(total, low, end, room[place])
            room[place] -= total[cut] - total[low]
            if cut > low:
                kept.append((demand, low, cut, int(who[place])))
            if cut < end:
                takers.pop(0)
            low = cut
    return kept


def _fitting(total: Ints, low: int, high: int, room: float) -> int:
    """Return how many of the pieces low:high fit into `room` bytes; the last counts if at least half of it fits."""
    middles = (total[low:high] + total[low + 1 : high + 1]) / 2 - total[low]
    return int(np.searchsorted(middles, room, side="right"))


def select_src_metadata_balanced(
    src_meta_list: Sequence[ParameterMetadata], dst_metadata: ParameterMetadata, dst_rank: int
) -> ParameterMetadata:
    """Choose the source description that `dst_rank` plans against.

    The rank's own description comes first. Otherwise, if both sides split experts over equally many ranks, only sources
    at the destination's position are candidates. Destinations take the candidates' data-parallel groups in turn, and
    within a group its members in turn.

    Raises:
        PlanError: the list is empty.
    """
    if not src_meta_list:
        raise PlanError(f"{canonical_name(dst_metadata)}: no source has it, and rank {dst_rank} wants it")
    for meta in src_meta_list:
        if meta.owner_rank == dst_rank:
            return meta
    candidates = _at_same_expert_position(src_meta_list, dst_metadata, dst_rank) or list(src_meta_list)
    groups: dict[tuple[int, ...], list[ParameterMetadata]] = {}
    for meta in sorted(candidates, key=lambda m: -1 if m.owner_rank is None else m.owner_rank):
        groups.setdefault(tuple(meta.data_parallel_group_ranks or ()), []).append(meta)
    members = groups[sorted(groups)[dst_rank % len(groups)]]
    return members[dst_rank // len(groups) % len(members)]


def _at_same_expert_position(
    src_meta_list: Sequence[ParameterMetadata], dst_metadata: ParameterMetadata, dst_rank: int
) -> list[ParameterMetadata]:
    """Return the sources at the destination's expert-parallel position; [] if the groups' sizes differ."""
    group = dst_metadata.expert_parallel_group_ranks
    if not group or dst_rank not in group:
        return []
    found = []
    for meta in src_meta_list:
        theirs = meta.expert_parallel_group_ranks
        if not theirs or len(theirs) != len(group):
            return []
        if meta.owner_rank in theirs and theirs.index(meta.owner_rank) == group.index(dst_rank):
            found.append(meta)
    return found
