"""Move the parameters and buffers that a block of code registers into one arena, in the block or at its end."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from refitd.buffers.layout import ALIGNMENT
from refitd.client.adopt import Adoption, StoragePart, holders, kind_problem, point
from refitd.client.arenas import Arena, Home, view_of
from refitd.client.given import refuse_all
from refitd.describe.memory import HOST, gpu_of
from refitd.errors import RefusedError

_thread = threading.local()  # `block`: the MemoryBlock that this thread has entered


@dataclass(slots=True)
class Placed:
    """The result of `Client.memory`; its attributes are zero and empty until the block has ended.

    Attributes:
        tensors, nbytes, left: as in `Adopted`.
    """

    tensors: int = 0
    nbytes: int = 0
    left: dict[str, str] = field(default_factory=dict)


def check_outside(what: str) -> None:
    """Raise RefusedError if this thread is in a block already: both would move the same tensors."""
    block = getattr(_thread, "block", None)
    if block is not None:
        raise RefusedError(f"{what} inside {block.called} of the same thread; call it outside that block")


class MemoryBlock:
    """A context that records which modules, parameters and buffers this thread registers.

    Attributes:
        called: the user's call, for errors.
        space: parameters and buffers move there as they are registered; None: they move at the end of the block.
    """

    def __init__(self, called: str, space: Space | None = None) -> None:
        self.called = called
        self.space = space
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
        """Return the outermost of the modules that registered something in this block.

        Raises:
            RefusedError: no such module still exists.
        """
        found = self._outermost()
        if len(found) > 1:
            del found
            gc.collect()  # a discarded module in a reference cycle still exists
            found = self._outermost()
        if not found:
            raise RefusedError(
                f"{self.called}: nothing has been registered in a module that still exists; build or load the "
                "model inside the block, in the thread that has entered it, and keep it in a variable"
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
        """Record a registration, and place the tensor of the registration before it.

        A hook runs before its own registration. Torch does not know yet whether a buffer is persistent, and a loader
        may still hold a parameter's value.
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
    """Bytes [start, end) of the arena that `storage` uses; None: they are reserved for a storage."""

    start: int
    end: int
    name: str
    storage: StorageWeakRef | None = None
    tensor: weakref.ref[torch.Tensor] | None = None

    def is_free(self) -> bool:
        """Whether the last tensor that used these bytes has been freed."""
        return self.storage is not None and self.storage.expired()


