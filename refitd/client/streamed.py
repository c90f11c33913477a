"""Publish versions whose tensors are produced one by one and never all in memory: exports, gathers, merges."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from refitd.buffers.arena import MappedArena
from refitd.client.arena_copies import copy_bytes
from refitd.client.arguments import seconds, whole
from refitd.client.connection import Connection
from refitd.client.devices import Arena
from refitd.client.given import held_of_given
from refitd.client.reconnect import Give, Line
from refitd.client.reentrant_lock import Turn, check_process
from refitd.client.rounding import offer_unrounded
from refitd.client.slots import SourceSlots
from refitd.client.source_casts import SourceCasts
from refitd.describe.metadata import ParameterMetadata, plain
from refitd.describe.renames import Names, rename
from refitd.dtypes import dtype_name
from refitd.errors import PeerLost, RefitdError, RefusedError, from_code
from refitd.protocol import local
from refitd.protocol.base import Message
from refitd.protocol.shards import shard_of
from refitd.protocol.target_forms import staged
from refitd.text import nearest, shown


class Unread(ABC):
    """A tensor that is not in memory yet, such as one of a file: it is read straight into the slot.

    Attributes:
        shape: as of a torch.Tensor.
        dtype: as of a torch.Tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @abstractmethod
    def load(self) -> torch.Tensor:
        """Return it as a tensor in memory of its own."""

    @abstractmethod
    def read_into(self, to: torch.Tensor) -> None:
        """Read it into a contiguous tensor in main memory of the same shape and dtype."""


Weights = Iterable[tuple[str, torch.Tensor | Unread]]


