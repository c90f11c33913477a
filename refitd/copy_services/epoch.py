"""An epoch: the workers that exchange with each other for one plan, and how they find each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field


class Mailbox(ABC):
    """Values that the workers of an epoch leave for each other, carried by daemons and the coordinator."""

    @abstractmethod
    def put(self, key: str, value: bytes) -> None:
        """Publish a value to all other workers; each key is put once, by one worker."""

    @abstractmethod
    def get(self, key: str, timeout: float) -> bytes:
        """Wait for a value and return it.

        Raises:
            DeadlineExceeded: nobody put it within `timeout` seconds.
            PeerLost: the epoch was abandoned meanwhile.
        """


@dataclass(frozen=True)
class Epoch:
    """One worker's place in an epoch.

    Attributes:
        id: the epoch's id, never reused.
        index: this worker's position.
        labels: name of each position, for errors; their number is the epoch's size.
        address: this node's address, at which the other workers reach this one.
        device: the device of this worker's tensors, by torch's name.
        staging_bytes: limit on the service's buffers, equal on all workers.
        mailbox: how the workers find each other.
        timeout: seconds within which all must join.
        key: 32 bytes that only the epoch's workers, their daemons and the coordinator know.
    """

    id: str
    index: int
    labels: tuple[str, ...]
    address: str
    staging_bytes: int
    mailbox: Mailbox
    timeout: float
    key: bytes = field(repr=False)
    device: str = "cpu"

    @property
    def size(self) -> int:
        """The number of workers."""
        return len(self.labels)
