"""Open files that a user named: only regular files, because a FIFO makes its reader wait."""

from __future__ import annotations

import errno
import os
import stat

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a directory",
}


def open_regular(path: str | os.PathLike[str], *, dir_fd: int | None = None) -> int:
    """Return a descriptor for reading a regular file, or a symbolic link to one.

    Args:
        path: the file.
        dir_fd: the descriptor of the folder that a relative path begins in; None: the working directory.

    Raises:
        OSError: there is no such file, it cannot be read, or it is not regular; `strerror` says which.
    """
    # before it is opened, because opening a device can act on it
    _check(os.stat(path, dir_fd=dir_fd), path)
    # O_NONBLOCK: a FIFO may have taken its place, and opening one waits for a writer
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        _check(os.fstat(fd), path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes.

    Raises:
        OSError: as `open_regular`, or the file has more bytes.
    """
    with open(open_regular(path), "rb") as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", os.fspath(path))
    return found


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise OSError unless the path leads to a regular file; for files that a library opens by their path."""
    os.close(open_regular(path))


def _check(found: os.stat_result, path: str | os.PathLike[str]) -> None:
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        number = errno.EISDIR if kind == stat.S_IFDIR else errno.EINVAL
        what = _KINDS.get(kind, "a special file")
        raise OSError(number, f"it is {what}, expected a regular file", os.fspath(path))
