"""ReshardTransform: the interface for converting parameters on their way to the destination."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Slices = tuple[slice, ...]


class ReshardTransform(ABC):
    """Replaces sending, receiving and writing of the parameters that it selects (Megatron-Core: `ReshardTransform`).

    A sender without a transform sends each piece as one tensor. If the sender sends one tensor per piece, the
    receiver's `prepare_recv` must return one buffer with the same number of elements and dtype. If a transform makes
    several tensors per piece (data and scale), both ends need it, and the tensors match one by one. The two ends
    compare what they will exchange before anything is sent.

    The order of calls; all receiving of a parameter happens between begin_recv and finish_recv:

        send_dtype, recv_dtype   while planning              an error refuses the plan on every rank
        prepare_send    each piece, once for all receivers   nothing has been sent; an error refuses the transfer
        begin_recv      all pieces                           likewise
        prepare_recv    each piece                           likewise
        finalize_recv   each piece, in any order             everything has arrived
        finish_recv     once
    """

    def should_transform(self, param_name: str) -> bool:
        """Return whether this parameter, named as in this rank's own module, goes through the transform."""
        return False

    def send_dtype(self, param_name: str, src_param: torch.Tensor, dtype: torch.dtype | str) -> torch.dtype | None:
        """Return the dtype that this rank sends; None for `dtype`, the dtype after declared casts.

        Planning compares it with `recv_dtype`, and refuses a parameter for which they differ.
        """
        return None

    def recv_dtype(self, param_name: str, dst_param: torch.Tensor) -> torch.dtype | None:
        """Return the dtype that must arrive; None for that of the destination module's tensor."""
        return None

    @abstractmethod
    def prepare_send(self, param_name: str, src_slice: Slices, src_param: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors to send for one piece of `src_param`, this rank's local tensor after declared casts."""

    def begin_recv(self, param_name: str, dst_slices: Sequence[Slices]) -> None:  # noqa: B027 - most need none
        """Prepare to receive a parameter; `dst_slices` are all its pieces."""

    @abstractmethod
    def prepare_recv(self, param_name: str, dst_slice: Slices) -> list[torch.Tensor]:
        """Return the buffers that receive one piece, as many as `prepare_send` returns tensors."""

    @abstractmethod
    def finalize_recv(self, param_name: str, dst_slice: Slices, recv_buffers: list[torch.Tensor]) -> None:
        """Write one received piece to its destination, in place. Called after everything has arrived."""

    def finish_recv(self, param_name: str) -> None:  # noqa: B027 - most need none
        """Finish a parameter after all its pieces have been finalized."""
