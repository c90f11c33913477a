"""The kernel's view of this process's mappings."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path

_libc = ctypes.CDLL(None)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _mappings() -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, line) of each mapping."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        yield int(start, 16), int(end, 16), line


def is_arena(address: int) -> bool:
    """Return whether an address shows a page of an arena."""
    (line,) = (line for start, end, line in _mappings() if start <= address < end)
    return "memfd:refitd" in line


def staging_arenas() -> list[int]:
    """Return the addresses of the mappings of files that were made as staging arenas."""
    return [start for start, _, line in _mappings() if "memfd:refitd" in line and ", staging" in line]


def fill_mappings(left: int) -> mmap.mmap:
    """Take all but `left` of the mappings that this process may have; closing the result frees them."""
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    count = limit - Path("/proc/self/maps").read_bytes().count(b"\n") - left
    taken = mmap.mmap(-1, (count + 1) * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(taken))
    for page in range(0, count, 2):
        _libc.mprotect(start + page * mmap.PAGESIZE, mmap.PAGESIZE, mmap.PROT_READ)
    return taken