class StreamedSource:
    """A source whose shard is declared by shapes. Made by `Client.declare_source`."""

    def __init__(
        self,
        line: Line,
        connection: Connection,
        model: str,
        held: Sequence[ParameterMetadata],
        casts: SourceCasts,
        registered: local.SourceRegistered,
        slots: SourceSlots,
        closed: Callable[[StreamedSource], object],
    ) -> None:
        """`held` are the declared tensors; `closed` is called when the source is closed."""
        self._line = line
        self._connection = connection
        self._failure: local.Failure | None = None  # why it could not be registered again
        self._pid = os.getpid()
        self._held = held
        self._casts = casts
        self._exact: set[str] = set()  # canonical names that are offered unrounded
        self._wire = self._widen(())
        self._slots = slots
        self._told = closed
        self._closed = False
        self._turn = Turn(f"a version of {model!r} is being published")
        self._next_version = registered.next_version
        self.model = model
        self.member = registered.member
        self.run = registered.run
        connection.listen(self.member, self._notified)

    @property
    def next_version(self) -> int:
        """The lowest version that may be published."""
        check_process(self._pid)
        return self._next_version

    def publish_from(self, version: int, weights: Weights, *, timeout: float = 60.0) -> None:
        """Publish the tensors that an iterator yields as `version`.

        Each tensor is copied into a slot, and cast if `cast` says so. It may be freed or changed when the iterator is
        advanced.

        Args:
            version: greater than all earlier ones.
            weights: yields (name, tensor), each declared name once, in any order, on any device.
            timeout: seconds for a slot to become free, and again for the daemon's final answer; the iterator's own time
                is unlimited.

        Raises:
            RefusedError: a name is unknown, repeated or missing, a tensor's shape or dtype is not the declared one, or
                the version is not newer. Nothing is published.
            DeadlineExceeded: every slot is still being read.
            PeerLost: the daemon has ended before the iterator did. Nothing is published; publish again.
        """
        version, timeout = whole("version", version), seconds("timeout", timeout)
        check_process(self._pid)
        with self._turn.taken(timeout):
            connection = self._line.steady(timeout)
            self._check_open()
            offer_unrounded(self, connection, self._wire, self._widen, timeout)
            member = self.member
            begin = local.BeginPublish(member=member, version=version, timeout_s=timeout)
            granted = connection.request(begin, local.SlotGranted, timeout + 2.0).slot
            try:
                slot = self._slots.granted(granted, connection)
                write_stream(slot, self._held, self._wire, self._offsets, weights)
            except BaseException:
                with contextlib.suppress(RefitdError):
                    connection.request(local.Withdraw(member=member, version=version), local.Done, 10.0)
                raise
            self._next_version = max(self._next_version, version + 1)
            before = self._slots.offered(version, granted, slot)
            done = local.Publish(member=member, version=version, slot=granted)
            try:
                connection.request(done, local.Done, timeout)
            except RefusedError:
                self._slots.refused(before, granted)
                raise
            except PeerLost:  # the next daemon is told of the finished slot, unless it was there before that
                self._line.steady(timeout)
                if not self._slots.passed_on(version):
                    raise

    def close(self) -> None:
        """End the registration and withdraw all its versions."""
        if self._closed:
            return
        connection, member = self._connection, self.member
        is_registered = bool(self._slots.arenas)  # not if it could not be registered again with wider tensors
        self.release()
        self._told(self)
        if is_registered:
            self._line.deregister(connection, member)

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Nothing of it lies in arenas that have got other numbers."""

    def register_again(self, connection: Connection, give: Give, timeout: float) -> None:
        """Register over a new connection; raises RefitdError if that is refused, or the daemon is gone again."""
        registered = self._slots.register_again(connection, give, timeout)
        self._next_version = max(self._next_version, registered.next_version)
        self.member, self.run = registered.member, registered.run
        self._connection = connection
        connection.listen(self.member, self._notified)

    def give_up(self, failure: local.Failure) -> None:
        """Take note that it could not be registered again."""
        self._failure = failure

    def _widen(self, exact: Collection[str]) -> list[ParameterMetadata]:
        """Offer these canonical tensors unrounded from now on; return the descriptions of all that is offered."""
        self._exact |= {*exact}
        self._wire = self._casts.offered(self._held, self._exact)
        self._offsets = staged(shard_of(self._wire), ()).wire
        return self._wire

    def _check_open(self) -> None:
        if self._failure is not None:
            raise from_code(self._failure.code, self._failure.message)
        if self._closed:
            raise RefusedError(f"this source of model {self.model!r} is closed; declare it again")

    def arenas(self) -> set[int]:
        """Return the arenas from `allocate` that it uses: none."""
        return set()

    def release(self) -> None:
        """Drop the slots; nothing can be published afterwards."""
        self._connection.unlisten(self.member)
        self._slots.arenas = ()
        self._closed = True

    def _notified(self, message: Message) -> None:
        """Ignore notifications: the daemon sends sources only the ends of leases, and this source lends nothing."""


def declared(
    shapes: Mapping[str, tuple[Sequence[int], torch.dtype]],
    metadata: Sequence[ParameterMetadata] | None,
    rank: int,
    names: Names | None = None,
) -> list[ParameterMetadata]:
    """Return the descriptions of declared tensors.

    Raises:
        RefusedError: an entry is malformed, or shapes and metadata disagree.
        PlanError: a tensor has no canonical name in `names`.
    """
    wire = _declared(shapes, metadata, rank)
    return wire if names is None else rename(wire, names, is_target=False)


def _declared(
    shapes: Mapping[str, tuple[Sequence[int], torch.dtype]], metadata: Sequence[ParameterMetadata] | None, rank: int
) -> list[ParameterMetadata]:
    found = {}
    for name, value in dict(shapes).items():
        try:
            shape, dtype = value
            size = tuple(whole(f"shape of {name}", n) for n in shape)
        except (TypeError, ValueError):
            raise RefusedError(f"{name}: {shown(value)}, expected (shape, dtype)") from None
        if not isinstance(dtype, torch.dtype):
            raise RefusedError(f"{name}: its dtype is {shown(dtype)}, expected a torch.dtype")
        found[name] = size, dtype
    if metadata is None:
        return [
            ParameterMetadata(name, shape, dtype, dtype.itemsize, owner_rank=rank, resolved_name=name)
            for name, (shape, dtype) in found.items()
        ]
    said = {m.name: plain(m) for m in metadata}
    if wrong := sorted(said.keys() ^ found.keys()):
        raise RefusedError(f"shapes and metadata do not name the same tensors (only one has: {wrong[:10]})")
    for name, (shape, dtype) in found.items():
        m = said[name]
        if (tuple(m.shape), dtype_name(m.dtype)) != (shape, dtype_name(dtype)):
            raise RefusedError(
                f"{name}: declared as {list(shape)} {dtype_name(dtype)}, its metadata say {list(m.shape)} "
                f"{dtype_name(m.dtype)}"
            )
    return [said[name] for name in found]


def write_stream(
    arena: Arena,
    declared: Sequence[ParameterMetadata],
    wire: Sequence[ParameterMetadata],
    offsets: Sequence[int],
    weights: Weights,
) -> dict[str, torch.Tensor]:
    """Copy tensors into a slot as the iterator yields them; return views of the slot by name.

    The iterator yields them as `declared`; the slot holds them as in `wire`.

    Raises:
        RefusedError: as `StreamedSource.publish_from`; parts of the slot have been written.
    """
    memory = torch.from_numpy(arena.bytes) if isinstance(arena, MappedArena) else arena.tensor
    places = {m.name: (m, to, offset) for m, to, offset in zip(declared, wire, offsets, strict=True)}
    written: dict[str, torch.Tensor] = {}
    for item in weights:
        try:
            name, tensor = item
        except (TypeError, ValueError):
            raise RefusedError(f"the iterator yields {shown(item)}, expected (name, tensor)") from None
        if name in written:
            raise RefusedError(f"{name}: the iterator yields it twice")
        if name not in places:
            close = ", ".join(nearest(str(name), places.keys() - written.keys()))
            raise RefusedError(f"{shown(name)}: no tensor is declared so; nearest: {close or 'none is left'}")
        m, to, offset = places[name]
        held = tensor if isinstance(tensor, Unread) else held_of_given(name, tensor)
        problem = _stream_problem(m, held)
        if problem:
            raise RefusedError(f"{name}: {problem}")
        dtype: Any = getattr(torch, dtype_name(to.dtype))
        slot = memory[offset : offset + prod(held.shape) * dtype.itemsize].view(dtype).view(held.shape)
        if isinstance(held, Unread) and dtype == held.dtype and slot.device.type == "cpu":
            held.read_into(slot)
            written[name] = slot
            continue
        if isinstance(held, Unread):
            held = held.load()
        if dtype == held.dtype:
            copy_bytes(slot, held)
        else:
            slot.copy_(held.detach())
        written[name] = slot
    if missing := [name for name in places if name not in written]:
        raise RefusedError(f"the iterator has ended without {len(missing)} of {len(places)} tensors: {missing[:10]}")
    if memory.device.type == "cuda":
        torch.cuda.synchronize(memory.device)
    return written


def _stream_problem(m: ParameterMetadata, tensor: torch.Tensor | Unread) -> str:
    if (tuple(tensor.shape), dtype_name(tensor.dtype)) != (tuple(m.shape), dtype_name(m.dtype)):
        return (
            f"it is {list(tensor.shape)} {dtype_name(tensor.dtype)}, declared were {list(m.shape)} "
            f"{dtype_name(m.dtype)}"
        )
    return ""
