"""Read a pickle as inert values: only listed names may occur in it, and nothing that they name is run."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any


class PickledState:
    """What stands for an instance of a listed class: the state that was pickled, unchecked."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, name: str) -> Any:
        """Return one attribute of the instance, None if it has none of this name."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class Call:
    """What stands for a listed function: another one. A pickle can call it and cannot change it."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        """`function` is called with what the pickle gives."""
        self._function = function

    def __call__(self, *args: Any) -> Any:
        """Call what stands for it."""
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it gives a function a state")


class _InertUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, known: Mapping[tuple[str, str], Any], persistent: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._known = known
        self._persistent = persistent

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._known:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which does not belong there")
        return self._known[module, name]

    def persistent_load(self, pid: Any) -> Any:
        return self._persistent(pid)


def _no_persistent(pid: Any) -> Any:
    raise pickle.UnpicklingError("it refers to an object outside of it")


def read_pickle(
    data: bytes, known: Mapping[tuple[str, str], Any], persistent: Callable[[Any], Any] = _no_persistent
) -> Any:
    """Return what a pickle holds, where only the names in `known` may occur.

    Args:
        data: the pickle.
        known: what stands for (module, name): a subclass of `PickledState`, a `Call`, or an immutable value or type.
        persistent: returns what stands for a persistent id.

    Raises:
        ValueError: the pickle is damaged, or names anything else; says which.
    """
    try:
        return _InertUnpickler(data, known, persistent).load()
    except Exception as exc:  # a pickle can make its reader raise anything
        raise ValueError(str(exc) or type(exc).__name__) from None
