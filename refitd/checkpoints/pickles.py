"""Read pickles as inert values, and the archives of torch.save around them, without running any of their code.

Only listed names may occur in a pickle, and each has a stand-in here. An archive of torch.save has one tensor:

    NAME/data.pkl    a pickle: a call that builds the tensor from a storage
    NAME/data/0      the storage's bytes, uncompressed
    NAME/byteorder   "little"
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, ClassVar, NamedTuple, TypeGuard

from refitd.checkpoints.safetensors import MAX_DIMS
from refitd.dtypes import ELEMENT_SIZES
from refitd.text import brief, shown

_SCALARS = (str, int, float, bytes, type(None))  # bool is an int

# The opcodes that `pickle.dumps` writes for the values of a checkpoint, in protocols 2 to 5. The others are refused:
# some allocate memory by an unchecked length, some put one object in many places, sets are not needed.
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
    """The stand-in for an instance of a listed class: its pickled state, unchecked."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, name: str) -> Any:
        """Return one attribute of the instance, None if it has none of this name."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class Call:
    """The stand-in for a listed function. A pickle can call it but cannot change it."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        """`function` is called with the arguments in the pickle; its result must not be larger than its arguments."""
        self._function = function

    def __call__(self, *args: Any) -> Any:
        """Call the stand-in."""
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


# Stand-ins for torch.Size, and for dict and OrderedDict, which a pickle creates first and fills then.
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
    """Return the value of a pickle in which only the names in `known` occur.

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


MAX_PICKLE_BYTES = 1 << 20
_LOCAL = struct.Struct("<4s22xHH")  # a zip entry's local header: its mark, and the lengths of its name and extra field
_UNTYPED = "bytes"

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}


class Storage(NamedTuple):
    """A storage that a pickle refers to: elements of `dtype`, in the archive's entry data/`key`."""

    dtype: str
    key: str
    elements: int


