"""A client's tensors: described, recognised in arenas, fingerprinted, copied to and from arenas."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from refitd.buffers.cuda import MappedDeviceArena
from refitd.buffers.layout import packed_offsets
from refitd.client.devices import HOST, Arena, gpu_of, settle
from refitd.copy_services.measure import Span
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.module import describe_module, module_tensors
from refitd.dtypes import dtype_name
from refitd.errors import CommitError, RefusedError
from refitd.protocol.shards import Place
from refitd.transforms.mxfp8_buffers import MXFP8Buffer, held_of, is_quantized

Tensors = torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, torch.Tensor] | Mapping[str, Any]


class Fingerprint(NamedTuple):
    """What must not change about a tensor that a CUDA graph may have captured.

    They are taken twice in every pause, of every tensor: a named tuple is made in a third of a dataclass's time.
    """

    data_ptr: int
    storage_ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """Take a tensor's fingerprint."""
    return Fingerprint(
        tensor.data_ptr(), tensor.untyped_storage().data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    )


class TensorSet:
    """The tensors of one registration, in a fixed order, and their descriptions.

    Attributes:
        metadata: one for each value that was registered; of one in MXFP8, of the bfloat16 tensor that it stands for.
        values: what was registered, by name.
        quantized: the names of those in MXFP8.
        names, tensors: all that is live: of a value in MXFP8 its data and its scales.
    """

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
            metadata = [_whole(n, t, rank) for n, t in named.items()] if metadata is None else list(metadata)
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
        self.values: dict[str, Any] = named
        self.quantized = frozenset(name for name, value in named.items() if is_quantized(value))
        self.names, self.tensors = self._live(named)
        for m in self.metadata:
            shape, dtype = _stands_for(m.name, named[m.name])
            if tuple(m.shape) != shape or dtype_name(m.dtype) != dtype_name(dtype):
                raise RefusedError(
                    f"{m.name}: described as {tuple(m.shape)} {dtype_name(m.dtype)}, the tensor is "
                    f"{shape} {dtype_name(dtype)}; correct its ParameterMetadata"
                )
        self.arena_places: tuple[Place, ...] = ()  # set by the client that knows the arenas
        self._fingerprints = [fingerprint(tensor) for tensor in self._captured(named)]
        self.offsets, self.packed_bytes = packed_offsets([t.numel() * t.element_size() for t in self.tensors])

    def places(self, arenas: Mapping[int, Arena]) -> tuple[Place, ...]:
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
            if tensor.device.type != "cpu" or gpu_of(tensor) != HOST or not tensor.is_contiguous():
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

    def check_unmoved(self, when: str = "since registration") -> None:
        """Raise CommitError when a registered tensor has been replaced, moved or reshaped; `when` is for its text."""
        named = self.values
        if self._module is not None:
            named = module_tensors(self._module)
            if list(named) != list(self.values):
                raise CommitError(
                    f"the module's tensors are not those registered (changed: "
                    f"{sorted(set(named) ^ set(self.values))[:10]}); register it again"
                )
        try:
            current = self._captured(named)
        except RefusedError as exc:
            raise CommitError(f"{exc}; it has changed {when}") from exc
        for name, was, tensor in zip(self.names, self._fingerprints, current, strict=True):
            if fingerprint(tensor) != was:
                raise CommitError(
                    f"{name}: its storage has changed {when} ({was} is now {fingerprint(tensor)}); "
                    "keep parameters in place, or register again"
                )

    def _captured(self, named: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors themselves, in the order of `names`; `tensors` are views of their bytes."""
        if not self.quantized:
            return list(named.values())
        found: list[torch.Tensor] = []
        for name, value in named.items():
            if name not in self.quantized:
                found.append(value)
            elif isinstance(value, MXFP8Buffer):
                found += [value.data, value.scale]
            else:
                found += self._live({name: value})[1]
        return found

    def _live(self, named: Mapping[str, Any]) -> tuple[list[str], list[torch.Tensor]]:
        """Return the live tensors of what is registered, and what messages call them."""
        names: list[str] = []
        tensors: list[torch.Tensor] = []
        for name, value in named.items():
            if name not in self.quantized:
                if not isinstance(value, torch.Tensor):
                    held_of(name, value)  # says what is wrong with it
                names.append(name)
                tensors.append(value.detach())
                continue
            held = held_of(name, value)
            scale = held.scale if held.scale is not None else held.swizzled
            assert scale is not None
            names += [f"{name}.data", f"{name}.scale"]
            tensors += [held.data, scale]
        return names, tensors

    def settle(self) -> None:
        """Return once the GPUs that the tensors lie on have done what this process gave them."""
        for gpu in {gpu_of(tensor) for tensor in self.tensors}:
            settle(gpu)

    def write_to(self, arena: Arena) -> None:
        """Copy every tensor into an arena in refitd's layout."""
        for tensor, offset in zip(self.tensors, self.offsets, strict=True):
            _copy(tensor, arena, offset, into_arena=True)

    def read_from(self, arena: Arena) -> None:
        """Copy every tensor out of an arena in refitd's layout, in place."""
        for tensor, offset in zip(self.tensors, self.offsets, strict=True):
            _copy(tensor, arena, offset, into_arena=False)


def tensors_in(arena: Arena, wanted: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> dict[str, torch.Tensor]:
    """Return tensors of these shapes and dtypes laid out in a writable arena."""
    offsets, _ = packed_offsets([prod(shape) * dtype.itemsize for shape, dtype in wanted.values()])
    return {
        name: _view(arena, offset, shape, dtype)
        for offset, (name, (shape, dtype)) in zip(offsets, wanted.items(), strict=True)
    }


def packed_bytes(wanted: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> int:
    """Return the bytes an arena needs for these tensors."""
    return packed_offsets([prod(shape) * dtype.itemsize for shape, dtype in wanted.values()])[1]


def _view(arena: Arena, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if prod(shape) == 0:
        where = arena.tensor.device if isinstance(arena, MappedDeviceArena) else None
        return torch.empty(tuple(shape), dtype=dtype, device=where)
    if isinstance(arena, MappedDeviceArena):
        return arena.tensor[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
    with warnings.catch_warnings():
        # a staging arena is mapped for reading only, and only read
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(arena.bytes, dtype=dtype, count=prod(shape), offset=offset)
    return flat.view(tuple(shape))


def write_tensor(tensor: torch.Tensor, arena: Arena, offset: int) -> None:
    """Copy a tensor to a place in an arena."""
    _copy(tensor, arena, offset, into_arena=True)


def _copy(tensor: torch.Tensor, arena: Arena, offset: int, *, into_arena: bool) -> None:
    if tensor.device.type == "cpu" and arena.device == HOST and tensor.is_contiguous():
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


def _place(tensor: torch.Tensor, arenas: Mapping[int, Arena]) -> Place | None:
    if tensor.device.type not in ("cpu", "cuda") or any(stride < 0 for stride in tensor.stride()):
        return None
    es = tensor.element_size()
    span = (sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1) * es
    for number, arena in arenas.items():
        if arena.device != gpu_of(tensor):
            continue
        offset = arena.offset_of(tensor.data_ptr(), span if tensor.numel() else 0)
        if offset is not None:
            return Place(number, offset, tuple(stride * es for stride in tensor.stride()))
    return None


def _whole(name: str, value: Any, rank: int) -> ParameterMetadata:
    shape, dtype = _stands_for(name, value)
    return ParameterMetadata(
        name=name,
        shape=shape,
        dtype=dtype,
        element_size=dtype.itemsize,
        owner_rank=rank,
        resolved_name=name,
    )


def _stands_for(name: str, value: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of a tensor, or of the bfloat16 one that one in MXFP8 stands for."""
    if isinstance(value, torch.Tensor) and not is_quantized(value):
        return tuple(value.shape), value.dtype
    return tuple(held_of(name, value).data.shape), torch.bfloat16
