"""Keep an engine as it was while its loader is traced: its modules' attributes, its tensors, and their bytes."""

from __future__ import annotations

import collections
import tempfile
import time
import types
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from refitd.errors import PlanError, RefusedError
from refitd.tracing.engine_objects import (
    ATOMS,
    CONTAINERS,
    attributes,
    engine_modules,
    items,
    joined,
    reached,
    tensors_of,
)
from refitd.tracing.held_bytes import HeldBytes, is_plain, place_of, storage_key

Load = Callable[..., object]

# Objects of an engine's modules that are looked at.
MAX_OBJECTS = 500_000

# Bytes of a tensor that is a plain attribute, not a parameter or buffer: a larger one is a cache, which loaders leave.
MAX_ATTRIBUTE = 16 << 20


@dataclass(frozen=True, slots=True)
class Held:
    """The state of an engine before a trace, kept to put it back.

    Attributes:
        tensors: the number of its tensors.
        copied_bytes: bytes that were copied.
        file_bytes: the part in a temporary file, because main memory was short.
        digested_bytes: bytes that only a digest is kept of, because both were short: a change is noticed, and cannot be
            put back. Such an engine's layout cannot be proven.
        seconds: the time for both, and for the comparisons afterwards.
    """

    tensors: int = 0
    copied_bytes: int = 0
    file_bytes: int = 0
    digested_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes that a loader has made in the engine around the trace; all of it has been put back but `lost`.

    Attributes:
        replaced: tensors that were given other memory, or whose place in a module holds another tensor.
        written: tensors whose bytes were written.
        lost: those of `written` that are not as they were, because memory for a copy was short.
        added: attributes that hold a tensor now and held none before.
    """

    replaced: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    added: tuple[tuple[str, torch.Tensor], ...] = ()

    def check(self) -> None:
        """Refuse a loader that changes the engine around the trace.

        Raises:
            PlanError: names the tensors, and how they were changed.
        """
        self.check_memory()
        if self.written:
            lost = f"{len(self.lost)} could not be put back, as memory was short: load the checkpoint again"
            raise PlanError(
                f"{', '.join(self.written[:5])}: the loader writes {len(self.written)} tensors around the trace: "
                "through numpy or a pointer, with dispatch modes disabled, or in a thread older than the trace; "
                + (lost if self.lost else "put back")
            )

    def check_memory(self) -> None:
        """Refuse a loader that gives tensors of the engine other memory.

        Raises:
            PlanError: names them.
        """
        if self.replaced:
            shown = ", ".join(self.replaced[:5])
            raise PlanError(f"{shown}: the loader gives {len(self.replaced)} tensors other memory; put back")


@dataclass(slots=True)
class _Tensor:
    """One tensor object, as it was. `alias` has its memory and view; `attributes` is its dictionary."""

    name: str
    tensor: torch.Tensor
    alias: torch.Tensor
    kind: type
    needs_grad: bool
    attributes: dict[str, Any]


@dataclass(slots=True)
class _Slots:
    """A container, as it was: attributes, a dictionary, a list, a set or a closure's variable.

    Only the engine's tensors are put back where `is_whole` is false: the rest is the loader's own.
    """

    name: str
    target: Any
    saved: Any
    is_whole: bool = True


class Isolation:
    """An engine as it was before a loader ran.

    Modules count as the engine's if one of the given tensors is theirs; so do the modules around and inside these.
    """

    def __init__(self, params: Mapping[str, torch.Tensor], load_fn: Load) -> None:
        """Look at the engine and copy its bytes; with little memory, to a file, and else take digests of them.

        Args:
            params: the engine's tensors by name.
            load_fn: the loader; tensors of the engine are put back also where only it holds them.
        """
        began = time.perf_counter()
        self._tensors: dict[int, _Tensor] = {}
        self._slots: list[_Slots] = []
        self._seen: dict[int, object] = {}
        self._names = {id(tensor): name for name, tensor in params.items()}
        self._bytes = HeldBytes()
        for name, tensor in params.items():
            self._add_tensor(name, tensor, is_registered=True)
        found = list(reached(params, load_fn))
        for label, module in engine_modules(params, load_fn, found):
            self._add(label, module)
        for value in found:
            self._add_reached(value)
        self._bytes.take()
        self._seconds = time.perf_counter() - began

    @property
    def held(self) -> Held:
        """The kept bytes, and the time that this took so far."""
        return Held(len(self._tensors), self._bytes.copied, self._bytes.filed, self._bytes.digested, self._seconds)

    @property
    def others(self) -> dict[int, str]:
        """The storages of the engine's tensors that were not given, with a name for each."""
        given = {storage_key(one.alias) for one in self._tensors.values() if id(one.tensor) in self._names}
        found = {storage_key(one.alias): one.name for one in self._tensors.values()}
        return {key: name for key, name in found.items() if key not in given}

    def check_room(self) -> None:
        """Refuse to have the engine's tensors written where no copy of some is kept.

        Raises:
            RefusedError: neither main memory nor the disk had room.
        """
        if self._bytes.digested:
            raise RefusedError(
                f"{self._bytes.digested} bytes of the engine's tensors have no copy while its layout is proven: main "
                f"memory and {tempfile.gettempdir()} are short; make room, or set TMPDIR to a larger file system"
            )

    def put_back(
        self, followed: Container[int] = (), overwritten: Container[str] = (), *, is_last: bool = True
    ) -> Changes:
        """Put the engine back as it was; return what was changed around the trace.

        Args:
            followed: storages that operators have written, which is no change around the trace.
            overwritten: tensors of them that were written whole, by name.
            is_last: if false, the loader runs again: the bytes of `overwritten`, and of what is not `followed`, are put
                back and compared by a later call.
        """
        began = time.perf_counter()
        memory = {storage_key(one.alias) for one in self._tensors.values()}
        replaced: dict[str, None] = {}
        added: list[tuple[str, torch.Tensor]] = []
        for slots in self._slots:
            if not (differences := _differences(slots)):
                continue
            for name, was, now in differences:
                present = dict(tensors_of(name, now))
                places = {place_of(tensor) for tensor in present.values() if is_plain(tensor)}
                if slots.is_whole or present:
                    for label, tensor in tensors_of(name, was):
                        if (one := self._tensors.get(id(tensor))) and place_of(one.alias) not in places:
                            replaced[self._names.get(id(tensor), label)] = None
                if slots.is_whole:
                    added += [(label, one) for label, one in present.items() if storage_key(one) not in memory]
            _put_back_slots(slots)
        for one in self._tensors.values():
            if _put_back_tensor(one):
                replaced[one.name] = None
        moved, written, lost = self._bytes.put_back(followed, overwritten, is_last=is_last)
        replaced.update(dict.fromkeys(moved))
        self._seconds += time.perf_counter() - began
        return Changes(tuple(replaced), tuple(written), tuple(lost), tuple(added))

    # --- what belongs to the engine -----------------------------------------------------------------------

    def _add(self, label: str, root: object) -> None:
        """Keep an object of the engine, with all that it holds."""
        todo: list[tuple[str, object, bool]] = [(label, root, False)]
        while todo and len(self._seen) < MAX_OBJECTS:
            name, value, is_registered = todo.pop()
            if isinstance(value, torch.Tensor):
                self._add_tensor(name, value, is_registered=is_registered)
            is_module = isinstance(value, torch.nn.Module)
            inside = value if isinstance(value, (*CONTAINERS, tuple)) else attributes(value)
            if inside is None or id(inside) in self._seen:
                continue
            self._seen[id(inside)] = inside
            if not isinstance(inside, tuple):
                self._slots.append(_Slots(name, inside, inside.copy()))
            for key, item in items(inside):
                if item is None or isinstance(item, ATOMS):
                    continue
                is_registry = is_module and key in ("_parameters", "_buffers")
                is_hidden = is_registry or (is_module and key == "_modules")
                todo.append((joined(name, "" if is_hidden else key), item, is_registry or is_registered))

    def _add_tensor(self, name: str, tensor: torch.Tensor, *, is_registered: bool) -> None:
        if id(tensor) in self._tensors or not is_plain(tensor):
            return
        name = self._names.get(id(tensor), name)
        alias = tensor.detach()
        self._tensors[id(tensor)] = _Tensor(name, tensor, alias, type(tensor), tensor.requires_grad, vars(tensor))
        if is_registered or tensor.numel() * tensor.element_size() <= MAX_ATTRIBUTE:
            self._bytes.add(name, alias)

    def _add_reached(self, value: object) -> None:
        """Keep a place outside modules that holds tensors of the engine."""
        if id(value) in self._seen or not isinstance(value, (dict, list, types.CellType)):
            return
        if not any(id(item) in self._tensors for _, item in items(value)):
            return
        self._seen[id(value)] = value
        saved = list(value) if isinstance(value, list) else {k: v for k, v in items(value) if id(v) in self._tensors}
        self._slots.append(_Slots("", value, saved, is_whole=False))


