"""ReshardTransform: a parameter's elements may travel, and lie in the destination, in another form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Slices = tuple[slice, ...]


class ReshardTransform(ABC):
    """Replaces sending, receiving and writing of the parameters that it selects (Megatron-Core: `ReshardTransform`).

    A sender that has no transform, or whose transform gives one tensor, sends the elements of a piece as they
    are; a receiver's `prepare_recv` must then give one buffer of the same number of elements and dtype. Where a
    transform gives several tensors (data and scale), both ends need it, and the tensors of a piece match one by
    one. The two ends compare what they are about to exchange before anything is sent.

    What is asked of it, with everything of a parameter that is received between begin_recv and finish_recv:

        send_dtype, recv_dtype   while planning              what is raised refuses the plan on every rank
        prepare_send    each piece, once for all receivers   nothing has been sent; what is raised refuses the transfer
        begin_recv      all pieces                           likewise
        prepare_recv    each piece                           likewise
        finalize_recv   each piece, in any order             everything has arrived
        finish_recv     once
    """

    def should_transform(self, param_name: str) -> bool:
        """Whether this parameter, named as in this rank's own module, goes through the transform."""
        return False

    def send_dtype(self, param_name: str, src_param: torch.Tensor, dtype: torch.dtype | str) -> torch.dtype | None:
        """Return the dtype that travels where this rank is a source; None for `dtype`, the one after declared casts.

        Planning compares it with `recv_dtype`: where only one end converts, the plan is refused by name.
        """
        return None

    def recv_dtype(self, param_name: str, dst_param: torch.Tensor) -> torch.dtype | None:
        """Return the dtype that has to arrive; None for that of the destination module's tensor."""
        return None

    @abstractmethod
    def prepare_send(self, param_name: str, src_slice: Slices, src_param: torch.Tensor) -> list[torch.Tensor]:
        """Return what is sent for one piece of `src_param`, this rank's local tensor, after declared casts."""

    def begin_recv(self, param_name: str, dst_slices: Sequence[Slices]) -> None:  # noqa: B027 - most need none
        """Take note of all pieces that are to be received of a parameter."""

    @abstractmethod
    def prepare_recv(self, param_name: str, dst_slice: Slices) -> list[torch.Tensor]:
        """Return the buffers that one piece is received into, as many as `prepare_send` gives."""

    @abstractmethod
    def finalize_recv(self, param_name: str, dst_slice: Slices, recv_buffers: list[torch.Tensor]) -> None:
        """Write what was received for one piece to its destination, in place. Called after everything arrived."""

    def finish_recv(self, param_name: str) -> None:  # noqa: B027 - most need none
        """Do what needs the whole parameter: every piece of it has been finalized."""
