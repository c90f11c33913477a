"""Open the files of a checkpoint once, and check that the folder still names these files.

Index, headers and data are all read from these descriptors. `check` finds a folder that was replaced (rename), a file
in it that was replaced (rsync), and a file that was written in place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import xxhash

from refitd.errors import CheckpointError
from refitd.files import open_regular

# The kernel stamps a change with the time of its last tick (up to 10 ms old), so two changes within one tick have
# equal stamps. A file that changed less than this long ago is checked again later.
TICK_S = 0.1
COARSE_TICK_S = 2.1  # of file systems that keep whole seconds
ADVICE_BYTES = 1 << 20  # the kernel reads about this much ahead for one request, and ignores the rest

AGAIN = "publish the folder again when its writer has finished"
# rsync's name for a file under way, and the endings of other writers
_UNFINISHED = re.compile(r"\.(?P<rsync>.+)\.[A-Za-z0-9]{6}|(?P<other>.+)\.(?:tmp|part|incomplete)")


class _Mark(NamedTuple):
    """The part of a file's status that changes with its content."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


class OpenedFile:
    """One file of a folder. `size` is the size when the folder was opened.

    Attributes:
        path: for errors.
    """

    def __init__(self, path: Path, fd: int) -> None:
        """`fd` belongs to this object from now on."""
        self.path = path
        self._fd = fd
        self.mark = _mark(os.fstat(fd))
        self._close = weakref.finalize(self, os.close, fd)

    @property
    def fd(self) -> int:
        """The descriptor; raises ValueError once it is closed, as its number may be another file's by then."""
        if not self._close.alive:
            raise ValueError(f"{self.path}: it is closed; a checkpoint is read once, open the folder again")
        return self._fd

    @property
    def size(self) -> int:
        """The file's size in bytes."""
        return self.mark.size

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return these bytes, fewer only at the end of the file; raises CheckpointError if the disk fails."""
        found = bytearray(max(0, min(nbytes, self.size - offset)))
        return bytes(found[: self.read_into(offset, memoryview(found))])

    def read_into(self, offset: int, memory: memoryview) -> int:
        """Fill `memory` with the bytes from `offset` on; return their number, which is less only at the file's end.

        Raises:
            CheckpointError: the disk fails.
        """
        found = 0
        try:
            while found < len(memory) and (more := os.preadv(self.fd, [memory[found:]], offset + found)):
                found += more
        except OSError as exc:
            raise CheckpointError(f"{self.path}: it cannot be read: {exc.strerror or exc}") from exc
        return found

    def will_need(self, offset: int, nbytes: int) -> None:
        """Ask the kernel to read these bytes ahead; a file system that cannot is read without that."""
        with contextlib.suppress(OSError):
            for at in range(offset, offset + nbytes, ADVICE_BYTES):
                size = min(ADVICE_BYTES, offset + nbytes - at)
                os.posix_fadvise(self.fd, at, size, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close the descriptor, after which the file cannot be read. The mark is kept."""
        self._close()


