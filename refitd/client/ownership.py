"""Memory that swaps write has one owner, one target; a second one over the same bytes is refused."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from refitd.client.mxfp8 import TargetTensors


@dataclass(frozen=True, slots=True, eq=False)
class Owned:
    """The memory of one target.

    Attributes:
        pid: the process that registers it. A fork copies this module's lists, and owns nothing of its parent.
        directory: of the daemon.
        model, replica, rank: the registration.
        tensors: what it writes and keeps.
    """

    pid: int
    directory: str
    model: str
    replica: str
    rank: int
    tensors: TargetTensors

    @property
    def who(self) -> str:
        """The registration, as errors call it."""
        return f"{self.model}/{self.replica}:{self.rank}"

    def is_registered_as(self, other: Owned) -> bool:
        """Return whether both are the same rank of a replica at one daemon: the coordinator admits one at a time."""
        mine = self.directory, self.model, self.replica, self.rank
        return mine == (other.directory, other.model, other.replica, other.rank)


class Owner(Protocol):
    """A registration that owns memory."""

    def owned(self) -> Owned | None:
        """Return its memory; None once it is registered no more."""

    def forked(self) -> None:
        """Warn, in a forked child, if the parent's commits change weights there."""


# Process-wide, because memory belongs to the process: two clients know nothing of each other. A target is forgotten
# with its last reference, and one that has ended owns nothing, so that no address outlives its tensor.
_OWNERS: weakref.WeakSet[Owner] = weakref.WeakSet()

# Registrations in progress, in the order of their start; the later of two conflicting ones is refused.
# It is only appended to and removed from, so that no lock is needed, which a signal handler could not wait for.
_REGISTERING: list[Owned] = []


def own(owner: Owner) -> None:
    """Note a target that has been registered; call it inside `registering`."""
    _OWNERS.add(owner)


@contextlib.contextmanager
def registering(mine: Owned) -> Iterator[None]:
    """Refuse memory that another target of this process writes or keeps; use around a registration.

    Raises:
        RefusedError: a tensor shares memory with a target, or with one that another thread is registering; names both.
    """
    _REGISTERING.append(mine)
    try:
        for other in list(_REGISTERING):
            if other is mine:
                break
            if other.pid == os.getpid():
                _check(other, mine, f"{other.who}, which another thread is registering")
        for owner in list(_OWNERS):
            if (owned := owner.owned()) is not None:
                _check(owned, mine, owned.who)
        yield
    finally:
        _REGISTERING.remove(mine)


def _check(first: Owned, mine: Owned, whose: str) -> None:
    if first.is_registered_as(mine):
        return  # the coordinator refuses it, unless the first was removed and has not heard of that yet
    first.tensors.written.check_apart(mine.tensors.written, whose)
    first.tensors.written.check_kept(*mine.tensors.unwritten(), f" of {whose}")
    mine.tensors.written.check_kept(*first.tensors.unwritten(), f" of {mine.who}, which registers now")


def _forked() -> None:
    for owner in list(_OWNERS):
        owner.forked()


os.register_at_fork(after_in_child=_forked)
