"""Memory that swaps write has one owner, one target; a second one over the same bytes is refused."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from refitd.client.mxfp8 import TargetTensors
from refitd.describe.memory import same_memory
from refitd.errors import RefusedError
from refitd.protocol.shards import SharedTensor
from refitd.text import shown


@dataclass(frozen=True, slots=True, eq=False)
class Owned:
    """The memory of one target.

    Attributes:
        pid: the process that registers it. A fork copies this module's lists and owns no memory of its parent.
        directory: of the daemon.
        model, replica, rank: the registration.
        tensors: those it writes and keeps.
        shared: the registrations that write tensors which this one names as shared, by name.
    """

    pid: int
    directory: str
    model: str
    replica: str
    rank: int
    tensors: TargetTensors
    shared: Mapping[str, Owned]

    @property
    def who(self) -> str:
        """The registration, as errors call it."""
        return f"{self.model}/{self.replica}:{self.rank}"

    def is_registered_as(self, other: Owned) -> bool:
        """Return whether both are the same rank of a replica at one daemon: the coordinator admits one at a time."""
        mine = self.directory, self.model, self.replica, self.rank
        return mine == (other.directory, other.model, other.replica, other.rank)


def sharing(model: str, shared: Mapping[str, Any] | None) -> dict[str, Owned]:
    """Return the registrations that the argument `shared` of a target of `model` names.

    Raises:
        RefusedError: it is no {name: Target}, or one has ended, or is of this model or another process.
    """
    if shared is None:
        return {}
    if not isinstance(shared, Mapping) or not all(isinstance(name, str) for name in shared):
        raise RefusedError(f"shared is {shown(shared)}, expected {{name: the Target that its memory is registered in}}")
    found = {}
    for name, target in shared.items():
        if not isinstance(target, Owner):
            raise RefusedError(
                f"shared[{shown(name)}] is {shown(target)}, expected the Target that registers its memory"
            )
        owned = target.owned()
        if owned is None:
            raise RefusedError(
                f"shared[{shown(name)}]: that target is closed or lost; register it again, then this one"
            )
        if owned.model == model:
            raise RefusedError(
                f"shared[{shown(name)}]: {owned.who} is of the same model {model!r}; let one replica serve both"
            )
        found[name] = owned
    return found


def check_shared(tensors: TargetTensors, shared: Mapping[str, Owned]) -> tuple[SharedTensor, ...]:
    """Return the shared tensors in the form of the message to the coordinator.

    Raises:
        RefusedError: a tensor is not in the memory of a tensor that the other target's versions write.
    """
    here = dict(zip(*tensors.unwritten(), strict=True))
    for name, owned in shared.items():
        if name not in here or not any(same_memory(here[name], tensor) for tensor in owned.tensors.tensors):
            raise RefusedError(
                f"{name}: it is named as shared with {owned.who}, and is no tensor of it (address, shape, strides and "
                "type); leave it out of shared, or use that target's tensor"
            )
    return tuple(SharedTensor(name, owned.model, owned.replica) for name, owned in shared.items())


@runtime_checkable
class Owner(Protocol):
    """A registration that owns memory."""

    def owned(self) -> Owned | None:
        """Return its memory; None once its registration has ended."""

    def claimed(self) -> Owned | None:
        """Return its memory; None once its registration has ended and it serves no version."""

    def forked(self) -> None:
        """Warn, in a forked child, if the parent's commits change weights there."""


# Process-wide, because memory belongs to the process: two clients do not know each other. A target is forgotten
# with its last reference, and an ended one owns no memory: no address outlives its tensor.
_OWNERS: weakref.WeakSet[Owner] = weakref.WeakSet()

# Registrations in progress, in the order of their start; the later of two conflicting ones is refused.
# Entries are only appended and removed, which needs no lock; a signal handler could not wait for a lock.
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
            if (owned := owner.claimed()) is not None:
                _check(owned, mine, owned.who)
        yield
    finally:
        _REGISTERING.remove(mine)


def _check(first: Owned, mine: Owned, whose: str) -> None:
    if first.is_registered_as(mine):
        return  # the coordinator refuses it, unless the first was removed and has not heard of that yet
    first.tensors.written.check_apart(mine.tensors.written, whose)
    first.tensors.written.check_kept(*_kept_beside(mine, first), f" of {whose}")
    mine.tensors.written.check_kept(*_kept_beside(first, mine), f" of {mine.who}, which registers now")


def _kept_beside(one: Owned, other: Owned) -> tuple[list[str], list[torch.Tensor]]:
    """Return what `one` keeps, without what it names as shared with `other`."""
    shared = {name for name, owner in one.shared.items() if owner.is_registered_as(other)}
    kept = [(name, tensor) for name, tensor in zip(*one.tensors.unwritten(), strict=True) if name not in shared]
    return [name for name, _ in kept], [tensor for _, tensor in kept]


def _forked() -> None:
    for owner in list(_OWNERS):
        owner.forked()


os.register_at_fork(after_in_child=_forked)
