"""One rank's view of a plan: the slices that it sends and receives, as TransferOps made on access.

Some rows are boxes that no tuple of slices can express (the two halves of a gated fc1 in one row). Such a row becomes
several ops; the first has the row's task id, the others have ids derived from it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from refitd.describe.layout import row_major
from refitd.plan.columns import Ints, mixed
from refitd.plan.layouts import Layouts, Side
from refitd.plan.shared import SharedPlan
from refitd.plan.table import PLACE_BITS, FillTable


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
        fills: constants that this rank writes to its padding; None if it has none to write.
    """

    send_ops: Sequence[TransferOp]
    recv_ops: Sequence[TransferOp]
    transform: Any = None
    fills: FillTable | None = None

    def __str__(self) -> str:
        return f"ReshardPlan(sends={len(self.send_ops)}, receives={len(self.recv_ops)})"


Slices = tuple[slice, ...]


def reshard_plans(plan: SharedPlan, layouts: Layouts) -> dict[int, ReshardPlan]:
    """Return every rank's view of the plan, idle ranks included."""
    slicer = _Slicer(plan, layouts)
    by_src = np.argsort(plan.job_src, kind="stable")
    sends = np.searchsorted(plan.job_src[by_src], np.append(layouts.ranks, layouts.ranks[-1:] + 1))
    receives = np.searchsorted(plan.job_dst, np.append(layouts.ranks, layouts.ranks[-1:] + 1))
    jobs = np.arange(len(plan.job_dst))
    fills = plan.fills.expand(plan.locals)
    filled = np.searchsorted(fills.rank, np.append(layouts.ranks, layouts.ranks[-1:] + 1))
    return {
        rank: ReshardPlan(
            send_ops=RankOps(slicer, by_src[sends[i] : sends[i + 1]], is_send=True),
            recv_ops=RankOps(slicer, jobs[receives[i] : receives[i + 1]], is_send=False),
            fills=fills.select(np.arange(filled[i], filled[i + 1])) if filled[i] < filled[i + 1] else None,
        )
        for i, rank in enumerate(layouts.ranks.tolist())
    }


