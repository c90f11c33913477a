"""Read Hugging Face folders of safetensors strictly: headers, the index, and whether the files belong together.

8 bytes   length of the header, little endian
header    JSON: {"__metadata__": {...}, NAME: {"dtype", "shape", "data_offsets": [first, end]}, ...}
data      the tensors' bytes, row-major, without holes; offsets count from here
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from refitd.checkpoints.opened import OpenedFile, OpenedFolder, refuse
from refitd.dtypes import ELEMENT_SIZES
from refitd.errors import CheckpointError
from refitd.text import shown

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
ALIGNMENT = 8
MAX_DIMS = 64  # as in torch's iterators; the product of millions of sizes would take hours

# The format's dtype names, in the order in which the safetensors library writes tensors: the widest first.
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
    """Return the tensors in the order of the safetensors library: wide types first, which aligns all of them."""
    return dict(sorted(tensors.items(), key=lambda item: (_ORDER.get(item[1][1], 0), item[0])))


def is_writable(dtype: str) -> bool:
    """Return whether the format has this dtype."""
    return dtype in _WRITTEN


def nbytes_of(shape: Iterable[int], dtype: str) -> int:
    """Return the size of a tensor in bytes."""
    return prod(shape) * ELEMENT_SIZES[dtype]


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


WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
METADATA = ".metadata"  # of torch.distributed.checkpoint
PART = re.compile(r"__\d+_\d+\.distcp")  # one of its files
MAX_INDEX_BYTES = 256_000_000


class TensorPart(NamedTuple):
    """The place of a piece of a tensor: at `offset` of a tensor `tensor` of shape `shape`."""

    tensor: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checked folder.

    Attributes:
        opened: the folder with its open files.
        files: each file's tensors and pieces of tensors, in the order of their bytes. Names are distinct in all files.
        pieces: by their names in `files`, the pieces of tensors.
        aside: the number of the folder's entries that were not chosen, or are no tensors.
    """

    opened: OpenedFolder
    files: dict[str, dict[str, Stored]]
    pieces: Mapping[str, TensorPart] = field(default_factory=dict)
    aside: int = 0

    @property
    def path(self) -> Path:
        """The folder."""
        return self.opened.path

    @property
    def count(self) -> int:
        """The number of tensors, including tensors with only some pieces here."""
        return len({self.pieces[name].tensor if name in self.pieces else name for _, name, _ in self.tensors()})

    @property
    def nbytes(self) -> int:
        """The total bytes of all tensors."""
        return sum(tensor.nbytes for _, _, tensor in self.tensors())

    def tensors(self) -> Iterator[tuple[str, str, Stored]]:
        """Yield (file, name, tensor), file by file, in the order of their bytes."""
        for file, held in self.files.items():
            for name, tensor in held.items():
                yield file, name, tensor


