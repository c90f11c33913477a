"""Two-sided CopyServices: both ends name each transfer, then all ranks of a group run theirs together.

The one-sided services (base.py) move bytes between memory that one worker can reach. Here each process reaches
only its own tensors, so a transfer has two halves, told apart by an id that both ends know.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from refitd.copy_services.base import CopyService

if TYPE_CHECKING:
    import torch

    from refitd.copy_services.pieces import Piece


@dataclass(frozen=True, slots=True)
class ExchangeResult:
    """What one run did on this rank."""

    sent_bytes: int
    received_bytes: int
    local_bytes: int
    messages: int
    seconds: float
    staging_bytes: int = 0  # most that this service has held in buffers of its own


class Transfers:
    """Halves that were noted, laid out to be run as often as wanted. Made by `ExchangeService.hold`."""


class ExchangeService(CopyService):
    """One way to exchange tensors within a process group.

    A transfer is (task id, part): parts number the tensors of one logical transfer, from 0. An id is used once
    per direction and run.
    """

    #: the torch process group whose ranks exchange
    group: Any
    #: its ranks, as parallel groups number ranks; peers are named by them
    ranks: tuple[int, ...]

    @property
    @abstractmethod
    def is_usable(self) -> bool:
        """Whether `run` may be called: false once closed, and after a transport error, which needs a new group."""

    @abstractmethod
    def send(
        self, task_id: int, data: torch.Tensor | Piece, peer: int, *, part: int = 0, dtype: torch.dtype | None = None
    ) -> None:
        """Note that `data` goes to rank `peer`; with this rank itself, to the receive of the same id.

        It is read during `run` and must not change until that returns. `dtype` is what the elements of a tensor are
        converted to on the way, by default nothing.
        """

    @abstractmethod
    def receive(self, task_id: int, data: torch.Tensor | Piece, peer: int, *, part: int = 0) -> None:
        """Note that rank `peer` fills `data`, in the order of its elements.

        It may change at any time during `run`. It holds what was sent once `run` has returned; after an error its
        content is undefined.
        """

    @abstractmethod
    def hold(self) -> Transfers:
        """Take what was noted since the last run, or the last `hold`, as transfers that can be run repeatedly."""

    @abstractmethod
    def run(
        self,
        timeout: float,
        transfers: Transfers | None = None,
        *,
        verify: bool = True,
        refuse: str = "",
        finish: Callable[[], object] | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> ExchangeResult:
        """Perform transfers: those held, or what was noted since the last run, which is then forgotten. Collective.

        Every rank of the group calls it, those with nothing to move too. All pairs of ranks first compare what
        one is about to send with what the other expects; unless all agree, nothing moves and every rank raises.
        When it returns on any rank, every rank's tensors hold what was sent to them.

        Args:
            timeout: seconds until every wait of this run ends.
            transfers: what to perform; None for what was noted.
            verify: read back what was written and compare its digest with that of what was read; the same on every
                rank.
            refuse: what stands in the way on this rank; not empty, nothing moves and every rank raises it.
            finish: what this rank still does once everything has arrived; if it raises, every rank does.
            on_progress: told the bytes that have arrived here after each message; what it raises ends the run.

        Raises:
            RefusedError: a rank refuses, or the ends do not agree, with the first difference; tensors are as before.
            RefitFailed: everything arrived, and a rank could not finish.
            DigestMismatch: what was written is not what was read.
            DeadlineExceeded, PeerLost: naming the rank that did not answer.
        """

    @abstractmethod
    def close(self) -> None:
        """Release every buffer. The group stays the caller's. May be called again."""
