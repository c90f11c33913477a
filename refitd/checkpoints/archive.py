"""Find where a tensor's bytes lie in an archive that torch.save has written, without loading it.

NAME/data.pkl    a pickle: a call that builds the tensor from a storage
NAME/data/0      the storage's bytes, uncompressed
NAME/byteorder   "little"
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from math import prod
from typing import Any, NamedTuple, TypeGuard

from refitd.checkpoints.header import MAX_DIMS
from refitd.checkpoints.pickles import EMPTY_DICT, SIZE, Call, read_pickle, told
from refitd.dtypes import ELEMENT_SIZES

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
    """Return whether these strides are those of row-major order over the dimensions in some order."""
    if not prod(shape):
        return True
    step = 1
    for size, gap in sorted(((n, s) for n, s in zip(shape, stride, strict=True) if n > 1), key=lambda pair: pair[1]):
        if gap != step:
            return False
        step *= size
    return True


def _place(file: int, offset: int, length: int, entry: zipfile.ZipInfo) -> int:
    """Return where an entry's bytes begin in the file; the archive's directory tells only where its header does."""
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
