"""One worker's halves of the transfers between nodes: what it sends to, and receives from, the worker of each peer.

Both ends derive the same from the rows of the plan that cross between their nodes: `cut` and `lanes_of` look at
nothing but sizes, in the order of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from refitd.addressing.copies import SPLIT_BYTES, side
from refitd.addressing.places import PROCESS_MEMORY, Places
from refitd.plan.table import CopyTable

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Crossing:
    """Rows that cross between nodes, large ones cut so that several workers can share one tensor.

    Attributes:
        table: the rows.
        part: number of the cut within its task, shape [n].
        origin: row of the plan's table it was cut from, shape [n].
        lane: which worker of both nodes moves it, shape [n].
        src_node, dst_node: positions of the two nodes in the epoch, shape [n].
    """

    table: CopyTable
    part: Int64
    origin: Int64
    lane: Int64
    src_node: Int64
    dst_node: Int64


def crossing(table: CopyTable, node_of: Mapping[int, int], lanes: int) -> Crossing:
    """Cut the rows of a plan that cross nodes and deal them to lanes.

    Args:
        table: rows whose source and destination are on different nodes, in the plan's order.
        node_of: rank -> position of its node.
        lanes: workers of each node that take part.
    """
    table, part, origin = cut(table)
    src = np.array([node_of[rank] for rank in table.src_rank.tolist()], dtype=np.int64)
    dst = np.array([node_of[rank] for rank in table.dst_rank.tolist()], dtype=np.int64)
    return Crossing(table, part, origin, lanes_of(table.row_bytes, src, dst, lanes), src, dst)


def cut(table: CopyTable, limit: int = SPLIT_BYTES) -> tuple[CopyTable, Int64, Int64]:
    """Cut rows of more than `limit` bytes along their outermost dimension of more than one element.

    Returns:
        The rows, each one's number within its task, and the row it was cut from.
    """
    nbytes, size = table.row_bytes, table.size
    dim = np.argmax(size > 1, axis=1)
    rows = np.arange(len(table))
    length = size[rows, dim]
    step = np.where(nbytes > limit, np.maximum(1, length * limit // np.maximum(nbytes, 1)), length)
    pieces = -(-length // np.maximum(step, 1))
    origin = np.repeat(rows, pieces)
    part = np.arange(len(origin)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    if len(origin) == len(table):
        return table, part, origin
    chosen = table.select(origin)
    start = part * step[origin]
    at = np.arange(len(origin)), dim[origin]
    chosen.size[at] = np.minimum(step[origin], length[origin] - start)
    chosen.src_offset[:] += start * chosen.src_stride[at]
    chosen.dst_offset[:] += start * chosen.dst_stride[at]
    return chosen, part, origin


def lanes_of(nbytes: Int64, src_node: Int64, dst_node: Int64, lanes: int) -> Int64:
    """Return the lane of each row: for every pair of nodes, runs of about equal bytes in the order of the rows."""
    lane = np.zeros(len(nbytes), dtype=np.int64)
    pairs = src_node * (dst_node.max(initial=0) + 1) + dst_node
    for pair in np.unique(pairs).tolist():
        rows = np.flatnonzero(pairs == pair)
        done = np.cumsum(nbytes[rows])
        middle = done - nbytes[rows] / 2
        lane[rows] = np.minimum((middle * lanes / max(1, int(done[-1]))).astype(np.int64), lanes - 1)
    return lane


@dataclass(frozen=True, eq=False)
class Halves:
    """Halves of transfers with addresses, one row each; offsets and strides in bytes, sizes in elements. All int64.

    `element_size` is that on the way, which is the destination's.
    """

    is_send: Int64  # [n] 1 to send, 0 to receive
    peer: Int64  # [n] position of the other worker in the epoch
    task_id: Int64  # [n]
    part: Int64  # [n]
    size: Int64  # [n, D]
    element_size: Int64  # [n]
    cast: Int64  # [n] performed by the sender (refitd.describe.casts), 0 for none
    arena: Int64  # [n] arena id or PROCESS_MEMORY
    pid: Int64  # [n] for PROCESS_MEMORY
    offset: Int64  # [n]
    stride: Int64  # [n, D]
    origin: Int64  # [n] row of the table this half was cut from

    def __len__(self) -> int:
        return len(self.origin)

    def arenas(self) -> set[int]:
        """Return the ids of all arenas the halves touch."""
        return set(np.unique(self.arena).tolist()) - {PROCESS_MEMORY}

    def to_bytes(self) -> bytes:
        """Return the halves as one block: rows, dims, then the columns, little-endian int64."""
        parts = [np.array(self.size.shape, dtype="<i8").tobytes()]
        parts += [np.ascontiguousarray(getattr(self, f.name), dtype="<i8").tobytes() for f in fields(self)]
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> Halves:
        """Rebuild the halves; raises ValueError when the block has another length than its head says."""
        head = np.frombuffer(data[:16], dtype="<i8")
        rows, dims = (int(head[0]), int(head[1])) if len(head) == 2 else (-1, -1)
        widths = {f.name: dims if f.name in ("size", "stride") else 1 for f in fields(cls)}
        if rows < 0 or not 0 < dims <= 16 or len(data) != 16 + 8 * rows * sum(widths.values()):
            raise ValueError(f"block of {len(data)} bytes does not hold {rows} halves of {dims} dimensions")
        at, columns = 16, {}
        for name, width in widths.items():
            column = np.frombuffer(data, dtype="<i8", count=rows * width, offset=at)
            columns[name] = column.reshape(rows, dims) if name in ("size", "stride") else column
            at += column.nbytes
        return cls(**columns)


def halves_of(
    rows: Crossing,
    node: int,
    lane: int,
    sources: Mapping[int, Places],
    destinations: Mapping[int, Places],
) -> Halves:
    """Return what the worker `lane` of the node at position `node` sends and receives.

    Args:
        rows: of which either end is on this node.
        node: this node's position.
        lane: the worker.
        sources: rank -> places of this node's source tensors.
        destinations: likewise for the tensors to be written.

    Raises:
        KeyError: a tensor that the plan names has no place.
        ValueError: a box cannot be addressed in its tensor.
    """
    mine = rows.lane == lane
    out = np.flatnonzero(mine & (rows.src_node == node))
    into = np.flatnonzero(mine & (rows.dst_node == node))
    sent, received = rows.table.select(out), rows.table.select(into)
    src = side(sent, sent.src_element_size, sent.src_rank, sent.src_local, sent.src_offset, sent.src_stride, sources)
    dst = side(
        received,
        received.element_size,
        received.dst_rank,
        received.dst_local,
        received.dst_offset,
        received.dst_stride,
        destinations,
    )
    both = np.concatenate([out, into])
    table = rows.table.select(both)
    return Halves(
        is_send=np.concatenate([np.ones(len(out), np.int64), np.zeros(len(into), np.int64)]),
        peer=np.concatenate([rows.dst_node[out], rows.src_node[into]]),
        task_id=table.task_id.astype(np.int64),
        part=rows.part[both],
        size=table.size.astype(np.int64),
        element_size=table.element_size.astype(np.int64),
        cast=np.concatenate([sent.cast.astype(np.int64), np.zeros(len(into), np.int64)]),
        arena=np.concatenate([src.arena, dst.arena]),
        pid=np.concatenate([src.pid, dst.pid]),
        offset=np.concatenate([src.offset, dst.offset]),
        stride=np.concatenate([src.stride, dst.stride]),
        origin=rows.origin[both],
    )
