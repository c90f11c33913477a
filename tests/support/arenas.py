"""Arenas of this process."""

from __future__ import annotations

import os

from refitd.buffers import arena


def arena_of(nbytes: int, *, write: bool = True) -> arena.MappedArena:
    """Return a new mapped arena."""
    fd = arena.create(nbytes, "test")
    try:
        return arena.MappedArena(fd, nbytes, write=write)
    finally:
        os.close(fd)
