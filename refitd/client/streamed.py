"""Publish versions whose tensors are produced one by one and are never all in memory: exports, gathers, merges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from refitd.buffers.arena import MappedArena
from refitd.buffers.cuda import name_of
from refitd.client.arenas import Arena, Wrote, copy_bytes, number_of
from refitd.client.calls import Layout, check_process, seconds, whole
from refitd.client.connection import Connection
from refitd.client.given import held_of_given
from refitd.client.reconnect import Line
from refitd.client.slot_source import Progress, SlotSource, Slotted, SourceSlots, register_slots
from refitd.client.source_tensors import SourceCasts
from refitd.describe.memory import HOST
from refitd.describe.metadata import ParameterMetadata, plain
from refitd.describe.renames import Names, rename
from refitd.dtypes import dtype_name
from refitd.errors import PeerLost, RefusedError
from refitd.protocol import local
from refitd.protocol.base import Message
from refitd.protocol.shards import shard_of, staged
from refitd.text import nearest, shown

if TYPE_CHECKING:
    from refitd.client.client import Client


class Unread(ABC):
    """A tensor that is not in memory yet, for example a tensor in a file. It is read directly into the slot.

    Attributes:
        shape: as of a torch.Tensor.
        dtype: as of a torch.Tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @abstractmethod
    def load(self) -> torch.Tensor:
        """Read the tensor into new memory and return it."""

    @abstractmethod
    def read_into(self, to: torch.Tensor) -> None:
        """Read the tensor into `to`: contiguous, in main memory, with the same shape and dtype."""


Weights = Iterable[tuple[str, torch.Tensor | Unread]]


class StreamedSource(SlotSource):
    """A source whose shard is declared by shapes. Created by `Client.declare_source`."""

    def __init__(
        self,
        line: Line,
        connection: Connection,
        model: str,
        held: Sequence[ParameterMetadata],
        casts: SourceCasts,
        registered: local.Registered,
        slots: SourceSlots,
        closed: Callable[[StreamedSource], object],
    ) -> None:
        """`held` are the declared tensors; `closed` is called when the source is closed."""
        self._held = held
        self._casts = casts
        self._exact: set[str] = set()  # canonical names that are offered unrounded
        super().__init__(line, connection, model, registered, slots, self._widen(()), closed)

    def publish_from(self, version: int, weights: Weights, *, timeout: float = 60.0) -> None:
        """Publish the tensors that an iterator yields as `version`.

        Each tensor is copied into a slot, and cast if the source was declared with `cast`. The caller may free or
        change a tensor when the iterator is advanced.

        Args:
            version: greater than all earlier versions.
            weights: yields (name, tensor), each declared name once, in any order, on any device.
            timeout: seconds to wait for a free slot, and again for the daemon's final answer. The time that the
                iterator takes is unlimited.

        Raises:
            RefusedError: a name is unknown, repeated or missing, a tensor's shape or dtype differs from the declared
                one, or the version is not newer. The version is not published.
            DeadlineExceeded: every slot is still being read.
            PeerLost: the daemon ended before the iterator did. The version is not published; publish it again.
        """
        version, timeout = whole("version", version), seconds("timeout", timeout)
        check_process(self._pid)
        with self._turn.taken(timeout):
            connection = self._line.steady(timeout)
            self._check_open()
            self._offer_unrounded(connection, timeout)
            with self._filling(connection, version, timeout) as filling:
                wrote = Progress(connection, version, filling, partial(_settle, filling.arena))
                write_stream(filling.arena, self._held, self._wire, self._offsets, weights, wrote)
            try:
                self._filled(connection, version, filling, timeout)
            except PeerLost:  # the next daemon learns of the finished slot, unless it connected before `offered`
                self._line.steady(timeout)
                if not self._slots.passed_on(version):
                    raise

    def _widen(self, exact: Collection[str]) -> Sequence[ParameterMetadata]:
        self._exact |= {*exact}
        wire = self._casts.offered(self._held, self._exact)
        self._offsets = staged(shard_of(wire), ()).wire
        return wire

    def _notified(self, message: Message) -> None:
        """Ignore notifications: the daemon notifies sources only when leases end, and this source has no leases."""


def declare(
    client: Client,
    shapes: Mapping[str, tuple[Sequence[int], torch.dtype]],
    layout: Layout,
    slotted: Slotted,
    is_partial: bool,
    origin: str,
) -> StreamedSource:
    """Register a source by the shapes of its tensors; raises as `Client.declare_source`."""
    layout, slots = layout.checked(), slotted.checked_slots()
    held = declared(shapes, layout.metadata, layout.rank, layout.names)
    casts = SourceCasts(slotted.cast, elsewhere=layout.world_size > 1)
    gpu = number_of(slotted.device or "cpu")
    message = local.RegisterSource(
        model=slotted.model,
        rank=layout.rank,
        world_size=layout.world_size,
        shard=shard_of(casts.offered(held), is_partial=is_partial),
        slots=slots,
        live=(),
        device="" if gpu == HOST else name_of(gpu),
        timeout_s=slotted.timeout,
        origin=origin,
    )
    connection, registered, made = register_slots(client, message)
    source = StreamedSource(
        client._connection, connection, slotted.model, held, casts, registered, made, client._forget
    )
    client._add(source, connection)
    return source


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
    wrote: Wrote = None,
) -> dict[str, torch.Tensor]:
    """Copy tensors into a slot as the iterator yields them; return views of the slot by name.

    `wrote` is called with the offset and bytes of each tensor.

    `declared` describes the tensors from the iterator; `wire` describes the tensors in the slot.

    Raises:
        RefusedError: as in `StreamedSource.publish_from`. Some tensors may already be in the slot.
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
        else:
            value = held.load() if isinstance(held, Unread) else held
            if dtype == value.dtype:
                copy_bytes(slot, value)
            else:
                slot.copy_(value.detach())
        written[name] = slot
        if wrote is not None:
            wrote(offset, slot.nbytes)
    if missing := [name for name in places if name not in written]:
        raise RefusedError(f"the iterator has ended without {len(missing)} of {len(places)} tensors: {missing[:10]}")
    _settle(arena)
    return written


def _settle(arena: Arena) -> None:
    """Wait until a GPU has written what was copied into an arena on it."""
    if not isinstance(arena, MappedArena) and arena.tensor.device.type == "cuda":
        torch.cuda.synchronize(arena.tensor.device)


def _stream_problem(m: ParameterMetadata, tensor: torch.Tensor | Unread) -> str:
    if (tuple(tensor.shape), dtype_name(tensor.dtype)) != (tuple(m.shape), dtype_name(m.dtype)):
        return (
            f"it is {list(tensor.shape)} {dtype_name(tensor.dtype)}, declared were {list(m.shape)} "
            f"{dtype_name(m.dtype)}"
        )
    return ""
