"""Arenas that a restarted daemon does not get back: the client keeps each of them, whatever number comes next."""

from __future__ import annotations

from typing import Any

from refitd.client.arena_memory import ArenaMemory


def test_arenas_of_two_daemons_that_had_the_same_number_stay_apart() -> None:
    line: Any = None
    memory: Any = ArenaMemory(line)
    kept = [object(), object(), object()]  # none is mapped from a file, as on a GPU
    for arena in kept:
        memory._arenas[1] = arena
        memory._give_back(lambda address, nbytes: None)
    assert set(memory._arenas.values()) == set(kept)
    assert all(number < 0 for number in memory._arenas) and memory._estranged == memory._arenas.keys()
