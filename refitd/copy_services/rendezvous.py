"""A torch Store over an epoch's mailbox, so that process groups meet through the control plane, not an open port."""

from __future__ import annotations

import time
from datetime import timedelta

from torch._C._distributed_c10d import Store

from refitd.copy_services.epoch import Epoch
from refitd.copy_services.peers import Deadline
from refitd.errors import DeadlineExceeded, RefitdError, TransportError


class MailboxStore(Store):
    """What process groups ask of a store while they are made: set, wait, get.

    `failure` is the error that ended a wait; torch turns it into an exception of its own on the way.
    """

    def __init__(self, epoch: Epoch, deadline: Deadline, attempt: str = "") -> None:
        """`deadline` is that of all attempts to join together; keys of one `attempt` are apart from those of others."""
        super().__init__()
        self._epoch, self._deadline, self._attempt = epoch, deadline, attempt
        self._found: dict[str, bytes] = {}
        self.failure: RefitdError | None = None

    def set(self, key: str, value: str | bytes) -> None:
        """Leave a value for the others, once."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._found[key] = data
        self._epoch.mailbox.put(self._attempt + key, data)

    def get(self, key: str) -> bytes:
        """Return a value, waiting for it until the deadline."""
        if key not in self._found:
            left = self._deadline.at - time.monotonic()
            try:
                self._found[key] = self._epoch.mailbox.get(self._attempt + key, max(0.001, left))
            except DeadlineExceeded as exc:
                # how long this wait was says nothing: it may have had the rest of the time alone
                self.failure = DeadlineExceeded(
                    f"{self._who(key)} did not come to epoch {self._epoch.id} within {self._deadline.seconds:.1f} s"
                )
                raise self.failure from exc
            except RefitdError as exc:
                self.failure = exc
                raise
        return self._found[key]

    def _who(self, key: str) -> str:
        """Return who leaves the value of a key: process groups end theirs with the position."""
        position = key.rpartition("/")[2]
        if position.isdecimal() and int(position) < self._epoch.size:
            return self._epoch.labels[int(position)]
        return "some worker"

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return once all values are there."""
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        """Whether all values are there."""
        return all(key in self._found for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Counting needs one place that counts; no transport of refitd asks for it."""
        raise TransportError(f"epoch {self._epoch.id}: the rendezvous has no counters (asked for {key!r})")

    def delete_key(self, key: str) -> bool:
        """Values go with their epoch."""
        return False

    def num_keys(self) -> int:
        """Return how many values are known here."""
        return len(self._found)

    def set_timeout(self, timeout: timedelta) -> None:
        """The deadline of joining counts, not torch's."""
