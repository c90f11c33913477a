"""Restores an engine after its loader was traced: its modules' attributes, its tensors, and their bytes."""

from __future__ import annotations

import collections
import enum
import functools
import gc
import itertools
import logging
import threading
import time
import types
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from refitd.errors import PlanError
from refitd.tracing.held_bytes import HeldBytes, is_plain, place_of, storage_key

Load = Callable[..., object]

# Maximum number of examined objects that a loader reaches.
MAX_REACHED = 50_000

CONTAINERS = (dict, list, set, collections.deque)
_SHARED = (  # an object with such an attribute is shared with other threads
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Condition,
    threading.Event,
    threading.Thread,
    threading.local,
)
_OPAQUE = (
    *_SHARED,
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.FunctionType,
    types.MethodType,
    types.CodeType,
    types.GeneratorType,
    functools.partial,
    enum.Enum,
    logging.Logger,
    torch.Generator,
)
ATOMS = (int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def joined(name: str, key: object) -> str:
    """Return the name of an attribute or item."""
    return ".".join(str(part) for part in (name, key) if part != "")


def attributes(value: object) -> dict[str, Any] | None:
    """Return the attributes of an object; None if it has none or is shared with other threads."""
    if isinstance(value, _OPAQUE):
        return None
    try:
        found = object.__getattribute__(value, "__dict__")
    except (AttributeError, RuntimeError):
        return None
    if not isinstance(found, dict):
        return None
    if not isinstance(value, torch.nn.Module) and any(isinstance(item, _SHARED) for item in list(found.values())):
        return None
    return found


def items(value: Any) -> list[tuple[Any, Any]]:
    """Return the places of a container, or of a closure's variable, and their values."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, types.CellType):
        try:
            return [("cell_contents", value.cell_contents)]
        except ValueError:
            return []
    return list(enumerate(value))


def tensors_of(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a tensor, the tensors of a module, or those directly in a container, by name."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, torch.nn.Module):
        for label, tensor in itertools.chain(value.named_parameters(), value.named_buffers()):
            yield joined(name, label), tensor
    elif isinstance(value, (*CONTAINERS, tuple)):
        for key, item in items(value):
            if isinstance(item, torch.Tensor):
                yield joined(name, key), item


def reached(params: Mapping[str, torch.Tensor], load_fn: Load) -> Iterator[Any]:
    """Yield the containers, closures' variables and modules that a loader reaches, the nearest first."""
    todo: collections.deque[Any] = collections.deque([params, load_fn])
    seen: dict[int, object] = {}
    while todo and len(seen) < MAX_REACHED:
        value = todo.popleft()
        if value is None or isinstance(value, (*ATOMS, torch.Tensor)) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.nn.Module):
            yield value
        elif isinstance(value, (*CONTAINERS, tuple, types.CellType)):
            yield value
            todo.extend(item for _, item in items(value))
        elif isinstance(value, types.MethodType):
            todo.extend((value.__self__, value.__func__))
        elif isinstance(value, functools.partial):
            todo.extend((value.func, value.args, value.keywords))
        elif isinstance(value, types.FunctionType):
            yield value.__globals__
            todo.extend(value.__closure__ or ())
            todo.extend((value.__defaults__, value.__kwdefaults__))
            todo.extend(value.__globals__.get(name) for name in _global_names(value.__code__))
        elif not isinstance(value, _OPAQUE) and isinstance(found := getattr(value, "__dict__", None), dict):
            yield found
            todo.extend(found.values())


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _own_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters, buffers and tensors of a module, not of its submodules."""
    attributes = vars(module)
    for held in (attributes, attributes.get("_parameters") or {}, attributes.get("_buffers") or {}):
        for item in held.values():
            if isinstance(item, torch.Tensor):
                yield item


def engine_modules(
    params: Mapping[str, torch.Tensor], load_fn: Load, reached: list[Any]
) -> list[tuple[str, torch.nn.Module]]:
    """Return the modules that hold one of the given tensors, or its memory, and the modules around them.

    A loader changes objects that it reaches. If some tensors belong to no module that it reaches, all modules that the
    garbage collector knows are searched, too (except modules from before `gc.freeze`).
    """
    own = getattr(load_fn, "__self__", None)
    keys = {key for tensor in params.values() if (key := storage_key(tensor))}
    found: dict[int, torch.nn.Module] = {}
    for value in (*reached, own):
        if isinstance(value, torch.nn.Module):
            found.update((id(module), module) for module in value.modules())
    if keys - {storage_key(tensor) for module in found.values() for tensor in _own_tensors(module)}:
        objects = gc.get_objects()
        kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.nn.Module)}
        found.update((id(value), value) for value in objects if type(value) in kinds)
        del objects
    parents: dict[int, list[int]] = {}
    engine: list[int] = [id(own)] if isinstance(own, torch.nn.Module) else []
    for number, module in found.items():
        for child in (vars(module).get("_modules") or {}).values():
            parents.setdefault(id(child), []).append(number)
        if any(storage_key(tensor) in keys for tensor in _own_tensors(module)):
            engine.append(number)
    belongs: set[int] = set()
    while engine:
        number = engine.pop()
        if number not in belongs:
            belongs.add(number)
            engine.extend(parents.get(number, ()))
    return [("", found[number]) for number in belongs if not belongs.intersection(parents.get(number, ()))]


# Maximum number of examined objects of an engine's modules.
MAX_OBJECTS = 500_000

# Maximum bytes of a tensor that is a plain attribute, not a parameter or buffer: loaders do not write larger caches.
MAX_ATTRIBUTE = 16 << 20


@dataclass(frozen=True, slots=True)
class Held:
    """The saved state of an engine before a trace.

    Attributes:
        tensors: the number of its tensors.
        copied_bytes: bytes that were copied.
        file_bytes: the part in a temporary file, because main memory was short.
        seconds: the time for all of this, and for the comparisons afterwards.
    """

    tensors: int = 0
    copied_bytes: int = 0
    file_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes that a loader made in the engine around the trace; all are undone.

    Attributes:
        replaced: tensors that were given other memory, or were replaced in a module by another tensor.
        written: tensors whose bytes were written.
        added: attributes that are tensors now and were none before.
    """

    replaced: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    added: tuple[tuple[str, torch.Tensor], ...] = ()

    def check(self) -> None:
        """Refuse a loader that changes the engine around the trace.

        Raises:
            PlanError: names the tensors, and how they were changed.
        """
        self.check_memory()
        if self.written:
            raise PlanError(
                f"{', '.join(self.written[:5])}: the loader writes {len(self.written)} tensors around the trace: "
                "through numpy or a pointer, with dispatch modes disabled, or in a thread older than the trace; their "
                "bytes were restored"
            )

    def check_memory(self) -> None:
        """Refuse a loader that gives tensors of the engine other memory.

        Raises:
            PlanError: names them.
        """
        if self.replaced:
            shown = ", ".join(self.replaced[:5])
            raise PlanError(f"{shown}: the loader gives {len(self.replaced)} tensors other memory; it was restored")