class Archived(NamedTuple):
    """One tensor in an archive: `nbytes` bytes starting at byte `offset` of the file, in these strides (elements)."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    nbytes: int


class _Built(NamedTuple):
    storage: Any
    offset: Any
    shape: Any
    stride: Any
    dtype: Any


def _typed(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> _Built:
    return _Built(storage, offset, shape, stride, getattr(storage, "dtype", None))


def _untyped(
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> _Built:
    return _Built(storage, offset, shape, stride, dtype)


_KNOWN: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): Call(_typed),
    ("torch._utils", "_rebuild_tensor_v3"): Call(_untyped),
    ("torch.storage", "UntypedStorage"): _UNTYPED,
    ("torch", "Size"): SIZE,
    ("collections", "OrderedDict"): EMPTY_DICT,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
    **{("torch", dtype): dtype for dtype in ELEMENT_SIZES},
}


def read_archive(file: int, offset: int, length: int) -> Archived:
    """Return the tensor in the archive at bytes [offset, offset + length) of a file (its descriptor).

    Raises:
        ValueError: it is not such an archive, is damaged, or holds anything but one dense tensor.
    """
    try:
        with zipfile.ZipFile(_FilePart(file, offset, length)) as opened:
            entries = {entry.filename: entry for entry in opened.infolist()}
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, struct.error) as exc:
        raise ValueError(f"it is no archive of torch.save: {exc}") from None
    roots = [name.removesuffix("/data.pkl") for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise ValueError("it is no archive of torch.save: it has no data.pkl")

    def bytes_of(name: str, most: int) -> tuple[int, int]:
        entry = entries.get(f"{roots[0]}/{name}")
        if entry is None:
            raise ValueError(f"its archive has no {name}")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > most:
            raise ValueError(f"its archive has {name} compressed, or too large ({entry.file_size} bytes)")
        return _place(file, offset, length, entry), entry.file_size

    def content(name: str) -> bytes:
        at, size = bytes_of(name, MAX_PICKLE_BYTES)
        return os.pread(file, size, at)

    if f"{roots[0]}/byteorder" in entries and content("byteorder") != b"little":
        raise ValueError("its bytes are not little endian")
    try:
        built = read_pickle(content("data.pkl"), _KNOWN, _storage)
    except ValueError as exc:
        raise ValueError(f"its archive's data.pkl is refused: {exc}") from None
    dtype, shape, stride, count = _checked(built)
    at, size = bytes_of(f"data/{built.storage.key}", length)
    nbytes = prod(shape) * ELEMENT_SIZES[dtype]
    if not count == size == nbytes:
        raise ValueError(f"its storage has {size} bytes (said to have {count}), its shape {shape} of {dtype} {nbytes}")
    return Archived(dtype, shape, stride, at, nbytes)


def _storage(pid: Any) -> Storage:
    if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
        raise pickle.UnpicklingError(f"it refers to {told(pid)}, expected a storage")
    _, dtype, key, _, count = pid
    if dtype not in (*ELEMENT_SIZES, _UNTYPED) or not isinstance(key, str) or type(count) is not int:
        raise pickle.UnpicklingError(f"it refers to {told(pid)}, expected a storage")
    return Storage(dtype, key, count)


def _checked(built: Any) -> tuple[str, tuple[int, ...], tuple[int, ...], int]:
    """Return dtype, shape, strides and the storage's bytes of a dense tensor at the start of its storage."""
    if not isinstance(built, _Built) or not isinstance(built.storage, Storage):
        raise ValueError(f"it holds a {type(built).__name__}, expected a tensor")
    _, offset, shape, stride, dtype = built
    if not isinstance(dtype, str) or dtype not in ELEMENT_SIZES:
        raise ValueError(f"its dtype is {told(dtype)}, known are {', '.join(ELEMENT_SIZES)}")
    if not are_sizes(shape) or not are_sizes(stride) or len(shape) != len(stride):
        raise ValueError(f"its shape is {told(shape)} with strides {told(stride)}, expected sizes")
    if offset != 0 or not _is_dense(shape, stride):
        raise ValueError(f"its strides {stride} of shape {shape}, from element {told(offset)}, leave gaps or overlap")
    width = 1 if built.storage.dtype == _UNTYPED else ELEMENT_SIZES[built.storage.dtype]
    nbytes: int = built.storage.elements * width
    return dtype, shape, stride, nbytes


def are_sizes(value: Any) -> TypeGuard[tuple[int, ...]]:
    """Return whether this is a tuple of at most MAX_DIMS sizes."""
    return (
        isinstance(value, tuple) and len(value) <= MAX_DIMS and all(type(n) is int and 0 <= n < 1 << 62 for n in value)
    )


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether these strides are row-major over the dimensions in some order."""
    if not prod(shape):
        return True
    step = 1
    for size, gap in sorted(((n, s) for n, s in zip(shape, stride, strict=True) if n > 1), key=lambda pair: pair[1]):
        if gap != step:
            return False
        step *= size
    return True


def _place(file: int, offset: int, length: int, entry: zipfile.ZipInfo) -> int:
    """Return the offset of an entry's bytes in the file; the archive's directory has only its header's offset."""
    start = entry.header_offset
    if not 0 <= start <= length - _LOCAL.size:
        raise ValueError(f"its archive's {entry.filename} begins outside of it")
    head = os.pread(file, _LOCAL.size, offset + start).ljust(_LOCAL.size)
    mark, name_length, extra_length = _LOCAL.unpack(head)
    begin: int = start + _LOCAL.size + name_length + extra_length
    if mark != b"PK\3\4" or begin + entry.file_size > length:
        raise ValueError(f"its archive's {entry.filename} is damaged, or ends outside of it")
    return offset + begin


class _FilePart(io.RawIOBase):
    """A part of a file, as a file that can be read."""

    def __init__(self, file: int, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
        at: int = to + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if at < 0:
            raise ValueError("it is too short")
        self._at = at
        return at

    def read(self, size: int = -1) -> bytes:
        end = self._length if size < 0 else min(self._at + size, self._length)
        found = os.pread(self._file, max(end - self._at, 0), self._offset + self._at)
        self._at += len(found)
        return found
