"""Place the parameters and buffers that a block of code registers into one arena, during the block or at its end."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from refitd.buffers.layout import ALIGNMENT
from refitd.client.adopt import Adoption, StoragePart, holders, point
from refitd.client.build import is_alone, move_alone, registrations
from refitd.client.devices import Arena, Home
from refitd.client.given import refuse_all
from refitd.describe.memory import HOST
from refitd.errors import RefusedError

_thread = threading.local()  # `block`: the one that this thread is in


@dataclass(slots=True)
class Placed:
    """The result of `Client.memory`; zero and empty until its block has ended.

    Attributes:
        tensors, nbytes, left: as in `Adopted`.
    """

    tensors: int = 0
    nbytes: int = 0
    left: dict[str, str] = field(default_factory=dict)


def check_outside(what: str) -> None:
    """Raise RefusedError if this thread is in a block already: both would take the same tensors."""
    block = getattr(_thread, "block", None)
    if block is not None:
        raise RefusedError(f"{what} inside {block.called} of the same thread; call it outside that block")


class MemoryBlock:
    """A context in which this thread's registrations of modules, parameters and buffers are noted.

    Attributes:
        called: what the user has called, for errors.
        space: if there is one, parameters and buffers move there as they are registered.
    """

    def __init__(self, model: str) -> None:
        self.called = f"client.memory({model!r})"
        self.space: Space | None = None
        self._seen: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._last: tuple[torch.nn.Module, str] | None = None
        self._hooks: AbstractContextManager[None] = registrations(self._parameter, self._registers, self._child)

    def __enter__(self) -> MemoryBlock:
        self._hooks.__enter__()
        _thread.block = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        _thread.block = None
        self._last = None
        self._hooks.__exit__(None, None, None)

    def roots(self) -> list[torch.nn.Module]:
        """Return the modules in which something was registered and that are in none of the others.

        Raises:
            RefusedError: there is none.
        """
        found = self._outermost()
        if len(found) > 1:
            del found
            gc.collect()  # a discarded module may be part of a cycle
            found = self._outermost()
        if not found:
            raise RefusedError(
                f"{self.called}: nothing has been registered in a module that still exists; build or load the model "
                "inside the block, in the thread that has entered it, and keep it in a variable"
            )
        return found

    def _outermost(self) -> list[torch.nn.Module]:
        alive = [module for seen in self._seen.values() if (module := seen()) is not None]
        inside = {id(one) for module in alive for one in module.modules() if one is not module}
        return [module for module in alive if id(module) not in inside]

    def _child(self, module: torch.nn.Module, name: str, child: Any) -> None:
        self._seen[id(module)] = weakref.ref(module)

    def _parameter(self, module: torch.nn.Module, name: str, param: torch.nn.Parameter) -> None:
        self._registers(module, name)
        self._place(module, name, param)

    def _registers(self, module: torch.nn.Module, name: str, _: Any = None) -> None:
        """Record a registration, and place the tensors registered before it.

        Only then does torch say whether a buffer is persistent, and loaders have let go of a parameter's value.
        """
        self._child(module, name, None)
        last, self._last = self._last, (module, name)
        if last is not None:
            owner, name = last
            value: Any = owner._parameters.get(name)
            if value is None and name not in owner._non_persistent_buffers_set:
                value = owner._buffers.get(name)
            self._place(owner, name, value)

    def _place(self, module: torch.nn.Module, name: str, value: Any) -> None:
        space = self.space
        if space is not None and isinstance(value, torch.Tensor) and is_alone(value, space.arena) and value.numel():
            space.place(f"{type(module).__name__}.{name}", value)


class _Region(NamedTuple):
    """Bytes [start, end) of the arena, taken by a storage; None: reserved for one."""

    start: int
    end: int
    name: str
    storage: StorageWeakRef | None = None
    tensor: weakref.ref[torch.Tensor] | None = None

    def is_free(self) -> bool:
        """Whether no tensor uses these bytes any more."""
        return self.storage is not None and self.storage.expired()


class Space:
    """An arena that is being filled, and its used bytes."""

    def __init__(self, arena: Arena, called: str) -> None:
        """`called` is what the user has called, for errors."""
        self.arena = arena
        self._called = called
        self._regions: list[_Region] = []
        self._end = 0

    def place(self, name: str, tensor: torch.Tensor) -> None:
        """Move an unshared tensor into the arena if there is room; if not, the block's end tries again."""
        start = self._room(tensor.untyped_storage().nbytes())
        if start is not None:
            move_alone(tensor, self.arena, start)
            storage = tensor.untyped_storage()
            end = start + _rounded(storage.nbytes())
            self._regions.append(_Region(start, end, name, StorageWeakRef(storage), weakref.ref(tensor)))

    def adopt(self, roots: list[torch.nn.Module], arenas: Mapping[int, Home]) -> Adoption:
        """Move these modules' remaining tensors into the arena, and all other tensors out of it.

        Raises:
            RefusedError: a tensor cannot be moved, or there is no room. The modules are as they were.
        """
        adoption = Adoption(roots, arenas, home=self.arena)
        if not adoption.parts:
            raise RefusedError(f"{self._called}: there is nothing to place ({adoption.left}); leave the block out")
        if adoption.gpu != self.arena.device:
            raise RefusedError(
                f"{self._called}: the model lies {_where(adoption.gpu)}, and nbytes= asks for memory "
                f"{_where(self.arena.device)}; say device=, or leave nbytes out"
            )
        self._let_go({part.storage._cdata for part in adoption.parts})
        adoption.lay_out(self._offsets(adoption.parts))
        adoption.perform(self.arena)
        return adoption

    def put_back(self) -> None:
        """Give every tensor that was moved into the arena memory of its own, except shared ones."""
        for region in self._regions:
            if (tensor := self._only_tensor(region)) is not None:
                _move_out(tensor)

    def _let_go(self, kept: set[int]) -> None:
        """Move tensors out that are in no module or no version: an exchange of arenas would change their values."""
        strays = [one for one in self._regions if one.storage and one.storage.cdata not in kept]
        if not all(region.is_free() for region in strays):
            gc.collect()  # the holder may be part of a cycle
        problems = []
        for region in [one for one in strays if not one.is_free()]:
            if (tensor := self._only_tensor(region)) is not None:
                _move_out(tensor)
            else:
                problems.append(
                    f"{region.name}: it is in no module any more, but views of it, or a state dict, are held; drop "
                    "them before the block ends"
                )
        refuse_all(problems)

    def _only_tensor(self, region: _Region) -> torch.Tensor | None:
        """Return the tensor that was moved to a region, if it is the only one there."""
        tensor = None if region.tensor is None else region.tensor()
        if tensor is None or region.storage is None or tensor.untyped_storage()._cdata != region.storage.cdata:
            return None
        return tensor if holders(tensor.untyped_storage()) == 1 else None

    def _offsets(self, parts: list[StoragePart]) -> list[int]:
        """Return the present or future offset of each part; raises RefusedError if there is no room."""
        found, missing = [], []
        for part in parts:
            offset = self.arena.offset_of(part.storage.data_ptr() + part.start, part.nbytes)
            if offset is None and (offset := self._room(part.nbytes)) is not None:
                self._regions.append(_Region(offset, offset + _rounded(part.nbytes), part.names[0]))
            if offset is None:
                missing.append(part)
            else:
                found.append(offset)
        if missing:
            has, needed = self.arena.nbytes, sum(_rounded(part.nbytes) for part in parts)
            if needed <= has:  # the free space is fragmented
                needed = has + sum(_rounded(part.nbytes) for part in missing)
            names = ", ".join(part.names[0] for part in missing[:10]) + (", ..." if missing[10:] else "")
            raise RefusedError(
                f"{self._called}: {names} found no room in nbytes={has}; {needed} are needed (each tensor takes a "
                f"multiple of {ALIGNMENT})"
            )
        return found

    def _room(self, nbytes: int) -> int | None:
        """Return the offset of so many free bytes, at the end or else between used regions; None if there are none."""
        size, start = _rounded(nbytes), self._end
        if start + size > self.arena.nbytes:
            self._regions = sorted((one for one in self._regions if not one.is_free()), key=lambda one: one.start)
            starts = [0, *(region.end for region in self._regions)]
            ends = [*(region.start for region in self._regions), self.arena.nbytes]
            gaps = (low for low, high in zip(starts, ends, strict=True) if high - low >= size)
            if (start := next(gaps, -1)) < 0:
                return None
            self._end = starts[-1]
        self._end = max(self._end, start + size)
        return start


def _where(gpu: int) -> str:
    return "in main memory" if gpu == HOST else f"on GPU {gpu}"


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _move_out(tensor: torch.Tensor) -> None:
    """Move a tensor that fills a storage to memory of its own."""
    here = StoragePart(tensor.untyped_storage(), 0, tensor.untyped_storage().nbytes()).bytes()
    with torch.inference_mode(False), torch.no_grad():
        point(tensor, here.clone())
