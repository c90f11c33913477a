"""Read the structure of a Hugging Face folder of safetensors, and check that its files belong together."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from refitd.checkpoints.header import Stored, read_header, refuse, unique_keys
from refitd.checkpoints.opened import OpenedFile, OpenedFolder
from refitd.errors import CheckpointError
from refitd.text import shown

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
METADATA = ".metadata"  # of torch.distributed.checkpoint
PART = re.compile(r"__\d+_\d+\.distcp")  # one of its files
MAX_INDEX_BYTES = 256_000_000


class TensorPart(NamedTuple):
    """Where a part of a tensor belongs: at `offset` of a tensor `tensor` of shape `shape`."""

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
        """The number of tensors, of which it may hold pieces only."""
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
        CheckpointError: there is none.
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
            has = ", ".join(weights[:5]) or "none of them"
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
