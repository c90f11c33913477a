"""The workers of an epoch over a transport that is no torch process group: the base class for other packages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from refitd.copy_services import Epoch, Posted
from refitd.copy_services.peers import MailboxStore, Peers
from refitd.copy_services.waits import Deadline


class EpochPeers(Peers, ABC):
    """The workers of an epoch over a transport that has sends and receives: override `send`, `receive` and `wait`.

    One thread calls all three. Between two workers, the nth send with a tag goes to the nth receive with that tag.
    Messages with different tags may overtake each other. Both ends know a message's size, which may be 0. A `wait` must
    not depend on the order in which the peer waits: two workers that send to each other must both proceed.

    After joining, `authenticator = prove(...)` lets all records and digests carry MACs; the transport need not be
    trusted.
    """

    def __init__(self, epoch: Epoch) -> None:
        """Take this worker's place in an epoch; its tensors are in main memory."""
        self.group, self.device, self._labels = None, torch.device("cpu"), tuple(epoch.labels)
        self.index, self.ranks = epoch.index, tuple(range(epoch.size))
        self.hops, self.degree = epoch.hops, epoch.peers

    @property
    def _is_named(self) -> bool:
        return len(self) > 1

    def introduce(self, epoch: Epoch, word: bytes, deadline: Deadline) -> list[bytes]:
        """Publish this worker's word, for example its address, in the epoch's mailbox; return all workers' words.

        Raises:
            DeadlineExceeded, PeerLost: a worker did not come (has its label), or the epoch was abandoned.
        """
        store = MailboxStore(epoch, deadline, "word/")
        store.set(str(self.index), word)
        return [store.get(str(position)) for position in range(len(self))]

    @abstractmethod
    def send(self, tensor: torch.Tensor, position: int, tag: int) -> Posted:
        """Start sending a contiguous tensor to a position; return a Posted without waiting for the receiver.

        The tensor does not change until `wait` returns.
        """

    @abstractmethod
    def receive(self, tensor: torch.Tensor, position: int, tag: int) -> Posted:
        """Start receiving into a contiguous tensor; return a Posted. Its bytes are there once `wait` returns."""

    @abstractmethod
    def wait(self, posted: Any, position: int, deadline: Deadline, purpose: str) -> None:
        """Return once a send's tensor may change, or a receive's tensor is filled.

        Raises:
            DeadlineExceeded: the deadline has passed; names `purpose` and the label of the position.
            PeerLost: that worker has ended.
            TransportError: it sent a message of another size.
        """
