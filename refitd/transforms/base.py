"""ReshardTransform: a parameter's elements may travel, and lie in the destination, in another form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class ReshardTransform(ABC):
    """Takes over sending, receiving and writing of the parameters that it wants.

    A sender that has no transform, or whose transform gives one tensor, sends the elements of a piece as they
    are; a receiver's `prepare_recv` must then give one buffer of the same number of elements and dtype. Where a
    transform gives several tensors (data and scale), both ends need it, and the tensors of a piece match one by
    one. The two ends compare what they are about to exchange before anything is sent.
    """

    def should_transform(self, param_name: str) -> bool:
        """Whether this parameter, named as in this rank's own module, goes through the transform."""
        return False

    @abstractmethod
    def prepare_send(
        self, param_name: str, src_slice: tuple[slice, ...], src_param: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return what is sent for one piece of `src_param`, this rank's local tensor."""

    @abstractmethod
    def prepare_recv(self, param_name: str, dst_slice: tuple[slice, ...]) -> list[torch.Tensor]:
        """Return the buffers that one piece is received into, as many as `prepare_send` gives."""

    @abstractmethod
    def finalize_recv(self, param_name: str, dst_slice: tuple[slice, ...], recv_buffers: list[torch.Tensor]) -> None:
        """Write what was received for one piece to its destination, in place. Called after everything arrived."""
