"""The collectives a tensor-parallel layer needs, with the gradients that belong to them."""

from __future__ import annotations

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
    """A group of processes, over torch.distributed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = group.rank()
        self.size = group.size()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the group, in place."""
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, in rank order."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor, group=self._group)
        return parts


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
    return x if comm.size == 1 else _Enter.apply(x, comm)  # type: ignore[no-any-return, no-untyped-call]


def leave(x: torch.Tensor, comm: Comm) -> torch.Tensor:
    """Sum the partial results of a row-parallel layer."""
    return x if comm.size == 1 else _Leave.apply(x, comm)  # type: ignore[no-any-return, no-untyped-call]


def gather(x: torch.Tensor, comm: Comm) -> torch.Tensor:
    """Join the vocabulary's parts of the logits."""
    return x if comm.size == 1 else _Gather.apply(x, comm)  # type: ignore[no-any-return, no-untyped-call]
