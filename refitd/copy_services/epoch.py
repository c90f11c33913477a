"""A membership epoch: the workers that exchange with each other for one plan, and how they find each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


class Mailbox(ABC):
    """Values that the workers of an epoch leave for each other, carried by daemons and coordinator."""

    @abstractmethod
    def put(self, key: str, value: bytes) -> None:
        """Leave a value for all other workers; each key is put once, by one of them."""

    @abstractmethod
    def get(self, key: str, timeout: float) -> bytes:
        """Return a value, waiting for it.

        Raises:
            DeadlineExceeded: nobody has left it within `timeout` seconds.
            PeerLost: the epoch has been given up in the meantime.
        """


@dataclass(frozen=True)
class Epoch:
    """One worker's place in a membership epoch.

    Attributes:
        id: of the epoch, never used again.
        index: this worker's position.
        labels: how people are told about each position; their number is the epoch's size.
        address: where this worker is reached by the others, an address of this node.
        device: where this worker's tensors lie, as torch names devices.
        staging_bytes: most bytes of buffers that the service may have, equal on all.
        mailbox: how the workers find each other.
        timeout: seconds until joining ends.
    """

    id: str
    index: int
    labels: tuple[str, ...]
    address: str
    staging_bytes: int
    mailbox: Mailbox
    timeout: float
    device: str = "cpu"

    @property
    def size(self) -> int:
        """How many workers there are."""
        return len(self.labels)
