"""Send what several ranks of a node need to that node once: the first of them receives it, the others copy it there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from refitd.plan.columns import hashed, numbered
from refitd.plan.table import CopyTable


def split(table: CopyTable, node_of: Mapping[int, str]) -> tuple[CopyTable, CopyTable]:
    """Return (rows that cross between nodes, rows that copy onward what has crossed).

    Rows with one source box, and destinations of one node that want it converted alike, cross once, to the first of
    these destinations. Each of the others becomes a copy from there, which runs after everything has arrived.

    Args:
        table: rows whose source and destination are on different nodes.
        node_of: rank -> node.
    """
    if not len(table):
        return table, table
    nodes = {name: number for number, name in enumerate(sorted(set(node_of.values())))}
    at = np.array([nodes.get(node_of.get(rank, ""), -1) for rank in range(int(table.dst_rank.max()) + 1)], np.int64)
    stride = np.where(table.size > 1, table.src_stride, 0)
    said = (table.src_rank, table.src_local, table.src_offset, table.cast, table.element_size)
    keys = np.column_stack([at[table.dst_rank], *said, table.size, stride]).astype(np.int64)
    # one number a row: sorting whole rows takes seconds for a million of them
    first, group = numbered(hashed([keys]))
    giver = first[group]
    copied = (giver != np.arange(len(table))) & (keys == keys[giver]).all(axis=1)
    onward, givers = table.select(copied), table.select(giver[copied])
    return table.select(~copied), replace(
        onward,
        src_rank=givers.dst_rank,
        src_local=givers.dst_local,
        src_offset=givers.dst_offset,
        src_stride=givers.dst_stride,
        cast=np.zeros(len(onward), np.int32),
    )
