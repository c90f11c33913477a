"""A plan from one rank's view: the slices that it sends and receives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refitd.plan.fills import FillTable


@dataclass(frozen=True, slots=True)
class TransferOp:
    """One piece of one tensor, sent or received.

    Attributes:
        param_name: the tensor's name in this rank's own module.
        peer_rank: the rank at the other end; this rank itself for a local copy.
        is_send: whether this rank sends the piece.
        my_slice: the piece of this rank's local tensor, one slice per dimension.
        peer_slice: the piece of the peer's local tensor; the same number of elements in the same order.
        task_id: equal on both ends of the transfer, unique in the plan.
    """

    param_name: str
    peer_rank: int
    is_send: bool
    my_slice: tuple[slice, ...]
    peer_slice: tuple[slice, ...]
    task_id: int | None = None


@dataclass(frozen=True, slots=True)
class ShardingDescriptor:
    """How one dimension of one parameter is split on the two sides.

    Attributes:
        name: the kind of parallelism, "tp".
        dim: the dimension.
        src_stride: the number of interleaved parts per source rank along it.
        dst_stride: the same for destination ranks.
        src_dim_ranks: source ranks in shard order.
        dst_dim_ranks: destination ranks in shard order.
    """

    name: str
    dim: int
    src_stride: int
    dst_stride: int
    src_dim_ranks: list[int]
    dst_dim_ranks: list[int]


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """One rank's part of a plan: its sends and its receives.

    Attributes:
        send_ops: the pieces that this rank sends, in plan order.
        recv_ops: the pieces that this rank receives, in plan order.
        transform: the ReshardTransform to apply on the way, if any.
        fills: what this rank writes where no canonical element belongs; None if there is nothing to fill.
    """

    send_ops: Sequence[TransferOp]
    recv_ops: Sequence[TransferOp]
    transform: Any = None
    fills: FillTable | None = None

    def __str__(self) -> str:
        return f"ReshardPlan(sends={len(self.send_ops)}, receives={len(self.recv_ops)})"
