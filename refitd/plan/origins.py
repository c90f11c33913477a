"""Choose which of several holders sends which pieces where their cables differ in speed.

Each piece has one origin, whoever needs it: then it leaves the sources' nodes once, and nodes that need it pass it on
(relays.py). Those who share a bundle share it evenly, because what one rank receives from several comes message by
message from each in turn (copy_services/windows.py), at the pace of the slowest. Slow holders share if that helps:

    n0 sends 4 GB/s, n1 3 GB/s, n2 1 GB/s, all hold 6 GB      n0 and n1 give 3 GB each, in 1 s
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from refitd.plan.columns import Ints, numbered

Floats = npt.NDArray[np.float64]

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
    """Return the holders that share an amount evenly so that the last of them ends first; rather few than many."""
    best, chosen = np.inf, who[:1]
    for count in range(1, min(MOST_ORIGINS, len(who)) + 1):
        ends = (load + amount / count) / speed
        order = np.lexsort((who, ends))[:count]
        if ends[order[-1]] < best:
            best, chosen = float(ends[order[-1]]), np.sort(who[order])
    return chosen
