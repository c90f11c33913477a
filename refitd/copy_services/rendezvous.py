"""A torch Store over an epoch's mailbox, so that process groups form through the control plane, not an open port."""

from __future__ import annotations

import time
from datetime import timedelta

from torch._C._distributed_c10d import Store

from refitd.copy_services.epoch import Epoch
from refitd.copy_services.peers import Deadline
from refitd.errors import DeadlineExceeded, RefitdError, TransportError


class MailboxStore(Store):
    """The part of a store that process groups use while they form: set, wait, get.

    `failure` is the error that ended a wait; torch replaces it by an exception of its own.
    """

    def __init__(self, epoch: Epoch, deadline: Deadline, attempt: str = "") -> None:
        """`deadline` applies to all attempts to join together; each `attempt` has its own keys."""
        super().__init__()
        self._epoch, self._deadline, self._attempt = epoch, deadline, attempt
        self._found: dict[str, bytes] = {}
        self.failure: RefitdError | None = None

    def set(self, key: str, value: str | bytes) -> None:
        """Publish a value to the others, once."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._found[key] = data
        self._epoch.mailbox.put(self._attempt + key, data)

    def get(self, key: str) -> bytes:
        """Wait for a value until the deadline, and return it."""
        if key not in self._found:
            left = self._deadline.at - time.monotonic()
            try:
                self._found[key] = self._epoch.mailbox.get(self._attempt + key, max(0.001, left))
            except DeadlineExceeded as exc:
                # report the whole timeout: this wait may have had only the rest of it
                self.failure = DeadlineExceeded(
                    f"{self._who(key)} did not come to epoch {self._epoch.id} within {self._deadline.seconds:.1f} s"
                )
                raise self.failure from exc
            except RefitdError as exc:
                self.failure = exc
                raise
        return self._found[key]

    def _who(self, key: str) -> str:
        """Return the label of the worker that puts a key's value: process groups end their keys with the position."""
        position = key.rpartition("/")[2]
        if position.isdecimal() and int(position) < self._epoch.size:
            return self._epoch.labels[int(position)]
        return "some worker"

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return once all values are known."""
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        """Whether all values are known."""
        return all(key in self._found for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Refuse: a counter needs one central place, and no transport of refitd uses one."""
        raise TransportError(f"epoch {self._epoch.id}: the rendezvous has no counters (asked for {key!r})")

    def delete_key(self, key: str) -> bool:
        """Do nothing: values are dropped with their epoch."""
        return False

    def num_keys(self) -> int:
        """Return the number of values known here."""
        return len(self._found)

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignored: the deadline of joining applies."""
