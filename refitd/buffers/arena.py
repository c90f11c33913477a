"""Arenas: sealed, prefaulted memory files. They outlive the processes that use them."""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from refitd.buffers.capacity import check_bytes, memory_limits, process_limits
from refitd.buffers.mapping import Mapping, exchange
from refitd.errors import ArenaError
from refitd.text import printable

if TYPE_CHECKING:
    from refitd.buffers.cuda_driver import Pin

# These are missing in some Python versions; the numbers are the kernel's (fcntl.h, mman-common.h).
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = 0x0001 | 0x0002 | 0x0004  # SEAL, SHRINK, GROW: no process can truncate a file that others have mapped
_libc = ctypes.CDLL(None, use_errno=True)

# The kernel's names for arenas and for the page of permits (refitd.buffers.permits). The daemon never adopts a page.
_FILES, PERMITS = "/memfd:refitd:", "permits"
_PERMITS = f"{_FILES}{PERMITS} "


# Bytes allocated per step: a step takes at most some seconds, and a caller can cancel between two steps.
_STEP = 256 << 20


def create(nbytes: int, label: str, moved: Callable[[], None] = lambda: None) -> int:
    """Return the descriptor of a new memory file of `nbytes`, mode 0600, sealed, with its pages allocated.

    `moved` is called between steps; if it raises, the memory is freed and the error is raised again.

    Raises:
        ArenaError: too little memory is left, or the kernel refuses; the memory has been freed.
    """
    check_bytes([(nbytes, label)])
    try:
        fd = os.memfd_create(printable(f"refitd:{label}")[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as exc:
        raise ArenaError(
            f"arena {label!r}: the kernel gives no memory file: {exc.strerror}; check `ulimit -n`"
        ) from exc
    try:
        _fill(fd, nbytes, label, moved)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _fill(fd: int, nbytes: int, label: str, moved: Callable[[], None]) -> None:
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, nbytes)
        for at in range(0, nbytes, _STEP):
            moved()
            os.posix_fallocate(fd, at, min(_STEP, nbytes - at))
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    except OSError as exc:
        allocated = os.fstat(fd).st_blocks * 512
        limits = ", ".join(map(str, memory_limits() + process_limits()))
        raise ArenaError(
            f"arena {label!r}: {nbytes} bytes asked for, the kernel said {exc.strerror!r} after {allocated}; "
            f"all were given back, and now there are: {limits}; free memory or raise the limit that is too low"
        ) from exc
    moved()
    MappedArena(fd, nbytes, write=True)  # touch every page now: the first touch costs 5 to 10 times as much as a copy


def is_sealed(fd: int) -> bool:
    """Return whether the file's size is sealed: no process can change it."""
    return fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS == _SEALS


def taken_back(fd: int, nbytes: int) -> tuple[int, bool]:
    """Check a descriptor of an arena that a client hands over; return a writable one, and whether the client can write.

    Raises:
        ArenaError: it is not an arena of `nbytes` created by a daemon of this user; the text lists the differences.
    """
    found = os.fstat(fd)
    try:
        name = os.readlink(f"/proc/self/fd/{fd}")
        is_sealed_file = is_sealed(fd)
    except OSError:
        name, is_sealed_file = "no file", False
    problems = {
        f"it is {printable(name)!r}, no arena": not name.startswith(_FILES) or name.startswith(_PERMITS),
        "its size is not sealed": not is_sealed_file,
        f"it has {found.st_size} bytes": found.st_size != nbytes or not nbytes,
        f"{found.st_blocks * 512} bytes of it are allocated": found.st_blocks * 512 < nbytes,
        f"it belongs to uid {found.st_uid}": found.st_uid != os.geteuid(),
        f"its mode is {stat.S_IMODE(found.st_mode):o}": stat.S_IMODE(found.st_mode) != 0o600,
    }
    if wrong := [text for text, holds in problems.items() if holds]:
        raise ArenaError(f"an arena of {nbytes} bytes is not taken back: {'; '.join(wrong)}; register anew")
    try:
        writable = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as exc:
        raise ArenaError(f"an arena of {nbytes} bytes is not taken back: {exc.strerror}; register anew") from exc
    return writable, fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR


def read_only(fd: int) -> int:
    """Return a new read-only descriptor of the memory file: it cannot be mapped for writing.

    Raises:
        ArenaError: this process cannot open more files.
    """
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        raise ArenaError(f"no descriptor for an arena's reader: {exc.strerror}; raise `ulimit -Hn`") from exc


_left: weakref.WeakSet[Mapping] = weakref.WeakSet()


def is_left(address: int) -> bool:
    """Return whether `address` is in an arena whose session has ended, still mapped because tensors use it."""
    return any(0 <= address - mapping.address < mapping.nbytes for mapping in _left)


class MappedArena:
    """An arena mapped into this process, with its page tables filled before first use.

    Attributes:
        pin: its memory as GPUs copy to and from it; None until a GPU has.
    """

    device = -1  # main memory

    def __init__(self, fd: int, nbytes: int, *, write: bool) -> None:
        """Map the file behind `fd`; the caller still closes `fd`.

        Raises:
            ArenaError: the file is too small, not sealed, or cannot be mapped.
        """
        found = os.fstat(fd).st_size
        if found < nbytes or not is_sealed(fd):
            raise ArenaError(f"descriptor {fd} is no sealed arena of {nbytes} bytes (found {found})")
        try:
            self.mapping = Mapping(fd, nbytes, write=write)
        except OSError as exc:
            raise ArenaError(
                f"arena of {nbytes} bytes cannot be mapped: {exc.strerror}; check `ulimit -v` of this process and the "
                "sysctl vm.max_map_count"
            ) from exc
        self.nbytes = nbytes
        self.writable = write
        self.bytes: npt.NDArray[np.uint8] = self.mapping.bytes(write=write)
        self.address: int = self.mapping.address
        self.pin: Pin | None = None

    def exchange(self, other: MappedArena) -> None:
        """Exchange two arenas of one size in this process: the addresses of each show the other arena's bytes.

        Raises:
            ArenaError: the kernel refuses; both arenas are unchanged.
        """
        exchange(self.mapping, other.mapping)
        self.pin, other.pin = other.pin, self.pin

    @property
    def exchanges(self) -> int:
        """How often the arena was exchanged."""
        return self.mapping.exchanges

    def unpin(self) -> None:
        """Undo the pin, if there is one; copies that use it have ended."""
        pin, self.pin = self.pin, None
        if pin is not None:
            pin.close()

    def leave(self) -> None:
        """Note that the arena's session has ended: only tensors of this process still use it."""
        _left.add(self.mapping)

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Return the offset in the arena of `nbytes` at this process's `address`, None if they are outside."""
        offset = address - self.address
        return offset if offset >= 0 and offset + nbytes <= self.nbytes else None


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    pr_set_pdeathsig, sigkill = 1, 9
    _libc.prctl(pr_set_pdeathsig, sigkill, 0, 0, 0)
