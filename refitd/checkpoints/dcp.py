"""Read the structure of a folder of torch.distributed.checkpoint, and check that its files belong together."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from refitd.checkpoints.opened import OpenedFile, OpenedFolder, refuse
from refitd.checkpoints.pickles import SIZE, Call, PickledState, are_sizes, read_archive, read_pickle, told
from refitd.checkpoints.safetensors import METADATA, PART, Checkpoint, Stored, TensorPart
from refitd.describe.layout import row_major
from refitd.dtypes import ELEMENT_SIZES
from refitd.errors import CheckpointError
from refitd.plan.boxes import layout_violations

MAX_METADATA_BYTES = 1 << 30

Offset = tuple[int, ...]


class _Metadata(PickledState):
    pass


class _Index(PickledState):
    pass


class _Tensor(PickledState):
    pass


class _Bytes(PickledState):
    pass


class _StoredChunk(PickledState):
    pass


class _TensorProperties(PickledState):
    pass


class _Place(PickledState):
    pass


class _Other(PickledState):
    """Metadata fields that we ignore."""


_CLASSES = {
    "Metadata": _Metadata,
    "MetadataIndex": _Index,
    "TensorStorageMetadata": _Tensor,
    "BytesStorageMetadata": _Bytes,
    "ChunkStorageMetadata": _StoredChunk,
    "TensorProperties": _TensorProperties,
    "_MEM_FORMAT_ENCODING": Call(lambda *_: None),
    "StorageMeta": _Other,
}
_KNOWN: dict[tuple[str, str], Any] = {
    **{("torch.distributed.checkpoint.metadata", name): cls for name, cls in _CLASSES.items()},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Place,
    # Megatron keeps every rank's plan, too
    **{("torch.distributed.checkpoint.planner", n): _Other for n in ("SavePlan", "WriteItem", "TensorWriteData")},
    ("torch.distributed.checkpoint.planner", "WriteItemType"): Call(lambda *_: None),
    ("torch.serialization", "_get_layout"): Call(lambda *_: None),
    ("torch", "Size"): SIZE,
    ("pathlib", "PosixPath"): Call(lambda *_: None),
    ("pathlib._local", "PosixPath"): Call(lambda *_: None),  # as Python 3.13 writes it
    **{("torch", dtype): dtype for dtype in ELEMENT_SIZES},
}


@dataclass(frozen=True, slots=True)
class _Declared:
    """One tensor of the metadata."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[Offset, tuple[int, ...]], ...]  # offset and size


@dataclass(frozen=True, slots=True)
class _Said:
    """The metadata, checked for their types."""

    tensors: dict[str, _Declared]
    others: frozenset[str]  # entries that are no tensors
    places: dict[tuple[str, Offset], tuple[str, int, int]]  # of a chunk: file, offset and length of its archive
    files: frozenset[str]  # files with any entry
    paths: dict[str, tuple[Any, ...]]  # of entries in the saved nested state dict


@dataclass(frozen=True, slots=True)
class _Placed:
    """A chunk that is to be read: `length` bytes of its file, starting at byte `offset`, are its archive."""

    local: str  # its name in the Checkpoint
    what: str  # for errors
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int
    piece: TensorPart | None  # None: it is the whole tensor


def is_dcp(opened: OpenedFolder) -> bool:
    """Return whether torch.distributed.checkpoint has begun to save a checkpoint in this folder."""
    return any(name == METADATA or PART.fullmatch(name) for name in opened.files)


def read_dcp(opened: OpenedFolder, prefix: str | None = None) -> Checkpoint:
    """Check a folder that torch.distributed.checkpoint has saved, and return the tensors of one of its dicts.

    `.metadata` is read as values only: no name in it is looked up or called. Of the other files it reads
    the archives of the chosen tensors.

    Args:
        opened: the folder.
        prefix: choose the tensors whose names begin so, and strip it. "": the tensors at the top level. None: the
            tensors of the only dict at the top level, by their names in that dict.

    Raises:
        CheckpointError: a file is missing, truncated, damaged or of another checkpoint; chunks of a tensor overlap, or
            leave a hole; the prefix chooses no tensor, or is needed and was not given. Names all of them.
    """
    path = opened.path
    if METADATA not in opened.files:
        raise CheckpointError(
            f"{path}: it has no {METADATA}, which torch.distributed.checkpoint writes last; this checkpoint was not "
            "finished"
        )
    said = _read_metadata(opened.files[METADATA])
    there = {name for name in opened.files if PART.fullmatch(name)}
    problems = [f"{path / name}: nothing in {METADATA} lies in it; remove it" for name in sorted(there - said.files)]
    chosen = _chosen(path, said, prefix)
    aside = len(said.tensors) + len(said.others) - len(chosen)
    placed: dict[str, list[_Placed]] = {}
    for name, (full, tensor) in chosen.items():
        problems += _place(name, full, tensor, said, placed)
    problems += [f"{path / name}: missing, and {METADATA} lists it" for name in sorted(placed.keys() - there)]
    files: dict[str, dict[str, Stored]] = {}
    pieces: dict[str, TensorPart] = {}
    for file in sorted(placed.keys() & there):
        found, wrong = _read_file(opened.files[file], placed[file])
        problems += wrong
        files[file] = {one.local: stored for one, stored in found}
        pieces |= {one.local: one.piece for one, _ in found if one.piece is not None}
    names = Counter(one.local for held in placed.values() for one in held)
    problems += [f"{name!r}: several tensors or chunks are called so" for name, count in names.items() if count > 1]
    refuse(problems)
    return Checkpoint(opened, files, pieces, aside)


