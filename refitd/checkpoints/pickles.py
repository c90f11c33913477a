"""Read a pickle as inert values: only listed names may occur in it, and nothing that they name is run."""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from refitd.checkpoints.header import MAX_DIMS
from refitd.text import brief, shown

_SCALARS = (str, int, float, bytes, type(None))  # bool is an int

# The opcodes that `pickle.dumps` writes for the values of a checkpoint, in protocols 2 to 5. The others are refused:
# some allocate what a length says before they read it, some give one object to many places, sets have no use here.
_OPCODES = (
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK,
    pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT,
    pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.LONG4,
    pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8,
    pickle.BINBYTES, pickle.SHORT_BINBYTES, pickle.BINBYTES8,
    pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3,
    pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS,
    pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET,
    pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD, pickle.BINPERSID,
)  # fmt: skip


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
        """`function` is called with the arguments in the pickle; its result must not be larger than its arguments."""
        self._function = function

    def __call__(self, *args: Any) -> Any:
        """Call what stands for it."""
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it gives a function a state")


def _size(*args: Any) -> tuple[int, ...]:
    """Return a torch.Size: the tuple itself, of at most MAX_DIMS integers."""
    if not args:
        return ()
    is_tuple = len(args) == 1 and type(args[0]) is tuple
    if not is_tuple or len(args[0]) > MAX_DIMS or not all(type(n) is int for n in args[0]):
        raise pickle.UnpicklingError(
            f"it makes a torch.Size of something other than a tuple of at most {MAX_DIMS} integers"
        )
    found: tuple[int, ...] = args[0]
    return found


def _empty_dict(*args: Any) -> dict[Any, Any]:
    if args:
        raise pickle.UnpicklingError("it calls a dict with arguments")
    return {}


# Stand-ins for torch.Size, and for dict and OrderedDict, which a pickle fills after it has made them.
SIZE = Call(_size)
EMPTY_DICT = Call(_empty_dict)


class _UnknownOpcode(Exception):
    """An opcode that is not listed."""


class _Dispatch(dict[int, Any]):
    """The methods of the listed opcodes."""

    def __missing__(self, code: int) -> Any:
        names = {ord(each.code): each.name for each in pickletools.opcodes}
        raise _UnknownOpcode(names.get(code, f"{code:#04x}"))


class _InertUnpickler(pickle._Unpickler):
    """The unpickler in Python: its memo is a dict, where the one in C has an array as long as the largest index.

    Its memory is within a fixed multiple of the bytes read: no opcode takes more than its argument in the stream.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Any]] = _Dispatch((code[0], pickle._Unpickler.dispatch[code[0]]) for code in _OPCODES)

    def __init__(self, data: bytes, known: Mapping[tuple[str, str], Any], persistent: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(data), fix_imports=False)
        self._known = known
        self._persistent = persistent

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._known:
            raise pickle.UnpicklingError(brief(f"it names {module}.{name}, which does not belong there"))
        return self._known[module, name]

    def persistent_load(self, pid: Any) -> Any:
        return self._persistent(pid)

    def _set_items(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(pairs) % 2:
            raise pickle.UnpicklingError("it sets items of something that is no dict, or a key without a value")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            # a tuple that holds one tuple twice, and so on, takes 2 ** depth steps to hash
            if not isinstance(key, (*_SCALARS, PickledState)) and not _is_flat(key):
                raise pickle.UnpicklingError(f"a dict has a {type(key).__name__} as a key, expected a string")
            target[key] = value

    def load_setitem(self) -> None:
        pair = self.stack[-2:]
        del self.stack[-2:]
        self._set_items(pair)

    dispatch[pickle.SETITEM[0]] = load_setitem

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    dispatch[pickle.SETITEMS[0]] = load_setitems


def _is_flat(value: Any) -> bool:
    return type(value) is tuple and all(isinstance(one, _SCALARS) for one in value)


def _no_persistent(pid: Any) -> Any:
    raise pickle.UnpicklingError("it refers to an object outside of it")


def read_pickle(
    data: bytes, known: Mapping[tuple[str, str], Any], persistent: Callable[[Any], Any] = _no_persistent
) -> Any:
    """Return what a pickle holds, where only the names in `known` may occur.

    It takes at most a few hundred bytes of memory for each byte of the pickle. An object may be in several places of
    the result, and in itself: show it with `told`, and compare or hash only what was checked.

    Args:
        data: the pickle, in protocol 2 or later.
        known: by (module, name), a subclass of `PickledState`, a `Call`, or an immutable value.
        persistent: returns the value for a persistent id.

    Raises:
        ValueError: the pickle is damaged, or names anything else; says which.
    """
    try:
        return _InertUnpickler(data, known, persistent).load()
    except _UnknownOpcode as exc:
        raise ValueError(f"it has the opcode {exc}, which does not belong there") from None
    except Exception as exc:  # a pickle can make its reader raise anything
        raise ValueError(brief(str(exc)) or type(exc).__name__) from None


def told(value: Any) -> str:
    """Return a value of a pickle for an error message: its repr if it is flat, else its type.

    The repr of a list that holds one list twice, and so on, has 2 ** depth characters.
    """
    is_flat = isinstance(value, _SCALARS) or (
        isinstance(value, (list, tuple)) and len(value) < 100 and all(isinstance(one, _SCALARS) for one in value)
    )
    return shown(value) if is_flat else f"a {type(value).__name__}"
