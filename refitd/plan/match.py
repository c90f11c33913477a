"""Match the elements that destinations want with the holders among the sources, once per layout class.

Tensors with the same source boxes and destination boxes (one weight in 80 layers) are matched once: the result is a
pattern, and every tensor refers to its pattern. The outputs are

    holding   (source class, tensor, cell) and the cell's place in the class's local tensor
    piece     (destination class, tensor, cell, box) and its place in the class's local tensor; pieces of several
              classes have equal elements, or none in common
    set       the source classes that hold a cell: any of their ranks can send it
    shared    a holding of a wanted cell that several ranks hold, or one rank twice: all must hold the same bytes
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refitd.plan.boxes import intersect, lcm_tiling
from refitd.plan.columns import Columns, Hashes, Ints, distinct, find, hashed, mixed, numbered, offsets_of, ranges
from refitd.plan.layouts import Layouts, Side
from refitd.plan.table import weights_of
from refitd.text import nearest

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Holdings:
    """Cells held by source classes. `key` is sorted and unique: spot * classes + class."""

    key: Ints
    source_class: Ints
    local: Ints
    offset: Ints  # of the cell's first element in the local tensor
    stride: Ints  # [holdings, D]


@dataclass(frozen=True, eq=False)
class WantedPieces:
    """Pieces of destination classes, sorted by (class, set, needers, again, tensor, place in it)."""

    dst_class: Ints
    set: Ints
    needers: Ints  # equal for pieces that the same destination classes need, equally often
    again: Ints  # number of earlier pieces of the class with equal elements
    box: Ints  # equal for pieces with equal elements
    spot: Ints  # (tensor, cell) as one number
    tensor: Ints
    local: Ints
    element_size: Ints
    weight: Ints  # number of members of the tensor's family
    cast: Ints
    origin: Ints  # [pieces, D] canonical
    size: Ints  # [pieces, D]
    shift: Ints  # [pieces, D] from the cell's first element to the piece's
    offset: Ints  # in the destination's local tensor
    stride: Ints  # [pieces, D]

    @property
    def nbytes(self) -> Ints:
        """The bytes of each piece."""
        nbytes: Ints = np.prod(self.size, axis=1) * self.element_size * self.weight
        return nbytes


@dataclass(frozen=True, eq=False)
class SharedCells(Columns):
    """Holdings of wanted cells that several source ranks hold, or one holds twice, sorted by (spot, class)."""

    spot: Ints  # equal for holdings with equal elements
    tensor: Ints
    source_class: Ints
    local: Ints
    dtype: Ints
    element_size: Ints
    offset: Ints  # of the cell's first element in the local tensor
    stride: Ints  # [holdings, D]


@dataclass(frozen=True, eq=False)
class Match:
    """All pieces, all holdings, and the source classes of each set (rows set_start[s]:set_start[s + 1])."""

    holdings: Holdings
    shared: SharedCells
    pieces: WantedPieces
    set_start: Ints
    set_class: Ints
    unused: tuple[str, ...]
    is_lcm: Flags  # [tensors] whether LCM tiling matched it


@dataclass(frozen=True, eq=False)
class _Patterns:
    """The cells of all patterns end to end, and each pattern's boxes in terms of cells (sorted by key)."""

    cell_offset: Ints
    cell_size: Ints
    is_wanted: Flags  # [cells] whether any destination wants a part of the cell
    held_key: Ints  # pattern * boxes + source box
    held_cell: Ints
    want_key: Ints  # pattern * boxes + destination box
    want_cell: Ints
    want_offset: Ints
    want_size: Ints
    want_place: Ints  # ascending with the place in the tensor
    is_lcm: Flags  # [patterns] whether LCM tiling matched its boxes; otherwise they are intersected


@dataclass(frozen=True, eq=False)
class _Spots:
    """A spot is one cell of one tensor; `key` (tensor * cells + cell) is sorted and unique."""

    key: Ints
    set: Ints
    set_start: Ints
    set_class: Ints


