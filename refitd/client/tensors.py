"""A client's tensors: described, recognised in arenas, fingerprinted, copied to and from arenas."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from refitd.buffers.arena import MappedArena
from refitd.buffers.layout import packed_offsets
from refitd.copy_services.measure import Span
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.module import describe_module, module_tensors
from refitd.dtypes import dtype_name
from refitd.errors import CommitError, RefusedError
from refitd.protocol.shards import Place

Tensors = torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What must not change about a tensor that a CUDA graph may have captured."""

    data_ptr: int
    storage_ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """Take a tensor's fingerprint."""
    return Fingerprint(
        tensor.data_ptr(),
        tensor.untyped_storage().data_ptr(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
    )


class TensorSet:
    """The tensors of one registration, in a fixed order, and their descriptions."""

    def __init__(
        self,
        tensors: Tensors,
        rank: int,
        metadata: Sequence[ParameterMetadata] | None,
        pg_collection: Any,
        num_experts: int | None,
    ) -> None:
        """Describe a module, or take a dict with (or, for whole tensors, without) explicit metadata.

        Raises:
            RefusedError: tensors and metadata do not belong together.
        """
        self._module: torch.nn.Module | Sequence[torch.nn.Module] | None = None
        if isinstance(tensors, Mapping):
            named = dict(tensors)
            metadata = _whole(named, rank) if metadata is None else list(metadata)
        else:
            self._module = tensors
            named = module_tensors(tensors)
            if metadata is None:
                metadata = describe_module(tensors, rank, pg_collection=pg_collection, num_experts=num_experts)
        described = {m.name: m for m in metadata}
        if missing := sorted(named.keys() ^ described.keys()):
            raise RefusedError(
                f"tensors and metadata name different parameters: {missing[:10]}; give one ParameterMetadata per tensor"
            )
        self.metadata = [described[name] for name in named]
        self.names = list(named)
        self.tensors = [tensor.detach() for tensor in named.values()]
        for m, tensor in zip(self.metadata, self.tensors, strict=True):
            if tuple(m.shape) != tuple(tensor.shape) or dtype_name(m.dtype) != dtype_name(tensor.dtype):
                raise RefusedError(
                    f"{m.name}: described as {tuple(m.shape)} {dtype_name(m.dtype)}, the tensor is "
                    f"{tuple(tensor.shape)} {dtype_name(tensor.dtype)}; correct its ParameterMetadata"
                )
        self.arena_places: tuple[Place, ...] = ()  # set by the client that knows the arenas
        self._fingerprints = [fingerprint(tensor) for tensor in self.tensors]
        self.offsets, self.packed_bytes = packed_offsets([t.numel() * t.element_size() for t in self.tensors])

    def places(self, arenas: Mapping[int, MappedArena]) -> tuple[Place, ...]:
        """Return where every tensor lies in arenas; empty unless all of them do."""
        found: list[Place] = []
        for tensor in self.tensors:
            place = _place(tensor, arenas)
            if place is None:
                return ()
            found.append(place)
        return tuple(found)

    def addresses(self) -> tuple[int, ...]:
        """Return where each tensor starts in this process.

        Raises:
            RefusedError: a tensor is not contiguous CPU memory, so that nobody else can read it in place.
        """
        for name, tensor in zip(self.names, self.tensors, strict=True):
            if tensor.device.type != "cpu" or not tensor.is_contiguous():
                raise RefusedError(
                    f"{name}: only contiguous CPU tensors can be pulled (found {tensor.device}, strides "
                    f"{tuple(tensor.stride())}); publish a snapshot instead"
                )
        return tuple(tensor.data_ptr() for tensor in self.tensors)

    def spans(self) -> tuple[Span, ...]:
        """Return the memory of every tensor that `addresses` allows: (address, rows, bytes of a row)."""
        found = []
        for address, tensor in zip(self.addresses(), self.tensors, strict=True):
            row = (tensor.shape[-1] if tensor.dim() > 1 else tensor.numel()) * tensor.element_size()
            if row:
                found.append((address, tensor.numel() * tensor.element_size() // row, row))
        return tuple(found)

    def check_unmoved(self) -> None:
        """Raise CommitError when a registered tensor has been replaced, moved or reshaped since."""
        current = self.tensors
        if self._module is not None:
            named = module_tensors(self._module)
            if list(named) != self.names:
                raise CommitError(
                    f"the module's tensors are not those registered (changed: "
                    f"{sorted(set(named) ^ set(self.names))[:10]}); register it again"
                )
            current = list(named.values())
        for name, was, tensor in zip(self.names, self._fingerprints, current, strict=True):
            if fingerprint(tensor) != was:
                raise CommitError(
                    f"{name}: its storage has changed since registration ({was} is now {fingerprint(tensor)}); "
                    "keep parameters in place, or register again"
                )

    def write_to(self, arena: MappedArena) -> None:
        """Copy every tensor into an arena in refitd's layout."""
        for tensor, offset in zip(self.tensors, self.offsets, strict=True):
            _copy(tensor, arena, offset, into_arena=True)

    def read_from(self, arena: MappedArena) -> None:
        """Copy every tensor out of an arena in refitd's layout, in place."""
        for tensor, offset in zip(self.tensors, self.offsets, strict=True):
            _copy(tensor, arena, offset, into_arena=False)


def tensors_in(arena: MappedArena, wanted: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> dict[str, torch.Tensor]:
    """Return tensors of these shapes and dtypes laid out in a writable arena."""
    offsets, _ = packed_offsets([prod(shape) * dtype.itemsize for shape, dtype in wanted.values()])
    return {
        name: _view(arena, offset, shape, dtype)
        for offset, (name, (shape, dtype)) in zip(offsets, wanted.items(), strict=True)
    }


def packed_bytes(wanted: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> int:
    """Return the bytes an arena needs for these tensors."""
    return packed_offsets([prod(shape) * dtype.itemsize for shape, dtype in wanted.values()])[1]


def _view(arena: MappedArena, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if prod(shape) == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    with warnings.catch_warnings():
        # a staging arena is mapped for reading only, and only read
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(arena.bytes, dtype=dtype, count=prod(shape), offset=offset)
    return flat.view(tuple(shape))


def _copy(tensor: torch.Tensor, arena: MappedArena, offset: int, *, into_arena: bool) -> None:
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        # one memmove, without the interpreter's lock and without waking OpenMP
        here, there = tensor.data_ptr(), arena.address + offset
        ctypes.memmove(*((there, here) if into_arena else (here, there)), tensor.numel() * tensor.element_size())
        return
    staged = _view(arena, offset, tensor.shape, tensor.dtype)
    with torch.no_grad():
        if into_arena:
            staged.copy_(tensor)
        else:
            tensor.copy_(staged)


def _place(tensor: torch.Tensor, arenas: Mapping[int, MappedArena]) -> Place | None:
    if tensor.device.type != "cpu" or any(stride < 0 for stride in tensor.stride()):
        return None
    es = tensor.element_size()
    span = (sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1) * es
    for number, arena in arenas.items():
        offset = arena.offset_of(tensor.data_ptr(), span if tensor.numel() else 0)
        if offset is not None:
            return Place(number, offset, tuple(stride * es for stride in tensor.stride()))
    return None


def _whole(named: Mapping[str, torch.Tensor], rank: int) -> list[ParameterMetadata]:
    return [
        ParameterMetadata(
            name=name,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            element_size=tensor.element_size(),
            owner_rank=rank,
            resolved_name=name,
        )
        for name, tensor in named.items()
    ]
