"""Join rows into fewer strided copies: adjacent boxes become one box, equally spaced rows get one more dimension.

[0:4] from 0, [4:8] from 4                    ->  [0:8] from 0
gate rows 0:64 and up rows 256:320, both from
the same source tensor                        ->  2 x 64 rows, 256 apart here, with the source's own distance there

Rows that read equal source elements are joined in one way for every destination. Their source boxes are then equal, and
a byte that several destinations need crosses to their node once:

    x wants a and b side by side, y wants them far apart
    joined for x alone: (a, b)     for y alone: (a), (b)     for both: (a), (b)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from refitd.plan.columns import Bools, Columns, Hashes, Ints, hashed, mixed, numbered


@dataclass(frozen=True, eq=False)
class Rows(Columns):
    """Copies without ranks. Rows of different owners are never joined."""

    owner: Ints
    tensor: Ints
    src_local: Ints
    dst_local: Ints
    element_size: Ints  # of the destination
    cast: Ints  # number of the conversion, see refitd.dtypes
    origin: Ints  # [n, D] canonical coordinates of the first element
    src_offset: Ints
    src_stride: Ints  # [n, D]
    dst_offset: Ints
    dst_stride: Ints  # [n, D]

    def in_order(self) -> Rows:
        """Return the rows sorted by owner, tensor, destination tensor and place in it."""
        return self.select(self.order())

    def order(self) -> Ints:
        """Return the order of the rows that `in_order` gives them."""
        return np.lexsort((self.dst_offset, self.dst_local, self.tensor, self.owner))


def coalesced(rows: Rows) -> Rows:
    """Return the same copies in fewer rows, in order; boxes may gain one dimension."""
    return joined(rows)[0]


def joined(rows: Rows) -> tuple[Rows, Ints]:
    """Return the rows as `coalesced` does, and the number of the row that each has become a part of."""
    rows, became = _sorted(rows)
    # only rows of one owner with the same tensors can be joined; set aside the many rows that are alone
    alike = (np.diff(rows.owner) == 0) & (np.diff(rows.tensor) == 0) & (np.diff(rows.dst_local) == 0)
    if not alike.any():
        return rows, became
    several = np.concatenate([alike, [False]]) | np.concatenate([[False], alike])
    some, at = rows.select(several), np.arange(int(several.sum()))
    for dim in reversed(range(rows.size.shape[1])):
        some, into = _join_neighbours(some, dim)
        at = into[at]
    some, into = _join_spaced(some)
    at = into[at]
    alone = _with_dims(rows.select(~several), some.size.shape[1])
    part = np.empty(len(several), np.int64)
    part[several], part[~several] = at, len(some) + np.arange(len(alone))
    found, into = _sorted(Rows.concatenated([some, alone]))
    return found, into[part[became]]


def _sorted(rows: Rows) -> tuple[Rows, Ints]:
    """Return the rows in order, and the place of each."""
    order = rows.order()
    return rows.select(order), _places(order)


def _places(order: Ints, starts: Bools | None = None) -> Ints:
    """Return the place of each row in this order; of its run, if runs begin at some places."""
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order)) if starts is None else np.cumsum(starts) - 1
    return place


def together(parts: Sequence[Rows]) -> Rows:
    """Return the rows of all parts, in order; boxes have as many dimensions as those with most."""
    dims = max(part.size.shape[1] for part in parts)
    return Rows.concatenated([_with_dims(part, dims) for part in parts]).in_order()


def _with_dims(rows: Rows, dims: int) -> Rows:
    """Return the rows with boxes padded in front to `dims` dimensions."""
    lead = np.zeros((len(rows.owner), dims - rows.size.shape[1]), np.int64)
    return replace(
        rows,
        origin=np.concatenate([lead, rows.origin], axis=1),
        size=np.concatenate([lead + 1, rows.size], axis=1),
        src_stride=np.concatenate([lead, rows.src_stride], axis=1),
        dst_stride=np.concatenate([lead, rows.dst_stride], axis=1),
    )


def _join_neighbours(rows: Rows, dim: int) -> tuple[Rows, Ints]:
    """Join boxes that are adjacent along one dimension in the canonical tensor and in both local tensors.

    Returns the rows, and the number of the row that each was joined into; so does `_join_spaced`.
    """
    others = [d for d in range(rows.size.shape[1]) if d != dim]
    alike = hashed(
        [rows.owner, rows.tensor, rows.src_local, rows.dst_local, rows.src_stride, rows.dst_stride]
        + [a[:, d] for d in others for a in (rows.origin, rows.size)]
    )
    order = np.lexsort((rows.origin[:, dim], alike))
    rows, alike = rows.select(order), alike[order]
    step = rows.size[:-1, dim]
    joins = (
        (alike[1:] == alike[:-1])
        & (np.diff(rows.origin[:, dim]) == step)
        & (np.diff(rows.src_offset) == step * rows.src_stride[:-1, dim])
        & (np.diff(rows.dst_offset) == step * rows.dst_stride[:-1, dim])
    )
    if not joins.any():
        return rows, _places(order)
    starts = np.concatenate([[True], ~joins])
    first = np.flatnonzero(starts)
    size = rows.size[first]
    size[:, dim] = np.add.reduceat(rows.size[:, dim], first)
    return replace(rows.select(first), size=size), _places(order, starts)


def _join_spaced(rows: Rows) -> tuple[Rows, Ints]:
    """Turn runs of equal boxes, equally spaced in both local tensors, into one box with a new leading dimension."""
    alike = hashed(
        [rows.owner, rows.tensor, rows.src_local, rows.dst_local, rows.size, rows.src_stride, rows.dst_stride]
    )
    order = np.lexsort((rows.dst_offset, alike))
    rows, alike = rows.select(order), alike[order]
    if len(alike) < 2 or not (alike[1:] == alike[:-1]).any():
        return rows, _places(order)
    src_step = np.diff(rows.src_offset, prepend=0)
    dst_step = np.diff(rows.dst_offset, prepend=0)
    # a new run opens where the source offset falls, because strides must not be negative
    opens = np.concatenate([[True], (alike[1:] != alike[:-1]) | (src_step[1:] < 0)])
    turns = np.concatenate([[True], (np.diff(src_step) != 0) | (np.diff(dst_step) != 0)])
    turns |= opens
    turns[1:] |= opens[:-1]
    # a run starts where the step changes, unless the previous row has just started one: of consecutive changes,
    # every other one starts a run
    index = np.arange(len(turns))
    begins = opens | (turns & ~np.concatenate([[False], turns[:-1]]))
    starts = turns & ((index - np.maximum.accumulate(np.where(begins, index, 0))) % 2 == 0)
    first = np.flatnonzero(starts)
    if len(first) == len(starts):
        return rows, _places(order)
    count = np.diff(np.append(first, len(turns)))
    second = np.minimum(first + 1, len(turns) - 1)
    found = _with_dims(rows.select(first), rows.size.shape[1] + 1)
    found.size[:, 0] = count
    found.src_stride[:, 0] = np.where(count > 1, src_step[second], 0)
    found.dst_stride[:, 0] = np.where(count > 1, dst_step[second], 0)
    return found, _places(order, starts)


# Bundles of one content may be joined into different rows. They are joined again, only within rows that all of them
# have, this many times at most; then their rows stay apart.
ROUNDS = 3


def joined_alike(rows: Rows, bundle: Hashes, content: Hashes, several: Bools, rounds: int = ROUNDS) -> Rows:
    """Return the same copies in fewer rows, in order.

    Args:
        rows: the rows.
        bundle: [rows] only rows of one bundle are joined. A bundle is of one owner.
        content: [rows] equal for rows that read the same elements from sources of one class. Bundles with equal content
            are joined into equal rows.
        several: [rows] whether other rows read the same elements; equal within a bundle.
        rounds: how often rows may be joined again (ROUNDS).
    """
    found, part = joined(replace(rows, owner=numbered(bundle)[1]))
    found.owner[part] = rows.owner
    at = np.flatnonzero(several)
    _, whole = numbered(bundle[at])
    kind = _sums(mixed(content[at]), whole)[whole]  # the content of the whole bundle
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
