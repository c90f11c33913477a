"""Read the structure of a folder of torch.distributed.checkpoint, and check that its files belong together."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from refitd.checkpoints.archive import are_sizes, read_archive
from refitd.checkpoints.folder import METADATA, PART, Checkpoint, Piece
from refitd.checkpoints.header import Stored, refuse
from refitd.checkpoints.pickles import Call, Record, read_pickle
from refitd.describe.layout import row_major
from refitd.dtypes import ELEMENT_SIZES
from refitd.errors import CheckpointError
from refitd.plan.boxes import layout_violations
from refitd.text import shown

MAX_METADATA_BYTES = 1 << 30

Offset = tuple[int, ...]


class _Metadata(Record):
    pass


class _Index(Record):
    pass


class _Tensor(Record):
    pass


class _Bytes(Record):
    pass


class _Chunk(Record):
    pass


class _Properties(Record):
    pass


class _Place(Record):
    pass


class _Other(Record):
    """What the metadata hold and nobody needs here."""


_CLASSES = {
    "Metadata": _Metadata,
    "MetadataIndex": _Index,
    "TensorStorageMetadata": _Tensor,
    "BytesStorageMetadata": _Bytes,
    "ChunkStorageMetadata": _Chunk,
    "TensorProperties": _Properties,
    "_MEM_FORMAT_ENCODING": Call(lambda *_: None),
    "StorageMeta": _Other,
}
_KNOWN: dict[tuple[str, str], Any] = {
    **{("torch.distributed.checkpoint.metadata", name): cls for name, cls in _CLASSES.items()},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Place,
    ("torch.serialization", "_get_layout"): Call(lambda *_: None),
    ("torch", "Size"): tuple,
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
    files: frozenset[str]  # that anything lies in
    paths: dict[str, tuple[Any, ...]]  # of entries in the nested state dict that was saved


def is_dcp(path: Path) -> bool:
    """Return whether torch.distributed.checkpoint has begun to save a checkpoint in this folder."""
    try:
        return any(each.name == METADATA or PART.fullmatch(each.name) for each in path.iterdir())
    except OSError:
        return False  # `read_folder` says what is wrong with it


def read_dcp(path: Path, prefix: str | None = None) -> Checkpoint:
    """Check a folder that torch.distributed.checkpoint has saved, and return the tensors of one of its dicts.

    `.metadata` is read as values only: no name in it is looked up or called. Of the other files only what the chosen
    tensors lie in is read.

    Args:
        path: the folder.
        prefix: choose the tensors whose names begin so, and strip it. "": those at the top level. None: those of the
            only dict at the top level that holds tensors, by their names in it.

    Raises:
        CheckpointError: a file is missing, truncated, damaged or of another checkpoint; chunks of a tensor overlap, or
            leave a hole; the prefix chooses no tensor, or is needed and was not given. Names all of them.
    """
    if not (path / METADATA).is_file():
        raise CheckpointError(
            f"{path}: it has no {METADATA}, which torch.distributed.checkpoint writes last; this checkpoint was not "
            "finished"
        )
    said = _read_metadata(path / METADATA)
    there = {each.name for each in path.iterdir() if PART.fullmatch(each.name)}
    problems = [f"{path / name}: nothing in {METADATA} lies in it; remove it" for name in sorted(there - said.files)]
    chosen = _chosen(path, said, prefix)
    aside = len(said.tensors) + len(said.others) - len(chosen)
    used = {file for entry in chosen.values() for file in _files_of(said, entry)}
    problems += [f"{path / name}: missing, and {METADATA} lists it" for name in sorted(used - there)]
    files: dict[str, dict[str, Stored]] = {name: {} for name in sorted(used & there)}
    pieces: dict[str, Piece] = {}
    opened = {name: os.open(path / name, os.O_RDONLY) for name in files}
    try:
        for name, entry in chosen.items():
            problems += _add(name, entry, said, path, opened, files, pieces)
    except OSError as exc:
        raise CheckpointError(f"{path}: it cannot be read: {exc.strerror or exc}") from exc
    finally:
        for file in opened.values():
            os.close(file)
    in_order = {
        file: dict(sorted(held.items(), key=lambda item: item[1].offset)) for file, held in files.items() if held
    }
    problems += _doubled(path, in_order)
    refuse(problems)
    return Checkpoint(path, in_order, pieces, aside)


# --- the metadata -----------------------------------------------------------------------------------------


def _read_metadata(path: Path) -> _Said:
    try:
        if path.stat().st_size > MAX_METADATA_BYTES:
            raise CheckpointError(f"{path}: it has more than {MAX_METADATA_BYTES} bytes; these are no metadata")
        found = read_pickle(path.read_bytes(), _KNOWN)
        return _said(found)
    except OSError as exc:
        raise CheckpointError(f"{path}: it cannot be read: {exc.strerror or exc}") from exc
    except ValueError as exc:
        raise CheckpointError(
            f"{path}: these are no metadata of torch.distributed.checkpoint, or they are damaged: {exc}"
        ) from exc


def _said(found: Any) -> _Said:
    """Return the metadata in plain types; raises ValueError if they are not what they should be."""
    if not isinstance(found, _Metadata):
        raise ValueError(f"it is {shown(found)}, expected Metadata")
    entries, stored = found.field("state_dict_metadata"), found.field("storage_data")
    if not isinstance(entries, dict) or not isinstance(stored, dict):
        raise ValueError("its state_dict_metadata or storage_data is missing")
    tensors, others = {}, set()
    for name, entry in entries.items():
        if not isinstance(name, str) or not name or not isinstance(entry, _Tensor | _Bytes):
            raise ValueError(f"{shown(name)} is described as {shown(entry)}")
        if isinstance(entry, _Tensor):
            tensors[name] = _declared(name, entry)
        else:
            others.add(name)
    places: dict[tuple[str, Offset], tuple[str, int, int]] = {}
    files = set()
    for index, place in stored.items():
        if not isinstance(index, _Index) or not isinstance(place, _Place):
            raise ValueError(f"its storage_data say that {shown(index)} lies in {shown(place)}")
        name, at = index.field("fqn"), index.field("offset")
        file = _file(name, place)
        files.add(file[0])
        if at is None:
            continue
        if not isinstance(name, str) or not are_sizes(at) or (name, at) in places:
            raise ValueError(f"{shown(name)}: its chunk at {shown(at)} is stored twice, or nowhere in a tensor")
        places[name, at] = file
    paths = found.field("planner_data")
    known = {n: p for n, p in paths.items() if isinstance(p, tuple) and p} if isinstance(paths, dict) else {}
    return _Said(tensors, frozenset(others), places, frozenset(files), known)


def _declared(name: str, entry: Record) -> _Declared:
    properties, shape, chunks = entry.field("properties"), entry.field("size"), entry.field("chunks")
    state = properties.state if isinstance(properties, _Properties) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, str) or dtype not in ELEMENT_SIZES:
        raise ValueError(f"{name!r}: its dtype is {shown(dtype)}, known are {', '.join(ELEMENT_SIZES)}")
    if not are_sizes(shape) or not isinstance(chunks, list):
        raise ValueError(f"{name!r}: its shape is {shown(shape)}, its chunks {shown(chunks)}")
    boxes = []
    for chunk in chunks:
        offset, size = (chunk.field("offsets"), chunk.field("sizes")) if isinstance(chunk, _Chunk) else (None, None)
        if not are_sizes(offset) or not are_sizes(size) or not len(offset) == len(size) == len(shape):
            raise ValueError(f"{name!r}: a chunk lies at {shown(offset)} and has shape {shown(size)}")
        boxes.append((offset, size))
    return _Declared(dtype, shape, tuple(boxes))


def _file(name: Any, place: Record) -> tuple[str, int, int]:
    file, offset, length = (place.field(each) for each in ("relative_path", "offset", "length"))
    if not isinstance(file, str) or not PART.fullmatch(file):
        raise ValueError(f"{shown(name)}: it lies in {shown(file)}, expected a file like __0_0.distcp in this folder")
    if not are_sizes((offset, length)):
        raise ValueError(f"{shown(name)}: it lies at bytes {shown(offset)}, {shown(length)} of them")
    if place.field("transform_descriptors"):
        raise ValueError(f"{shown(name)}: it was written through {shown(place.field('transform_descriptors'))}")
    return file, offset, length


# --- which tensors ----------------------------------------------------------------------------------------


def _chosen(path: Path, said: _Said, prefix: str | None) -> dict[str, tuple[str, _Declared]]:
    """Return the chosen tensors, as {name: (name in the folder, tensor)}."""
    dicts: dict[str, dict[str, str]] = {}  # by what their tensors' names begin with: the tensors' names in it
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


def _files_of(said: _Said, entry: tuple[str, _Declared]) -> Iterator[str]:
    full, tensor = entry
    for offset, _ in tensor.chunks:
        if (full, offset) in said.places:
            yield said.places[full, offset][0]


# --- the files --------------------------------------------------------------------------------------------


def _add(
    name: str,
    entry: tuple[str, _Declared],
    said: _Said,
    path: Path,
    opened: Mapping[str, int],
    files: dict[str, dict[str, Stored]],
    pieces: dict[str, Piece],
) -> Iterator[str]:
    """Add the chunks of one tensor to `files` and `pieces`; yield what is wrong with them."""
    full, tensor = entry
    chunks = [(offset, size) for offset, size in tensor.chunks if prod(size)]
    problems = layout_violations(tensor.shape, chunks)
    yield from (f"{full!r}: {problem}" for problem in problems)
    if problems:
        return
    if not prod(tensor.shape):
        chunks = list(tensor.chunks[:1])  # a tensor without elements is one piece, wherever it lies
        if not chunks:
            yield f"{full!r}: it has no chunk"
    for offset, size in chunks:
        said_to_be = said.places.get((full, offset))
        if said_to_be is None:
            yield f"{full!r}: its chunk at {list(offset)} lies in no file"
            continue
        file, at, length = said_to_be
        if file not in opened:
            continue  # missing; said already
        where = f"{path / file}: {full!r} at {list(offset)}"
        if at + length > (end := os.fstat(opened[file]).st_size):
            yield f"{where}: it ends at byte {at + length}, and the file at {end}: it is truncated"
            continue
        try:
            found = read_archive(opened[file], at, length)
        except ValueError as exc:
            yield f"{where}: {exc}"
            continue
        if (found.dtype, found.shape) != (tensor.dtype, size):
            yield (
                f"{where}: the file has {list(found.shape)} {found.dtype}, {METADATA} says {list(size)} "
                f"{tensor.dtype}; it is of another checkpoint"
            )
            continue
        whole = size == tensor.shape
        local = name if whole else f"{name} at {list(offset)}"
        stride = None if found.stride == row_major(size) or not found.nbytes else found.stride
        files[file][local] = Stored(found.dtype, size, found.offset, found.nbytes, stride)
        if not whole:
            pieces[local] = Piece(name, offset, tensor.shape)


def _doubled(path: Path, files: Mapping[str, Mapping[str, Stored]]) -> Iterator[str]:
    """Yield what lies where something else does, or has another's name."""
    owners: dict[str, str] = {}
    for file, held in files.items():
        for name in held:
            if name in owners:
                yield f"{name!r}: it is in {owners[name]} and in {file}"
            owners[name] = file
        for (one, a), (other, b) in itertools.pairwise(held.items()):
            if a.offset + a.nbytes > b.offset:
                yield f"{path / file}: {one!r} and {other!r} lie in the same bytes"
