"""Descriptors of a client's arenas, kept so that they can be given back to the daemon after it has been restarted."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

from refitd.buffers.capacity import descriptors_left

# Number of descriptors that stay free for the application.
_RESERVE = 256

_MAPS = Path("/proc/self/maps")
_ARENA = "/memfd:refitd:"


class ArenaFiles:
    """The descriptors by memory file. An exchange moves files between addresses: the kernel says which file is where.

    A file that is mapped nowhere any more is closed at the next look, since its descriptor holds the memory.
    """

    def __init__(self) -> None:
        self._kept: dict[int, int] = {}  # inode -> descriptor
        weakref.finalize(self, _close, self._kept).atexit = False

    def keep(self, fd: int) -> None:
        """Keep a copy of an arena's descriptor, unless few are left: without one the arena cannot be given back."""
        if descriptors_left() < _RESERVE:
            return
        with contextlib.suppress(OSError):
            copy = os.dup(fd)
            if self._kept.setdefault(os.fstat(copy).st_ino, copy) != copy:
                os.close(copy)

    def shown_at(self, address: int) -> int | None:
        """Return the descriptor of the arena that this process's `address` shows; None if none is kept."""
        for start, end, inode in _mapped():
            if start <= address < end:
                return self._kept.get(inode)
        return None

    def drop(self, address: int) -> None:
        """Close the descriptor of the arena at `address`: its daemon has freed it."""
        for start, end, inode in _mapped():
            if start <= address < end and (fd := self._kept.pop(inode, None)) is not None:
                os.close(fd)

    def drop_unmapped(self) -> None:
        """Close the descriptors of files that are mapped nowhere any more."""
        mapped = {inode for _, _, inode in _mapped()}
        for inode in self._kept.keys() - mapped:
            os.close(self._kept.pop(inode))

    def close(self) -> None:
        """Close every descriptor."""
        _close(self._kept)


def _close(kept: dict[int, int]) -> None:
    while kept:
        os.close(kept.popitem()[1])


def _mapped() -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, inode) of every mapping of an arena in this process."""
    with contextlib.suppress(OSError):
        for line in _MAPS.read_text(errors="replace").splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(_ARENA):
                start, _, end = fields[0].partition("-")
                yield int(start, 16), int(end, 16), int(fields[4])
