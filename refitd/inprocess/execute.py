"""Execute one rank's part of a plan: turn its rows into strided views of tensors for an exchange service."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from refitd.copy_services import ExchangeResult, ExchangeService
from refitd.copy_services.pieces import raw
from refitd.copy_services.waits import Deadline
from refitd.errors import RefusedError
from refitd.inprocess.rank_plan import RankPlan
from refitd.inprocess.request import RankTensors
from refitd.transforms import ReshardTransform, Slices

Tensors = Mapping[str, torch.Tensor]


def execute(
    plan: RankPlan,
    tensors: RankTensors,
    transform: ReshardTransform | None,
    service: ExchangeService,
    deadline: Deadline,
    *,
    verify: bool,
) -> ExchangeResult:
    """Perform the plan's transfers, through `transform` where it applies. Collective; returns when all ranks are done.

    Raises:
        RefusedError: a rank cannot do its part; every rank raises its reason before any transfer.
        RefitFailed: everything arrived, but a rank could not write it to its place (a transform failed).
        TransportError: bytes did not arrive; destinations are then undefined.
    """
    work, failure = _ExchangeWork(), None
    try:
        _prepare(plan, tensors, transform, work)
    except Exception as exc:  # any failure must be sent to the other ranks, which would wait otherwise
        work, failure = _ExchangeWork(), exc
    for out in work.sends:
        service.send(out.task_id, out.tensor, out.peer, part=out.part, dtype=out.dtype)
    for half in work.receives:
        service.receive(half.task_id, half.tensor, half.peer, part=half.part)
    refuse = f"rank {plan.rank}: {type(failure).__name__}: {failure}" if failure else ""
    try:
        return service.run(deadline.left().total_seconds(), verify=verify, refuse=refuse, finish=work.finish)
    except RefusedError as exc:
        raise exc from failure


@dataclass(frozen=True, slots=True)
class _Half:
    """One end of a transfer."""

    task_id: int
    tensor: torch.Tensor
    peer: int
    part: int = 0
    dtype: torch.dtype | None = None


@dataclass(slots=True)
class _ExchangeWork:
    """Everything to exchange, and the steps to run after it has arrived."""

    sends: list[_Half] = field(default_factory=list)
    receives: list[_Half] = field(default_factory=list)
    afterwards: list[Callable[[], object]] = field(default_factory=list)

    @torch.no_grad()
    def finish(self) -> None:
        for step in self.afterwards:
            step()


@torch.no_grad()
def _prepare(plan: RankPlan, tensors: RankTensors, transform: ReshardTransform | None, work: _ExchangeWork) -> None:
    _check_overlap(plan, tensors, transform)
    table = plan.table
    sources, destinations = _Rows(tensors.sources), _Rows(tensors.destinations)
    columns = zip(
        table.src_rank.tolist(),
        table.dst_rank.tolist(),
        table.src_local.tolist(),
        table.dst_local.tolist(),
        table.task_id.tolist(),
        table.size.tolist(),
        table.src_offset.tolist(),
        table.src_stride.tolist(),
        table.dst_offset.tolist(),
        table.dst_stride.tolist(),
        strict=True,
    )
    received: dict[str, list[int]] = {}
    prepared: _Prepared = {}
    for row, (src, dst, src_local, dst_local, task, size, src_at, src_step, dst_at, dst_step) in enumerate(columns):
        if src == plan.rank:
            name = table.locals[src_local]
            if transform is not None and transform.should_transform(name):
                tensor = sources.cast(name, tensors.casts)
                work.sends += _transformed_sends(plan, row, name, tensor, transform, prepared)
            else:
                view = sources.view(name, size, src_at, src_step)
                work.sends.append(_Half(task, view, dst, dtype=tensors.casts.get(name)))
        if dst == plan.rank:
            name = table.locals[dst_local]
            if transform is not None and transform.should_transform(name):
                received.setdefault(name, []).append(row)
            else:
                work.receives.append(_Half(task, destinations.view(name, size, dst_at, dst_step), src))
    if transform is not None:
        for name, rows in received.items():
            _receive_transformed(plan, rows, name, transform, work)
    work.afterwards += destinations.copies_back()


class _Rows:
    """Strided views of local tensors, addressed as if they were row-major; their strides do not matter."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        # non-contiguous tensors go through a contiguous copy, because as_strided cannot address them row-major
        self._copies: dict[str, torch.Tensor] = {}
        self._cast: dict[str, torch.Tensor] = {}

    def whole(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise RefusedError(f"{name}: the plan names it and the module has no such tensor; plan again")
        return self._tensors[name]

    def cast(self, name: str, casts: Mapping[str, torch.dtype]) -> torch.Tensor:
        """Return a tensor after its declared conversion."""
        if name not in casts:
            return self.whole(name)
        if name not in self._cast:
            self._cast[name] = self.whole(name).to(casts[name])
        return self._cast[name]

    def view(self, name: str, size: list[int], offset: int, stride: list[int]) -> torch.Tensor:
        """Return the box of a row; raises RefusedError unless it is inside the tensor."""
        tensor = self.whole(name)
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if last >= tensor.numel():
            raise RefusedError(f"{name}: the plan reaches element {last} of {tuple(tensor.shape)}; plan again")
        if not tensor.is_contiguous():
            if name not in self._copies:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                raw(copy).copy_(raw(tensor))
                self._copies[name] = copy
            tensor = self._copies[name]
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset)

    def copies_back(self) -> list[Callable[[], object]]:
        """Return the steps that write the contiguous copies back to their tensors, in place."""

        def step(name: str, copy: torch.Tensor) -> Callable[[], object]:
            # as integers: copying bools would normalise every byte to 0 or 1
            return lambda: raw(self._tensors[name]).copy_(raw(copy))

        return [step(name, copy) for name, copy in self._copies.items()]


