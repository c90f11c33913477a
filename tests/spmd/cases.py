"""What the processes of a pool run. Every function is called on all ranks at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

import refitd
from tests.spmd.layouts import Built, Layout, bits, build, random_pair

TIMEOUT_S = 20.0


class World:
    """One process's place, and groups of the first n ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.first = {n: dist.new_group(list(range(n))) for n in range(2, size)}
        self.first[size] = dist.group.WORLD
        self.state: dict[str, object] = {}


def check(target: Built, what: str, pointers: dict[str, int]) -> None:
    for name, expected in target.expected.items():
        found = target.tensors[name]
        assert bits(found) == bits(expected), f"{what}: {name} is wrong"
        assert found.data_ptr() == pointers[name], f"{what}: {name} has moved"
        assert found.dtype == expected.dtype


def swap_and_check(world: World, source_layout: Layout, target_layout: Layout, seed: int, what: str, size: int) -> None:
    source = build(source_layout, world.rank, seed, seed)
    target = build(target_layout, world.rank, None, seed)
    pointers = {} if target is None else {name: t.data_ptr() for name, t in target.tensors.items()}
    refitd.swap_model_weights(
        source and source.module, target and target.module, "gloo", world.first[size], timeout=TIMEOUT_S
    )
    if target is not None:
        check(target, what, pointers)
    if source is not None:
        check(source, f"{what}: source", {name: t.data_ptr() for name, t in source.tensors.items()})


def random_pairs(world: World, seeds: Sequence[int]) -> int:
    for seed in seeds:
        size = 2 + seed % (world.size - 1)
        if world.rank >= size:
            continue
        source, target, kind = random_pair(seed, size)
        swap_and_check(world, source, target, seed, f"seed {seed} ({kind}): {source} -> {target}", size)
    return len(seeds)
