"""Draw one tensor as text: which part each rank holds, and which parts are sent.

    rank 0  |######..........|  [0:6, 0:4]
    rank 1  |......##########|  [6:16, 0:4]

There is a bar for each dimension that is cut, and the exact boxes beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from refitd.describe.layout import canonical_name, elements, global_shape_of, is_sharded, tiles_of
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.roster import Roster
from refitd.describe.tiles import Tile
from refitd.dtypes import dtype_name
from refitd.plan.table import CopyTable

BAR_WIDTH = 48
MAX_BOXES = 4

Box = tuple[tuple[int, int], ...]  # [start, end) of each dimension


@dataclass(frozen=True)
class Holding:
    """The part of a canonical tensor that one local tensor holds; boxes are in local order."""

    rank: int
    local: str
    boxes: tuple[Box, ...]
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Picture:
    """A canonical tensor and everything that rosters say about it."""

    tensor: str
    shape: tuple[int, ...]
    dtype: str
    element_size: int
    source: tuple[Holding, ...]
    destination: tuple[Holding, ...]


@dataclass(frozen=True)
class SentBox:
    """A box that one rank sends to another."""

    src: int
    dst: int
    box: Box
    bytes: int


def pictures(rosters: Sequence[Roster], wanted: str) -> list[Picture]:
    """Return the canonical tensors of this name; for a local name, those that the local tensor holds parts of."""
    holdings: dict[str, tuple[list[tuple[Holding, ParameterMetadata]], list[tuple[Holding, ParameterMetadata]]]] = {}
    names = _canonical_names(rosters, wanted)
    sizes = _Uneven(rosters)
    for number, side in enumerate(("source", "destination")):
        for roster in rosters:
            for meta in getattr(roster, side):
                if not names.isdisjoint(tensors_of(meta)):
                    for tensor, holding in _holdings(meta, roster.rank, sizes.of(side, roster, meta)):
                        if tensor in names:
                            holdings.setdefault(tensor, ([], []))[number].append((holding, meta))
    found = []
    for tensor, (sources, destinations) in sorted(holdings.items()):
        meta = (sources or destinations)[0][1]
        found.append(
            Picture(
                tensor,
                _shape(tensor, [*sources, *destinations]),
                dtype_name(meta.dtype),
                meta.element_size,
                tuple(holding for holding, _ in sources),
                tuple(holding for holding, _ in destinations),
            )
        )
    return found


def tensors_of(meta: ParameterMetadata) -> set[str]:
    """Return the canonical tensors that a local tensor holds parts of."""
    return {tile.tensor for tile in meta.tiles} if meta.tiles else {canonical_name(meta)}


def side_lines(picture: Picture, holdings: Sequence[Holding]) -> list[str]:
    """Return one line for each different holding: the ranks that have it, bars, boxes and the local name."""
    from refitd_cli.output import rank_ranges

    kinds: dict[tuple[tuple[Box, ...], str], list[int]] = {}
    for holding in holdings:
        kinds.setdefault((holding.boxes, holding.local), []).append(holding.rank)
    dims = cut_dims(picture)
    labels = [f"rank{'s' if len(who) > 1 else ''} {rank_ranges(sorted(who))}" for who in kinds.values()]
    width = max(map(len, labels), default=0)
    lines = []
    for label, (boxes, local) in zip(labels, kinds, strict=True):
        place = f"  in {local}" if local != picture.tensor else ""
        lines.append(f"  {label:<{width}}  {bars(picture.shape, dims, boxes)}  {boxes_text(boxes)}{place}")
    return lines


def cut_dims(picture: Picture) -> list[int]:
    """Return the dimensions that some rank holds only a part of; the first one where there is none."""
    boxes = [box for holding in (*picture.source, *picture.destination) for box in holding.boxes]
    cut = [d for d, n in enumerate(picture.shape) if any(box[d] != (0, n) for box in boxes)]
    return cut or list(range(min(1, len(picture.shape))))


def bars(shape: Sequence[int], dims: Sequence[int], boxes: Iterable[Box]) -> str:
    """Return a bar for each of the dimensions: # all of it, + a part of it, . nothing."""
    found = list(boxes)
    width = max(8, BAR_WIDTH // max(1, len(dims)))
    return " ".join(f"|{_bar(shape[d], [box[d] for box in found], width)}|" for d in dims)


def boxes_text(boxes: Sequence[Box]) -> str:
    """Return boxes as slices, a few of many."""
    if not boxes:
        return "nothing"
    shown = " ".join("[" + ", ".join(f"{low}:{high}" for low, high in box) + "]" for box in boxes[:MAX_BOXES])
    return shown + (f" and {len(boxes) - MAX_BOXES} more" if len(boxes) > MAX_BOXES else "")


def pieces(picture: Picture, copies: CopyTable) -> list[SentBox]:
    """Return the boxes that are sent, in canonical coordinates, by destination and source."""
    tiles: dict[tuple[int, str], tuple[Tile, ...]] = {(h.rank, h.local): h.tiles for h in picture.destination}
    dims = len(picture.shape)
    found = []
    for row in range(len(copies)):
        src, dst = int(copies.src_rank[row]), int(copies.dst_rank[row])
        local = copies.locals[int(copies.dst_local[row])]
        sizes, strides = copies.size[row].tolist(), copies.dst_stride[row].tolist()
        lead = len(sizes) - dims
        for steps in itertools.product(*(range(n) for n in sizes[:lead])):
            offset = int(copies.dst_offset[row]) + sum(i * s for i, s in zip(steps, strides[:lead], strict=True))
            start = _place(tiles[dst, local], offset)
            box = tuple((o, o + n) for o, n in zip(start, sizes[lead:], strict=True))
            found.append(SentBox(src, dst, box, elements(sizes[lead:]) * int(copies.element_size[row])))
    return sorted(found, key=lambda piece: (piece.dst, piece.src, piece.box))


def _canonical_names(rosters: Sequence[Roster], wanted: str) -> set[str]:
    local: set[str] = set()
    for roster in rosters:
        for meta in (*roster.source, *roster.destination):
            tensors = tensors_of(meta)
            if wanted in tensors:
                return {wanted}
            if meta.name == wanted:
                local |= tensors
    return local


class _Uneven:
    """Local sizes in unevenly split groups: a rank's offset depends on the ranks before it."""

    def __init__(self, rosters: Sequence[Roster]) -> None:
        self.by_rank = {roster.rank: roster for roster in rosters}

    def of(self, side: str, roster: Roster, meta: ParameterMetadata) -> tuple[int, ...] | None:
        """Return the sizes along the split dimension of every rank of the tensor's group, if all are known."""
        if not is_sharded(meta):
            return None
        sizes = []
        for rank in meta.tensor_parallel_group_ranks or ():
            held = getattr(self.by_rank.get(rank), side, ())
            same = [m for m in held if canonical_name(m) == canonical_name(meta)]
            if len(same) != 1 or meta.partition_dim >= len(same[0].shape):
                return None
            sizes.append(same[0].shape[meta.partition_dim])
        return tuple(sizes) if len(set(sizes)) > 1 else None


def _holdings(meta: ParameterMetadata, rank: int, sizes: tuple[int, ...] | None) -> Iterable[tuple[str, Holding]]:
    tiles: dict[str, list[Tile]] = {tensor: [] for tensor in tensors_of(meta)}
    for tile in tiles_of(meta, sizes):
        tiles[tile.tensor] += _repeated(tile)
    for tensor, mine in tiles.items():
        mine.sort(key=lambda tile: tile.local_offset)
        boxes = tuple(tuple((o, o + n) for o, n in zip(t.offset, t.size, strict=True)) for t in mine)
        yield tensor, Holding(rank, meta.name, boxes, tuple(mine))


def _repeated(tile: Tile) -> list[Tile]:
    repeat = tile.repeat
    if repeat is None:
        return [tile]
    found = []
    for i in range(repeat.count):
        offset = list(tile.offset)
        offset[repeat.dim] += i * repeat.step
        place = tile.local_offset + i * repeat.local_step
        found.append(Tile(tile.tensor, tuple(offset), tile.size, place, tile.local_stride))
    return found


def _shape(tensor: str, holdings: Sequence[tuple[Holding, ParameterMetadata]]) -> tuple[int, ...]:
    """Return the declared shape, or how far the tiles reach."""
    for _, meta in holdings:
        if tensors_of(meta) == {tensor} and not is_sharded(meta) and (shape := global_shape_of(meta)) is not None:
            return shape
    ends = [tuple(high for _, high in box) for holding, _ in holdings for box in holding.boxes]
    return tuple(max(end) for end in zip(*ends, strict=True)) if ends else ()


def _place(tiles: Sequence[Tile], offset: int) -> tuple[int, ...]:
    """Return the canonical coordinates of an element of a local tensor."""
    for tile in tiles:
        inside, at = offset - tile.local_offset, []
        # the largest stride first: what is left over belongs to the smaller ones
        for d in sorted(range(len(tile.size)), key=lambda d: (-tile.local_stride[d], -tile.size[d])):
            step = tile.local_stride[d]
            count = inside // step if step else 0
            inside -= count * step
            at.append((d, count))
        if inside == 0 and all(0 <= count < tile.size[d] for d, count in at):
            places = dict(at)
            return tuple(o + places[d] for d, o in enumerate(tile.offset))
    raise ValueError(f"element {offset} lies in no tile of {tiles!r}")


def _bar(size: int, spans: Sequence[tuple[int, int]], width: int) -> str:
    """Return a bar of `width` cells over `size` elements."""
    width = min(width, size) or 1
    covered = [0] * width
    merged: list[list[int]] = []
    for low, high in sorted(set(spans)):
        if merged and low <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    edges = [size * i // width for i in range(width + 1)]
    for low, high in merged:
        for i in range(width):
            covered[i] += max(0, min(high, edges[i + 1]) - max(low, edges[i]))
    return "".join(
        "#" if done == edges[i + 1] - edges[i] and done else "+" if done else "." for i, done in enumerate(covered)
    )
