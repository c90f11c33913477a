"""Build a module straight into an arena: once on the meta device to learn its sizes, then with memory."""

from __future__ import annotations

import contextlib
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from refitd.client.adopt import Adoption, StoragePart, holders, kind_problem, point
from refitd.client.arena_copies import view_of
from refitd.client.devices import Arena
from refitd.describe.memory import gpu_of
from refitd.errors import RefusedError

M = TypeVar("M", bound="torch.nn.Module | Sequence[torch.nn.Module]")


class Draft(Generic[M]):
    """A module on the meta device, and where the registered tensors of one that is built so lie in an arena.

    Attributes:
        nbytes, contents: as in `Adoption`.
    """

    def __init__(self, make: Callable[[], M]) -> None:
        """Build the module on the meta device.

        Raises:
            RefusedError: it cannot be laid out. What `make` raises is passed on.
        """
        self._make = make
        order: dict[int, int] = {}
        kept: list[torch.Tensor] = []  # keeps them alive, so that no id is reused

        def note(module: torch.nn.Module, name: str, param: torch.nn.Parameter) -> None:
            order.setdefault(id(param), len(kept))
            kept.append(param)

        try:
            # loading values into meta tensors does nothing, and torch warns of each
            with torch.device("meta"), registrations(note), warnings.catch_warnings(action="ignore"):
                draft = make()
        except Exception as exc:
            exc.add_note(
                "client.build() calls the function on the meta device first; build and load the model as always, and "
                "then call client.adopt(model)"
            )
            raise
        laid_out = Adoption(draft, {}, is_draft=True)
        self.nbytes, self.contents = laid_out.nbytes, laid_out.contents
        self._regions: dict[int, tuple[int, torch.Tensor]] = {}  # number of the registration: (offset, as on meta)
        for part, offset in zip(laid_out.parts, laid_out.offsets, strict=True):
            first = part.tensors[0]
            if len(part.tensors) == 1 and _fills(first, part.nbytes) and id(first) in order:
                self._regions[order[id(first)]] = offset, first

    def build_in(self, arena: Arena) -> M:
        """Build the module with its registered tensors in the arena.

        Raises:
            RefusedError: it is not laid out as the draft, or a tensor cannot be moved. What `make` raises is passed on.
        """
        numbers = itertools.count()

        def place(module: torch.nn.Module, name: str, param: torch.nn.Parameter) -> None:
            offset, wanted = self._regions.get(next(numbers), (0, None))
            if wanted is None or (param.shape, param.dtype) != (wanted.shape, wanted.dtype):
                return
            if is_alone(param, arena):
                move_alone(param, arena, offset)

        with registrations(place):
            module = self._make()
        built = Adoption(module, {}, home=arena)
        if built.contents != self.contents:
            wrong = sorted({name for name, _ in {*built.contents.items()} ^ {*self.contents.items()}})
            raise RefusedError(
                f"make() has built two different modules, first on the meta device ({', '.join(wrong[:10])}); build "
                "the model as always, and then call client.adopt(model)"
            )
        built.perform(arena)
        return module


def is_alone(tensor: torch.Tensor, arena: Arena) -> bool:
    """Return whether a tensor is the only one in ordinary memory that it fills, on the arena's device.

    Whatever has company, or comes from elsewhere, is checked and moved when all is built.
    """
    if kind_problem(tensor) or gpu_of(tensor) != arena.device:
        return False
    storage = tensor.untyped_storage()
    return storage.resizable() and _fills(tensor, storage.nbytes()) and holders(storage) == 1


def move_alone(tensor: torch.Tensor, arena: Arena, offset: int) -> None:
    """Move a tensor that is alone to a place in an arena."""
    storage = tensor.untyped_storage()
    with torch.inference_mode(False):
        there = view_of(arena, offset, (storage.nbytes(),), torch.uint8)
        there.copy_(StoragePart(storage, 0, storage.nbytes()).bytes())
        point(tensor, there)


def _fills(tensor: torch.Tensor, nbytes: int) -> bool:
    """Return whether these bytes are a tensor's own, row-major from the first."""
    is_whole = tensor.is_contiguous() and tensor.storage_offset() == 0
    return is_whole and tensor.numel() * tensor.element_size() == nbytes


@contextlib.contextmanager
def registrations(
    parameter: Callable[[torch.nn.Module, str, torch.nn.Parameter], None],
    buffer: Callable[[torch.nn.Module, str, Any], None] | None = None,
    child: Callable[[torch.nn.Module, str, Any], None] | None = None,
) -> Iterator[None]:
    """Call hooks with module and name before each registration of this thread in a module."""
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
