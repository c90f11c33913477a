"""The fixtures of the suite: each test gets every backend that can run here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from refitd.testing.conformance.world import Contestant, World, contestants

# contestants that cannot run here are skipped once, with the reason, in test_capabilities.py
_ABLE = [contestant for contestant in contestants() if not contestant.missing()]


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker of slow tests, which refitd's own configuration skips."""
    config.addinivalue_line("markers", "slow: more of what another test does already")


@pytest.fixture(params=_ABLE, ids=str)
def contestant(request: pytest.FixtureRequest) -> Contestant:
    """Every copy service that can run here, once for each kind of memory that it supports."""
    found: Contestant = request.param
    return found


@pytest.fixture(params=[c for c in _ABLE if not c.capabilities.is_one_sided], ids=str)
def two_sided(request: pytest.FixtureRequest) -> Contestant:
    """Contestants whose ends are different processes."""
    found: Contestant = request.param
    return found


@pytest.fixture(params=[c for c in _ABLE if c.capabilities.is_one_sided], ids=str)
def one_sided(request: pytest.FixtureRequest) -> Contestant:
    """Contestants that reach both ends from one process."""
    found: Contestant = request.param
    return found


@pytest.fixture(scope="session")
def _worlds() -> Iterator[dict[Contestant, World]]:
    worlds: dict[Contestant, World] = {}
    yield worlds
    for world in worlds.values():
        world.close()


@pytest.fixture
def joined(_worlds: dict[Contestant, World]) -> Callable[[Contestant], World]:
    """Return a world of three with ready services; tests share it until one of them breaks it."""

    def find(contestant: Contestant) -> World:
        world = _worlds.get(contestant)
        if world is None or not world.is_ready:
            if world is not None:
                world.close()
            world = _worlds[contestant] = World(contestant)
            assert {answer.error for answer in world.join().values()} == {""}
        return world

    return find


@pytest.fixture
def world(contestant: Contestant, joined: Callable[[Contestant], World]) -> World:
    """A world of three that is ready."""
    return joined(contestant)


@pytest.fixture
def exchange(two_sided: Contestant, joined: Callable[[Contestant], World]) -> World:
    """A world of three that is ready, with a two-sided service."""
    return joined(two_sided)


@pytest.fixture
def mapped(one_sided: Contestant, joined: Callable[[Contestant], World]) -> World:
    """A world of three that is ready, with a one-sided service."""
    return joined(one_sided)


@pytest.fixture
def fresh() -> Iterator[Callable[..., World]]:
    """Make worlds that a test may break; their services are not made yet."""
    made: list[World] = []

    def make(contestant: Contestant, size: int = 3, **more: int) -> World:
        made.append(World(contestant, size, **more))
        return made[-1]

    yield make
    for world in made:
        world.close()
