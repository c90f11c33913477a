"""refitctl explain: draw one parameter's tiles and transfers as text.

    rank 0  |######..........|  [0:6, 0:4]
    rank 1  |......##########|  [6:16, 0:4]

There is a bar for each dimension that is cut, and the exact boxes beside it.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from refitd.describe.layout import canonical_name, elements, global_shape_of, is_sharded, tiles_of
from refitd.describe.metadata import ParameterMetadata, Roster, Tile
from refitd.dtypes import dtype_name
from refitd.errors import ConfigError, PlanError
from refitd.plan.table import CopyTable
from refitd_cli.group import EXIT_FAILED, error_object
from refitd_cli.layouts import copies_of, manifest_options, read_manifests
from refitd_cli.output import print_json, rank_ranges, say, size, to_json
from refitd_cli.printed import Box, BoxSent, Explained, HeldBoxes, TensorExplained
from refitd_cli.session import Session, prints

if TYPE_CHECKING:
    from refitd.plan.shared import GlobalPlan


BAR_WIDTH = 48
MAX_BOXES = 4


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


def pictures(rosters: Sequence[Roster], wanted: str) -> list[Picture]:
    """Return the canonical tensors of this name; for a local name, all that the local tensor has parts of."""
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
    """Return the dimensions that are cut among ranks; the first one if none is."""
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


def pieces(picture: Picture, copies: CopyTable) -> list[BoxSent]:
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
            found.append(BoxSent(src, dst, box, elements(sizes[lead:]) * int(copies.element_size[row])))
    return sorted(found, key=lambda piece: (piece.target, piece.source, piece.box))


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
        # the largest stride first: the remainder belongs to the smaller ones
        for d in sorted(range(len(tile.size)), key=lambda d: (-tile.local_stride[d], -tile.size[d])):
            step = tile.local_stride[d]
            count = inside // step if step else 0
            inside -= count * step
            at.append((d, count))
        if inside == 0 and all(0 <= count < tile.size[d] for d, count in at):
            places = dict(at)
            return tuple(o + places[d] for d, o in enumerate(tile.offset))
    raise ValueError(f"element {offset} is in no tile of {tiles!r}")


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


SIDE_LINES = 40
PLANNERS = {
    "lcm": "each side holds it whole or splits it evenly, along the same dimension",
    "intersect": "the sides split it unevenly or in several ways: their tiles are intersected",
}


@click.command()
@click.argument("param")
@manifest_options
@click.option("--rank", type=click.IntRange(min=0), help="Show the transfers into this rank only.")
@click.option("--top", type=click.IntRange(min=0), default=8, show_default=True, help="Receiving ranks; 0 shows all.")
@prints
def explain(
    session: Session,
    param: str,
    source: str | None,
    targets: tuple[str, ...],
    model_file: str | None,
    collocated: bool,
    rank: int | None,
    top: int,
) -> int:
    """Show the place of PARAM on each side, and its transfers between ranks.

    PARAM is a canonical name, or a local one that holds several (a fused qkv). Works on manifests, without a
    daemon. The tiles are shown even where the plan is refused; the exit status is then 1.
    """
    if source is None or not targets:
        raise click.UsageError("give the manifests of both sides: --source FILE --target FILE")
    from refitd.offline.rosters import rosters_of
    from refitd.plan.build import plan_copies

    sender, receivers = read_manifests(source, targets, model_file)
    rosters = rosters_of(sender, receivers, collocated=collocated)
    found = pictures(rosters, param)
    if not found:
        raise ConfigError(_unknown(param, rosters))
    plan: GlobalPlan | None = None
    refusal: PlanError | None = None
    try:
        plan = plan_copies(rosters)
    except PlanError as error:
        refusal = error
    if session.as_json:
        shown = to_json(Explained(tuple(_object(picture, plan) for picture in found)))
        print_json(shown | (error_object(refusal) if refusal else {}))
    else:
        for picture in found:
            _show(picture, plan, rank, top)
        if refusal is not None:
            _show_refusal(refusal, [picture.tensor for picture in found])
    return EXIT_FAILED if refusal is not None else 0


def _pieces(picture: Picture, plan: GlobalPlan | None) -> list[BoxSent]:
    return pieces(picture, copies_of(plan, picture.tensor)) if plan is not None else []


def _planner(picture: Picture, plan: GlobalPlan | None) -> str | None:
    planner = plan.planner_of(picture.tensor) if plan is not None else None
    return planner and planner.value


def _show(picture: Picture, plan: GlobalPlan | None, rank: int | None, top: int) -> None:
    shape = ", ".join(map(str, picture.shape))
    say(f"{picture.tensor}  [{shape}] {picture.dtype}, {size(elements(picture.shape) * picture.element_size)}")
    dims = cut_dims(picture)
    what = ", ".join(f"dimension {d} of {picture.shape[d]}" for d in dims)
    say(f"  bars: {what}; # held, + held in part, . not held" if dims else "  a single element")
    for title, holdings in (("source", picture.source), ("destination", picture.destination)):
        say(f"{title}:" if holdings else f"{title}: nobody")
        lines = side_lines(picture, holdings)
        for line in lines[:SIDE_LINES] if top else lines:
            say(line)
        if top and len(lines) > SIDE_LINES:
            say(f"  and {len(lines) - SIDE_LINES} other parts (--top 0 shows all)")
    if planner := _planner(picture, plan):
        say(f"planned by: {planner} ({PLANNERS[planner]})")
    by_pair: dict[int, dict[int, list[BoxSent]]] = {}
    for piece in _pieces(picture, plan):
        by_pair.setdefault(piece.target, {}).setdefault(piece.source, []).append(piece)
    receivers = [dst for dst in by_pair if rank is None or dst == rank]
    shown = receivers if rank is not None else receivers[: top or None]
    for dst in shown:
        say(f"into rank {dst}:")
        width = max(len(str(src)) for src in by_pair[dst])
        for src, some in by_pair[dst].items():
            boxes = [piece.box for piece in some]
            moved = size(sum(piece.bytes for piece in some))
            kept = " (local copy)" if src == dst else ""
            say(f"  from rank {src:>{width}}  {bars(picture.shape, dims, boxes)}  {boxes_text(boxes)}  {moved}{kept}")
    if len(shown) < len(receivers):
        rest = receivers[len(shown) :]
        say(f"and into {len(rest)} more ranks: {rank_ranges(rest)} (--top 0 shows all, --rank N shows one)")


def _show_refusal(refusal: PlanError, tensors: Sequence[str]) -> None:
    mine = [text for text in refusal.violations if any(tensor in text for tensor in tensors)]
    others = len(refusal.violations) - len(mine)
    say("the plan is refused:", err=True)
    for text in mine:
        say(f"  {text}", err=True)
    if others:
        say(f"  {others} reasons that are not about this parameter; refitctl plan shows them", err=True)


def _object(picture: Picture, plan: GlobalPlan | None) -> TensorExplained:
    return TensorExplained(
        name=picture.tensor,
        shape=tuple(picture.shape),
        dtype=picture.dtype,
        source=tuple(HeldBoxes(h.rank, h.local, h.boxes) for h in picture.source),
        destination=tuple(HeldBoxes(h.rank, h.local, h.boxes) for h in picture.destination),
        planned_by=_planner(picture, plan),
        transfers=tuple(_pieces(picture, plan)),
    )


def _unknown(param: str, rosters: Sequence[Roster]) -> str:

    names: set[str] = set()
    seen: set[int] = set()
    for roster in rosters:
        for held in (roster.source, roster.destination):
            if id(held) not in seen:
                seen.add(id(held))
                for meta in held:
                    names |= {meta.name, *tensors_of(meta)}
    close = [name for name in sorted(names) if param in name][:5] or difflib.get_close_matches(param, names, 5, 0.5)
    return f"{param}: no rank has a tensor of this name" + (f"; did you mean {', '.join(close)}?" if close else "")
