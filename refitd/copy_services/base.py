"""CopyService: how bytes move between places that a worker can reach."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from refitd.buffers.arena import MappedArena
from refitd.errors import TransportError
from refitd.execute.copies import CopyList


class DigestMismatch(TransportError):
    """What was written is not what was read. `copy` is the row of the CopyList."""

    code = "digest"

    def __init__(self, message: str, copy: int = -1) -> None:
        super().__init__(message)
        self.copy = copy


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one run of a job did."""

    copies: int
    bytes: int
    seconds: float


class PreparedJob(ABC):
    """Copies made ready for a service: views built, addresses checked. Run as often as wanted."""

    @abstractmethod
    def run(self, *, verify: bool, on_progress: Callable[[int], None]) -> RunResult:
        """Perform every copy; return once all bytes are visible to every process that maps the destination.

        The sources must not change until this returns. `on_progress` is told the bytes written so far, at most
        every few milliseconds.

        Raises:
            DigestMismatch: with `verify`, the digest of a copy's source differs from its destination's.
            PeerLost: a process whose memory is read is gone.
        """


class CopyService(ABC):
    """One way to move bytes. A worker owns its services and closes them."""

    name: str

    @abstractmethod
    def prepare(self, copies: CopyList, arenas: Mapping[int, MappedArena]) -> PreparedJob:
        """Check that every copy stays inside its arenas and build what running needs.

        Raises:
            TransportError: a copy leaves its arena, or this service cannot perform it.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything; prepared jobs must not be run afterwards."""