class _Tiles:
    """The tiles of all classes of one side, as columns."""

    def __init__(self, layouts: Layouts, side: Side) -> None:
        entry, self.row = side.tiles(layouts.geometries)
        self.layout_class = side.entry_class[entry]
        self.tensor = side.entry_tensor[entry]
        self.local = side.entry_local[entry]
        self.geometry = side.entry_geometry[entry]
        self.box = layouts.geometries.tile_box[self.row]


def match(layouts: Layouts) -> tuple[Match, list[str]]:
    """Return the match and every reason why it does not write each destination element exactly once."""
    tensors, boxes = len(layouts.tensors), len(layouts.geometries.box_offset)
    held, wanted = _Tiles(layouts, layouts.source), _Tiles(layouts, layouts.destination)
    is_held, is_wanted = np.zeros(tensors, bool), np.zeros(tensors, bool)
    is_held[held.tensor], is_wanted[wanted.tensor] = True, True
    both = is_held & is_wanted
    problems = [*_extent_problems(layouts, held, wanted, both), *_unsourced(layouts, wanted, is_held)]

    held_boxes = distinct((held.tensor * boxes + held.box)[both[held.tensor]])
    wanted_boxes = distinct((wanted.tensor * boxes + wanted.box)[both[wanted.tensor]])
    kind = hashed(
        [_sums(mixed(keys % boxes), keys // boxes, tensors) for keys in (held_boxes, wanted_boxes)] if boxes else [both]
    )
    pattern = np.full(tensors, -1, np.int64)
    examples, pattern[both] = numbered(kind[both])
    patterns, missing = _patterns(layouts, np.flatnonzero(both)[examples], held_boxes, wanted_boxes)
    problems += _gaps(layouts, wanted, pattern, missing)
    holdings, spots, shared = _holdings(layouts, held, pattern, patterns)
    is_lcm = np.zeros(tensors, bool)
    is_lcm[both] = patterns.is_lcm[pattern[both]]
    return Match(
        holdings=holdings,
        shared=shared,
        pieces=_wanted_pieces(layouts, wanted, pattern, patterns, spots),
        set_start=spots.set_start,
        set_class=spots.set_class,
        unused=tuple(layouts.tensors[i] for i in np.flatnonzero(is_held & ~is_wanted).tolist()),
        is_lcm=is_lcm,
    ), problems


def _sums(values: Hashes, sorted_owner: Ints, size: int) -> Hashes:
    """Sum the values of each owner, modulo 2**64."""
    running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values, dtype=np.uint64)])
    start = offsets_of(sorted_owner, size)
    sums: Hashes = running[start[1:]] - running[start[:-1]]
    return sums


def _patterns(
    layouts: Layouts, examples: Ints, held_boxes: Ints, wanted_boxes: Ints
) -> tuple[_Patterns, dict[int, int]]:
    """Match the boxes of one example tensor per pattern, by LCM tiling if it applies, else by intersection.

    Returns the patterns, and {pattern * boxes + box: number of its elements that no source holds}.
    """
    offset, size = layouts.geometries.box_offset, layouts.geometries.box_size
    boxes, dims = offset.shape
    columns: dict[str, list[Ints]] = defaultdict(list)
    missing: dict[int, int] = {}
    is_lcm: list[bool] = []
    wanted_cells: list[Flags] = [np.zeros(0, bool)]
    count = 0
    for number, tensor in enumerate(examples.tolist()):
        held, wanted = (
            keys[np.searchsorted(keys, tensor * boxes) : np.searchsorted(keys, (tensor + 1) * boxes)] % boxes
            for keys in (held_boxes, wanted_boxes)
        )
        boxes_of_both = offset[held], size[held], offset[wanted], size[wanted]
        tiling = lcm_tiling(*boxes_of_both)
        is_lcm.append(tiling is not None)
        cells, pieces = tiling or intersect(*boxes_of_both)
        by_box, by_want = np.argsort(cells.box, kind="stable"), np.argsort(pieces.want, kind="stable")
        lacking = np.prod(size[wanted], axis=1)
        np.subtract.at(lacking, pieces.want, np.prod(pieces.size, axis=1))
        for i in np.flatnonzero(lacking).tolist():
            missing[number * boxes + int(wanted[i])] = int(lacking[i])
        columns["cell_offset"].append(cells.offset)
        columns["cell_size"].append(cells.size)
        is_wanted = np.zeros(len(cells.offset), bool)
        is_wanted[pieces.cell] = True
        wanted_cells.append(is_wanted)
        columns["held_key"].append(number * boxes + held[cells.box[by_box]])
        columns["held_cell"].append(count + cells.cell[by_box])
        columns["want_key"].append(number * boxes + wanted[pieces.want[by_want]])
        columns["want_cell"].append(count + pieces.cell[by_want])
        columns["want_offset"].append(pieces.offset[by_want])
        columns["want_size"].append(pieces.size[by_want])
        count += len(cells.offset)
    none = np.zeros(0, np.int64)
    empty = {name: none.reshape(0, dims) for name in ("cell_offset", "cell_size", "want_offset", "want_size")}
    names = ("cell_offset", "cell_size", "held_key", "held_cell", "want_key", "want_cell", "want_offset", "want_size")
    joined = {name: np.concatenate([empty.get(name, none), *columns[name]]) for name in names}
    place = np.empty(len(joined["want_cell"]), np.int64)
    place[np.lexsort((*joined["want_size"].T[::-1], *joined["want_offset"].T[::-1]))] = np.arange(len(place))
    flags = {"is_wanted": np.concatenate(wanted_cells), "is_lcm": np.array(is_lcm, bool)}
    return _Patterns(**joined, want_place=place, **flags), missing