class Space:
    """An arena, the tensors placed in it so far, and its free regions.

    Attributes:
        arena: the arena.
        called: the user's call, for errors.
    """

    def __init__(self, arena: Arena, called: str) -> None:
        self.arena = arena
        self.called = called
        self._regions: list[_Region] = []
        self._end = 0

    def place(self, name: str, tensor: torch.Tensor) -> None:
        """Move an unshared tensor into the arena if it has room; if not, `adopt` tries again later."""
        start = self._room(tensor.untyped_storage().nbytes())
        if start is not None:
            move_alone(tensor, self.arena, start)
            storage = tensor.untyped_storage()
            end = start + _rounded(storage.nbytes())
            self._regions.append(_Region(start, end, name, StorageWeakRef(storage), weakref.ref(tensor)))

    def adopt(self, roots: list[torch.nn.Module], arenas: Mapping[int, Home]) -> Adoption:
        """Move the remaining tensors of these modules into the arena, and all other tensors out of it.

        Raises:
            RefusedError: a tensor cannot be moved, or the arena has no room for it. The modules are unchanged.
        """
        adoption = Adoption(roots, arenas, home=self.arena)
        if not adoption.parts:
            raise RefusedError(f"{self.called}: there is nothing to place ({adoption.left}); leave the block out")
        if adoption.gpu != self.arena.device:
            raise RefusedError(
                f"{self.called}: the model lies {_where(adoption.gpu)}, and nbytes= asks for memory "
                f"{_where(self.arena.device)}; say device=, or leave nbytes out"
            )
        self._let_go({part.storage._cdata for part in adoption.parts})
        adoption.lay_out(self._offsets(adoption.parts))
        adoption.perform(self.arena)
        return adoption

    def put_back(self) -> None:
        """Move every tensor out of the arena into new memory, except shared ones."""
        for region in self._regions:
            if (tensor := self._only_tensor(region)) is not None:
                _move_out(tensor)

    def _let_go(self, kept: set[int]) -> None:
        """Move tensors that no module or no version has out of the arena: an exchange would change their values."""
        strays = [one for one in self._regions if one.storage and one.storage.cdata not in kept]
        if not all(region.is_free() for region in strays):
            gc.collect()  # a holder in a reference cycle still counts
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
        """Return the tensor that was moved to a region, if it is the only user of its storage."""
        tensor = None if region.tensor is None else region.tensor()
        if tensor is None or region.storage is None or tensor.untyped_storage()._cdata != region.storage.cdata:
            return None
        return tensor if holders(tensor.untyped_storage()) == 1 else None

    def _offsets(self, parts: list[StoragePart]) -> list[int]:
        """Return each part's offset; reserve one for a part outside the arena. Raises RefusedError without room."""
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
                f"{self.called}: {names} found no room in nbytes={has}; {needed} are needed (each tensor takes a "
                f"multiple of {ALIGNMENT})"
            )
        return found

    def _room(self, nbytes: int) -> int | None:
        """Return the offset of `nbytes` free bytes, at the end or else in a gap between regions; None if none fit."""
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
    """Move a tensor that fills its storage out of the arena into new memory."""
    here = StoragePart(tensor.untyped_storage(), 0, tensor.untyped_storage().nbytes()).bytes()
    with torch.inference_mode(False), torch.no_grad():
        point(tensor, here.clone())


def is_alone(tensor: torch.Tensor, arena: Arena) -> bool:
    """Return whether a tensor fills an ordinary storage on the arena's device and is the only user of the storage.

    All other tensors are checked and moved at the end of the block.
    """
    if kind_problem(tensor) or gpu_of(tensor) != arena.device:
        return False
    storage = tensor.untyped_storage()
    return storage.resizable() and _fills(tensor, storage.nbytes()) and holders(storage) == 1


def move_alone(tensor: torch.Tensor, arena: Arena, offset: int) -> None:
    """Move a tensor, for which `is_alone` holds, to an offset of an arena."""
    storage = tensor.untyped_storage()
    with torch.inference_mode(False):
        there = view_of(arena, offset, (storage.nbytes(),), torch.uint8)
        there.copy_(StoragePart(storage, 0, storage.nbytes()).bytes())
        point(tensor, there)


def _fills(tensor: torch.Tensor, nbytes: int) -> bool:
    """Return whether a tensor is row-major and uses all `nbytes` of its storage."""
    is_whole = tensor.is_contiguous() and tensor.storage_offset() == 0
    return is_whole and tensor.numel() * tensor.element_size() == nbytes


@contextlib.contextmanager
def registrations(
    parameter: Callable[[torch.nn.Module, str, torch.nn.Parameter], None],
    buffer: Callable[[torch.nn.Module, str, Any], None] | None = None,
    child: Callable[[torch.nn.Module, str, Any], None] | None = None,
) -> Iterator[None]:
    """Call hooks with (module, name, value) before each registration in a module by this thread."""
    me = threading.get_ident()

    def mine(seen: Callable[..., None]) -> Callable[..., None]:
        def hook(*registered: Any) -> None:
            if threading.get_ident() == me:
                seen(*registered)

        return hook

    with contextlib.ExitStack() as stack:
        for register, seen in (
            (register_module_parameter_registration_hook, parameter),
            (register_module_buffer_registration_hook, buffer),
            (register_module_module_registration_hook, child),
        ):
            if seen is not None:
                stack.callback(register(mine(seen)).remove)
        yield