def part_of(checkpoint: Checkpoint, rank: int, world_size: int) -> Checkpoint:
    """Return the part that one of `world_size` nodes publishes: consecutive tensors, about as many bytes for each node.

    0-----4-----8 bytes, 2 nodes: a tensor belongs to the node whose half contains its middle
    """
    total, before = max(1, checkpoint.nbytes), 0
    files: dict[str, dict[str, Stored]] = {}
    for file, name, tensor in checkpoint.tensors():
        middle = before + tensor.nbytes // 2
        if min(middle * world_size // total, world_size - 1) == rank:
            files.setdefault(file, {})[name] = tensor
        before += tensor.nbytes
    return replace(checkpoint, files=files)


def is_weights(name: str) -> bool:
    """Return whether a file of this name holds or indexes a checkpoint's weights, in either format."""
    return name in (WHOLE, INDEX, METADATA) or any(kind.fullmatch(name) for kind in (SHARD, PART))


def is_safetensors(name: str) -> bool:
    """Return whether a file of this name holds or indexes weights of a Hugging Face folder."""
    return name in (WHOLE, INDEX) or SHARD.fullmatch(name) is not None


def under(checkpoint: Checkpoint, prefix: str) -> Checkpoint:
    """Return the tensors whose names begin with `prefix`, under the rest of their names.

    Raises:
        CheckpointError: no name begins so.
    """
    files = {
        file: {
            name.removeprefix(prefix): tensor
            for name, tensor in held.items()
            if name.startswith(prefix) and name != prefix
        }
        for file, held in checkpoint.files.items()
    }
    chosen = {file: held for file, held in files.items() if held}
    if not chosen:
        has = ", ".join(repr(name) for _, name, _ in itertools.islice(checkpoint.tensors(), 5))
        raise CheckpointError(f"{checkpoint.path}: the name of no tensor begins with {prefix!r}; it has {has}, ...")
    left = sum(map(len, checkpoint.files.values())) - sum(map(len, chosen.values()))
    return replace(checkpoint, files=chosen, aside=left)


def open_folder(path: Path) -> OpenedFolder:
    """Open a folder and all weights in it, in either format.

    Raises:
        CheckpointError: as `OpenedFolder`.
    """
    return OpenedFolder(path, is_weights)


def read_folder(opened: OpenedFolder) -> Checkpoint:
    """Check a folder with model.safetensors, or with shards and model.safetensors.index.json.

    Other files of the folder are ignored (config, tokenizer, adapters).

    Raises:
        CheckpointError: a shard is missing, truncated, damaged or of another checkpoint, a tensor is in two shards, or
            index and files disagree. Names all of them.
    """
    path, there = opened.path, sorted(name for name in opened.files if is_safetensors(name))
    weights = [name for name in there if name != INDEX]
    if INDEX not in there:
        if weights != [WHOLE]:
            has = ", ".join(weights[:5]) or "no file of weights"
            raise CheckpointError(f"{path}: it has {has}, expected {WHOLE} alone, or shards and {INDEX}")
        return Checkpoint(opened, {WHOLE: _with_tensors(path, read_header(opened.files[WHOLE]))})
    index = _read_index(opened.files[INDEX])
    listed = dict.fromkeys(index.values())
    problems = [f"{path / name}: missing, and the index lists it" for name in listed if name not in weights]
    problems += [
        f"{path / name}: no tensor of the index is in it; it is of another checkpoint, or the index is old"
        for name in weights
        if name not in listed
    ]
    files: dict[str, dict[str, Stored]] = {}
    for name in sorted(set(weights) & listed.keys()):
        try:
            files[name] = read_header(opened.files[name])
        except CheckpointError as exc:
            problems.append(str(exc))
    problems += _disagreements(path, index, files)
    refuse(problems)
    return Checkpoint(opened, files)


def _with_tensors(path: Path, held: dict[str, Stored]) -> dict[str, Stored]:
    if not held:
        raise CheckpointError(f"{path / WHOLE}: it holds no tensor")
    return held


def _disagreements(path: Path, index: dict[str, str], files: dict[str, dict[str, Stored]]) -> Iterator[str]:
    owners: dict[str, str] = {}
    for file, held in files.items():
        for name in held:
            if (other := owners.setdefault(name, file)) != file:
                yield f"{name!r}: it is in {other} and in {file}; a checkpoint has each tensor once"
            elif name not in index:
                yield f"{name!r}: it is in {path / file}, and not in the index"
    for name, file in index.items():
        if file in files and name not in files[file]:
            where = f"; it is in {owners[name]}" if name in owners else ""
            yield f"{name!r}: the index says that it is in {file}, and it is not{where}"


def _read_index(file: OpenedFile) -> dict[str, str]:
    path = file.path
    if file.size > MAX_INDEX_BYTES:
        raise CheckpointError(f"{path}: it has more than {MAX_INDEX_BYTES} bytes; it is no index")
    try:
        said: Any = json.loads(file.read(0, file.size).decode(), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as exc:
        raise CheckpointError(f"{path}: it is damaged: {exc}") from exc
    index = said.get("weight_map") if isinstance(said, dict) else None
    if not isinstance(index, dict) or not index:
        raise CheckpointError(f"{path}: its weight_map is {shown(index)}, expected an object of tensors and files")
    refuse(
        f"{path}: {name!r} is said to be in {shown(file)}, expected the name of a shard in this folder"
        for name, file in index.items()
        if not isinstance(file, str) or file != Path(file).name or not is_safetensors(file) or file == INDEX
    )
    return index
