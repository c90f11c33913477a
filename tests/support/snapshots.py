"""Flatten all values of a state object into one mapping, to compare before and after."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

_PLAIN = (type(None), bool, int, float, str, bytes, enum.Enum, frozenset, msgspec.Struct, type)


def snapshot(root: object, leave_out: Collection[str] = ()) -> dict[str, object]:
    """Return every value reached from `root` by its path; `leave_out` has attributes as "Class.attribute".

    A function is recorded by its name only: the values that it captured are the same objects before and after.
    """
    return dict(_leaves(root, "", frozenset(leave_out), {}))


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return one line for each path whose value differs."""
    missing = object()
    paths = [path for path in {**before, **after} if before.get(path, missing) != after.get(path, missing)]
    return [f"{path}: {before.get(path, 'nothing')!r} -> {after.get(path, 'nothing')!r}"[:500] for path in paths]


def _leaves(value: Any, path: str, leave_out: frozenset[str], seen: dict[int, str]) -> Iterator[tuple[str, object]]:
    if isinstance(value, _PLAIN):
        yield path, value
    elif isinstance(value, np.ndarray):
        yield path, (value.dtype.str, value.shape, value.tobytes())
    elif isinstance(value, set):
        yield path, frozenset(value)
    elif callable(value):
        yield path, getattr(value, "__qualname__", "")
    elif isinstance(value, list | tuple | deque):
        yield f"{path}.len", len(value)
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]", leave_out, seen)
    elif id(value) in seen:
        yield path, seen[id(value)]
    else:
        seen[id(value)] = path
        if isinstance(value, dict):
            yield f"{path}.keys", frozenset(map(repr, value))
            for key, item in sorted(value.items(), key=lambda pair: repr(pair[0])):
                yield from _leaves(item, f"{path}[{key!r}]", leave_out, seen)
        for name in sorted(_attributes(value)):
            if f"{type(value).__name__}.{name}" not in leave_out:
                yield from _leaves(getattr(value, name), f"{path}.{name}", leave_out, seen)


def _attributes(value: object) -> set[str]:
    slots = {name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())}
    return {name for name in slots | set(getattr(value, "__dict__", {})) if hasattr(value, name)}
