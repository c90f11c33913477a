"""Choose which of several holders sends which pieces where their cables differ in speed.

Each piece has one origin, whoever needs it: then it leaves the sources' nodes once, and nodes that need it pass it on
(relays.py). The holders share the pieces of a bundle so that all of them send for equally long:

    n0 sends 4 GB/s, n1 1 GB/s, both hold 5 GB      n0 gives the first 4 GB to everybody, n1 the last
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
        who = who[np.lexsort((who, -speed[who], load[who] / speed[who]))][:MOST_ORIGINS]
        shares = np.cumsum(_poured(load[who], speed[who], float(nbytes[number])))
        cut = low + np.searchsorted(middles[low:high], total[low] + shares[:-1], side="right")
        cut = np.concatenate([[low], cut, [high]])
        load[who] += total[cut[1:]] - total[cut[:-1]]
        for holder, start, end in zip(who.tolist(), cut[:-1].tolist(), cut[1:].tolist(), strict=True):
            if end > start:
                same = np.ones_like(demands)
                found.append(np.stack([demands, start * same, end * same, holder * same]))
    demand, lows, highs, holders = np.concatenate(found, axis=1)
    return demand, lows, highs, holders


def _poured(load: Floats, speed: Floats, amount: float) -> Floats:
    """Return what each holder takes of an amount so that all who take any end together. Idle ones come first."""
    ends = load / speed  # ascending
    # for the first k to end when the next one does, they take this much
    needed = ends * np.cumsum(speed) - np.cumsum(load)
    k = int(np.searchsorted(needed, amount, side="right"))
    end = (amount + load[:k].sum()) / speed[:k].sum()
    taken: Floats = np.maximum(end * speed - load, 0.0)
    return taken
