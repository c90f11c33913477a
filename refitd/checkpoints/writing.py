"""Write a checkpoint: a folder that appears by one rename, and the formats of its files.

A folder is written beside its place, synced, and moved there atomically. Its files are safetensors with an index, or
files of torch.distributed.checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import RawIOBase
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from refitd.checkpoints.safetensors import INDEX, METADATA, WHOLE, header, is_weights, is_writable, nbytes_of
from refitd.errors import CheckpointError

if TYPE_CHECKING:
    import torch


CHUNK_BYTES = 64 << 20  # written between two calls of `on_progress`
RENAME_EXCHANGE = 2
AT_FDCWD = -100
_KNOWN = ("config.json", WHOLE, INDEX, METADATA)

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def new_folder(path: Path, nbytes: int) -> Iterator[Path]:
    """Yield an empty folder beside `path`. It replaces `path` when the block ends, and is removed if the block raises.

    Files other than weights (config, tokenizer) of an older checkpoint at `path` are kept by hard links. Then the two
    folders are exchanged in one step, and the older one is removed. Readers of `path` always find one complete
    checkpoint, the older or the new one. Leftovers of killed writers are removed first.

    Args:
        path: the folder's final place.
        nbytes: the bytes to be written, to check the disk's free space.

    Raises:
        CheckpointError: the place cannot be used, or the disk is full or fails; the place is unchanged.
    """
    place = Path(os.path.realpath(path))
    _check_place(place)
    with _told(place):
        _remove_abandoned(place)
        free = shutil.disk_usage(place.parent).free
    if free < nbytes:
        raise CheckpointError(f"{path}: {nbytes:,} bytes are to be written, and {place.parent} has {free:,} free")
    with _told(place):
        made = Path(tempfile.mkdtemp(prefix=_prefix(place), dir=place.parent))
    lock = os.open(made, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held while this process writes; an unlocked folder is abandoned
        yield made
        with _told(place):
            old = place.exists() and any(place.iterdir())
            if old:
                _take_over(place, made)
            made.chmod(place.stat().st_mode & 0o7777 if place.exists() else 0o777 & ~_umask())
            os.fsync(lock)
            if old:
                _exchange(made, place)
            else:
                made.replace(place)
            _sync(place.parent)
    finally:
        # this name is now the unfinished folder, or after the exchange the older checkpoint
        shutil.rmtree(made, ignore_errors=True)
        os.close(lock)


def write_file(
    path: Path,
    head: bytes,
    parts: Iterable[memoryview] = (),
    on_progress: Callable[[int], object] = lambda nbytes: None,
) -> None:
    """Write a new file and sync it to disk: `head`, then `parts` (byte views), for which `on_progress` is called.

    Raises:
        CheckpointError: the disk is full or fails.
    """
    with new_file(path) as file:
        write_all(file, memoryview(head))
        for part in parts:
            for at in range(0, len(part), CHUNK_BYTES):
                chunk = part[at : at + CHUNK_BYTES]
                write_all(file, chunk)
                on_progress(len(chunk))


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[RawIOBase]:
    """Yield a new file, unbuffered; sync it to disk when the block ends.

    Raises:
        CheckpointError: an OSError was raised in the block: the disk is full or fails.
    """
    with _told(path), path.open("xb", buffering=0) as file:
        yield file
        os.fsync(file.fileno())


def write_all(file: RawIOBase, chunk: memoryview) -> None:
    """Write all of a chunk."""
    while chunk:  # one write() takes at most 2 GiB
        chunk = chunk[file.write(chunk) or 0 :]


def _check_place(place: Path) -> None:
    if not place.parent.is_dir():
        raise CheckpointError(f"{place.parent}: there is no such folder; make it first")
    if not place.exists():
        return
    if not place.is_dir():
        raise CheckpointError(f"{place}: it is a file; give a folder")
    if place.is_mount():
        raise CheckpointError(f"{place}: a disk is mounted there, which cannot be replaced; give a folder on it")
    held = {each.name for each in place.iterdir()}
    if held and not held & set(_KNOWN):
        raise CheckpointError(
            f"{place}: it is not empty and no checkpoint ({', '.join(_KNOWN)}: none is there); give another folder"
        )


def _take_over(place: Path, made: Path) -> None:
    for each in place.iterdir():
        if is_weights(each.name):
            continue
        if each.is_dir() and not each.is_symlink():
            shutil.copytree(each, made / each.name, symlinks=True, copy_function=os.link)
        else:
            os.link(each, made / each.name, follow_symlinks=False)


def _exchange(made: Path, place: Path) -> None:
    """Swap two folders in one step."""
    wrong = _libc.renameat2(AT_FDCWD, os.fsencode(made), AT_FDCWD, os.fsencode(place), RENAME_EXCHANGE)
    number = ctypes.get_errno() if wrong else 0
    if number in (errno.EINVAL, errno.ENOSYS, errno.EXDEV):
        raise CheckpointError(
            f"{place}: its file system cannot replace a folder in one step; save to a folder that is not there yet"
        )
    if number:
        raise OSError(number, os.strerror(number))


def _prefix(place: Path) -> str:
    return f".{place.name}.saving-"


def _remove_abandoned(place: Path) -> None:
    for each in place.parent.glob(f"{_prefix(place)}*"):
        lock = os.open(each, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # another process is writing it
        else:
            shutil.rmtree(each, ignore_errors=True)
        finally:
            os.close(lock)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names the path."""
    try:
        yield
    except OSError as exc:
        more = "; nothing of it is left, free some space and save again" if exc.errno == errno.ENOSPC else ""
        raise CheckpointError(f"{path}: {exc.strerror or exc}{more}") from exc


