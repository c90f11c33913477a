"""A few hundred inputs of `scripts/fuzz` for every reader and socket; a long run is recorded in benchmarks/results."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz.__main__ import run_live, table
from tests.fuzz.readers import NAMES, readers
from tests.fuzz.values import damaged, spoilt


@pytest.mark.parametrize("name", NAMES)
def test_reader_accepts_or_refuses_and_does_nothing_else(name: str, tmp_path: Path) -> None:
    reader = next(reader for reader in readers(tmp_path) if reader.name == name)
    rng = random.Random(f"pytest {reader.name}")
    for _ in range(300):
        reader.counts[reader.feed(rng)] += 1
    assert reader.counts[True] and reader.counts[False], f"{reader.counts}: inputs that are all alike try nothing"


def test_live_sockets_refuse_and_everybody_else_goes_on() -> None:
    found: list[str] = []
    result = run_live(400, 7, found)
    assert not found, "\n".join(found)
    assert [row["inputs"] for row in result["surfaces"]] == [400] * 3
    assert result["normal_requests"] >= 6 and result["swaps"] >= 1
    about = {"cpu": "c", "cores": 1, "kernel": "k", "python": "p"}
    everything = {"machine": about, "seed": 7, "inputs": 1200, "seconds": 1.0, "findings": [], "live": result}
    assert "coordinator: ZeroMQ | 400" in table({**everything, "surfaces": result["surfaces"]})


def test_the_same_seed_makes_the_same_inputs() -> None:
    made = [
        (damaged(bytes(range(100)), random.Random(seed)), spoilt({"a": [1, 2]}, random.Random(seed))) for seed in (1, 1)
    ]
    assert made[0] == made[1]
    assert damaged(bytes(range(100)), random.Random(1)) != damaged(bytes(range(100)), random.Random(2))
