"""How bytes travel: the paths within a node, and the transfers between a worker and its peer on each other node.

A path depends on the memories at its ends and the node's abilities. `copy_services/cuda.py` copies on these paths.
Reports show their names. Paths between nodes have the names of services.

Both ends of a transfer compute the same lists from the plan's crossing rows, because `cut` and `lanes_of` depend only
on the sizes and the order of the rows. Rows between GPUs have a separate lane, where each GPU has a position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from refitd.addressing.copies import WorkList, cut, destination_addresses, equal_shares, source_addresses
from refitd.addressing.places import Int64, Places, with_pitches
from refitd.plan.table import CrossingTable


@dataclass(frozen=True, eq=False)
class NodeTransfers:
    """Rows that cross between nodes. Large rows are cut, because several workers may then share one tensor.

    Attributes:
        table: the rows.
        part: number of the cut within its task, shape [n].
        origin: row of the plan's table before the cut, shape [n].
        lane: the lane that transfers the row, shape [n].
        src_node, dst_node: positions of the two nodes in the epoch, shape [n].
        src_at, dst_at: positions of the two workers in the lane: of their nodes, or of their GPUs, shape [n].
    """

    table: CrossingTable
    part: Int64
    origin: Int64
    lane: Int64
    src_node: Int64
    dst_node: Int64
    src_at: Int64
    dst_at: Int64


def node_transfers(
    table: CrossingTable, node_of: Mapping[int, int], lanes: int, gpu_of: Mapping[int, int] | None = None
) -> NodeTransfers:
    """Cut the rows of a plan that cross nodes and assign them to lanes.

    Args:
        table: rows whose source and destination are on different nodes, in the plan's order.
        node_of: rank -> position of its node.
        lanes: number of lanes in the epoch, without the one of the GPUs, which is lane number `lanes`.
        gpu_of: rank -> position of its GPU in the epoch; ranks in main memory have none.
    """
    table, part, origin = cut(table)
    ends = table.src_rank.tolist(), table.dst_rank.tolist()
    src, dst = (np.array([node_of[rank] for rank in ranks], dtype=np.int64) for ranks in ends)
    if not gpu_of:
        lane = lanes_of(table.row_bytes, src, dst, lanes, table.path.astype(np.int64))
        return NodeTransfers(table, part, origin, lane, src, dst, src, dst)
    src_gpu, dst_gpu = (np.array([gpu_of.get(rank, -1) for rank in ranks], dtype=np.int64) for ranks in ends)
    on_gpus = (src_gpu >= 0) & (dst_gpu >= 0)
    lane = np.full(len(src), lanes, dtype=np.int64)
    rest = np.flatnonzero(~on_gpus)
    lane[rest] = lanes_of(table.row_bytes[rest], src[rest], dst[rest], lanes, table.path[rest].astype(np.int64))
    src_at, dst_at = np.where(on_gpus, src_gpu, src), np.where(on_gpus, dst_gpu, dst)
    return NodeTransfers(table, part, origin, lane, src, dst, src_at, dst_at)


def lanes_of(nbytes: Int64, src_node: Int64, dst_node: Int64, lanes: int, path: Int64) -> Int64:
    """Return the lane of each row: for each pair of nodes and each path, contiguous ranges of about equal bytes.

    A row therefore has the same lane at every hop of its path: the worker that receives it also forwards it.
    """
    lane = np.zeros(len(nbytes), dtype=np.int64)
    pairs = (path * (src_node.max(initial=0) + 1) + src_node) * (dst_node.max(initial=0) + 1) + dst_node
    for pair in np.unique(pairs).tolist():
        rows = np.flatnonzero(pairs == pair)
        lane[rows] = equal_shares(nbytes[rows], lanes)
    return lane


def partners(rows: NodeTransfers, position: int, lane: int) -> tuple[int, ...]:
    """Return the positions of the workers of a lane that one of them exchanges with, and its own; () if it has no rows.

    Both ends find each other, because each has all rows of the pair.
    """
    mine = rows.lane == lane
    out, into = mine & (rows.src_at == position), mine & (rows.dst_at == position)
    found = {*rows.dst_at[out].tolist(), *rows.src_at[into].tolist()}
    return tuple(sorted({position} | found)) if found else ()


@dataclass(frozen=True, eq=False)
class TransferList(WorkList):
    """Addressed sends and receives, one per row. Offsets and strides are in bytes.

    `element_size` is the size in transit, which is the destination's.
    """

    is_send: Int64  # [n] 1 to send, 0 to receive
    peer: Int64  # [n] position of the other worker among this worker's partners
    task_id: Int64  # [n]
    part: Int64  # [n]
    element_size: Int64  # [n]
    cast: Int64  # conversion by the sender (refitd.dtypes), 0 for none
    path: Int64  # [n] the path that the row follows over several nodes (refitd.plan.relays), 0 for none
    hop: Int64  # [n] number of relays before this hop on the path
    arena: Int64  # [n] arena id
    offset: Int64  # [n]
    stride: Int64  # [n, D]
    origin: Int64  # row of the plan's table before the cut


def transfers_of(
    rows: NodeTransfers,
    position: int,
    lane: int,
    sources: Mapping[int, Places],
    destinations: Mapping[int, Places],
    met: Sequence[int] = (),
) -> TransferList:
    """Return the sends and receives of one worker.

    Args:
        rows: rows with at least one end on this node.
        position: the worker's position in its lane: of this node, or of a GPU.
        lane: the worker's lane.
        sources: rank -> places of this node's source tensors.
        destinations: rank -> places of this node's tensors to write.
        met: the positions of the workers that it knows, ascending; (): its `partners`.

    Raises:
        KeyError: a tensor in the plan has no place.
        ValueError: a box cannot be addressed in its tensor.
    """
    mine = rows.lane == lane
    out = np.flatnonzero(mine & (rows.src_at == position))
    into = np.flatnonzero(mine & (rows.dst_at == position))
    every = with_pitches(rows.table)
    sent = every.select(out)
    # a relay reads forwarded rows from the memory that received them
    src = source_addresses(sent, {**destinations, **sources})
    dst = destination_addresses(every.select(into), destinations)
    both = np.concatenate([out, into])
    table = every.select(both)
    return TransferList(
        is_send=np.concatenate([np.ones(len(out), np.int64), np.zeros(len(into), np.int64)]),
        peer=np.searchsorted(
            np.array(met or partners(rows, position, lane), np.int64),
            np.concatenate([rows.dst_at[out], rows.src_at[into]]),
        ),
        task_id=table.task_id.astype(np.int64),
        part=rows.part[both],
        size=table.size.astype(np.int64),
        element_size=table.element_size.astype(np.int64),
        cast=np.concatenate([sent.cast.astype(np.int64), np.zeros(len(into), np.int64)]),
        path=table.path.astype(np.int64),
        hop=table.hop.astype(np.int64),
        arena=np.concatenate([src.arena, dst.arena]),
        offset=np.concatenate([src.offset, dst.offset]),
        stride=np.concatenate([src.stride, dst.stride]),
        origin=rows.origin[both],
    )


# --- paths within a node ----------------------------------------------------------------------------------

MAIN_MEMORY = ""  # the device of an arena in main memory; other arenas have a GPU's name


class Path(StrEnum):
    """A way from one memory to another of the node; the value is its name in reports."""

    SHARED = "shared memory"
    KERNEL = "same GPU, one kernel"
    TENSORS = "tensor operations"
    PEER = "peer GPU, one kernel"
    PINNED = "pinned"
    WINDOWS = "pinned windows"


@dataclass(frozen=True)
class Abilities:
    """The abilities of a node's GPUs and driver.

    Attributes:
        has_kernels: Triton is installed, which compiles the copy kernel.
        can_pin: the driver pins arenas in main memory (cuMemHostRegister).
        peers: pairs of GPU names; the first GPU may access the memory of the second.
    """

    has_kernels: bool = True
    can_pin: bool = True
    peers: frozenset[tuple[str, str]] = frozenset()


def path(source: str, destination: str, abilities: Abilities) -> Path:
    """Return the path between the memories of two devices: MAIN_MEMORY or a GPU's name.

    The GPU that is written copies; if main memory is written, the GPU that is read. Converted elements always take
    the path of tensor operations, between two memories through pageable memory.
    """
    if MAIN_MEMORY in (source, destination):
        if source == destination:
            return Path.SHARED
        return Path.PINNED if abilities.can_pin else Path.WINDOWS
    if source == destination:
        return Path.KERNEL if abilities.has_kernels else Path.TENSORS
    is_peer = abilities.has_kernels and (destination, source) in abilities.peers
    return Path.PEER if is_peer else Path.WINDOWS
