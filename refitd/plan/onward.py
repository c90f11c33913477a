"""Send what several ranks of a node need to that node once: the first of them receives it, the others copy it there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from refitd.plan.coalesce import Rows
from refitd.plan.columns import Ints, distinct, hashed, numbered
from refitd.plan.table import CopyTable


def source_boxes(rows: Rows | CopyTable) -> Ints:
    """Number the distinct source boxes of any rank, shape [n]: elements in one order, wanted as one dtype."""
    stride = np.where(rows.size > 1, rows.src_stride, 0)
    keys = np.column_stack([rows.src_local, rows.src_offset, rows.cast, rows.element_size, rows.size, stride])
    first, number = numbered(hashed([keys]))  # sorting whole rows takes seconds for a million of them
    if (keys != keys[first[number]]).any():  # two boxes of one hash: as if no box were wanted twice
        return np.arange(len(keys))
    return number


def split(table: CopyTable, box: Ints, node_of: Mapping[int, str]) -> tuple[CopyTable, Ints, CopyTable]:
    """Return (rows that cross between nodes, which rows of `table` they are, rows that copy onward what has crossed).

    Rows with one source box, and destinations of one node that want it converted alike, cross once, to the first of
    these destinations. Each of the others becomes a copy from there, which runs after everything has arrived.

    Args:
        table: rows whose source and destination are on different nodes.
        box: each row's source box (`source_boxes`), shape [n].
        node_of: rank -> node.
    """
    if not len(table):
        return table, box, table
    nodes = {name: number for number, name in enumerate(sorted(set(node_of.values())))}
    at = np.zeros(1 + int(table.dst_rank.max()), np.int64)
    for rank in distinct(table.dst_rank).tolist():
        at[rank] = nodes[node_of[rank]]
    key = (table.src_rank.astype(np.int64) * (1 + int(box.max())) + box) * len(nodes) + at[table.dst_rank]
    order = np.argsort(key, kind="stable")
    opens = np.append(True, np.diff(key[order]) != 0)
    giver = np.empty(len(key), np.int64)
    giver[order] = order[opens][np.cumsum(opens) - 1]
    crosses = giver == np.arange(len(key))
    first, copied = np.flatnonzero(crosses), np.flatnonzero(~crosses)
    onward, givers = table.select(copied), table.select(giver[copied])
    return (
        table if not len(copied) else table.select(first),
        first,
        replace(
            onward,
            src_rank=givers.dst_rank,
            src_local=givers.dst_local,
            src_offset=givers.dst_offset,
            src_stride=givers.dst_stride,
            cast=np.zeros(len(onward), np.int32),
        ),
    )
