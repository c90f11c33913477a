"""Memory files mapped at aligned addresses, and the exchange of two of them: each address then shows the other file.

Whole tables of pages change places where addresses are aligned to what such a table covers (1 GiB), so that an exchange
takes some microseconds per GiB (`man 2 mremap`). Alignment costs address space and nothing else.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from refitd.errors import ArenaError, CommitError

_GIB, _HUGE = 1 << 30, 1 << 21
_LARGE = 64 << 20  # files from this size on are worth a gibibyte of address space

# These are missing in some Python versions; the numbers are the kernel's (mman-common.h, linux/mman.h).
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MAYMOVE, _FIXED, _DONTUNMAP = 1, 2, 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Mapping:
    """A shared mapping of the first `nbytes` of a file, unmapped when nothing refers to it any more."""

    def __init__(self, fd: int, nbytes: int, *, write: bool) -> None:
        """Map the file and fill the page tables.

        Raises:
            OSError: the kernel refuses.
        """
        self.nbytes = nbytes
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        self.address = _reserved(nbytes, _alignment(nbytes))
        try:
            _mapped(self.address, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
        except OSError:
            _libc.munmap(self.address, nbytes)
            raise
        # not atexit: other threads may still read when the interpreter ends
        weakref.finalize(self, _libc.munmap, self.address, nbytes).atexit = False
        # Not mmap.madvise, which holds the interpreter's lock for the seconds that first touch can take.
        # Kernels before 5.14 refuse this advice; pages then fault in at first touch, which is slower but correct.
        _libc.madvise(self.address, nbytes, _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ)

    def bytes(self, *, write: bool) -> npt.NDArray[np.uint8]:
        """Return the mapped bytes; the array, and whatever is made of it, keeps the mapping."""
        memory = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
        memory.mapping = self  # type: ignore[attr-defined]
        found: npt.NDArray[np.uint8] = np.frombuffer(memoryview(memory).cast("B"), dtype=np.uint8)
        found.flags.writeable = write
        return found


def exchange(one: Mapping, other: Mapping) -> None:
    """Exchange the files behind two mappings of one size; their addresses stay. Nobody may use them meanwhile.

    Raises:
        ArenaError: the kernel refuses; both mappings show what they showed.
        CommitError: the kernel refuses half way, and then to go back, too.
    """
    nbytes = one.nbytes
    if other.nbytes != nbytes:
        raise ArenaError(f"mappings of {nbytes} and {other.nbytes} bytes cannot be exchanged")
    spare = 0
    moved: list[tuple[int, int]] = []  # (from, to)
    try:
        spare = _reserved(nbytes, _alignment(nbytes))
        # DONTUNMAP keeps the addresses taken: another thread's mmap could get them in between
        for here, there, flags in (
            (one.address, spare, _DONTUNMAP),
            (other.address, one.address, _DONTUNMAP),
            (spare, other.address, 0),
        ):
            _remapped(here, there, nbytes, flags)
            moved.append((here, there))
    except BaseException as exc:  # KeyboardInterrupt too: half an exchange would show one file twice
        _undo(moved, nbytes, spare, exc)
        if not isinstance(exc, OSError):
            raise
        raise ArenaError(
            f"the kernel does not exchange two mappings of {nbytes} bytes: {exc.strerror}; check `ulimit -v` and the "
            "sysctl vm.max_map_count"
        ) from exc


def _undo(moved: list[tuple[int, int]], nbytes: int, spare: int, cause: BaseException) -> None:
    """Move back what has been moved; a mapping that cannot be moved back must not be served."""
    try:
        for here, there in reversed(moved):
            _remapped(there, here, nbytes, _DONTUNMAP if there != spare else 0)
    except OSError as exc:
        raise CommitError(
            f"an exchange of mappings failed half way ({cause}), and undoing it too ({exc.strerror}); end this process"
        ) from exc
    if spare and not moved:
        _libc.munmap(spare, nbytes)


def _alignment(nbytes: int) -> int:
    if nbytes >= _LARGE:
        return _GIB
    return _HUGE if nbytes >= _HUGE else mmap.PAGESIZE


def _reserved(nbytes: int, alignment: int) -> int:
    """Return an aligned range of addresses that holds nothing; unaligned if address space is short.

    Raises:
        OSError: there is none.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        found = _mapped(None, nbytes + alignment, 0, flags, -1)
    except OSError:
        return _mapped(None, nbytes, 0, flags, -1)
    start = -(-found // alignment) * alignment
    end, taken = start + nbytes, found + nbytes + alignment
    end = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
    if start > found:
        _libc.munmap(found, start - found)
    if taken > end:
        _libc.munmap(end, taken - end)
    return start


def _mapped(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    return _checked(lambda: _libc.mmap(address, nbytes, protection, flags, fd, 0))


def _remapped(here: int, there: int, nbytes: int, flags: int) -> None:
    _checked(lambda: _libc.mremap(here, nbytes, nbytes, _MAYMOVE | _FIXED | flags, there))


def _checked(call: Callable[[], int | None]) -> int:
    found = call() or 0
    if found == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found
