"""Two-sided CopyServices: both ends register each transfer, then all ranks of a group run theirs together.

The one-sided services (base.py) move bytes within memory that one worker can reach. Here each process reaches only its
own tensors, so a transfer has two halves, matched by an id that both ends know.
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
    staging_bytes: int = 0  # most held in the service's own buffers
    crossed_bytes: int = 0  # `received_bytes`, or less where deltas came
    delta_bytes: int = 0  # of `received_bytes`, what came as deltas
    changed_bytes: int = 0  # of these, what had changed


@dataclass(frozen=True, slots=True, order=True)
class Route:
    """The path that transfers follow over several ranks, and how many ranks have passed them on before.

    What a rank receives on a path it sends to the next rank of that path. All transfers of a path have one origin,
    and are noted in one order, with equal sizes, by all its ranks. Path 0 is none: from one rank to another.
    """

    path: int = 0
    hop: int = 0


DIRECT = Route()


class Transfers:
    """Noted transfers, laid out for repeated runs. Made by `ExchangeService.hold`."""


class ExchangeService(CopyService):
    """One way to exchange tensors within a process group.

    A transfer's id is (task id, part); parts number the tensors of a task from 0. An id is used once per direction and
    run.
    """

    #: the torch process group whose ranks exchange
    group: Any
    #: its ranks, as parallel groups number them; they name peers
    ranks: tuple[int, ...]

    @property
    @abstractmethod
    def is_usable(self) -> bool:
        """Whether `run` may be called: False once closed, or after a transport error, which needs a new group."""

    @abstractmethod
    def send(
        self,
        task_id: int,
        data: torch.Tensor | Piece,
        peer: int,
        *,
        part: int = 0,
        dtype: torch.dtype | None = None,
        route: Route = DIRECT,
    ) -> None:
        """Note that `data` goes to rank `peer`; if that is this rank, to the receive with the same id.

        `data` is read during `run` and must not change until that returns, unless `route` has hops before this rank:
        then it is what this rank receives on the same path. `dtype` converts a tensor's elements in transit; None
        keeps them.

        Raises:
            TransportError: the service does not follow paths.
        """

    @abstractmethod
    def receive(
        self, task_id: int, data: torch.Tensor | Piece, peer: int, *, part: int = 0, route: Route = DIRECT
    ) -> None:
        """Note that rank `peer` fills `data`, in the order of its elements.

        `data` may change at any time during `run`. It holds what was sent once `run` has returned; after an error its
        content is undefined.
        """

    @abstractmethod
    def hold(self) -> Transfers:
        """Return the transfers noted since the last run or `hold`, for repeated runs."""

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
        on_wrong_base: Callable[[], object] | None = None,
    ) -> ExchangeResult:
        """Run the given transfers, or else those noted since the last run, which are then forgotten. Collective.

        Every rank of the group must call it, even with nothing to move. All pairs of ranks first compare what one sends
        with what the other expects; unless all agree, nothing moves and every rank raises. When it returns on any rank,
        every rank's tensors hold what was sent to them.

        Args:
            timeout: seconds after which every wait of this run ends. Some end up to 5 % earlier, so that a rank that
                stops is named by one that waits for it.
            transfers: what to run; None for what was noted.
            verify: read back what was written, and compare its digest with that of what was read. Must be equal on
                all ranks.
            refuse: if not empty, why this rank refuses; then nothing moves and every rank raises it.
            finish: called on this rank once everything has arrived; if it raises, every rank raises.
            on_progress: gets the bytes that have arrived here after each message; if it raises, the run ends.
            on_wrong_base: called if this rank built wrong bytes from a delta and a base, one of which is wrong;
                no other rank knows yet that the run fails.

        Raises:
            RefusedError: a rank refuses, or the ends differ (names the first difference); tensors are unchanged.
            RefitFailed: everything arrived, but a rank could not finish.
            DigestMismatch: what was written differs from what was read.
            DeadlineExceeded, PeerLost: names the rank that did not answer.
        """

    @abstractmethod
    def close(self) -> None:
        """Release every buffer, but not the group, which the caller owns. May be called again."""
