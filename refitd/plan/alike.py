"""Join rows of the same elements alike, wherever they go: then they are equal boxes at the source, and cross once.

x wants a, b side by side, y wants them far apart      x alone: (a, b)     y: (a), (b)     both here: (a), (b)
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from refitd.plan.coalesce import Rows, joined, together
from refitd.plan.columns import Bools, Hashes, Ints, hashed, mixed, numbered

# Rows that were joined unlike are joined again within what all had joined, so many times; then not at all.
ROUNDS = 3


def joined_alike(rows: Rows, bundle: Hashes, content: Hashes, several: Bools, rounds: int = ROUNDS) -> Rows:
    """Return the same copies in fewer rows, in order.

    Args:
        rows: the rows.
        bundle: [rows] only rows of one bundle are joined. A bundle is of one owner.
        content: [rows] equal for rows of the same elements from alike sources; such bundles are joined alike.
        several: [rows] whether other rows have the same elements: equal within a bundle.
        rounds: how often rows may be joined again.
    """
    found, part = joined(replace(rows, owner=numbered(bundle)[1]))
    found.owner[part] = rows.owner
    at = np.flatnonzero(several)
    _, whole = numbered(bundle[at])
    kind = _sums(mixed(content[at]), whole)[whole]  # of all that is in the bundle
    first, same = numbered(hashed([kind, content[at]]))
    box = _source_boxes(found)[part[at]]
    unlike = np.isin(kind, kind[box[first][same] != box])
    if not rounds or not unlike.any():
        return found.in_order()
    again = at[unlike]
    common = _sums(mixed(box), same)[same][unlike] if rounds > 1 else content[again]
    few = joined_alike(rows.select(again), hashed([bundle[again], common]), content[again], several[again], rounds - 1)
    is_done = np.ones(len(found), bool)
    is_done[part[again]] = False
    return together([found.select(is_done), few])


def _source_boxes(rows: Rows) -> Hashes:
    stride = np.where(rows.size > 1, rows.src_stride, 0)
    return hashed([rows.src_local, rows.src_offset, rows.size, stride])


def _sums(values: Hashes, number: Ints) -> Hashes:
    """Sum the values of each number, modulo 2**64."""
    found = np.zeros(1 + int(number.max(initial=-1)), np.uint64)
    np.add.at(found, number, values)
    return found