# --- the metadata -----------------------------------------------------------------------------------------


def _read_metadata(file: OpenedFile) -> _Said:
    path = file.path
    if file.size > MAX_METADATA_BYTES:
        raise CheckpointError(f"{path}: it has more than {MAX_METADATA_BYTES} bytes; these are no metadata")
    try:
        found = read_pickle(file.read(0, file.size), _KNOWN)
        return _said(found)
    except ValueError as exc:
        raise CheckpointError(
            f"{path}: these are no metadata of torch.distributed.checkpoint, or they are damaged: {exc}"
        ) from exc


def _said(found: Any) -> _Said:
    """Return the metadata in plain types; raises ValueError if a type is wrong."""
    if not isinstance(found, _Metadata):
        raise ValueError(f"it is {told(found)}, expected Metadata")
    entries, stored = found.field("state_dict_metadata"), found.field("storage_data")
    if not isinstance(entries, dict) or not isinstance(stored, dict):
        raise ValueError("its state_dict_metadata or storage_data is missing")
    tensors, others = {}, set()
    for name, entry in entries.items():
        if not isinstance(name, str) or not name or not isinstance(entry, _Tensor | _Bytes):
            raise ValueError(f"{told(name)} is described as {told(entry)}")
        if isinstance(entry, _Tensor):
            tensors[name] = _declared(name, entry)
        else:
            others.add(name)
    places: dict[tuple[str, Offset], tuple[str, int, int]] = {}
    files = set()
    for index, place in stored.items():
        if not isinstance(index, _Index) or not isinstance(place, _Place):
            raise ValueError(f"its storage_data has {told(index)} at {told(place)}")
        name, at = index.field("fqn"), index.field("offset")
        file = _file(name, place)
        files.add(file[0])
        if at is None:
            continue
        if not isinstance(name, str) or not are_sizes(at) or (name, at) in places:
            raise ValueError(f"{told(name)}: its chunk at {told(at)} is stored twice, or nowhere in a tensor")
        places[name, at] = file
    paths = found.field("planner_data")
    known = {n: p for n, p in paths.items() if isinstance(p, tuple) and p} if isinstance(paths, dict) else {}
    return _Said(tensors, frozenset(others), places, frozenset(files), known)


def _declared(name: str, entry: PickledState) -> _Declared:
    properties, shape, chunks = entry.field("properties"), entry.field("size"), entry.field("chunks")
    state = properties.state if isinstance(properties, _TensorProperties) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, str) or dtype not in ELEMENT_SIZES:
        raise ValueError(f"{name!r}: its dtype is {told(dtype)}, known are {', '.join(ELEMENT_SIZES)}")
    if not are_sizes(shape) or not isinstance(chunks, list):
        raise ValueError(f"{name!r}: its shape is {told(shape)}, its chunks {told(chunks)}")
    boxes = []
    for chunk in chunks:
        offset, size = (
            (chunk.field("offsets"), chunk.field("sizes")) if isinstance(chunk, _StoredChunk) else (None, None)
        )
        if not are_sizes(offset) or not are_sizes(size) or not len(offset) == len(size) == len(shape):
            raise ValueError(f"{name!r}: a chunk has offset {told(offset)} and shape {told(size)}")
        boxes.append((offset, size))
    return _Declared(dtype, shape, tuple(boxes))


def _file(name: Any, place: PickledState) -> tuple[str, int, int]:
    file, offset, length = (place.field(each) for each in ("relative_path", "offset", "length"))
    if not isinstance(file, str) or not PART.fullmatch(file):
        raise ValueError(f"{told(name)}: its file is {told(file)}, expected one like __0_0.distcp in this folder")
    if not are_sizes((offset, length)):
        raise ValueError(f"{told(name)}: its bytes are {told(offset)} with length {told(length)}, expected sizes")
    if place.field("transform_descriptors"):
        raise ValueError(f"{told(name)}: it was written through {told(place.field('transform_descriptors'))}")
    return file, offset, length


