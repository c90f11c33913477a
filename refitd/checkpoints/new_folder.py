"""Write a folder atomically: write it beside its place, sync it, and move it there by one rename."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from io import RawIOBase
from pathlib import Path

from refitd.checkpoints.folder import INDEX, METADATA, WHOLE, is_weights
from refitd.errors import CheckpointError

CHUNK_BYTES = 64 << 20  # written between two calls of `on_progress`
RENAME_EXCHANGE = 2
AT_FDCWD = -100
_KNOWN = ("config.json", WHOLE, INDEX, METADATA)

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def new_folder(path: Path, nbytes: int) -> Iterator[Path]:
    """Yield an empty folder beside `path`. It replaces `path` when the block ends, and is removed if the block raises.

    Files other than weights (config, tokenizer) of an older checkpoint at `path` are kept by hard links. Then the two
    folders are exchanged in one step, and the older one is removed. So readers of `path` always find a whole
    checkpoint, the older or the new one. Leftovers of killed writers are removed first.

    Args:
        path: the folder's final place.
        nbytes: the bytes to be written, to check the disk's free space.

    Raises:
        CheckpointError: the place cannot be used, or the disk is full or fails; nothing new is left there.
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