@dataclass(slots=True)
class _Tensor:
    """The saved state of one tensor object. `alias` has its memory and view; `attributes` is its dictionary."""

    name: str
    tensor: torch.Tensor
    alias: torch.Tensor
    kind: type
    needs_grad: bool
    attributes: dict[str, Any]


@dataclass(slots=True)
class _Slots:
    """The saved state of a container: attributes, a dictionary, a list, a set or a closure's variable.

    If `is_whole` is false, only the engine's tensors are restored: the other items belong to the loader.
    """

    name: str
    target: Any
    saved: Any
    is_whole: bool = True


class Isolation:
    """The saved state of an engine before a loader runs.

    A module belongs to the engine if it has one of the given tensors, or is around or inside such a module.
    """

    def __init__(self, params: Mapping[str, torch.Tensor], load_fn: Load) -> None:
        """Save the engine's state and copy its bytes, to memory or a file.

        Args:
            params: the engine's tensors by name.
            load_fn: the loader; its own references to tensors of the engine are restored, too.

        Raises:
            RefusedError: neither main memory nor the disk has room.
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
        """The saved bytes, and the time spent so far."""
        return Held(len(self._tensors), self._bytes.copied, self._bytes.filed, self._seconds)

    @property
    def others(self) -> dict[int, str]:
        """The storages of the engine's tensors that were not given, with a name for each."""
        given = {storage_key(one.alias) for one in self._tensors.values() if id(one.tensor) in self._names}
        found = {storage_key(one.alias): one.name for one in self._tensors.values()}
        return {key: name for key, name in found.items() if key not in given}

    def put_back(
        self, followed: Container[int] = (), overwritten: Container[str] = (), *, is_last: bool = True
    ) -> Changes:
        """Restore the engine; return the changes that were made around the trace.

        Args:
            followed: storages that operators have written; such writes are no changes around the trace.
            overwritten: names of tensors in these storages that were written whole.
            is_last: if false, the loader runs again, and a later call restores and compares the bytes of `overwritten`
                and of storages outside `followed`.
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
        moved, written = self._bytes.put_back(followed, overwritten, is_last=is_last)
        replaced.update(dict.fromkeys(moved))
        self._seconds += time.perf_counter() - began
        return Changes(tuple(replaced), tuple(written), tuple(added))

    # --- finding the objects of the engine -----------------------------------------------------------------------

    def _add(self, label: str, root: object) -> None:
        """Save an object of the engine, and everything inside it."""
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
        """Save a container outside modules that has tensors of the engine."""
        if id(value) in self._seen or not isinstance(value, (dict, list, types.CellType)):
            return
        if not any(id(item) in self._tensors for _, item in items(value)):
            return
        self._seen[id(value)] = value
        saved = list(value) if isinstance(value, list) else {k: v for k, v in items(value) if id(v) in self._tensors}
        self._slots.append(_Slots("", value, saved, is_whole=False))


# --- restoring -------------------------------------------------------------------------------------------


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
        target.update(saved)  # without emptying it: other threads may read it
    else:
        target.clear()
        if isinstance(target, collections.deque):
            target.extend(saved)
        else:
            target.update(saved)


def _put_back_tensor(one: _Tensor) -> bool:
    """Restore a tensor's class, memory and view; return whether it had other memory."""
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
