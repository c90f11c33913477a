"""CopyService, the base of transports: its capabilities, and its one-sided kind, whose worker reaches both ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from refitd.addressing.copies import CopyList
from refitd.buffers.arena import MappedArena
from refitd.errors import TransportError


class DigestMismatch(TransportError):
    """Written bytes differ from the read ones, by comparison or by digests. `copy` is the row of the CopyList."""

    code = "digest"

    def __init__(self, message: str, copy: int = -1) -> None:
        super().__init__(message)
        self.copy = copy


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a service can do.

    Attributes:
        is_one_sided: one process reaches both ends; otherwise both ends take part in every transfer.
        crosses_nodes: the ends may be on different machines.
        devices: device types, by torch's names, where tensors may lie.
        needs_contiguous: strided tensors are packed before sending and unpacked after.
        max_message_bytes: maximum size of a message; longer tensors are cut. None: no limit.
    """

    is_one_sided: bool
    crosses_nodes: bool
    devices: frozenset[str] = frozenset({"cpu"})
    needs_contiguous: bool = False
    max_message_bytes: int | None = None


# Maximum message, and common capabilities, of the services over packed.py, which load torch.
MAX_MESSAGE_BYTES = 8 << 20
PACKED = Capabilities(
    is_one_sided=False,
    crosses_nodes=True,
    devices=frozenset({"cpu", "cuda"}),
    needs_contiguous=True,
    max_message_bytes=MAX_MESSAGE_BYTES,
)
# Its messages lie in main memory; it knows no devices yet.
NIXL = Capabilities(is_one_sided=False, crosses_nodes=True, needs_contiguous=True, max_message_bytes=MAX_MESSAGE_BYTES)


class CopyService(ABC):
    """One way to move bytes. Its creator closes it.

    Sources must not change during a run; destinations hold what was sent once the run has returned. To cancel a run,
    raise an exception in its `on_progress`: the run ends between two chunks and passes it on. Nothing is written after
    a run has raised.
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
    staging_bytes: int = 0  # held in the service's own buffers
    crossed_bytes: int = 0  # that came from other nodes
    delta_bytes: int = 0  # that came as deltas, counted whole
    changed_bytes: int = 0  # of these, what had changed


class PreparedJob(ABC):
    """Copies prepared for a service: views built, addresses checked. May be run repeatedly."""

    @abstractmethod
    def run(self, *, verify: bool, on_progress: Callable[[int], None], timeout: float | None = None) -> RunResult:
        """Perform every copy; return once all bytes are visible to every process that maps the destination.

        The sources must not change until this returns. `on_progress` gets the bytes written so far, at most every few
        milliseconds; if it raises, the run ends. `timeout` limits waits for other processes, in seconds.

        Raises:
            DigestMismatch: with `verify`, a copy's destination differs from its source, which is read again for this.
            PeerLost: a process whose memory is read has ended.
        """


class MappedCopyService(CopyService):
    """A one-sided service: copies between arenas that are mapped into one process."""

    @abstractmethod
    def prepare(self, copies: CopyList, arenas: Mapping[int, MappedArena]) -> PreparedJob:
        """Check that every copy stays inside its arenas, and build a job.

        Raises:
            TransportError: a copy leaves its arena, or this service cannot perform it.
        """
