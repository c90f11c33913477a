"""The collectives a tensor-parallel layer needs, with the gradients that belong to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Comm(Protocol):
    """A tensor-parallel group as one of its ranks sees it."""

    @property
    def rank(self) -> int:
        """The place of this process in the group."""

    @property
    def size(self) -> int:
        """Processes in the group."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the group; `tensor` may be overwritten."""

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, in rank order."""


class Solo:
    """A group of one."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor."""
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensor."""
        return [tensor]


class Gloo:
    """A group of processes, over torch.distributed.

    The first rank collects, combines and hands back: with four processes on two cores that takes a fifth of
    the time of gloo's own all_reduce, whose rings wake every process several times. Every rank gets the same
    bits.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = group.rank()
        self.size = group.size()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the group."""
        return self._combine(tensor, tensor, lambda parts: torch.stack(parts).sum(0))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, in rank order."""
        result = tensor.new_empty((self.size, *tensor.shape))
        return list(self._combine(tensor, result, torch.stack).unbind(0))

    def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """Return the root's tensor."""
        if self.rank == root:
            self._hand_out(tensor)
        else:
            self._group.recv([tensor], root, 0).wait()
        return tensor

    def _combine(
        self, mine: torch.Tensor, result: torch.Tensor, combine: Callable[[list[torch.Tensor]], torch.Tensor]
    ) -> torch.Tensor:
        """Return what `combine` makes of every rank's tensor. It has `result`'s shape, and may take its place."""
        if self.rank:
            self._group.send([mine], 0, 0).wait()
            self._group.recv([result], 0, 0).wait()
            return result
        parts = [mine] + [torch.empty_like(mine) for _ in range(1, self.size)]
        for work in [self._group.recv([part], rank, 0) for rank, part in enumerate(parts) if rank]:
            work.wait()
        result = combine(parts)
        self._hand_out(result)
        return result

    def _hand_out(self, tensor: torch.Tensor) -> None:
        for work in [self._group.send([tensor], rank, 0) for rank in range(self.size) if rank != self.rank]:
            work.wait()


class _Enter(torch.autograd.Function):
    """Identity; the gradient is summed, since each rank's layer contributes a part of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Comm) -> torch.Tensor:
        ctx.comm = comm
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.comm.all_reduce(grads[0].contiguous()), None


class _Leave(torch.autograd.Function):
    """Sum over the group; the gradient of the sum is everyone's gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Comm) -> torch.Tensor:
        return comm.all_reduce(x.contiguous().clone() if ctx.needs_input_grad[0] else x.contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    """Concatenate on the last dimension; each rank keeps its own part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Comm) -> torch.Tensor:
        ctx.comm, ctx.width = comm, x.shape[-1]
        return torch.cat(comm.all_gather(x.contiguous()), dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].narrow(-1, ctx.comm.rank * ctx.width, ctx.width), None


def enter(x: torch.Tensor, comm: Comm) -> torch.Tensor:
    """Hand a replicated activation to a column-parallel layer."""
    return x if comm.size == 1 else _Enter.apply(x, comm)  # type: ignore[no-untyped-call]


def leave(x: torch.Tensor, comm: Comm) -> torch.Tensor:
    """Sum the partial results of a row-parallel layer."""
    return x if comm.size == 1 else _Leave.apply(x, comm)  # type: ignore[no-untyped-call]


def gather(x: torch.Tensor, comm: Comm) -> torch.Tensor:
    """Join the vocabulary's parts of the logits."""
    return x if comm.size == 1 else _Gather.apply(x, comm)  # type: ignore[no-untyped-call]