class OpenedFolder:
    """A folder whose weights are open. Use it as a context manager, or close it.

    Attributes:
        path: the folder.
        files: the opened files by name.
    """

    def __init__(self, path: Path, is_weights: Callable[[str], bool]) -> None:
        """Open the folder and each file in it that `is_weights`.

        Raises:
            CheckpointError: the folder cannot be opened, one of these files is not regular or cannot be opened, or is
                being written; names them.
        """
        self.path = path
        self.files: dict[str, OpenedFile] = {}
        self._is_weights = is_weights
        _raise_limit()
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as exc:
            raise CheckpointError(f"{path}: it cannot be opened: {_why(exc)}; give a folder") from exc
        self._close = weakref.finalize(self, os.close, self._fd)
        try:
            self._names = self._list()
            self._open()
            self._settle()
            self.check()
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Return if the path leads to the same folder, and each name in it to the same content, as when it was opened.

        Raises:
            CheckpointError: it does not; names the files that were replaced or changed, and the next step.
        """
        try:
            found = os.stat(self.path)
        except OSError as exc:
            raise CheckpointError(
                f"{self.path}: it can no longer be read: {exc.strerror or exc}; publish a folder that stays there"
            ) from exc
        was = os.fstat(self._fd)
        if (found.st_dev, found.st_ino) != (was.st_dev, was.st_ino):
            raise CheckpointError(f"{self.path}: the folder was replaced while it was read; publish it again")
        problems = [problem for name, file in self.files.items() if (problem := self._change(name, file))]
        problems += [
            f"{self.path / name}: it was {'added' if name not in self._names else 'removed'} while the folder was read"
            for name in sorted(self._list() ^ self._names)
            if name not in self.files
        ]
        refuse(problems, f"; {AGAIN}")

    def identity(self) -> str:
        """Return a digest of the files' names, sizes and modification times, equal on all nodes that see the folder."""
        marks = [(name, file.mark.size, file.mark.modified_ns) for name, file in sorted(self.files.items())]
        return xxhash.xxh3_128_hexdigest(repr(marks).encode())

    def keep(self, names: Collection[str]) -> None:
        """Close the files of other names; `check` still compares them."""
        for name, file in self.files.items():
            if name not in names:
                file.close()

    def close(self) -> None:
        """Close all descriptors."""
        self.keep(())
        self._close()

    def _list(self) -> frozenset[str]:
        """Return the names of weights, and of files that are to become weights."""
        try:
            return frozenset(name for name in os.listdir(self._fd) if self._is_weights(name) or self._becomes(name))
        except OSError as exc:
            raise CheckpointError(f"{self.path}: it cannot be listed: {_why(exc)}") from exc

    def _becomes(self, name: str) -> bool:
        found = _UNFINISHED.fullmatch(name)
        return found is not None and self._is_weights(found["rsync"] or found["other"])

    def _open(self) -> None:
        problems = [
            f"{self.path / name}: a file that is being written; {AGAIN}, or remove this file if the writer was killed"
            for name in sorted(self._names)
            if self._becomes(name)
        ]
        for name in sorted(self._names):
            try:
                self.files[name] = OpenedFile(self.path / name, open_regular(name, dir_fd=self._fd))
            except OSError as exc:
                problems.append(f"{self.path / name}: it cannot be read: {_why(exc)}")
                if exc.errno == errno.EMFILE:
                    break
        refuse(problems)

    def _settle(self) -> None:
        """Wait until a new change would get another stamp than the last change."""
        stamps = [file.mark.changed_ns for file in self.files.values()]
        if not stamps:
            return
        tick = TICK_S if any(stamp % 1_000_000_000 for stamp in stamps) else COARSE_TICK_S
        left = max(stamps) / 1e9 + tick - time.time()
        if left > 0:
            time.sleep(min(left, tick))

    def _change(self, name: str, file: OpenedFile) -> str:
        """Return how a file has changed, "" if it has not."""
        try:
            now = _mark(os.stat(name, dir_fd=self._fd))
        except OSError as exc:
            return f"{file.path}: it can no longer be read: {exc.strerror or exc}"
        if now[:2] != file.mark[:2]:
            return f"{file.path}: it was replaced while the folder was read"
        return "" if now == file.mark else f"{file.path}: it was changed while it was read"

    def __enter__(self) -> OpenedFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def refuse(problems: Iterable[str], advice: str = "") -> None:
    """Raise CheckpointError listing these problems, if any."""
    found = list(problems)
    if found:
        more = f"; and {len(found) - 10} more" if len(found) > 10 else ""
        raise CheckpointError("; ".join(found[:10]) + more + advice)


def _raise_limit() -> None:
    """Raise the soft limit of open files to the hard one: all files of a folder are open together."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _why(exc: OSError) -> str:
    if exc.errno != errno.EMFILE:
        return exc.strerror or str(exc)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"this process may have {limit} open files (ulimit -n), and all files of the folder are open; raise that limit"
    )


def _mark(found: os.stat_result) -> _Mark:
    return _Mark(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