# (name, slice bounds) -> a transform's tensors for a piece, cached because a piece often goes to several ranks
_Prepared = dict[tuple[str, tuple[tuple[int, int], ...]], list[torch.Tensor]]


def _transformed_sends(
    plan: RankPlan, row: int, name: str, tensor: torch.Tensor, transform: ReshardTransform, prepared: _Prepared
) -> list[_Half]:
    task, peer = int(plan.table.task_id[row]), int(plan.table.dst_rank[row])
    pieces = []
    for piece in plan.sliced(row):
        key = name, tuple((part.start, part.stop) for part in piece.src_slices)
        if key not in prepared:
            prepared[key] = transform.prepare_send(name, piece.src_slices, tensor)
        pieces.append(prepared[key])
    if all(len(tensors) == 1 for tensors in pieces):
        if len(pieces) == 1:
            return [_Half(task, pieces[0][0], peer)]
        return [_Half(task, torch.cat([tensors[0].reshape(-1) for tensors in pieces]), peer)]
    return [_Half(task, t, peer, part) for part, t in enumerate(t for tensors in pieces for t in tensors)]


def _receive_transformed(
    plan: RankPlan, rows: Sequence[int], name: str, transform: ReshardTransform, work: _ExchangeWork
) -> None:
    """Add the receives of all rows of a parameter, and the steps that follow them."""
    sliced = {row: [piece.dst_slices for piece in plan.sliced(row)] for row in rows}
    transform.begin_recv(name, [slices for pieces in sliced.values() for slices in pieces])
    for row, pieces in sliced.items():
        _receive_row(plan, row, name, pieces, transform, work)
    work.afterwards.append(lambda: transform.finish_recv(name))


def _receive_row(
    plan: RankPlan, row: int, name: str, sliced: Sequence[Slices], transform: ReshardTransform, work: _ExchangeWork
) -> None:
    """Add the receives of a row, and the steps that finalize its pieces.

    A row whose pieces need one tensor each is one transfer, because a sender without a transform sends it so.
    """
    task, peer = int(plan.table.task_id[row]), int(plan.table.src_rank[row])
    pieces = [(slices, transform.prepare_recv(name, slices)) for slices in sliced]
    if all(len(buffers) == 1 for _, buffers in pieces) and len(pieces) > 1:
        joined = torch.cat([buffers[0].reshape(-1) for _, buffers in pieces])
        work.receives.append(_Half(task, joined, peer))
        parts = joined.split([buffers[0].numel() for _, buffers in pieces])
        pieces = [
            (slices, [part.view(buffers[0].shape)]) for part, (slices, buffers) in zip(parts, pieces, strict=True)
        ]
    else:
        every = (buffer for _, buffers in pieces for buffer in buffers)
        work.receives += [_Half(task, buffer, peer, part) for part, buffer in enumerate(every)]

    def step(slices: Slices, buffers: list[torch.Tensor]) -> Callable[[], object]:
        return lambda: transform.finalize_recv(name, slices, buffers)

    work.afterwards += [step(slices, buffers) for slices, buffers in pieces]


def _check_overlap(plan: RankPlan, tensors: RankTensors, transform: ReshardTransform | None) -> None:
    """Refuse destinations that overlap sources, except a tensor that is copied onto itself.

    Raises:
        RefusedError: two tensors overlap; names them.
    """
    table = plan.table
    read = {table.locals[i] for i in table.src_local[table.src_rank == plan.rank].tolist()} & tensors.sources.keys()
    written = {
        table.locals[i] for i in table.dst_local[table.dst_rank == plan.rank].tolist()
    } & tensors.destinations.keys()
    if transform is not None:  # a transform writes to its own memory
        read, written = ({n for n in names if not transform.should_transform(n)} for names in (read, written))
    by_storage: dict[int, list[str]] = {}
    for name in sorted(read):
        by_storage.setdefault(tensors.sources[name].untyped_storage().data_ptr(), []).append(name)
    shared: dict[str, str] = {}
    for name in sorted(written):
        target = tensors.destinations[name]
        for other in by_storage.get(target.untyped_storage().data_ptr(), ()):
            if _extents_meet(tensors.sources[other], target):
                shared[name] = other
    for name, other in shared.items():
        rows = table.select(
            ((table.dst_rank == plan.rank) & (table.dst_local == table.locals.index(name)))
            | ((table.src_rank == plan.rank) & (table.src_local == table.locals.index(other)))
        )
        is_identity = (
            tensors.sources[other].data_ptr() == tensors.destinations[name].data_ptr()
            and tensors.sources[other].stride() == tensors.destinations[name].stride()
            and (rows.src_rank == rows.dst_rank).all()
            and all(rows.locals[i] == other for i in rows.src_local.tolist())
            and all(rows.locals[i] == name for i in rows.dst_local.tolist())
            and (rows.src_offset == rows.dst_offset).all()
            and (rows.src_stride == rows.dst_stride).all()
        )
        if not is_identity:
            raise RefusedError(
                f"{name}: it shares memory with the source's {other}, which would be overwritten while it is read; "
                "clone the target model's tensors"
            )


def _extents_meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.numel() or not b.numel():
        return False
    low_a, low_b = a.data_ptr(), b.data_ptr()
    return low_a < low_b + _span(b) and low_b < low_a + _span(a)


def _span(tensor: torch.Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((n - 1) * step for n, step in steps)) * tensor.element_size()
