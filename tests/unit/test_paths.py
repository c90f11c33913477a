"""The path of bytes within a node follows from the memories at both ends and the node's abilities."""

from __future__ import annotations

import pytest

from refitd.addressing.paths import MAIN_MEMORY, Abilities, Path, path

ALL = Abilities(peers=frozenset({("b", "a")}))
NONE = Abilities(has_kernels=False, can_pin=False, peers=frozenset({("b", "a")}))


@pytest.mark.parametrize(
    ("source", "destination", "with_all", "with_none"),
    [
        (MAIN_MEMORY, MAIN_MEMORY, Path.SHARED, Path.SHARED),
        (MAIN_MEMORY, "a", Path.PINNED, Path.WINDOWS),
        ("a", MAIN_MEMORY, Path.PINNED, Path.WINDOWS),
        ("a", "a", Path.KERNEL, Path.TENSORS),
        ("a", "b", Path.PEER, Path.WINDOWS),  # b is written, so b reads a
        ("b", "a", Path.WINDOWS, Path.WINDOWS),
    ],
)
def test_each_pair_of_memories_has_one_path(source: str, destination: str, with_all: Path, with_none: Path) -> None:
    assert path(source, destination, ALL) is with_all
    assert path(source, destination, NONE) is with_none
