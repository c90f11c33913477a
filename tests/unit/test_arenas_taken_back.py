"""What a daemon takes back from a client after its restart: memory that it has made itself, and nothing else."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator

import pytest

from refitd.buffers.arena import PERMITS, create, read_only, taken_back
from refitd.errors import ArenaError

NBYTES = 12_288
_F_ADD_SEALS, _SEALS = 1033, 7


def memory(name: str = "refitd:x", *, seals: int = _SEALS, mode: int = 0o600, filled: bool = True) -> int:
    fd = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    os.fchmod(fd, mode)
    os.ftruncate(fd, NBYTES)
    if filled:
        os.posix_fallocate(fd, 0, NBYTES)
    fcntl.fcntl(fd, _F_ADD_SEALS, seals)
    return fd


@pytest.fixture
def opened() -> Iterator[Callable[[int], int]]:
    fds: list[int] = []

    def opens(fd: int) -> int:
        fds.append(fd)
        return fd

    yield opens
    for fd in fds:
        os.close(fd)


def test_an_arena_is_taken_back_with_its_bytes(opened: Callable[[int], int]) -> None:
    fd = opened(create(NBYTES, "policy/source:0@n0#1/slot0"))
    os.pwrite(fd, b"weights", 5)
    taken, may_write = taken_back(fd, NBYTES)
    opened(taken)
    assert may_write and os.path.sameopenfile(fd, taken) and os.pread(taken, 7, 5) == b"weights"


def test_who_could_only_read_an_arena_can_only_read_it_afterwards(opened: Callable[[int], int]) -> None:
    fd = opened(read_only(opened(create(NBYTES, "staging"))))
    taken, may_write = taken_back(fd, NBYTES)
    opened(taken)
    assert not may_write and os.pwrite(taken, b"x", 0) == 1, "the daemon's workers write it"


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: memory("evil:x"), "no arena"),
        (lambda: memory("refitd"), "no arena"),
        (lambda: create(NBYTES, PERMITS), "no arena"),
        (lambda: memory(seals=1), "not sealed"),
        (lambda: memory(mode=0o666), "mode is 666"),
        (lambda: memory(filled=False), "0 bytes of it are allocated"),
        (lambda: os.open("/dev/null", os.O_RDWR), "no arena"),
        (lambda: os.open("/dev/zero", os.O_RDONLY), "no arena"),
        (lambda: os.pipe()[0], "no arena"),
    ],
)
def test_anything_else_is_refused_by_what_is_wrong(
    make: Callable[[], int], match: str, opened: Callable[[int], int]
) -> None:
    with pytest.raises(ArenaError, match=match):
        taken_back(opened(make()), NBYTES)


@pytest.mark.parametrize("nbytes", [0, 1, NBYTES - 1, NBYTES + 1, 1 << 62])
def test_another_size_is_refused(nbytes: int, opened: Callable[[int], int]) -> None:
    with pytest.raises(ArenaError, match="not taken back"):
        taken_back(opened(create(NBYTES, "x")), nbytes)