# --- which tensors ----------------------------------------------------------------------------------------


def _chosen(path: Path, said: _Said, prefix: str | None) -> dict[str, tuple[str, _Declared]]:
    """Return the chosen tensors, as {name: (name in the folder, tensor)}."""
    dicts: dict[str, dict[str, str]] = {}  # prefix -> {name in this dict: name in the folder}
    for name in said.tensors:
        key = said.paths.get(name, (name,))
        first = f"{key[0]}." if len(key) > 1 else ""
        dicts.setdefault(first if name.startswith(first) else "", {})[name.removeprefix(first)] = name
    if prefix is None:
        if len(dicts) > 1:
            has = ", ".join(f"{len(held)} under {first!r}" for first, held in sorted(dicts.items()))
            raise CheckpointError(f"{path}: it holds tensors of several dicts ({has}); choose one by its prefix")
        names = next(iter(dicts.values()), {})
    elif prefix == "":
        names = dicts.get("", {})
    else:
        names = {name.removeprefix(prefix): name for name in said.tensors if name.startswith(prefix) and name != prefix}
    if not names:
        has = ", ".join(f"{len(held)} under {first!r}" for first, held in sorted(dicts.items())) or "none"
        what = f"the name of no tensor begins with {prefix!r}" if prefix else "it holds no tensor at the top level"
        raise CheckpointError(f"{path}: {what}; its tensors: {has}")
    return {name: (full, said.tensors[full]) for name, full in names.items()}


# --- the files --------------------------------------------------------------------------------------------


def _place(name: str, full: str, tensor: _Declared, said: _Said, placed: dict[str, list[_Placed]]) -> Iterator[str]:
    """Add the chunks of one tensor to `placed`, by file; yield their problems."""
    chunks = [(offset, size) for offset, size in tensor.chunks if prod(size)]
    if problems := layout_violations(tensor.shape, chunks):
        yield from (f"{full!r}: {problem}" for problem in problems)
        return
    if not prod(tensor.shape):
        chunks = list(tensor.chunks[:1])  # a tensor without elements is one piece, at any offset
        if not chunks or chunks[0][1] != tensor.shape:
            yield f"{full!r}: it has no elements, and no chunk of its shape {list(tensor.shape)}"
            return
    for offset, size in chunks:
        place = said.places.get((full, offset))
        if place is None:
            yield f"{full!r}: its chunk at {list(offset)} lies in no file"
            continue
        file, at, length = place
        is_whole = size == tensor.shape
        local = name if is_whole else f"{name} at {list(offset)}"
        piece = None if is_whole else TensorPart(name, offset, tensor.shape)
        what = f"{full!r} at {list(offset)}"
        placed.setdefault(file, []).append(_Placed(local, what, tensor.dtype, size, at, length, piece))


def _read_file(file: OpenedFile, placed: list[_Placed]) -> tuple[list[tuple[_Placed, Stored]], list[str]]:
    """Return the places of these chunks' elements in their file, in its order, and their problems."""
    found: list[tuple[_Placed, Stored]] = []
    problems: list[str] = []
    path = file.path
    try:
        for one in sorted(placed, key=lambda one: one.offset):
            try:
                found.append((one, _read_chunk(file, one)))
            except ValueError as exc:
                problems.append(f"{path}: {one.what}: {exc}")
    except OSError as exc:
        problems.append(f"{path}: it cannot be read: {exc.strerror or exc}")
    for (one, a), (other, b) in itertools.pairwise(found):
        if a.offset + a.nbytes > b.offset:
            problems.append(f"{path}: {one.what} and {other.what} lie in the same bytes")
    return found, problems


def _read_chunk(file: OpenedFile, one: _Placed) -> Stored:
    """Return the place of a chunk's elements in its file; raises ValueError if they are not there."""
    if one.offset + one.length > file.size:
        raise ValueError(f"it ends at byte {one.offset + one.length}, and the file at {file.size}: it is truncated")
    found = read_archive(file.fd, one.offset, one.length)
    if (found.dtype, found.shape) != (one.dtype, one.shape):
        raise ValueError(
            f"the file has {list(found.shape)} {found.dtype}, {METADATA} says {list(one.shape)} {one.dtype}; it is of "
            "another checkpoint"
        )
    stride = None if found.stride == row_major(one.shape) or not found.nbytes else found.stride
    return Stored(found.dtype, found.shape, found.offset, found.nbytes, stride)