# --- putting back -------------------------------------------------------------------------------------------


def _differences(slots: _Slots) -> list[tuple[str, Any, Any]]:
    """Return the old and the new value of each place of a container, where they differ."""
    was, now = dict(items(slots.saved)), dict(items(slots.target))
    if isinstance(slots.target, (set, collections.deque, list)):
        was, now = {id(v): v for v in was.values()}, {id(v): v for v in now.values()}
    keys = [*was, *(key for key in now if key not in was)] if slots.is_whole else list(was)
    return [(joined(slots.name, key), was.get(key), now.get(key)) for key in keys if was.get(key) is not now.get(key)]


def _put_back_slots(slots: _Slots) -> None:
    target, saved = slots.target, slots.saved
    if isinstance(target, types.CellType):
        target.cell_contents = saved.get("cell_contents")
    elif isinstance(target, list):
        target[:] = saved
    elif isinstance(target, dict) and not slots.is_whole:
        target.update(saved)
    elif isinstance(target, dict) and len(target) == len(saved) and list(target) == list(saved):
        target.update(saved)  # no moment without the other items
    else:
        target.clear()
        if isinstance(target, collections.deque):
            target.extend(saved)
        else:
            target.update(saved)


def _put_back_tensor(one: _Tensor) -> bool:
    """Put back a tensor's class, memory and view; return whether it had other memory."""
    if one.tensor.device != one.alias.device:  # `torch.utils.swap_tensors`; `data` takes memory of this device only
        torch.utils.swap_tensors(one.tensor, torch.empty_like(one.alias))
    if vars(one.tensor) is not one.attributes:
        one.tensor.__dict__ = one.attributes
    if type(one.tensor) is not one.kind:
        one.tensor.__class__ = one.kind
    is_moved = place_of(one.tensor) != place_of(one.alias)
    if is_moved:
        one.tensor.data = one.alias
    if one.tensor.requires_grad != one.needs_grad:
        one.tensor.requires_grad = one.needs_grad
    return is_moved
