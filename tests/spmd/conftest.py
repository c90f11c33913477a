from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.spmd.pool import Pool


@pytest.fixture(scope="session")
def _shared() -> Iterator[list[Pool]]:
    pools: list[Pool] = []
    yield pools
    for pool in pools:
        pool.close()


@pytest.fixture
def pool(_shared: list[Pool]) -> Pool:
    """Eight processes, the same for every test until one of them hangs."""
    if not _shared or not _shared[-1].is_alive:
        _shared.append(Pool(8))
    return _shared[-1]


@pytest.fixture
def small_pool() -> Iterator[Callable[[int], Pool]]:
    """Start a pool of processes that a test may break."""
    started: list[Pool] = []

    def start(size: int) -> Pool:
        started.append(Pool(size))
        return started[-1]

    yield start
    for pool in started:
        pool.close()
