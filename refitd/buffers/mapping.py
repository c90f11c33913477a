"""Map memory files at aligned addresses, and exchange the files or pages behind two ranges of addresses.

If both addresses are aligned to the range of a page table (1 GiB), `mremap` moves the whole table (`man 2 mremap`). An
exchange then takes some microseconds per GiB. Alignment costs only address space.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat, takewhile

import numpy as np
import numpy.typing as npt

from refitd.errors import ArenaError, CommitError

_GIB, HUGE = 1 << 30, 1 << 21  # the ranges of a page middle directory and of a page table
_LARGE = 64 << 20  # files of at least this size are worth a gibibyte of address space

# These are missing in some Python versions; the numbers are the kernel's (mman-common.h, linux/mman.h).
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MAYMOVE, _FIXED, _DONTUNMAP = 1, 2, 4
_MS_ASYNC = 1
_SPLITS = 8  # pairs of mappings in a `SpareMappings`
_REFUSED = ctypes.c_void_p(-1).value  # the result of mmap and mremap on failure

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_libc.msync.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


Move = tuple[int, int, int]  # (from this address, to this address, bytes)


class Mapping:
    """A shared mapping of the first `nbytes` of a file, unmapped when it is garbage collected.

    Attributes:
        exchanges: how often it was exchanged; correct even if an interrupt (KeyboardInterrupt) follows immediately.
    """

    def __init__(self, fd: int, nbytes: int, *, write: bool) -> None:
        """Map the file and fill the page tables.

        Raises:
            OSError: the kernel refuses.
        """
        self.nbytes = nbytes
        self.exchanges = 0
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        self.address = reserved(nbytes, _alignment(nbytes))
        try:
            mapped(self.address, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
        except OSError:
            _libc.munmap(self.address, nbytes)
            raise
        unmapped_with(self, self.address, nbytes)
        touched(self.address, nbytes, write=write)

    def bytes(self, *, write: bool) -> npt.NDArray[np.uint8]:
        """Return the mapped bytes; the array and all views of it keep the mapping alive."""
        memory = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
        memory.mapping = self  # type: ignore[attr-defined]
        found: npt.NDArray[np.uint8] = np.frombuffer(memoryview(memory).cast("B"), dtype=np.uint8)
        found.flags.writeable = write
        return found


def exchange(one: Mapping, other: Mapping) -> None:
    """Exchange the files behind two mappings of one size; addresses do not change.

    No thread may use either mapping during the call.

    Raises:
        ArenaError: the kernel refuses; both mappings are unchanged.
        CommitError: the kernel refuses half way, and also refuses to undo the first half.
    """
    nbytes = one.nbytes
    if other.nbytes != nbytes:
        raise ArenaError(f"mappings of {nbytes} and {other.nbytes} bytes cannot be exchanged")
    spare, done = 0, list[int]()
    moves: list[Move] = []
    try:
        spare = reserved(nbytes, _alignment(nbytes))
        pairs = (one.address, spare), (other.address, one.address), (spare, other.address)
        moves = [(here, there, nbytes) for here, there in pairs]
        remap(moves, done)
        one.exchanges += 1
    except BaseException as exc:  # KeyboardInterrupt too: half an exchange would show one file twice
        undo(moves[: len(done)], exc)
        if spare:
            _libc.munmap(spare, nbytes)
        if not isinstance(exc, OSError):
            raise
        raise ArenaError(
            f"the kernel does not exchange two mappings of {nbytes} bytes: {exc.strerror}; check `ulimit -v` and the "
            "sysctl vm.max_map_count"
        ) from exc
    _libc.munmap(spare, nbytes)


def remap(moves: Sequence[Move], done: list[int]) -> None:
    """Move mappings to other addresses, one after the other; append to `done` for each move.

    The old addresses stay reserved: no other thread's mmap can get them. The interpreter runs no code between two
    moves, so `done` is complete if an interrupt is raised.

    Raises:
        OSError: the kernel refuses a move; the earlier moves are done.
    """
    if not moves:
        return
    here, there, sizes = zip(*moves, strict=True)
    flags = repeat(_MAYMOVE | _FIXED | _DONTUNMAP)
    done.extend(takewhile(_REFUSED.__ne__, map(_libc.mremap, here, sizes, sizes, flags, there)))
    if len(done) < len(moves):
        raise _last_error()


def undo(moves: Sequence[Move], cause: BaseException) -> None:
    """Undo these moves, the last one first.

    Raises:
        CommitError: the kernel refuses; the contents at these addresses must not be served.
    """
    try:
        remap([(there, here, nbytes) for here, there, nbytes in reversed(moves)], [])
    except OSError as exc:
        raise CommitError(
            f"an exchange of mappings failed half way ({cause}), and undoing it too ({exc.strerror}); end this process"
        ) from exc


def _alignment(nbytes: int) -> int:
    if nbytes >= _LARGE:
        return _GIB
    return HUGE if nbytes >= HUGE else mmap.PAGESIZE


def reserved(nbytes: int, alignment: int) -> int:
    """Reserve an aligned range of addresses without memory; unaligned if address space is short.

    Raises:
        OSError: no range is free.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        found = mapped(None, nbytes + alignment, 0, flags, -1)
    except OSError:
        return mapped(None, nbytes, 0, flags, -1)
    start = -(-found // alignment) * alignment
    end, taken = start + nbytes, found + nbytes + alignment
    end = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
    if start > found:
        _libc.munmap(found, start - found)
    if taken > end:
        _libc.munmap(end, taken - end)
    return start


def mapped(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    """Call `mmap` for the first bytes of a file, and return the address; raises OSError if the kernel refuses."""
    return _checked(lambda: _libc.mmap(address, nbytes, protection, flags, fd, 0))


def show_again(here: int, nbytes: int, there: int) -> None:
    """Map the pages of a shared mapping a second time, replacing the mapping `there`; raises OSError on failure."""
    _checked(lambda: _libc.mremap(here, 0, nbytes, _MAYMOVE | _FIXED, there))


def show_private(here: int, nbytes: int, there: int) -> None:
    """Replace the mapping `there` by private pages with the bytes of `here`.

    Readers see the old or the new pages. Only if limits leave no room for both, readers see zeros in between.

    Raises:
        OSError: the kernel refuses; the mapping is unchanged.
    """
    flags, protection = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, mmap.PROT_READ | mmap.PROT_WRITE
    try:
        with congruent(there, nbytes) as copy:
            mapped(copy, nbytes, protection, flags, -1)
            ctypes.memmove(copy, here, nbytes)
            remap([(copy, there, nbytes)], [])
    except OSError:
        mapped(there, nbytes, protection, flags, -1)
        ctypes.memmove(there, here, nbytes)


class SpareMappings:
    """A reserve of address space and mappings, freed when an exchange that hit a limit must be undone."""

    def __init__(self, nbytes: int) -> None:
        """Allocate the reserve; raises OSError if a limit is reached."""
        size = nbytes + 2 * _SPLITS * mmap.PAGESIZE
        self._start, self._size = reserved(size, mmap.PAGESIZE), size
        for page in range(_SPLITS):
            if _libc.mprotect(self._start + 2 * page * mmap.PAGESIZE, mmap.PAGESIZE, mmap.PROT_READ):
                number = ctypes.get_errno()
                self.free()
                raise OSError(number, os.strerror(number))

    def free(self) -> None:
        """Free the reserve; may be called again."""
        if self._size:
            _libc.munmap(self._start, self._size)
            self._size = 0


@contextlib.contextmanager
def congruent(address: int, nbytes: int) -> Iterator[int]:
    """Reserve addresses during the block, at the offset of `address` in a page table: whole tables can then move.

    Raises:
        OSError: no range is free.
    """
    size = nbytes + HUGE
    start = reserved(size, HUGE)
    try:
        yield start + address % HUGE
    finally:
        _libc.munmap(start, size)


def is_mapped(address: int, nbytes: int) -> bool:
    """Return whether all of these addresses are mapped."""
    return not _libc.msync(address, nbytes, _MS_ASYNC)


def touched(address: int, nbytes: int, *, write: bool) -> None:
    """Fill the page tables.

    This does not use mmap.madvise: the first touch can take seconds, and mmap.madvise holds the interpreter's lock.
    Kernels before 5.14 refuse this advice; pages then fault in at first touch, which is slower but correct.
    """
    _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ)


def unmapped_with(owner: object, address: int, nbytes: int) -> None:
    """Unmap a range when its owner is collected, but not at exit, because other threads may still read it."""
    weakref.finalize(owner, _libc.munmap, address, nbytes).atexit = False


def _checked(call: Callable[[], int | None]) -> int:
    found = call() or 0
    if found == _REFUSED:
        raise _last_error()
    return found


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
