"""Two-sided CopyServices: both ends name each transfer, then all ranks of a group run theirs together.

The one-sided services (base.py) move bytes between memory that one worker can reach. Here each process reaches
only its own tensors, so a transfer has two halves, told apart by an id that both ends know.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ExchangeResult:
    """What one run did on this rank."""

    sent_bytes: int
    received_bytes: int
    local_bytes: int
    messages: int
    seconds: float


class ExchangeService(ABC):
    """One way to exchange tensors within a process group. Whoever made it closes it.

    A transfer is (task id, part): parts number the tensors of one logical transfer, from 0. An id is used once
    per direction and run.
    """

    name: str
    #: the torch process group whose ranks exchange
    group: Any
    #: its ranks, as parallel groups number ranks; peers are named by them
    ranks: tuple[int, ...]
    #: whether tensors may lie on an accelerator
    moves_device_memory: bool = False
    #: whether tensors must be contiguous
    needs_contiguous: bool = False

    @property
    @abstractmethod
    def is_usable(self) -> bool:
        """Whether `run` may be called: false once closed, and after a transport error, which needs a new group."""

    @abstractmethod
    def send(
        self, task_id: int, tensor: torch.Tensor, peer: int, *, part: int = 0, dtype: torch.dtype | None = None
    ) -> None:
        """Note that `tensor` goes to rank `peer`; with this rank itself, to the receive of the same id.

        The tensor is read during `run` and must not change until that returns. `dtype` is what the elements are
        converted to on the way, by default nothing.
        """

    @abstractmethod
    def receive(self, task_id: int, tensor: torch.Tensor, peer: int, *, part: int = 0) -> None:
        """Note that rank `peer` fills `tensor`, in the order of its elements.

        The tensor may change at any time during `run`. It holds what was sent once `run` has returned; after an
        error its content is undefined.
        """

    @abstractmethod
    def run(
        self, timeout: float, *, verify: bool = True, refuse: str = "", finish: Callable[[], object] | None = None
    ) -> ExchangeResult:
        """Perform what was noted since the last run, and forget it, whatever happens. Collective.

        Every rank of the group calls it, those with nothing to move too. All pairs of ranks first compare what
        one is about to send with what the other expects; unless all agree, nothing moves and every rank raises.
        When it returns on any rank, every rank's tensors hold what was sent to them.

        Args:
            timeout: seconds until every wait of this run ends.
            verify: read back what was written and compare its digest with that of what was read; the same on every
                rank.
            refuse: what stands in the way on this rank; not empty, nothing moves and every rank raises it.
            finish: what this rank still does once everything has arrived; if it raises, every rank does.

        Raises:
            RefusedError: a rank refuses, or the ends do not agree, with the first difference; tensors are as before.
            RefitFailed: everything arrived, and a rank could not finish.
            DigestMismatch: what was written is not what was read.
            DeadlineExceeded, PeerLost: naming the rank that did not answer.
        """

    @abstractmethod
    def close(self) -> None:
        """Release every buffer. The group stays the caller's. May be called again."""
