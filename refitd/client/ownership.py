"""Ensure that memory written by swaps has one owner, within a registration and across several."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from refitd.describe.layout import canonical_name, same_elements, same_places
from refitd.describe.memory import (
    extents,
    files_mapped_twice,
    lie_in,
    mapped_twice,
    met,
    overlapping,
    overlaps_itself,
    same_memory,
)
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.module import local_tensor
from refitd.errors import RefusedError
from refitd.mxfp8.buffers import is_quantized
from refitd.protocol.shards import SharedTensor, VersionOf
from refitd.text import shown, target_rank

if TYPE_CHECKING:
    from refitd.client.target_tensors import TargetTensors


def one_of_each(
    metadata: Sequence[ParameterMetadata], values: Mapping[str, Any]
) -> tuple[list[ParameterMetadata], dict[str, str]]:
    """Merge tied names that share memory: keep the first name, and make the others its aliases.

        embedding (aliases: output) and output, one memory   ->   embedding, with output as an alias

    One source tensor then feeds that memory, under any of the tied names.

    Returns:
        The remaining descriptions, and {dropped name: kept name}.
    """
    by_place: dict[Any, list[ParameterMetadata]] = {}
    for m in metadata:
        value = values[m.name]
        if isinstance(value, torch.Tensor) and not is_quantized(value) and value.numel():
            tensor = local_tensor(value)
            place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
            by_place.setdefault(place, []).append(m)
    kept = {m.name: m for m in metadata}
    tied: dict[str, str] = {}
    for group in by_place.values():
        first, first_name = group[0], canonical_name(group[0])
        for other in group[1:]:
            name = canonical_name(other)
            if name == first_name or not (name in first.aliases or first_name in other.aliases):
                continue
            if not same_places(first, other):  # different elements of that weight: WrittenMemory refuses them
                continue
            said = dict.fromkeys((*first.aliases, name, *other.aliases))
            first = kept[first.name] = replace(first, aliases=tuple(a for a in said if a != first_name))
            tied[other.name] = first.name
            del kept[other.name]
    return list(kept.values()), tied


class WrittenMemory:
    """The memory of one registration's live tensors and derived tensors."""

    def __init__(
        self,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        metadata: Sequence[ParameterMetadata],
        made: Mapping[str, torch.Tensor],
    ) -> None:
        """Refuse tensors that share memory, unless they are the same elements of one tensor.

        Args:
            names: the names of `tensors`.
            tensors: the tensors that swaps write.
            metadata: their descriptions; the data and scales of MXFP8 tensors have none.
            made: tensors that are derived from `tensors`. They may share memory with each other.

        Raises:
            RefusedError: tensors share memory; names two of them.
        """
        for name, tensor in zip(names, tensors, strict=True):
            if overlaps_itself(tensor):
                raise RefusedError(
                    f"{name}: several of its elements lie in one place (shape {tuple(tensor.shape)}, strides "
                    f"{tuple(tensor.stride())}), so that what is written last would win; register what it was expanded "
                    "from, or a clone"
                )
        count = len(names)
        self._names, self._tensors = [*names, *made], [*tensors, *made.values()]
        described = {m.name: m for m in metadata}

        def is_one_weight(a: int, b: int) -> bool:
            if a >= count and b >= count:
                return True
            one, other = (described.get(self._names[each]) for each in (a, b))
            if one is None or other is None or b >= count:
                return False
            return same_memory(self._tensors[a], self._tensors[b]) and same_elements(one, other)

        self._lies = extents(self._tensors)
        sharing = overlapping(self._tensors, self._lies)
        if (found := next((pair for pair in sharing if not is_one_weight(*pair)), None)) is not None:
            one, other = (self._names[each] for each in found)
            raise RefusedError(
                f"{one} and {other} share memory, so that what is written last would win; register it once (tied "
                f"weights: as {one}, with the other's canonical name in its ParameterMetadata.aliases), or clone one"
            )
        files = files_mapped_twice()
        self._in_file_mapped_twice = lie_in(files, self._lies)
        if (found := mapped_twice(self._lies, files)) is not None:
            raise RefusedError(
                f"{self._names[found[0]]} and {self._names[found[1]]} lie in one place of a file that is mapped twice, "
                "so that what is written last would win; register one of them, or clone one"
            )

    def check_kept(self, names: Sequence[str], tensors: Sequence[torch.Tensor], whose: str = "") -> None:
        """Refuse tensors that must keep their values if they share memory with a tensor that commits write.

        If another registration writes, `whose` is " of " and its name.

        Raises:
            RefusedError: names a tensor of each.
        """
        every, count = [*self._tensors, *tensors], len(self._tensors)
        sharing = overlapping(every, extents(every)) if tensors else iter(())
        if (found := next(((a, b) for a, b in sharing if a < count <= b), None)) is not None:
            todo = "keep it in one registration and write it in none" if whose else "keep both, or clone one"
            raise RefusedError(
                f"{names[found[1] - count]}: it is to keep its values and shares memory with "
                f"{self._names[found[0]]}{whose}, which is written; {todo}"
            )

    def check_apart(self, other: WrittenMemory, whose: str) -> None:
        """Refuse `other` if it shares memory with this registration, which errors call `whose`.

        Raises:
            RefusedError: they share memory; names a tensor of each.
        """
        has_met, is_twice = met(self._lies, other._lies), other._in_file_mapped_twice
        if not has_met and not is_twice:
            return
        names, tensors, count = [*self._names, *other._names], [*self._tensors, *other._tensors], len(self._names)
        lies = extents(tensors)  # computed again: memory that was freed since registration no longer conflicts
        how = "shares memory with"
        sharing = overlapping(tensors, lies) if has_met else iter(())
        found = next(((a, b) for a, b in sharing if a < count <= b), None)
        if found is None and is_twice:
            how = "lies, by another mapping of a file, in one place with"
            found = mapped_twice(lies, files_mapped_twice())
        if found is not None:
            raise RefusedError(
                f"{names[found[1]]}: it {how} {names[found[0]]} of {whose}, and both would write it, so that a swap of "
                "one changes what the other serves; close the other registration first, or register a clone"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Owned:
    """The memory of one target.

    Attributes:
        pid: the process that registers it. A forked child copies this module's lists, but owns no memory.
        directory: the daemon's directory.
        model, replica, rank: the registration.
        tensors: the tensors that the target writes or keeps.
        shared: {name of a shared tensor: the registration that writes it}.
        owner: the target; None while it registers.
    """

    pid: int
    directory: str
    model: str
    replica: str
    rank: int
    tensors: TargetTensors
    shared: Mapping[str, Owned]
    owner: Owner | None = None

    @property
    def who(self) -> str:
        """The registration's name in errors."""
        return f"model {self.model!r} {target_rank(self.replica, self.rank)}"

    def is_registered_as(self, other: Owned) -> bool:
        """Return whether both are the same rank of a replica at one daemon; the coordinator admits one at a time."""
        mine = self.directory, self.model, self.replica, self.rank
        return mine == (other.directory, other.model, other.replica, other.rank)


class SharedOwners:
    """The owners of a target's shared tensors, and the version that each owner must serve together with the target's.

    The target's version is whole only while every owner serves the version that was decided with it, because shared
    tensors change when their owner commits, not when this target commits.
    """

    def __init__(self, shared: Mapping[str, Owned]) -> None:
        """`shared` is a return value of `sharing`."""
        self.needed = {one.owner: one.owner.serving() for one in shared.values() if one.owner is not None}

    def committed(self, beside: Iterable[VersionOf]) -> None:
        """Record the owners' versions that were decided with the version that the target commits now."""
        given = {one.model: (one.version, one.run) for one in beside}
        self.needed = {owner: given.get(owner.model) or owner.serving() for owner in self.needed}

    def obstacle(self) -> str:
        """Return why the target's version is not whole; "" if it is."""
        for owner, needed in self.needed.items():
            version, run = serving = owner.serving()
            if serving == needed and version is not None:
                continue
            name = f"model {owner.model!r} replica {owner.replica!r}, which owns a shared tensor,"
            if version is None:
                return f"{name} serves no version now: {owner.fenced or 'none was committed'}"
            if needed[0] is None:
                return f"{name} serves version {version}, and this version was not decided with it; swap both together"
            return (
                f"{name} serves version {version}{f' of run {run}' if version == needed[0] else ''}, and this version "
                f"was decided with its version {needed[0]}; it is whole once the owner serves that version: poll both "
                "targets, or swap both together"
            )
        return ""


def sharing(model: str, shared: Mapping[str, Any] | None) -> dict[str, Owned]:
    """Return the registrations that the argument `shared` of a target of `model` names.

    Raises:
        RefusedError: it is not a {name: Target}; or a target has ended, is written in place, has the same model, or
            belongs to another process.
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
        if target.is_in_place:
            raise RefusedError(
                f"shared[{shown(name)}]: {owned.who} is written in place, before its version is decided, and this "
                "target would compute with parts of two versions; register the owner without mode='in-place'"
            )
        found[name] = owned
    return found


def check_shared(tensors: TargetTensors, shared: Mapping[str, Owned]) -> tuple[SharedTensor, ...]:
    """Return the shared tensors in the form of the message to the coordinator.

    Raises:
        RefusedError: a tensor is not the same memory as a tensor that the owner's versions write.
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
    """A registration that owns memory.

    Attributes:
        model, replica: as registered.
        is_in_place: staging writes its live tensors.
        fenced: why it must not serve a version; "" otherwise.
    """

    model: str
    replica: str

    @property
    def is_in_place(self) -> bool:
        """See the class."""

    @property
    def fenced(self) -> str:
        """See the class."""

    def serving(self) -> tuple[int | None, str]:
        """Return the version that it serves and the trainer's incarnation (run); (None, "") if it serves no version."""

    def owned(self) -> Owned | None:
        """Return its memory; None if its registration has ended."""

    def claimed(self) -> Owned | None:
        """Return its memory; None if its registration has ended and it serves no version."""

    def forked(self) -> None:
        """Warn, in a forked child, if the parent's commits change weights there."""


# Process-wide, because memory belongs to the process, and two clients do not know each other. The references are weak,
# and an ended target owns no memory, so no address outlives its tensor.
_OWNERS: weakref.WeakSet[Owner] = weakref.WeakSet()

# Registrations in progress, in the order of their start. If two conflict, the later one is refused.
# Appending and removing need no lock. A lock could deadlock in a signal handler.
_REGISTERING: list[Owned] = []


def own(owner: Owner) -> None:
    """Record a target that has been registered; call this inside `registering`."""
    _OWNERS.add(owner)


@contextlib.contextmanager
def registering(mine: Owned) -> Iterator[None]:
    """Refuse memory that another target of this process writes or keeps; use around a registration.

    Raises:
        RefusedError: a tensor shares memory with a target, which another thread may still be registering; names both.
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
        return  # the coordinator refuses `mine`, unless it has removed `first` and the notification is still under way
    first.tensors.written.check_apart(mine.tensors.written, whose)
    first.tensors.written.check_kept(*_kept_beside(mine, first), f" of {whose}")
    mine.tensors.written.check_kept(*_kept_beside(first, mine), f" of {mine.who}, which registers now")


def _kept_beside(one: Owned, other: Owned) -> tuple[list[str], list[torch.Tensor]]:
    """Return names and tensors that `one` keeps, except the tensors that it shares with `other`."""
    shared = {name for name, owner in one.shared.items() if owner.is_registered_as(other)}
    kept = [(name, tensor) for name, tensor in zip(*one.tensors.unwritten(), strict=True) if name not in shared]
    return [name for name, _ in kept], [tensor for _, tensor in kept]


def _forked() -> None:
    for owner in list(_OWNERS):
        owner.forked()


os.register_at_fork(after_in_child=_forked)
