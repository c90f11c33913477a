"""Make the rosters of manifests: place them on ranks and nodes, and cut each tensor for each kind of rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from refitd.describe.layout import elements, row_major
from refitd.describe.metadata import ParameterMetadata, Repeat, Roster, Tile, spaced
from refitd.describe.names import expert_range
from refitd.dtypes import ELEMENT_SIZES
from refitd.files import refusal
from refitd.offline.files import shard_metadata
from refitd.offline.layouts import (
    Kind,
    Layout,
    Manifest,
    PlacedManifest,
    Shards,
    Split,
    TensorSpec,
    classes_of,
    expert_fsdp_of,
    group_of,
    span_of,
    stage_layers,
    world_size,
)

Run = tuple[int, int, int]  # number of the canonical tensor, first element in it, number of elements
Box = tuple[int, int, int, int, Repeat | None]  # number of the tensor, first element, elements, local place, repeat


@dataclass(frozen=True, slots=True)
class RankCut:
    """The part of a tensor that ranks of one kind hold: local shape, tiles by number of the canonical tensor."""

    shape: tuple[int, ...]
    tiles: tuple[tuple[int, tuple[int, ...], tuple[int, ...], int, Repeat | None], ...]
    strides: tuple[int, ...]


def cut_of(spec: TensorSpec, layout: Layout, index: int, place: int, fsdp: int) -> RankCut:
    """Cut a tensor for position `index` of its group and position `place` among the `fsdp` ranks that share a copy."""
    dim = spec.split.dim if spec.split is not None else 0
    runs: list[Run] = [(0, 0, spec.shape[dim])] if spec.shape else []
    if spec.split is not None:
        runs = _runs(spec, spec.split, group_of(spec, layout)[1], index)
    lead: Run = (0, 0, spec.shape[0]) if spec.shape else (0, 0, 1)
    if spec.shape and dim == 0:
        runs = _chunk(runs, fsdp, place)
    elif spec.shape:
        (lead,) = _chunk([lead], fsdp, place) or [(0, 0, 0)]
    shape = list(spec.shape)
    if shape:
        shape[0] = lead[2]
        shape[dim] = sum(size for _, _, size in runs)
    strides = row_major(shape)
    if 0 in shape:
        return RankCut(tuple(shape), (), strides)
    tiles = []
    for number, start, size, local, repeat in _boxes(runs, dim, strides[dim]) if shape else [(0, 0, 1, 0, None)]:
        offset, sizes = [0] * len(shape), list(shape)
        if shape:
            offset[0], sizes[0] = lead[1], lead[2]
            offset[dim], sizes[dim] = start, size
        tiles.append((number, tuple(offset), tuple(sizes), local, repeat))
    return RankCut(tuple(shape), tuple(tiles), strides)


def _runs(spec: TensorSpec, split: Split, ways: int, index: int) -> list[Run]:
    """Return the runs that position `index` of `ways` holds along the split dimension, in local order."""
    size = spec.shape[split.dim]
    if split.uneven:
        return _chunk([(0, 0, size)], ways, index)
    if spec.interleave is not None:
        here = spec.interleave // ways
        return [
            (number, group * (part.size // spec.interleave), part.size // spec.interleave)
            for group in range(index * here, (index + 1) * here)
            for number, part in enumerate(spec.parts or ())
        ]
    if spec.parts is not None:
        return [(number, *_share(part.size, part.units, ways, index)) for number, part in enumerate(spec.parts)]
    blocks = split.sizes or (size // split.stride,) * split.stride
    starts = itertools.accumulate(blocks, initial=0)
    shares = [(start, *_share(block, split.units, ways, index)) for start, block in zip(starts, blocks, strict=False)]
    return [(0, start + offset, held) for start, offset, held in shares]


def _share(size: int, units: int | None, ways: int, index: int) -> tuple[int, int]:
    """Return (first element, elements) of an equal share; if there are fewer units than ranks, ranks share units."""
    if units is not None and units < ways:
        index, ways = index // (ways // units), units
    return index * (size // ways), size // ways


def _chunk(runs: list[Run], ways: int, index: int) -> list[Run]:
    """Return the part of the runs that torch.chunk gives to position `index` of `ways`."""
    if ways == 1:
        return runs
    each = -(-sum(size for _, _, size in runs) // ways)
    found, position, begin, end = [], 0, index * each, (index + 1) * each
    for number, start, size in runs:
        low, high = max(begin, position), min(end, position + size)
        if low < high:
            found.append((number, start + low - position, high - low))
        position += size
    return found


def _boxes(runs: list[Run], dim: int, step: int) -> list[Box]:
    """Place runs one after the other; equally spaced runs of one tensor become one box with a repeat."""
    places = itertools.accumulate((size for _, _, size in runs), initial=0)
    by_tensor: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (number, start, size), local in zip(runs, places, strict=False):
        by_tensor.setdefault((number, size), []).append((start, local * step))
    return [
        (number, start, size, local, repeat)
        for (number, size), spots in by_tensor.items()
        for start, local, repeat in spaced(spots, size, dim)
    ]


class Describer:
    """Makes the descriptions of each kind of rank of one layout, with tiles instead of groups, so without ranks."""

    def __init__(self, layout: Layout) -> None:
        assert layout.model is not None
        self.layout = layout
        self.model = layout.model
        self.cuts: dict[tuple[int, int, int], RankCut] = {}

    def tensors(self, kind: Kind) -> Iterator[ParameterMetadata]:
        """Yield the descriptions of all tensors of a kind of rank."""
        stage, tp, ep, etp, shard, expert_shard = kind
        layout, model = self.layout, self.model
        held_layers = stage_layers(layout, stage)
        held_experts = expert_range(model.experts, layout.ep, ep) if model.experts else range(0)
        for number, spec in enumerate(model.tensors):
            is_expert = "{expert}" in spec.name
            index = etp if group_of(spec, layout)[0] == "etp" else tp
            place = expert_shard if is_expert else shard
            key = (number, index, place)
            if key not in self.cuts:
                self.cuts[key] = cut_of(
                    spec, layout, index, place, expert_fsdp_of(layout) if is_expert else layout.fsdp
                )
            cut = self.cuts[key]
            experts = _common(held_experts, span_of(spec.experts, model.experts)) if is_expert else range(1)
            for layer in self._layers(spec, stage, held_layers):
                if spec.fused is not None and len(experts):
                    yield self._fused(spec, cut, layer, experts)
                    continue
                for expert in experts:
                    yield self._one(spec, cut, layer, expert)

    def _layers(self, spec: TensorSpec, stage: int, held: range) -> range:
        if "{layer}" in spec.name:
            return _common(held, span_of(spec.layers, self.model.layers))
        stages = (spec.stage,) if isinstance(spec.stage, str) else spec.stage or ()
        is_here = (
            "every" in stages
            or ("first" in stages and stage == 0)
            or ("last" in stages and stage == self.layout.pp - 1)
        )
        return range(1) if is_here else range(0)

    def _one(self, spec: TensorSpec, cut: RankCut, layer: int, expert: int) -> ParameterMetadata:
        name, names = _filled(spec.name, layer, expert), _canonical(spec, layer, expert)
        dtype = spec.dtype or self.model.dtype
        # the shape alone describes a whole tensor
        is_whole = spec.parts is None and cut.shape == tuple(spec.shape)
        return ParameterMetadata(
            name=name,
            shape=cut.shape,
            dtype=dtype,
            element_size=ELEMENT_SIZES[dtype],
            resolved_name=names[0] if spec.parts is None else name,
            tiles=None
            if is_whole
            else tuple(
                Tile(names[n], offset, size, local, cut.strides, repeat) for n, offset, size, local, repeat in cut.tiles
            ),
            global_shape=None if is_whole or spec.parts is not None else tuple(spec.shape),
        )

    def _fused(self, spec: TensorSpec, cut: RankCut, layer: int, experts: range) -> ParameterMetadata:
        """Describe all experts of a rank as one tensor, one after the other."""
        assert spec.fused is not None
        dtype, each = spec.dtype or self.model.dtype, elements(cut.shape)
        name = _filled(spec.fused, layer, 0)
        tiles = tuple(
            Tile(names[n], offset, size, nth * each + local, cut.strides, repeat)
            for nth, names in enumerate(_canonical(spec, layer, expert) for expert in experts)
            for n, offset, size, local, repeat in cut.tiles
        )
        return ParameterMetadata(
            name=name,
            shape=(len(experts), *cut.shape),
            dtype=dtype,
            element_size=ELEMENT_SIZES[dtype],
            resolved_name=name,
            tiles=tiles,
        )


def _filled(pattern: str, layer: int, expert: int) -> str:
    return pattern.replace("{layer}", str(layer)).replace("{expert}", str(expert))


def _canonical(spec: TensorSpec, layer: int, expert: int) -> list[str]:
    patterns = [part.tensor for part in spec.parts] if spec.parts is not None else [spec.tensor or spec.name]
    return [_filled(pattern, layer, expert) for pattern in patterns]


def _common(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def rosters_of(source: Manifest, targets: Sequence[Manifest], *, collocated: bool = False) -> list[Roster]:
    """Return one roster per rank: the source's ranks, followed by each target's.

    Args:
        source: the sending side.
        targets: the receiving side.
        collocated: targets without a `first_rank` start at rank 0, beside the source.

    Raises:
        ConfigError: two targets claim one rank, or a rank is on two nodes.
    """
    placed = place([source, *targets], collocated=collocated)
    found: dict[int, Roster] = {}
    problems: list[str] = []
    for number, each in enumerate(placed):
        for roster in side_rosters(each, "destination" if number else "source"):
            other = found.get(roster.rank)
            if other is None:
                found[roster.rank] = roster
                continue
            if number and other.destination:
                problems.append(
                    f"{each.manifest.name}: rank {roster.rank} is also that of {other.label}; set first_rank"
                )
            if other.node and roster.node and other.node != roster.node:
                problems.append(
                    f"{each.manifest.name}: rank {roster.rank} is on {roster.node}, and {other.label} is on "
                    f"{other.node}; check ranks_per_node and first_node"
                )
            label = other.label if other.label == roster.label else f"{other.label} ({roster.label})"
            found[roster.rank] = replace(
                other, destination=roster.destination, node=other.node or roster.node, label=label
            )
    if problems:
        raise refusal("ranks", problems)
    return [found[rank] for rank in sorted(found)]


def place(manifests: Sequence[Manifest], *, collocated: bool = False) -> list[PlacedManifest]:
    """Give each manifest its first rank and node: as declared, else after the earlier manifests (collocated: 0)."""
    placed: list[PlacedManifest] = []
    rank = node = 0
    for manifest in manifests:
        first = 0 if collocated and manifest.first_rank is None else manifest.first_rank
        if isinstance(manifest, Shards):
            first = rank if first is None else first
            placed.append(PlacedManifest(manifest, first, 0))
            rank = max([rank, *(first + each.rank + 1 for each in manifest.ranks)])
            numbers = [each.node.removeprefix("node") for each in manifest.ranks if each.node.startswith("node")]
            node = max([node, *(int(n) + 1 for n in numbers if n.isdecimal() and len(n) < 8)])
            continue
        first_node = manifest.first_node
        if first_node is None:
            first_node = node if first is None else first // manifest.ranks_per_node
        first = rank if first is None else first
        placed.append(PlacedManifest(manifest, first, first_node))
        ranks = world_size(manifest)
        rank, node = max(rank, first + ranks), max(node, first_node + -(-ranks // manifest.ranks_per_node))
    return placed


def side_rosters(placed: PlacedManifest, side: Literal["source", "destination"]) -> Iterator[Roster]:
    """Yield the rosters of one manifest, in the order of its ranks; equal ranks share one tuple of descriptions."""
    manifest = placed.manifest
    if isinstance(manifest, Shards):
        for rank in manifest.ranks:
            tensors = manifest.shards[rank.shard]
            held = tuple(shard_metadata(t, rank, placed.first_rank) for t in tensors)
            label = rank.label or f"{manifest.name} rank {rank.rank}"
            yield _roster(placed.first_rank + rank.rank, side, held, rank.node, label)
        return
    holdings: dict[Kind, tuple[ParameterMetadata, ...]] = {}
    describe = Describer(manifest)
    for index, kind in enumerate(classes_of(manifest)):
        if kind not in holdings:
            holdings[kind] = tuple(describe.tensors(kind))
        node = f"node{placed.first_node + index // manifest.ranks_per_node}"
        label = f"{manifest.label or manifest.name} rank {index}"
        yield _roster(placed.first_rank + index, side, holdings[kind], node, label)


def _roster(rank: int, side: str, held: tuple[ParameterMetadata, ...], node: str, label: str) -> Roster:
    if side == "source":
        return Roster(rank, source=held, node=node, label=label)
    return Roster(rank, destination=held, node=node, label=label)
