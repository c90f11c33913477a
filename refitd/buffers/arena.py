"""Arenas: sealed, prefaulted memory files that outlive the processes which use them."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from refitd.errors import ArenaError

# Not in every Python's fcntl and mmap modules; the numbers are the kernel's (fcntl.h, mman-common.h).
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = 0x0001 | 0x0002 | 0x0004  # SEAL, SHRINK, GROW: no peer can truncate the file under another's mapping
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
_libc = ctypes.CDLL(None, use_errno=True)


def create(nbytes: int, label: str) -> int:
    """Return the descriptor of a new memory file of `nbytes`, mode 0600, sealed, its pages allocated.

    Raises:
        ArenaError: there is not that much memory left, or the kernel refuses.
    """
    available = available_memory()
    if nbytes > available:
        raise ArenaError(
            f"arena {label!r} needs {nbytes} bytes, this node has {available} bytes of memory available; "
            "register a smaller shard here, lower `slots`, or free memory"
        )
    try:
        fd = os.memfd_create(f"refitd:{label}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as exc:
        raise ArenaError(
            f"arena {label!r}: the kernel gives no memory file: {exc.strerror}; check `ulimit -n`"
        ) from exc
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, nbytes)
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
        MappedArena(fd, nbytes, write=True)  # touches every page now: 5 to 10 times the cost of a copy
    except OSError as exc:
        os.close(fd)
        raise ArenaError(f"arena {label!r} of {nbytes} bytes: {exc.strerror}; free memory on this node") from exc
    return fd


def is_sealed(fd: int) -> bool:
    """Whether no holder of the descriptor can change the file's size."""
    return fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS == _SEALS


def read_only(fd: int) -> int:
    """Return a new descriptor of the same memory file that cannot be mapped for writing."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def available_memory() -> int:
    """Return the bytes that can be allocated without swapping, as the kernel estimates them."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ArenaError("/proc/meminfo has no MemAvailable; refitd needs Linux 3.14 or newer")


class MappedArena:
    """An arena in this process's address space, its page tables filled before first use."""

    def __init__(self, fd: int, nbytes: int, *, write: bool) -> None:
        """Map the file behind `fd` (which stays the caller's to close).

        Raises:
            ArenaError: the file is smaller than said, not sealed, or cannot be mapped.
        """
        found = os.fstat(fd).st_size
        if found < nbytes or not is_sealed(fd):
            raise ArenaError(f"descriptor {fd} is no sealed arena of {nbytes} bytes (found {found})")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        try:
            self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=access)
        except OSError as exc:
            raise ArenaError(f"arena of {nbytes} bytes cannot be mapped: {exc.strerror}") from exc
        self.nbytes = nbytes
        self.writable = write
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self.address: int = self.bytes.ctypes.data
        # Not mmap.madvise, which holds the interpreter's lock for the seconds that first touch can take.
        # Kernels before 5.14 refuse the advice; pages then fault in at first touch, slower but right.
        advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
        _libc.madvise(ctypes.c_void_p(self.address), ctypes.c_size_t(nbytes), advice)

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Return where `nbytes` at `address` of this process lie in the arena, None if they do not."""
        offset = address - self.address
        return offset if offset >= 0 and offset + nbytes <= self.nbytes else None


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends."""
    pr_set_pdeathsig, sigkill = 1, 9
    _libc.prctl(pr_set_pdeathsig, sigkill, 0, 0, 0)