class RankOps(Sequence[TransferOp]):
    """The sends or the receives of one rank, as a sequence of ops that is made at the first access."""

    def __init__(self, slicer: _Slicer, jobs: Ints, *, is_send: bool) -> None:
        self._slicer = slicer
        self._jobs = jobs
        self._is_send = is_send

    @functools.cached_property
    def _ops(self) -> list[TransferOp]:
        return [op for job in self._jobs.tolist() for op in self._slicer.ops(job, is_send=self._is_send)]

    def __len__(self) -> int:
        return len(self._ops)

    def __iter__(self) -> Iterator[TransferOp]:
        return iter(self._ops)

    @overload
    def __getitem__(self, index: int) -> TransferOp: ...
    @overload
    def __getitem__(self, index: slice) -> list[TransferOp]: ...
    def __getitem__(self, index: int | slice) -> TransferOp | list[TransferOp]:
        return self._ops[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RankOps({self._ops!r})"


@dataclass(frozen=True, slots=True)
class RowBox:
    """The box of one row, as Python numbers."""

    size: tuple[int, ...]
    src_offset: int
    src_stride: tuple[int, ...]
    dst_offset: int
    dst_stride: tuple[int, ...]

    def parts(self) -> Iterator[RowBox]:
        """Yield the sub-box at each index of the outermost dimension."""
        count, src, dst = self.size[0], self.src_stride[0], self.dst_stride[0]
        for i in range(count):
            yield RowBox(
                self.size[1:],
                self.src_offset + i * src,
                self.src_stride[1:],
                self.dst_offset + i * dst,
                self.dst_stride[1:],
            )


class _Slicer:
    """Turns rows into slices, once for all ranks that share a row."""

    def __init__(self, plan: SharedPlan, layouts: Layouts) -> None:
        self._plan = plan
        self._layouts = layouts
        self._pieces: dict[int, list[tuple[Slices, Slices]]] = {}
        self._src_shapes = _local_shapes(layouts, layouts.source)
        self._dst_shapes = _local_shapes(layouts, layouts.destination)

    def ops(self, job: int, *, is_send: bool) -> Iterator[TransferOp]:
        """Yield the ops of one job for its sender or its receiver."""
        plan, layouts = self._plan, self._layouts
        src, dst = int(plan.job_src[job]), int(plan.job_dst[job])
        kind = int(plan.job_rows[job])
        classes = (
            int(layouts.source.rank_class[np.searchsorted(layouts.ranks, src)]),
            int(layouts.destination.rank_class[np.searchsorted(layouts.ranks, dst)]),
        )
        for row in range(int(plan.row_start[kind]), int(plan.row_start[kind + 1])):
            local = plan.rows.src_local[row] if is_send else plan.rows.dst_local[row]
            name = plan.locals[int(local)]
            for number, (src_slices, dst_slices) in enumerate(self._sliced(row, *classes)):
                yield TransferOp(
                    param_name=name,
                    peer_rank=dst if is_send else src,
                    is_send=is_send,
                    my_slice=src_slices if is_send else dst_slices,
                    peer_slice=dst_slices if is_send else src_slices,
                    task_id=op_task_id(dst, int(plan.places[row]), number),
                )

    def _sliced(self, row: int, src_class: int, dst_class: int) -> list[tuple[Slices, Slices]]:
        if row not in self._pieces:
            rows = self._plan.rows
            src_shape = self._src_shapes[src_class, int(rows.src_local[row])]
            dst_shape = self._dst_shapes[dst_class, int(rows.dst_local[row])]
            whole = RowBox(
                tuple(rows.size[row].tolist()),
                int(rows.src_offset[row]),
                tuple(rows.src_stride[row].tolist()),
                int(rows.dst_offset[row]),
                tuple(rows.dst_stride[row].tolist()),
            )
            self._pieces[row] = list(row_pieces(whole, src_shape, dst_shape))
        return self._pieces[row]


def row_pieces(row: RowBox, src_shape: Sequence[int], dst_shape: Sequence[int]) -> Iterator[tuple[Slices, Slices]]:
    """Yield (source slices, destination slices) that together make up the row, in the same order on both ends."""
    src = slices_of(src_shape, row.src_offset, row.size, row.src_stride)
    dst = slices_of(dst_shape, row.dst_offset, row.size, row.dst_stride)
    if src is not None and dst is not None:
        yield src, dst
        return
    for part in row.parts():
        yield from row_pieces(part, src_shape, dst_shape)


def slices_of(shape: Sequence[int], offset: int, size: Sequence[int], stride: Sequence[int]) -> Slices | None:
    """Return the slices of a row-major tensor that select this box in this order; None if no slices do.

    shape [4, 6], offset 13, size (2, 3), stride (6, 1)  ->  [2:4, 1:4]
    """
    runs: list[tuple[int, int]] = []
    for count, step in zip(size, stride, strict=True):
        if count > 1 and runs and runs[-1][1] == count * step:
            runs[-1] = (runs[-1][0] * count, step)
        elif count > 1:
            runs.append((count, step))
    steps = row_major(shape)
    begin = [offset // step % extent for step, extent in zip(steps, shape, strict=True)]
    extents = [1] * len(shape)
    dim = len(shape) - 1
    for run, step in reversed(runs):
        while dim >= 0 and (shape[dim] == 1 or steps[dim] < step):
            dim -= 1
        if dim < 0 or steps[dim] != step:
            return None
        left = run
        while left > 1:
            if dim < 0:
                return None
            if left <= shape[dim] - begin[dim]:
                extents[dim], left = left, 1
            elif begin[dim] == 0 and left % shape[dim] == 0:
                extents[dim], left = shape[dim], left // shape[dim]
            else:
                return None
            dim -= 1
    return tuple(slice(low, low + extent) for low, extent in zip(begin, extents, strict=True))


def _local_shapes(layouts: Layouts, side: Side) -> dict[tuple[int, int], tuple[int, ...]]:
    geometries = layouts.geometries
    shapes = geometries.local_shape[side.entry_geometry].tolist()
    return {
        key: geometries.shapes[shape]
        for key, shape in zip(
            zip(side.entry_class.tolist(), side.entry_local.tolist(), strict=True), shapes, strict=True
        )
    }


def op_task_id(dst_rank: int, place: int, number: int) -> int:
    """Return the task id of piece `number` of a row: the row's own for piece 0, a derived one for the others."""
    if number:
        place = int(mixed(np.array([place * 2**20 + number], np.int64))[0]) & (2**PLACE_BITS - 1)
    return dst_rank << PLACE_BITS | place
