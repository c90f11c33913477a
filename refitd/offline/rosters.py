"""Place manifests on ranks and nodes, and make the rosters of their ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from refitd.describe.metadata import ParameterMetadata
from refitd.describe.roster import Roster
from refitd.offline.holdings import Describer
from refitd.offline.layouts import Kind, classes_of, world_size
from refitd.offline.shards import shard_metadata
from refitd.offline.tables import refusal
from refitd.offline.values import Manifest, PlacedManifest, Shards


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
