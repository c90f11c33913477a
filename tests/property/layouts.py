"""Random models in random layouts, small enough to check element by element."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from hypothesis import strategies as st

from refitd.describe.layout import global_shape_of, tiles_of
from refitd.describe.metadata import ParameterMetadata, Repeat, Roster, Tile
from tests.support.layouts import meta, replicated, rosters, tp

Side = dict[int, ParameterMetadata]


@dataclass(frozen=True)
class Fleet:
    """Rosters, and the shapes of the whole tensors they share."""

    rosters: list[Roster]
    shapes: dict[str, tuple[int, ...]]


FILL = 35.25  # gaps of all tensors hold it, on both sides: one local tensor may have tiles of several


def fleets() -> st.SearchStrategy[Fleet]:
    """Any model over any ranks."""
    return st.randoms(use_true_random=False).map(random_fleet)


def random_fleet(rng: Random) -> Fleet:
    shapes = {f"t{i}": random_shape(rng) for i in range(rng.randint(1, 4))}
    pool = list(range(rng.randint(1, 6)))
    other = pool if rng.random() < 0.4 else list(range(rng.randint(0, len(pool)), len(pool) + rng.randint(1, 6)))
    sources, destinations, alike = [], [], {}
    for name, shape in shapes.items():
        # replicas may hold a tensor in different layouts; together they cover it
        held = [random_side(rng, name, shape, ranks) for ranks in random_groups(rng, pool)]
        wanted = [random_side(rng, name, shape, ranks) for ranks in random_groups(rng, other)]
        if any(m.partition_sizes for side in (*held, *wanted) for m in side.values()):
            held, wanted = [in_one_block(side) for side in held], [in_one_block(side) for side in wanted]
            # one side declares its blocks; all other sides with blocks or strides use tiles
            parts = rng.choice([side for side in (*held, *wanted) if any(m.partition_sizes for m in side.values())])
            held, wanted = ([s if s is parts else in_tiles(s) for s in sides] for sides in (held, wanted))
        for copy in [name, *(f"{name}.{i}" for i in range(rng.choice((0, 0, 3))))]:
            alike[copy] = shape
            sources += [renamed(side, name, copy) for side in held]
            destinations += [renamed(side, name, copy) for side in wanted]
    nodes = {rank: f"node{rank // rng.randint(1, 4)}" for rank in {*pool, *other}} if rng.random() < 0.5 else None
    found = rosters(sources, destinations, nodes)
    rng.shuffle(found)
    return Fleet(found, alike)


def renamed(side: Side, name: str, other: str) -> Side:
    """Describe another tensor that ranks hold as they hold this one."""
    return {
        rank: replace(m, name=other, tiles=m.tiles and tuple(replace(tile, tensor=other) for tile in m.tiles))
        for rank, m in side.items()
    }


def in_one_block(side: Side) -> Side:
    """Declare one block for ranks with one range of rows each; else they would get the blocks that others declare."""
    return {
        rank: replace(m, partition_sizes=[m.shape[m.partition_dim]])
        if m.is_tp and m.partition_stride == 1 and m.partition_sizes is None
        else m
        for rank, m in side.items()
    }


def in_tiles(side: Side) -> Side:
    """Declare tiles instead of a stride or several blocks."""
    return {
        rank: meta(m.name, m.shape, rank, tiles=tuple(tiles_of(m)), global_shape=global_shape_of(m))
        if m.partition_stride > 1 or len(m.partition_sizes or ()) > 1
        else m
        for rank, m in side.items()
    }


def random_shape(rng: Random) -> tuple[int, ...]:
    return tuple(rng.choice((1, 2, 3, 4, 6, 8, 12, 24)) for _ in range(rng.choice((1, 1, 2, 2, 2, 3))))


def random_groups(rng: Random, ranks: Sequence[int]) -> list[list[int]]:
    """Cut ranks into groups; each group has the whole tensor."""
    mixed = list(ranks)
    rng.shuffle(mixed)
    size = rng.randint(1, len(mixed))
    groups = [mixed[i : i + size] for i in range(0, len(mixed), size)]
    return groups if rng.random() < 0.7 else groups[:1]


def random_side(rng: Random, name: str, shape: tuple[int, ...], ranks: Sequence[int]) -> Side:
    """Describe how a group of ranks holds one tensor between them, in one of many ways."""
    ways = [whole, boxes, flat_slices, strided_rows]
    splits = [
        (dim, stride) for dim, extent in enumerate(shape) for stride in (1, 2, 3) if extent % (len(ranks) * stride) == 0
    ]
    if splits and rng.random() < 0.6:
        dim, stride = rng.choice(splits)
        local = [extent // len(ranks) if d == dim else extent for d, extent in enumerate(shape)]
        if stride == 1 and rng.random() < 0.4:
            return tp(name, local, ranks, dim, partition_sizes=random_parts(rng, local[dim]))
        return tp(name, local, ranks, dim, partition_stride=stride)
    return rng.choice(ways)(rng, name, shape, ranks)


def random_parts(rng: Random, total: int) -> list[int]:
    edges = sorted(rng.randint(0, total) for _ in range(rng.randint(0, 2)))
    return [high - low for low, high in itertools.pairwise([0, *edges, total])]


def whole(rng: Random, name: str, shape: tuple[int, ...], ranks: Sequence[int]) -> Side:
    return replicated(name, shape, ranks)


def boxes(rng: Random, name: str, shape: tuple[int, ...], ranks: Sequence[int]) -> Side:
    """Cut the tensor into a grid of boxes and deal them; a rank packs its boxes one after the other."""
    cuts = [random_parts(rng, extent) for extent in shape]
    starts = [list(itertools.accumulate(parts, initial=0)) for parts in cuts]
    dealt: dict[int, list[Tile]] = {rank: [] for rank in ranks}
    used = dict.fromkeys(ranks, 0)
    for index in itertools.product(*(range(len(parts)) for parts in cuts)):
        offset = tuple(starts[d][i] for d, i in enumerate(index))
        size = tuple(cuts[d][i] for d, i in enumerate(index))
        rank, gap = rng.choice(list(ranks)), rng.choice((0, 0, 1))
        order = rng.sample(range(len(shape)), len(shape))
        strides, step = [0] * len(shape), 1
        for d in order:
            strides[d] = step
            step *= max(1, size[d])
        dealt[rank].append(Tile(name, offset, size, used[rank] + gap, tuple(strides)))
        used[rank] += gap + (step if 0 not in size else 0)
    return {
        rank: meta(name, (used[rank],), rank, tiles=tuple(dealt[rank]), global_shape=shape, fill=FILL) for rank in ranks
    }


def flat_slices(rng: Random, name: str, shape: tuple[int, ...], ranks: Sequence[int]) -> Side:
    """Deal the flattened tensor in runs, as ZeRO-3 does: some boxes of it per rank, empty for some ranks."""
    total = 1
    for extent in shape:
        total *= extent
    edges = sorted(rng.randint(0, total) for _ in range(len(ranks) - 1))
    found = {}
    for rank, (low, high) in zip(ranks, itertools.pairwise([0, *edges, total]), strict=True):
        tiles = tuple(run_tiles(name, shape, low, high))
        found[rank] = meta(name, (high - low,), rank, tiles=tiles, global_shape=shape)
    return found


def run_tiles(name: str, shape: tuple[int, ...], low: int, high: int) -> list[Tile]:
    """Return the boxes that a run of the flattened tensor consists of, one per innermost row."""
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * extent)
    found, at = [], low
    while at < high:
        offset = tuple(at // s % n for s, n in zip(strides, shape, strict=True))
        length = min(high - at, shape[-1] - offset[-1])
        size = (*(1 for _ in shape[1:]), length)
        found.append(Tile(name, offset, size, at - low, tuple(strides)))
        at += length
    return found


def strided_rows(rng: Random, name: str, shape: tuple[int, ...], ranks: Sequence[int]) -> Side:
    """Deal rows round robin, described with a repeat: rank i has rows i, i + n, i + 2n, ..."""
    world, row = len(ranks), 1
    for extent in shape[1:]:
        row *= extent
    inner = [row]
    for extent in shape[1:]:
        inner.append(inner[-1] // extent)
    found = {}
    for i, rank in enumerate(ranks):
        count = len(range(i, shape[0], world))
        tiles = ()
        if count:
            size = (1, *shape[1:])
            offset = (i, *(0 for _ in shape[1:]))
            tiles = (Tile(name, offset, size, 0, tuple(inner), Repeat(0, count, world, row)),)
        found[rank] = meta(name, (count, *shape[1:]), rank, tiles=tiles, global_shape=shape)
    return found
