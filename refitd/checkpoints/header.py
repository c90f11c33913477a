"""Read and write the header of a safetensors file, strictly.

8 bytes   length of the header, little endian
header    JSON: {"__metadata__": {...}, NAME: {"dtype", "shape", "data_offsets": [first, end]}, ...}
data      the tensors' bytes, row-major, without holes; offsets count from here
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from refitd.checkpoints.opened import OpenedFile
from refitd.dtypes import ELEMENT_SIZES
from refitd.errors import CheckpointError
from refitd.text import shown

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
ALIGNMENT = 8
MAX_DIMS = 64  # as in torch's iterators; the product of millions of sizes would take hours

# The format's dtype names, in the order in which its own library writes tensors: the widest first.
NAMES: dict[str, str] = {
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
    "F32": "float32",
    "U32": "uint32",
    "I32": "int32",
    "BF16": "bfloat16",
    "F16": "float16",
    "U16": "uint16",
    "I16": "int16",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_ORDER = {dtype: place for place, dtype in enumerate(NAMES.values())}
_WRITTEN = {dtype: name for name, dtype in NAMES.items()}
_FIELDS = {"dtype", "shape", "data_offsets"}


class Stored(NamedTuple):
    """One tensor in a file: `nbytes` bytes starting at byte `offset` of the file, without gaps between elements.

    `stride` counts elements, as torch's strides do; None: row-major.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    stride: tuple[int, ...] | None = None


def read_header(file: OpenedFile) -> dict[str, Stored]:
    """Return the tensors of an opened safetensors file by name, in the order of their bytes.

    Raises:
        CheckpointError: it is not a safetensors file, or is damaged or truncated; lists every problem.
    """
    path, file_bytes = file.path, file.size
    length = int.from_bytes(file.read(0, LENGTH_BYTES), "little")
    room = file_bytes - LENGTH_BYTES
    if not 2 <= length <= min(room, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{path}: its header says that it takes {length} bytes, expected 2 to "
            f"{min(max(room, 0), MAX_HEADER_BYTES)} in a file of {file_bytes}; it is truncated or no safetensors file"
        )
    text = file.read(LENGTH_BYTES, length)
    found, problems = _read(_parsed(path, text), LENGTH_BYTES + length)
    end = LENGTH_BYTES + length
    for name, tensor in found.items():
        if tensor.offset != end:
            what = "overlap what is before them" if tensor.offset < end else "leave a hole before them"
            problems.append(f"{name!r}: its bytes {what} ({tensor.offset}, expected {end})")
        end = tensor.offset + tensor.nbytes
    if not problems and end != file_bytes:
        what = "it is truncated" if file_bytes < end else "something follows its tensors"
        problems.append(f"its tensors end at byte {end}, and the file at {file_bytes}: {what}")
    refuse(f"{path}: {problem}" for problem in problems)
    return found


def header(tensors: dict[str, tuple[tuple[int, ...], str]]) -> bytes:
    """Return the length and header of a file that holds tensors of these shapes and dtypes in this order."""
    said: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # required by transformers
    end = 0
    for name, (shape, dtype) in tensors.items():
        first, end = end, end + nbytes_of(shape, dtype)
        said[name] = {"dtype": _WRITTEN[dtype], "shape": list(shape), "data_offsets": [first, end]}
    text = json.dumps(said, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def in_file_order(tensors: dict[str, tuple[tuple[int, ...], str]]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the tensors in the order of the format's own library: wide types first, so that all are aligned."""
    return dict(sorted(tensors.items(), key=lambda item: (_ORDER.get(item[1][1], 0), item[0])))


def is_writable(dtype: str) -> bool:
    """Return whether the format has this dtype."""
    return dtype in _WRITTEN


def nbytes_of(shape: Iterable[int], dtype: str) -> int:
    """Return the size of a tensor in bytes."""
    return prod(shape) * ELEMENT_SIZES[dtype]


def refuse(problems: Iterable[str]) -> None:
    """Raise CheckpointError listing these problems, if any."""
    found = list(problems)
    if found:
        more = f"; and {len(found) - 10} more" if len(found) > 10 else ""
        raise CheckpointError("; ".join(found[:10]) + more)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict; raises ValueError if a key is repeated."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{shown(key)} is in it twice")
        found[key] = value
    return found


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    try:
        said = json.loads(text.decode(), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as exc:
        raise CheckpointError(f"{path}: its header is damaged: {exc}") from exc
    if not isinstance(said, dict):
        raise CheckpointError(f"{path}: its header is {shown(said)}, expected an object")
    said.pop("__metadata__", None)
    return said


def _read(said: dict[str, Any], begin: int) -> tuple[dict[str, Stored], list[str]]:
    found, problems = {}, []
    for name, one in said.items():
        problem = _problem(one)
        if problem or not name:
            problems.append(f"{name!r}: {problem or 'a tensor has no name'}")
            continue
        first, end = one["data_offsets"]
        found[name] = Stored(NAMES[one["dtype"]], tuple(one["shape"]), begin + first, end - first)
    return dict(sorted(found.items(), key=lambda item: (item[1].offset, item[1].nbytes))), problems


def _problem(one: Any) -> str:
    if not isinstance(one, dict) or one.keys() != _FIELDS:
        return f"it is described as {shown(one)}, expected dtype, shape and data_offsets"
    dtype, shape, offsets = one["dtype"], one["shape"], one["data_offsets"]
    if not isinstance(dtype, str) or dtype not in NAMES:
        return f"its dtype is {shown(dtype)}, known are {', '.join(NAMES)}"
    if not _are_sizes(shape):
        return f"its shape is {shown(shape)}, expected at most {MAX_DIMS} sizes"
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"its data_offsets are {shown(offsets)}, expected [first, end]"
    if (wanted := nbytes_of(shape, NAMES[dtype])) != offsets[1] - offsets[0]:
        return f"it has {offsets[1] - offsets[0]} bytes, its shape {tuple(shape)} of {dtype} takes {wanted}"
    return ""


def _are_sizes(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) <= MAX_DIMS and all(type(n) is int and 0 <= n < 1 << 62 for n in value)
    )
