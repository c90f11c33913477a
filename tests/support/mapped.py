"""The kernel's view of this process's mappings."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

_libc = ctypes.CDLL(None)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def is_arena(address: int) -> bool:
    """Return whether an address shows a page of an arena."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= address < int(end, 16):
            return "memfd:refitd" in line
    raise AssertionError(f"nothing is mapped at {address:#x}")


def fill_mappings(left: int) -> mmap.mmap:
    """Take all mappings that this process may have but `left`; they go with what is returned."""
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    count = limit - Path("/proc/self/maps").read_bytes().count(b"\n") - left
    taken = mmap.mmap(-1, (count + 1) * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(taken))
    for page in range(0, count, 2):
        _libc.mprotect(start + page * mmap.PAGESIZE, mmap.PAGESIZE, mmap.PROT_READ)
    return taken