def _holdings(
    layouts: Layouts, held: _Tiles, pattern: Ints, patterns: _Patterns
) -> tuple[Holdings, _Spots, SharedCells]:
    """Divide the source classes' tiles into cells, and find which classes hold each cell.

    A rank that holds elements twice (one expert in two places, say) sends them from the first place.
    """
    geometries, classes = layouts.geometries, max(1, layouts.source.classes)
    tile, at = _expanded(held, pattern, patterns.held_key, layouts)
    cell, row = patterns.held_cell[at], held.row[tile]
    stride = geometries.tile_stride[row]
    inside = patterns.cell_offset[cell] - geometries.box_offset[held.box[tile]]
    offset = geometries.tile_offset[row] + (inside * stride).sum(axis=1)
    cells = max(1, len(patterns.cell_offset))
    spot_key, spot = np.unique(held.tensor[tile] * cells + cell, return_inverse=True)
    key = spot * classes + held.layout_class[tile]
    order = np.argsort(key, kind="stable")
    shared = _shared(layouts, held, patterns, order, key[order], tile, cell, offset, stride)
    order = np.delete(order, 1 + np.flatnonzero(np.diff(key[order]) == 0))
    key = key[order]
    source_class = key % classes
    # spots held by the same classes have the same sum of hashes and form one set
    examples, set_of_spot = numbered(_sums(mixed(source_class), key // classes, len(spot_key)))
    start = offsets_of(key // classes, len(spot_key))
    _, members = ranges(start[examples], start[examples + 1] - start[examples])
    set_start = np.concatenate([np.zeros(1, np.int64), np.cumsum(start[examples + 1] - start[examples])])
    holdings = Holdings(key, source_class, held.local[tile[order]], offset[order], stride[order])
    return holdings, _Spots(spot_key, set_of_spot, set_start, source_class[members]), shared


def _shared(
    layouts: Layouts,
    held: _Tiles,
    patterns: _Patterns,
    order: Ints,
    sorted_key: Ints,
    tile: Ints,
    cell: Ints,
    offset: Ints,
    stride: Ints,
) -> SharedCells:
    """Return the holdings of wanted cells that are held more than once, in the given order."""
    geometries, classes = layouts.geometries, max(1, layouts.source.classes)
    rank_class = layouts.source.rank_class
    ranks = np.bincount(rank_class[rank_class >= 0], minlength=classes)
    spot, source_class = sorted_key // classes, sorted_key % classes
    holders = np.bincount(spot, weights=ranks[source_class]) if len(spot) else np.zeros(0)
    at = np.flatnonzero((holders[spot] > 1) & patterns.is_wanted[cell[order]]) if len(spot) else order
    rows = order[at]
    geometry = held.geometry[tile[rows]]
    return SharedCells(
        spot=spot[at],
        tensor=held.tensor[tile[rows]],
        source_class=source_class[at],
        local=held.local[tile[rows]],
        dtype=geometries.dtype[geometry],
        element_size=geometries.element_size[geometry],
        offset=offset[rows],
        stride=stride[rows],
        size=patterns.cell_size[cell[rows]],
    )


def _wanted_pieces(layouts: Layouts, wanted: _Tiles, pattern: Ints, patterns: _Patterns, spots: _Spots) -> WantedPieces:
    geometries = layouts.geometries
    tile, at = _expanded(wanted, pattern, patterns.want_key, layouts)
    cell, row = patterns.want_cell[at], wanted.row[tile]
    tensor, origin, stride = wanted.tensor[tile], patterns.want_offset[at], geometries.tile_stride[row]
    inside = origin - geometries.box_offset[wanted.box[tile]]
    offset = geometries.tile_offset[row] + (inside * stride).sum(axis=1)
    spot = find(spots.key, tensor * max(1, len(patterns.cell_offset)) + cell)
    group, local, layout_class = spots.set[spot], wanted.local[tile], wanted.layout_class[tile]
    size, shift = patterns.want_size[at], origin - patterns.cell_offset[cell]
    box = numbered(hashed([spot, size, shift]))[1]
    order = np.lexsort((offset, local, layout_class, box))
    opens = np.append(True, (np.diff(box[order]) != 0) | (np.diff(layout_class[order]) != 0))[: len(order)]
    again = np.empty(len(order), np.int64)
    again[order] = ranges(np.zeros(int(opens.sum()), np.int64), np.diff(np.append(np.flatnonzero(opens), len(order))))[
        1
    ]
    needed = _sums(mixed(layout_class[order]), box[order], 1 + int(box.max(initial=-1)))
    needers = numbered(needed)[1][box]
    order = np.lexsort((patterns.want_place[at], tensor, again, needers, group, layout_class))
    geometry = wanted.geometry[tile[order]]
    return WantedPieces(
        dst_class=layout_class[order],
        set=group[order],
        needers=needers[order],
        again=again[order],
        box=box[order],
        spot=spot[order],
        tensor=tensor[order],
        local=local[order],
        element_size=geometries.element_size[geometry],
        weight=weights_of(layouts.families, tensor[order]),
        cast=geometries.cast[geometry],
        origin=origin[order],
        size=size[order],
        shift=shift[order],
        offset=offset[order],
        stride=stride[order],
    )


def _expanded(tiles: _Tiles, pattern: Ints, sorted_key: Ints, layouts: Layouts) -> tuple[Ints, Ints]:
    """Return (tile, row of the pattern columns) for every row that a tile's box has in its pattern."""
    chosen = np.flatnonzero(pattern[tiles.tensor] >= 0)
    key = pattern[tiles.tensor[chosen]] * len(layouts.geometries.box_offset) + tiles.box[chosen]
    start = np.searchsorted(sorted_key, key, side="left")
    owner, at = ranges(start, np.searchsorted(sorted_key, key, side="right") - start)
    return chosen[owner], at


# An error names the nearest names for this many tensors without a source, each compared with so many names: planning
# must not take seconds if no name of a model matches.
NEAREST_OF, COMPARED = 5, 500

_CHECK = "check the names, or pipeline and expert numbering, of the source"
_WAYS_OUT = (
    f"{_CHECK} (`refitctl manifest MODEL` lists them); names= at registration maps names, and refitd.trace_loader "
    "learns the layout of an engine with a loader of its own"
)


def _unsourced(layouts: Layouts, wanted: _Tiles, is_held: Flags) -> list[str]:
    tensors, first = np.unique(wanted.tensor[~is_held[wanted.tensor]], return_index=True)
    rows = np.flatnonzero(~is_held[wanted.tensor])[first]
    held = [layouts.tensors[tensor] for tensor in np.flatnonzero(is_held).tolist()] if len(rows) else []
    return [
        f"{layouts.tensors[tensor]}: {_who(layouts, layouts.destination, wanted, row)} wants it and no source has it"
        f"{_alike(layouts.tensors[tensor], held) if nth < NEAREST_OF else ''}; {_WAYS_OUT if nth == 0 else _CHECK}"
        for nth, (tensor, row) in enumerate(zip(tensors.tolist(), rows.tolist(), strict=True))
    ]


def _alike(name: str, held: list[str]) -> str:
    if len(held) > COMPARED:
        held = [other for other in held if other.rpartition(".")[2] == name.rpartition(".")[2]][:COMPARED]
    inside = [other for other in held if other.endswith(f".{name}") or name.endswith(f".{other}")]
    close = ", ".join(dict.fromkeys([*inside[:3], *nearest(name, held)]))
    return f" (nearest: {close})" if close else ""


def _gaps(layouts: Layouts, wanted: _Tiles, pattern: Ints, missing: dict[int, int]) -> list[str]:
    if not missing:
        return []
    boxes = len(layouts.geometries.box_offset)
    key = np.where(pattern[wanted.tensor] >= 0, pattern[wanted.tensor] * boxes + wanted.box, -1)
    found, seen = [], set()
    for row in np.flatnonzero(np.isin(key, list(missing))).tolist():
        tensor = layouts.tensors[int(wanted.tensor[row])]
        if tensor in seen:
            continue
        seen.add(tensor)
        offset, size = (
            a[wanted.box[row]].tolist() for a in (layouts.geometries.box_offset, layouts.geometries.box_size)
        )
        place = ", ".join(f"{o}:{o + s}" for o, s in zip(offset, size, strict=True))
        found.append(
            f"{tensor}: {_who(layouts, layouts.destination, wanted, row)} wants [{place}], and no source holds "
            f"{missing[int(key[row])]} of these {int(np.prod(size))} elements; check that every source rank has "
            "registered and that its groups are right"
        )
    return found


def _extent_problems(layouts: Layouts, held: _Tiles, wanted: _Tiles, both: Flags) -> list[str]:
    """Check tensors whose explicit tiles come without a global shape: both sides' tiles must reach equally far.

    Declared shapes have already been compared, and tiles never exceed a declared shape.
    """
    geometries = layouts.geometries
    declared = np.full(len(layouts.tensors), -1, np.int64)
    reach, silent = [], []
    for side, tiles in ((layouts.source, held), (layouts.destination, wanted)):
        shape = geometries.global_shape[side.entry_geometry]
        declared[side.entry_tensor[shape >= 0]] = shape[shape >= 0]
        quiet = np.ones(len(layouts.tensors), bool)
        quiet[side.entry_tensor[shape >= 0]] = False
        silent.append(quiet)
        end = (geometries.box_offset + geometries.box_size)[tiles.box]
        order = np.argsort(tiles.tensor, kind="stable")
        present, start = np.unique(tiles.tensor[order], return_index=True)
        ends = np.zeros((len(layouts.tensors), end.shape[1]), np.int64)
        if len(present):
            ends[present] = np.maximum.reduceat(end[order], start, axis=0)
        reach.append(ends)
    problems = []
    for tensor in np.flatnonzero(both & (silent[0] | silent[1])).tolist():
        known = geometries.shapes[declared[tensor]] if declared[tensor] >= 0 else None
        source, destination = (tuple(ends[tensor, -len(known) if known else 0 :].tolist()) for ends in reach)
        pairs = zip((source, destination), silent, strict=True)
        agreed = all(end == known for end, quiet in pairs if quiet[tensor]) if known else source == destination
        if not agreed:
            problems.append(
                f"{layouts.tensors[tensor]}: the sources' tiles reach to {source}, the destinations' to "
                f"{destination}{f', the global shape is {known}' if known else ''}; they must agree; where only a "
                "part is meant, declare global_shape beside the tiles"
            )
    return problems


def _who(layouts: Layouts, side: Side, tiles: _Tiles, row: int) -> str:
    ranks = layouts.members(side, int(tiles.layout_class[row]))
    return f"{ranks} ({layouts.locals[int(tiles.local[row])]})"
