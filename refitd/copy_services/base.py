"""CopyService: one way to move bytes, what it can do, and its one-sided kind, whose worker reaches both ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from refitd.addressing.copies import CopyList
from refitd.buffers.arena import MappedArena
from refitd.errors import TransportError


class DigestMismatch(TransportError):
    """What was written is not what was read, by comparison or by digests. `copy` is the row of the CopyList."""

    code = "digest"

    def __init__(self, message: str, copy: int = -1) -> None:
        super().__init__(message)
        self.copy = copy


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a service can do, for whoever chooses one.

    Attributes:
        is_one_sided: one process reaches both ends; else both ends take part in every transfer.
        crosses_nodes: its ends may be on different machines.
        devices: where tensors may lie, as torch names device types.
        needs_contiguous: strided tensors are packed before they travel, and unpacked after.
        max_message_bytes: the longest single message; longer tensors are cut. None: no limit.
    """

    is_one_sided: bool
    crosses_nodes: bool
    devices: frozenset[str] = frozenset({"cpu"})
    needs_contiguous: bool = False
    max_message_bytes: int | None = None


# Of the services over packed.py, which load torch: what they have in common, and the longest message.
MAX_MESSAGE_BYTES = 8 << 20
PACKED = Capabilities(
    is_one_sided=False,
    crosses_nodes=True,
    devices=frozenset({"cpu", "cuda"}),
    needs_contiguous=True,
    max_message_bytes=MAX_MESSAGE_BYTES,
)


class CopyService(ABC):
    """One way to move bytes. Whoever made it closes it.

    Sources must not change while a run is under way; destinations hold what was sent once it has returned. An
    exception raised by a run's `on_progress` ends the run between two chunks and is passed on: that is how a run
    is cancelled. Nothing is written after a run has raised.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    @abstractmethod
    def close(self) -> None:
        """Release everything; nothing may be run afterwards. May be called again."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one run of a job did."""

    copies: int
    bytes: int
    seconds: float
    staging_bytes: int = 0  # held in buffers of its own


class PreparedJob(ABC):
    """Copies made ready for a service: views built, addresses checked. Run as often as wanted."""

    @abstractmethod
    def run(self, *, verify: bool, on_progress: Callable[[int], None], timeout: float | None = None) -> RunResult:
        """Perform every copy; return once all bytes are visible to every process that maps the destination.

        The sources must not change until this returns. `on_progress` is told the bytes written so far, at most
        every few milliseconds; what it raises ends the run. `timeout` bounds waits for other processes, in
        seconds, where there are any.

        Raises:
            DigestMismatch: with `verify`, a copy's destination differs from its source, which was read once more.
            PeerLost: a process whose memory is read is gone.
        """


class MappedCopyService(CopyService):
    """A one-sided service: copies between arenas that are mapped into one process."""

    @abstractmethod
    def prepare(self, copies: CopyList, arenas: Mapping[int, MappedArena]) -> PreparedJob:
        """Check that every copy stays inside its arenas and build what running needs.

        Raises:
            TransportError: a copy leaves its arena, or this service cannot perform it.
        """