def _sync(folder: Path) -> None:
    held = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(held)
    finally:
        os.close(held)


def _umask() -> int:
    found = os.umask(0o077)
    os.umask(found)
    return found


# {name: (shape, dtype name)} of one file's tensors, in the file's order
Shard = Mapping[str, tuple[tuple[int, ...], str]]
Progress = Callable[[int], object]


class Format(Protocol):
    """Writes the shards of one checkpoint into a folder, then their index."""

    def can_hold(self, dtype: str) -> bool:
        """Return whether the format has this dtype."""

    def file_names(self, count: int) -> list[str]:
        """Return the names of `count` files of weights."""

    def write(self, path: Path, shard: Shard, tensors: Mapping[str, torch.Tensor], on_progress: Progress) -> None:
        """Write one file, new or again; `on_progress` gets the number of bytes of tensors in each write."""

    def finish(self, folder: Path, shards: Mapping[str, Shard]) -> None:
        """Write the index: the file of each tensor."""


class Safetensors:
    """model.safetensors, or shards with model.safetensors.index.json."""

    def can_hold(self, dtype: str) -> bool:
        """Return whether safetensors has this dtype."""
        return is_writable(dtype)

    def file_names(self, count: int) -> list[str]:
        """Return Hugging Face's names for `count` files."""
        return [WHOLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]

    def write(self, path: Path, shard: Shard, tensors: Mapping[str, torch.Tensor], on_progress: Progress) -> None:
        """Write the header, and the tensors one after the other."""
        path.unlink(missing_ok=True)
        write_file(path, header(dict(shard)), (_bytes(tensors[name]) for name in shard), on_progress)

    def finish(self, folder: Path, shards: Mapping[str, Shard]) -> None:
        """Write the index, if there are several files."""
        if len(shards) == 1:
            return
        where = {name: file for file, shard in shards.items() for name in shard}
        total = sum(nbytes_of(*one) for shard in shards.values() for one in shard.values())
        said = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        write_file(folder / INDEX, (json.dumps(said, indent=2) + "\n").encode())


class Dcp:
    """__0_*.distcp, one archive of torch.save for each tensor, and .metadata: as one rank would save them."""

    def __init__(self) -> None:
        """Start without files."""
        self._places: dict[str, tuple[str, int, int]] = {}  # by tensor: file, offset and length of its archive

    def can_hold(self, dtype: str) -> bool:
        """Return True: torch.save writes every dtype."""
        return True

    def file_names(self, count: int) -> list[str]:
        """Return the names of `count` files of one rank."""
        return [f"__0_{i}.distcp" for i in range(count)]

    def write(self, path: Path, shard: Shard, tensors: Mapping[str, torch.Tensor], on_progress: Progress) -> None:
        """Write the tensors' archives one after the other."""
        import torch

        path.unlink(missing_ok=True)
        with new_file(path) as file:
            for name in shard:
                stream = _Stream(file, tensors[name].nbytes, on_progress)
                offset = file.tell()
                torch.save(tensors[name], cast("IO[bytes]", stream))
                if stream.failed is not None:
                    raise stream.failed
                self._places[name] = path.name, offset, file.tell() - offset

    def finish(self, folder: Path, shards: Mapping[str, Shard]) -> None:
        """Write .metadata."""
        import torch
        from torch.distributed.checkpoint import metadata as dcp
        from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

        entries: dict[str, Any] = {}
        stored: dict[Any, Any] = {}
        for name, (shape, dtype) in (item for shard in shards.values() for item in shard.items()):
            start, size = torch.Size([0] * len(shape)), torch.Size(shape)
            entries[name] = dcp.TensorStorageMetadata(
                properties=dcp.TensorProperties(dtype=getattr(torch, dtype)),
                size=size,
                chunks=[dcp.ChunkStorageMetadata(offsets=start, sizes=size)],
            )
            stored[dcp.MetadataIndex(name, start)] = _StorageInfo(*self._places[name])
        said = dcp.Metadata(
            state_dict_metadata=entries,
            planner_data={name: (name,) for name in entries},  # a state dict that is not nested
            storage_data=stored,
            storage_meta=dcp.StorageMeta(),
            version=CURRENT_DCP_VERSION,
        )
        write_file(folder / METADATA, pickle.dumps(said))


FORMATS: Mapping[str, Callable[[], Format]] = {"safetensors": Safetensors, "dcp": Dcp}


class _Stream:
    """The file that torch.save writes to. Its writer is C++, where exceptions are fatal: they are stored instead."""

    def __init__(self, file: RawIOBase, nbytes: int, on_progress: Progress) -> None:
        self._file, self._left, self._on_progress = file, nbytes, on_progress
        self.failed: BaseException | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for at in range(0, len(view), CHUNK_BYTES):
            chunk = view[at : at + CHUNK_BYTES]
            if self.failed is None:
                try:
                    self._write(chunk)
                except BaseException as exc:  # Ctrl-C, too
                    self.failed = exc
        return len(view)

    def _write(self, chunk: memoryview) -> None:
        size = min(len(chunk), self._left)  # only the tensor's bytes count, not the rest of the archive
        write_all(self._file, chunk)
        self._left -= size
        if size:
            self._on_progress(size)

    def flush(self) -> None:
        pass


def _bytes(tensor: torch.Tensor) -> memoryview:
    import torch

    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)  # type: ignore[arg-type]  # a buffer, as numpy declares only from Python 3.12 on
