"""Make the memory of arenas, all of a request or none."""

from __future__ import annotations

import os

from refitd.buffers import arena as memory
from refitd.buffers import capacity
from refitd.daemon.slow_work import Moved


def make_arenas(
    wanted: tuple[tuple[int, str], ...], held: tuple[int, ...], workers: int, device: str, moved: Moved
) -> list[int]:
    """Make all arenas or none; `device` is the GPU that holds them, "" for main memory."""
    capacity.check_descriptors(wanted, len(held), workers)
    if device:
        from refitd.buffers import cuda

        return cuda.create_all(wanted, cuda.index_of(device))
    capacity.check_bytes(wanted, sum(held))
    fds: list[int] = []
    try:
        for nbytes, label in wanted:
            fds.append(memory.create(nbytes, label, moved))
    except BaseException:
        close_all(fds)
        raise
    return fds


def close_all(fds: object) -> None:
    """Close the arenas that `make_arenas` returned."""
    assert isinstance(fds, list)
    for fd in fds:
        os.close(fd)
