"""Bounded caches as objects, owned by their creator."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """A least-recently-used cache. `release` is called with every value that is removed."""

    def __init__(self, capacity: int, release: Callable[[V], None] | None = None) -> None:
        self._capacity = capacity
        self._release = release
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """Return the entry, and mark it as used; None if it does not exist."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key]

    def put(self, key: K, value: V) -> None:
        """Add an entry; removes an old one of this key, and the least recently used one if the cache is full."""
        self.drop(key)
        self._entries[key] = value
        while len(self._entries) > self._capacity:
            self._leave(self._entries.popitem(last=False)[1])

    def drop(self, key: K) -> None:
        """Remove an entry, if it exists."""
        if key in self._entries:
            self._leave(self._entries.pop(key))

    def clear(self) -> None:
        """Remove every entry."""
        while self._entries:
            self._leave(self._entries.popitem()[1])

    def _leave(self, value: V) -> None:
        if self._release is not None:
            self._release(value)
