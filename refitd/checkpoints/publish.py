"""Publish a checkpoint on disk as a version, without a trainer.

Tensors are read from the open files straight into the memory where they are published.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from refitd.checkpoints.dcp import is_dcp, read_dcp
from refitd.checkpoints.opened import AGAIN, OpenedFile, OpenedFolder
from refitd.checkpoints.safetensors import (
    METADATA,
    Checkpoint,
    Stored,
    is_safetensors,
    open_folder,
    part_of,
    read_folder,
    under,
)
from refitd.client.arenas import copy_bytes
from refitd.client.client import Client
from refitd.client.streamed import Unread
from refitd.describe.layout import row_major
from refitd.describe.metadata import ParameterMetadata, Tile
from refitd.dtypes import element_size
from refitd.errors import CheckpointError, DeadlineExceeded, RefusedError

WAIT_S = 60.0
POLL_S = 0.1  # seconds between two checks for the other nodes' parts


@dataclass(frozen=True, slots=True)
class Published:
    """The result of publishing a folder; `aside` counts its entries that were not chosen, or are no tensors."""

    model: str
    version: int
    path: str
    files: int
    tensors: int
    bytes: int
    seconds: float
    aside: int = 0


def publish_checkpoint(
    client: Client,
    model: str,
    path: str | os.PathLike[str],
    *,
    version: int | None = None,
    prefix: str | None = None,
    rank: int = 0,
    world_size: int = 1,
    partial: bool = False,
    timeout: float = WAIT_S,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> Published:
    """Publish a folder as a version of `model`, which must have no other source.

    The folder is Hugging Face's (model.safetensors, or shards with model.safetensors.index.json) or one that
    torch.distributed.checkpoint has saved (.metadata and __*_*.distcp), in any layout.

    The files are read once, into a slot that this node's daemon owns. Like the version of an ended trainer,
    it outlives this client, until another source of the model registers. The version is published only if the
    whole folder is valid and has been read.

    Args:
        client: a separate session (`refitd.connect`), closed afterwards: until then the checkpoint is an attached
            source, which no other checkpoint or trainer replaces.
        model: the name that engines use.
        path: the folder.
        version: the version's number; None: the next one.
        prefix: publish the tensors whose names begin so, under the rest of their names. None: all of a Hugging Face
            folder; of torch.distributed.checkpoint the only dict of tensors, where the folder has one ("": the tensors
            at the top level).
        rank: this node's number among `world_size` nodes that all see the folder, read one part each and share the
            memory. All must publish at the same time; each call returns when all parts are published.
        world_size: the number of nodes.
        partial: the folder has only some of the targets' tensors; see `Client.register_source`.
        timeout: seconds for memory and admission, and for the other nodes.
        on_progress: called with the bytes read so far and the total.

    Raises:
        CheckpointError: files are missing, truncated, damaged, duplicated or of another checkpoint, chunks of a tensor
            overlap or leave holes, the prefix chooses no tensor, a file is not regular, or the folder or a file was
            replaced or changed while it was read; names them.
        RefusedError: the model has an attached trainer, or the version is not above all earlier live ones.
        ArenaError: the daemon does not have enough memory for a slot.
        DeadlineExceeded: another node has not published its part in time.
    """
    began = time.monotonic()
    if any(held.member.startswith(f"model {model!r} source rank {rank} on ") for held in client._registered):
        raise RefusedError(
            f"model {model!r}: this client holds its source rank {rank}; close the client, whose versions stay, and "
            "publish with another (refitd.connect)"
        )
    checkpoint = part_of(read_checkpoint(Path(path), prefix), rank, world_size)
    total = checkpoint.nbytes
    done = 0

    def progress(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        on_progress(done, total)

    with Reader(checkpoint) as reader:
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in reader.tensors.items()}
        source = client.declare_source(
            model,
            shapes,
            metadata=described(checkpoint, rank),
            rank=rank,
            world_size=world_size,
            slots=1,
            partial=partial,
            origin=checkpoint.opened.identity() if world_size > 1 else "",
            timeout=timeout,
        )
        number = source.next_version if version is None else version
        try:
            others = _Others(client, model, number, world_size, timeout) if world_size > 1 else None
            source.publish_from(number, _read(reader, progress, others), timeout=timeout)
            if others is not None:
                others.wait_until_published()
        except BaseException:
            source.close()
            raise
    seconds = time.monotonic() - began
    return Published(
        model, number, str(path), len(checkpoint.files), checkpoint.count, total, seconds, checkpoint.aside
    )


def read_checkpoint(path: Path, prefix: str | None) -> Checkpoint:
    """Check a folder of either format, and return the tensors that the prefix chooses. Its files are open.

    Raises:
        CheckpointError: it is neither, both, its files do not belong together, or they are being written.
    """
    opened = open_folder(path)
    try:
        found = _checked(opened, prefix)
        opened.check()  # before anything is registered: writers often write the headers of all files first
    except BaseException:
        opened.close()
        raise
    return found


def _checked(opened: OpenedFolder, prefix: str | None) -> Checkpoint:
    if not is_dcp(opened):
        found = read_folder(opened)
        return under(found, prefix) if prefix else found
    if others := sorted(name for name in opened.files if is_safetensors(name)):
        raise CheckpointError(
            f"{opened.path}: it has {METADATA} or .distcp files of torch.distributed.checkpoint, and {others[0]} of "
            "Hugging Face; move one of the two checkpoints elsewhere"
        )
    return read_dcp(opened, prefix)


def described(checkpoint: Checkpoint, rank: int) -> list[ParameterMetadata]:
    """Describe each tensor of a checkpoint as whole, and each piece as a box of its tensor."""
    found = []
    for _, name, stored in checkpoint.tensors():
        piece = checkpoint.pieces.get(name)
        box = piece and Tile(piece.tensor, piece.offset, stored.shape, 0, row_major(stored.shape))
        found.append(
            ParameterMetadata(
                name=name,
                shape=stored.shape,
                dtype=stored.dtype,
                element_size=element_size(stored.dtype),
                owner_rank=rank,
                resolved_name=piece.tensor if piece else name,
                tiles=(box,) if box else None,
                global_shape=piece.shape if piece else None,
            )
        )
    return found


def _read(
    reader: Reader, progress: Callable[[int], object], others: _Others | None
) -> Iterator[tuple[str, FileTensor]]:
    """Yield a part's tensors. It ends, and the part is published, only once all nodes have read one folder.

    All nodes have opened the folder when the last one has registered. If on every node the path then leads to the files
    that it has read, all have read one folder, even if another one has equal names, sizes and times.
    """
    yield from reader.read(progress)
    if others is not None:
        others.wait_until_opened()
        reader.check()


class _Others:
    """The other nodes that publish parts of a folder."""

    def __init__(self, client: Client, model: str, version: int, world_size: int, timeout: float) -> None:
        self._client, self._model, self._version = client, model, version
        self._world_size, self._timeout = world_size, timeout

    def wait_until_opened(self) -> None:
        """Return once every node has registered its part, which it does after it has opened the folder."""
        self._wait(lambda source: source.attached, lambda found: False)

    def wait_until_published(self) -> None:
        """Return once every part is published: a source that leaves earlier would take its part away."""
        self._wait(lambda source: self._version in source.versions, lambda found: self._version in found)

    def _wait(self, is_there: Callable[[Any], bool], is_done: Callable[[tuple[int, ...]], bool]) -> None:
        deadline = time.monotonic() + self._timeout
        while True:
            # a coordinator that has just started may not know the model yet
            found = next((m for m in self._client.status().models if m.model == self._model), None)
            there = {source.rank for source in found.sources if is_there(source)} if found is not None else set()
            missing = sorted(set(range(self._world_size)) - there)
            if not missing or (found is not None and is_done(found.complete_versions)):
                return
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"model {self._model!r}: parts {[rank + 1 for rank in missing]} of {self._world_size} were not "
                    f"published within {self._timeout:.0f} s; publish on all nodes at the same time, with one version"
                )
            time.sleep(POLL_S)


STRIDE_BYTES = 16 << 20  # read between two calls of `on_progress`
AHEAD_BYTES = 64 << 20  # read ahead by the disk while tensors are copied: twice as fast on a cold file


class FileTensor(Unread):
    """A tensor in an open file.

    It is read by system calls and not through a memory map: if another process truncates the file, a read returns
    fewer bytes, and touching a page of a map kills this process (SIGBUS).
    """

    def __init__(self, stored: Stored, read: Callable[[memoryview], None]) -> None:
        """`read` fills memory of `stored.nbytes` bytes with the tensor's."""
        self.shape = tuple(stored.shape)
        self.dtype: torch.dtype = getattr(torch, stored.dtype)
        self._stride = stored.stride
        self._nbytes = stored.nbytes
        self._read = read

    def load(self) -> torch.Tensor:
        """Return it as a tensor in new memory; raises CheckpointError as `Reader.read`."""
        flat = torch.empty(self._nbytes, dtype=torch.uint8)
        self._fill(flat)
        found = flat.view(self.dtype)
        return found.view(self.shape) if self._stride is None else found.as_strided(self.shape, self._stride)

    def read_into(self, to: torch.Tensor) -> None:
        """Read it into a contiguous tensor in main memory; raises CheckpointError as `Reader.read`."""
        if self._stride is None:
            self._fill(to.view(-1).view(torch.uint8))
        else:
            copy_bytes(to, self.load())

    def _fill(self, flat: torch.Tensor) -> None:
        if self._nbytes:
            self._read(flat.numpy().data)


