"""Which objects of a process belong to an engine: its modules, and the places that its loader reaches."""

from __future__ import annotations

import collections
import enum
import functools
import gc
import itertools
import logging
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from refitd.tracing.held_bytes import storage_key

Load = Callable[..., object]

# Objects that a loader reaches that are looked at.
MAX_REACHED = 50_000

CONTAINERS = (dict, list, set, collections.deque)
_SHARED = (  # an object that holds one of these is shared with other threads
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
    """Return the attributes of an object; None for one that has none or is shared with other threads."""
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

    A loader changes what it reaches. If it reaches no module with some of the tensors, all modules that the garbage
    collector knows are looked at, too (except those before `gc.freeze`).
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