class Reader:
    """Reads the opened files of a checkpoint. Use it as a context manager; it closes the files.

    Attributes:
        tensors: the tensors by name.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Close unused files."""
        self._checkpoint = checkpoint
        self._opened = checkpoint.opened
        self._opened.keep(checkpoint.files)
        self._asked = dict.fromkeys(checkpoint.files, 0)
        self._on_progress: Callable[[int], object] = lambda nbytes: None
        self.tensors = {name: self._tensor(file, stored) for file, name, stored in checkpoint.tensors()}

    def read(self, on_progress: Callable[[int], object] = lambda nbytes: None) -> Iterator[tuple[str, FileTensor]]:
        """Yield each tensor's name and the tensor, which must be read before the iterator is advanced.

        Each file is closed after its last tensor.

        `on_progress` is called with the number of bytes of each read.

        Raises:
            CheckpointError: the disk cannot be read, or the folder or a file was replaced or changed. Also raised when
                the tensor is read.
        """
        self._on_progress = on_progress
        for file, held in self._checkpoint.files.items():
            for name in held:
                yield name, self.tensors[name]
            self._opened.files[file].close()
        self.check()

    def check(self) -> None:
        """Raise CheckpointError if the folder or a file was replaced or changed."""
        self._opened.check()

    def _tensor(self, file: str, stored: Stored) -> FileTensor:
        return FileTensor(stored, lambda memory: self._read(self._opened.files[file], stored.offset, memory))

    def _read(self, file: OpenedFile, offset: int, memory: memoryview) -> None:
        """Fill memory with the bytes from `offset` on."""
        self._read_ahead(file, offset, offset + len(memory))
        for at in range(0, len(memory), STRIDE_BYTES):
            wanted = memory[at : at + STRIDE_BYTES]
            found = file.read_into(offset + at, wanted)
            if found < len(wanted):
                raise CheckpointError(
                    f"{file.path}: it was changed while it was read: it ends at byte {offset + at + found}, expected "
                    f"{file.size} bytes; {AGAIN}"
                )
            self._on_progress(found)

    def _read_ahead(self, file: OpenedFile, start: int, used: int) -> None:
        """Ask the kernel to read ahead of the bytes in use."""
        end = min(used + AHEAD_BYTES, file.size)
        name = file.path.name
        asked = max(self._asked[name], start)
        file.will_need(asked, end - asked)
        self._asked[name] = max(self._asked[name], end)

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tensors = {}
        self._opened.close()
