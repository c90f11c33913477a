"""Prove a plan correct, or list everything that is wrong with it. Shares only the reading of rosters with planning.

Three things are proven. *Content*: at both ends, each row's places in local tensors are mapped back to canonical
coordinates, and both ends must give the same box. This also checks bounds: a place outside what a rank described has
no coordinates. *Coverage*: the boxes that a rank receives must make up exactly what it wants, each element once. For
this each box gets an additive number:

    number(box) = product over dimensions of (h(high edge) - h(low edge))   modulo 2**64, h a hash

If boxes tile a larger box, the hashes of inner edges cancel and the numbers add up to that box's number. If an element
is missing or doubled they do not (except with a probability of about 2**-60). So rows that many ranks share are checked
once, and each rank costs one sum. *Fills*: tiles share no place (`doubly_placed`). So the fills of a local tensor must
be inside it, overlap neither tiles nor each other, and have as many elements as are in no tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from refitd.dtypes import SOURCE_SIZES
from refitd.plan.boxes import StridedBox, share_a_place
from refitd.plan.coalesce import Rows
from refitd.plan.columns import Columns, Hashes, Ints, Memo, below, distinct, find, hashed, numbered, ranges
from refitd.plan.layouts import Layouts, Side
from refitd.plan.shared import SharedFills, SharedPlan, fill_patterns


@dataclass(frozen=True, eq=False)
class Spans(Columns):
    """Each row's box of canonical coordinates on one side, inside one tile.

    A row that starts in no tile has tile -1. A row that leaves its tile is not whole: cut it along `cut_dim` after
    `cut_at` elements and map both parts again.
    """

    owner: Ints
    tile: Ints
    offset: Ints  # [n, D] canonical
    along: Ints  # [n, row dims] canonical dimension that each dimension of the row follows, -1 for none
    cut_dim: Ints  # -1 if whole
    cut_at: Ints

    @property
    def is_whole(self) -> npt.NDArray[np.bool_]:
        """Whether each row is one box of one tile."""
        return self.cut_dim < 0


class TileIndex:
    """All tiles of all classes of one side, indexed by (class, local tensor, canonical tensor)."""

    def __init__(self, layouts: Layouts, side: Side) -> None:
        geometries = layouts.geometries
        entry, row = side.tiles(geometries)
        key = self._key(layouts, side.entry_class[entry], side.entry_local[entry], side.entry_tensor[entry])
        order = np.lexsort((geometries.tile_offset[row], key))
        entry, row = entry[order], row[order]
        self._layouts = layouts
        self.key = key[order]
        self.number = np.arange(len(row))
        self.layout_class = side.entry_class[entry]
        self.local = side.entry_local[entry]
        self.tensor = side.entry_tensor[entry]
        geometry = side.entry_geometry[entry]
        self.element_size = geometries.element_size[geometry]
        self.cast = geometries.cast[geometry]
        self.offset = geometries.box_offset[geometries.tile_box[row]]
        self.size = geometries.box_size[geometries.tile_box[row]]
        self.local_offset = geometries.tile_offset[row]
        # the stride of a dimension of one element is meaningless
        self.stride = np.where(self.size > 1, geometries.tile_stride[row], 0)
        self.local_end = self.local_offset + ((self.size - 1) * self.stride).sum(axis=1) + 1

    @staticmethod
    def _key(layouts: Layouts, layout_class: Ints, local: Ints, tensor: Ints) -> Ints:
        key = (layout_class * len(layouts.locals) + local) * len(layouts.tensors) + tensor
        return np.where((local >= 0) & (tensor >= 0), key, -1)

    def spans(self, layout_class: Ints, rows: Rows, *, is_source: bool) -> Spans:
        """Return the spans of the rows on this side."""
        local = rows.src_local if is_source else rows.dst_local
        start = rows.src_offset if is_source else rows.dst_offset
        stride = rows.src_stride if is_source else rows.dst_stride
        key = self._key(self._layouts, layout_class, local, rows.tensor)
        row, tile = ranges(*self._near(key, start))
        coordinates, inside = self._coordinates(start[row], tile)
        row, tile, coordinates = row[inside], tile[inside], coordinates[inside]
        chosen = np.full(len(key), -1, np.int64)
        chosen[row[::-1]] = tile[::-1]
        begin = np.zeros((len(key), self.offset.shape[1]), np.int64)
        begin[row[::-1]] = coordinates[::-1]
        return self._extended(rows, chosen, begin, stride)

    def _near(self, key: Ints, start: Ints) -> tuple[Ints, Ints]:
        """Return the first tile, and the number of tiles, among which is each place's if it has one.

        A tensor may have thousands of tiles (one for every other column), so only some are searched: tiles that begin
        at or before the place, from the first tile that may reach it.
        """
        places = distinct(np.concatenate([self.local_offset, self.local_end, start]))
        keys = distinct(np.concatenate([self.key, key]))

        def numbered(of: Ints, place: Ints) -> Ints:
            # numbers, because key and place do not fit into 64 bits together
            return np.searchsorted(keys, of) * len(places) + np.searchsorted(places, place)

        last = np.searchsorted(numbered(self.key, self.local_offset), numbered(key, start), side="right")
        ends = np.maximum.accumulate(numbered(self.key, self.local_end)) if len(self.key) else last[:0]
        first = np.searchsorted(ends, numbered(key, start), side="right")
        return first, np.maximum(last - first, 0)

    def _coordinates(self, start: Ints, tile: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Return each place's coordinates in its tile, and whether the place belongs to the tile."""
        rest = start - self.local_offset[tile]
        inside = rest >= 0
        result = np.zeros((len(tile), self.size.shape[1]), np.int64)
        stride = self.stride[tile]
        # strides are nested (describe/layout.py checks it), so divide by the largest first
        order = np.argsort(-stride, axis=1, kind="stable")
        index = np.arange(len(tile))
        for k in range(order.shape[1]):
            dim = order[:, k]
            step = stride[index, dim]
            steps = np.where(step > 0, rest // np.maximum(step, 1), 0)
            rest = rest - steps * step
            result[index, dim] = steps
        return result, inside & (rest == 0) & (result < self.size[tile]).all(axis=1)

    def _extended(self, rows: Rows, tile: Ints, begin: Ints, stride: Ints) -> Spans:
        """Follow each dimension of the rows through their tiles."""
        n, dims = rows.size.shape
        found = tile >= 0
        if not len(self.key):
            none = np.full(n, -1, np.int64)
            return Spans(begin, rows.owner, none, begin, np.full((n, dims), -1), none, none)
        size = np.ones_like(begin)
        along = np.full((n, dims), -1, np.int64)
        cut_dim, cut_at = np.full(n, -1, np.int64), np.ones(n, np.int64)
        tile_stride, tile_size = self.stride[tile], self.size[tile]
        index = np.arange(n)
        for j in reversed(range(dims)):
            long = found & (rows.size[:, j] > 1)
            fits = (tile_stride == stride[:, j, None]) & (tile_size > 1) & (size == 1)
            matched = long & fits.any(axis=1)
            dim = np.argmax(fits, axis=1)
            room = tile_size[index, dim] - begin[index, dim]
            extent = np.where(matched, rows.size[:, j], 1)
            over = matched & (extent > room)
            along[matched, j] = dim[matched]
            size[index[matched], dim[matched]] = extent[matched]
            stuck = long & ~matched
            cut_dim[over | stuck] = j
            cut_at[over] = room[over]
            cut_at[stuck] = rows.size[stuck, j] // 2
        return Spans(size, rows.owner, tile, self.offset[tile] + begin, along, cut_dim, cut_at)


def doubly_placed(layouts: Layouts, places: TileIndex, side: Side) -> list[str]:
    """Return a message for each local tensor of a side with two tiles that share a place."""
    low = places.local_offset
    high = low + ((places.size - 1) * places.stride).sum(axis=1)
    where = places.layout_class * len(layouts.locals) + places.local
    order = np.lexsort((low, where))
    # if any two intervals overlap, then so do two that are adjacent in this order
    near = (where[order][1:] == where[order][:-1]) & (low[order][1:] <= high[order][:-1])
    found: dict[str, str] = {}
    for group in np.unique(where[order][1:][near]).tolist():
        tiles = np.flatnonzero(where == group).tolist()
        boxes = zip(
            places.local_offset[tiles].tolist(), places.size[tiles].tolist(), places.stride[tiles].tolist(), strict=True
        )
        if share_a_place(boxes):
            name = layouts.locals[places.local[tiles[0]]]
            ranks = layouts.members(side, int(places.layout_class[tiles[0]]))
            found.setdefault(
                name,
                f"{name}: two of its tiles on {ranks} share a place; each element of a local tensor must belong to "
                "one tile at most",
            )
    return list(found.values())


MAX_ROUNDS = 1024
MAX_PIECES = 2**23


@dataclass(frozen=True, eq=False)
class _Uses:
    """Distinct (rows, source class, destination class) of jobs: use u performs rows kind[u] between its classes."""

    kind: Ints
    source_class: Ints
    destination_class: Ints
    job: Ints  # [uses] an example job
    use_of_job: Ints


# of each use, the number of all elements that it brings; of each destination class, the number that it wants
Proof = tuple[Hashes, Hashes]


def shared_violations(plan: SharedPlan, layouts: Layouts, known: Memo[Proof] | None = None) -> list[str]:
    """Return everything that is wrong with a plan for these layouts, which must be free of problems.

    An empty list proves four things: every row stays within the tensors that both ranks described and carries the right
    elements; every element of every destination's local tensor is written once, by a copy or by its declared fill; the
    ranks at both ends exist; task ids are unique.

    Args:
        plan: the plan; its names must be the layouts' names, in their order.
        layouts: the layouts.
        known: the last proof. Its rows are not checked again if the layouts' classes are unchanged.
    """
    src, dst = (_positions(layouts.ranks, column) for column in (plan.job_src, plan.job_dst))
    if strangers := _strangers(plan, layouts, src, dst):
        return strangers
    uses = _uses(plan, layouts.source.rank_class[src], layouts.destination.rank_class[dst])
    proven = (plan.rows, uses.kind, uses.source_class, uses.destination_class)
    found = fill_violations(plan.fills, layouts)
    proof = None if known is None or found else known.of(proven)
    if proof is not None and not len(_lacking(*proof, uses, dst, layouts)):
        return []
    held, wanted = TileIndex(layouts, layouts.source), TileIndex(layouts, layouts.destination)
    found = doubly_placed(layouts, wanted, layouts.destination) + found
    use, at = ranges(plan.row_start[uses.kind], plan.row_start[uses.kind + 1] - plan.row_start[uses.kind])
    spans, wrong = _traced(replace(plan.rows.select(at), owner=use), uses, held, wanted, layouts, plan)
    found += wrong
    found += _ambiguous_ids(plan, at, uses.destination_class[use])
    owed, received = _owed(wanted, layouts), np.zeros(len(uses.kind), np.uint64)
    np.add.at(received, spans.owner, _numbers(spans.tile, spans.offset, spans.size))
    if len(lacking := _lacking(received, owed, uses, dst, layouts)):
        found += _uncovered(spans, uses, wanted, dst, layouts, lacking)
    elif not found and known is not None:
        known.keep(proven, (received, owed))
    return found


def _positions(ranks: Ints, wanted: Ints) -> Ints:
    bound = below(ranks)
    if not bound or wanted.min(initial=0) < 0:
        return find(ranks, wanted)
    at = np.full(bound + 1, -1)
    at[ranks] = np.arange(len(ranks))
    found: Ints = at[np.minimum(wanted, bound)]
    return found


def _strangers(plan: SharedPlan, layouts: Layouts, src: Ints, dst: Ints) -> list[str]:
    """Return a message for each sender of the plan without source tensors, and each receiver without destinations."""
    found = []
    for side, at, ranks, what in (
        (layouts.source, src, plan.job_src, "sends, but it offers no tensor"),
        (layouts.destination, dst, plan.job_dst, "receives, but it wants no tensor"),
    ):
        stranger = at < 0
        stranger[~stranger] = side.rank_class[at[~stranger]] < 0
        found += [f"rank {rank}: the plan says it {what}" for rank in np.unique(ranks[stranger]).tolist()]
    return found


def _uses(plan: SharedPlan, source_class: Ints, destination_class: Ints) -> _Uses:
    example, number = numbered(plan.job_rows)
    alike = example[number]  # jobs of one kind should be of one class at each end
    if (source_class != source_class[alike]).any() or (destination_class != destination_class[alike]).any():
        example, number = numbered(hashed([plan.job_rows, source_class, destination_class]))
    return _Uses(plan.job_rows[example], source_class[example], destination_class[example], example, number)


def _traced(
    rows: Rows, uses: _Uses, held: TileIndex, wanted: TileIndex, layouts: Layouts, plan: SharedPlan
) -> tuple[Spans, list[str]]:
    """Map every row to canonical boxes at both ends; return the destinations' spans, by use, and problems."""
    done: list[Spans] = []
    wrong: dict[str, str] = {}

    def complain(some: Rows, what: str) -> None:
        for use, tensor in zip(some.owner.tolist(), some.tensor.tolist(), strict=True):
            job = int(uses.job[use])
            name = layouts.tensors[tensor] if tensor >= 0 else "an unknown tensor"
            ends = f"the copy from rank {plan.job_src[job]} to rank {plan.job_dst[job]}"
            wrong.setdefault(name, f"{name}: {ends} {what}")

    for _ in range(MAX_ROUNDS):
        src = held.spans(uses.source_class[rows.owner], rows, is_source=True)
        dst = wanted.spans(uses.destination_class[rows.owner], rows, is_source=False)
        lost = (src.tile < 0) | (dst.tile < 0)
        complain(rows.select(lost), "reaches outside what these ranks have described")
        whole = ~lost & src.is_whole & dst.is_whole
        true = (src.offset == dst.offset).all(axis=1) & (src.size == dst.size).all(axis=1)
        true &= (src.along == dst.along).all(axis=1)
        if len(held.key) and len(wanted.key):
            sizes = np.where(
                rows.cast == 0, rows.element_size, np.array(SOURCE_SIZES)[rows.cast.clip(0, len(SOURCE_SIZES) - 1)]
            )
            true &= held.element_size[src.tile] == sizes
            true &= wanted.element_size[dst.tile] == rows.element_size
            true &= wanted.cast[dst.tile] == rows.cast
        complain(rows.select(whole & ~true), "would put other elements there than belong there")
        done.append(dst if whole.all() else dst.select(whole))
        part = ~lost & ~whole
        if not part.any():
            break
        # the end that leaves its tile determines where both are cut
        dim = np.where(dst.is_whole, src.cut_dim, dst.cut_dim)[part]
        count = np.where(dst.is_whole, src.cut_at, dst.cut_at)[part]
        rows = _cut(rows.select(part), dim, count)
        if len(rows.owner) > MAX_PIECES:
            break
    else:
        complain(rows, "is cut too finely to be checked")
    return Spans.concatenated(done), list(wrong.values())


def _cut(rows: Rows, dim: Ints, count: Ints) -> Rows:
    """Cut each row along a dimension into the first `count` elements and the rest."""
    index = np.arange(len(dim))
    begun, rest = rows.size.copy(), rows.size.copy()
    begun[index, dim] = count
    rest[index, dim] -= count
    first = replace(rows, size=begun)
    second = replace(
        rows,
        size=rest,
        src_offset=rows.src_offset + count * rows.src_stride[index, dim],
        dst_offset=rows.dst_offset + count * rows.dst_stride[index, dim],
    )
    return Rows.concatenated([first, second])


def _numbers(tile: Ints, offset: Ints, size: Ints) -> Hashes:
    """Return the additive number of each box of a tile (see the module's docstring)."""
    result = np.ones(len(tile), np.uint64)
    for d in range(offset.shape[1]):
        dims = np.full(len(tile), d)
        low, high = offset[:, d], offset[:, d] + size[:, d]
        result *= hashed([tile, dims, high]) - hashed([tile, dims, low])
    return result


def _owed(wanted: TileIndex, layouts: Layouts) -> Hashes:
    """Return the number of all elements that each destination class wants."""
    owed = np.zeros(layouts.destination.classes, np.uint64)
    np.add.at(owed, wanted.layout_class, _numbers(np.arange(len(wanted.key)), wanted.offset, wanted.size))
    return owed


def _lacking(of_use: Hashes, owed: Hashes, uses: _Uses, dst: Ints, layouts: Layouts) -> Ints:
    """Return the ranks, by index, that do not receive exactly what their class is owed."""
    received = np.zeros(len(layouts.ranks), np.uint64)
    np.add.at(received, dst, of_use[uses.use_of_job])
    classes = layouts.destination.rank_class
    receivers = np.flatnonzero(classes >= 0)
    lacking: Ints = receivers[received[receivers] != owed[classes[receivers]]]
    return lacking


def _uncovered(spans: Spans, uses: _Uses, wanted: TileIndex, dst: Ints, layouts: Layouts, lacking: Ints) -> list[str]:
    """Return a message for each tile of these ranks whose elements are not all received exactly once."""
    side = layouts.destination
    number = _numbers(spans.tile, spans.offset, spans.size)
    found: dict[int, str] = {}
    for rank in lacking.tolist():
        times = np.bincount(uses.use_of_job[dst == rank], minlength=len(uses.kind))[spans.owner]
        sums = np.zeros(len(wanted.key), np.uint64)
        count = np.zeros(len(wanted.key), np.int64)
        np.add.at(sums, spans.tile, number * times.astype(np.uint64))
        np.add.at(count, spans.tile, np.prod(spans.size, axis=1) * times)
        mine = np.flatnonzero(wanted.layout_class == side.rank_class[rank])
        for tile in mine[sums[mine] != _numbers(mine, wanted.offset[mine], wanted.size[mine])].tolist():
            found.setdefault(
                tile,
                f"{layouts.tensors[wanted.tensor[tile]]}: {layouts.labels[rank]} would be sent {int(count[tile])} "
                f"elements for the {int(np.prod(wanted.size[tile]))} at element {int(wanted.local_offset[tile])} of "
                f"{layouts.locals[wanted.local[tile]]}; each must be written exactly once",
            )
    return list(found.values())


def _ambiguous_ids(plan: SharedPlan, at: Ints, destination_class: Ints) -> list[str]:
    """Return a message if two copies to one destination class have the same task id."""
    rows = plan.rows.select(at)
    example, _ = numbered(hashed([destination_class, rows.tensor, rows.dst_local, rows.dst_offset]))
    where, places = plan.places_of(at[example])
    if len(distinct(hashed([destination_class[example[where]], places]))) == len(places):
        return []
    return ["plan: two copies to one rank have the same task id; rename one of the destination's tensors"]


@dataclass(frozen=True, eq=False)
class _Locals:
    """The destinations' local tensors by class: tensor i has entries first[i]:end[i] and `owed[i]` elements to fill."""

    first: Ints
    end: Ints
    owed: Ints
    key: Ints  # class * names + local, sorted
    row: Ints  # index into `first` for each key


def fill_violations(fills: SharedFills, layouts: Layouts) -> list[str]:
    """Return a message for each local tensor that is filled wrongly."""
    side, names = layouts.destination, len(layouts.locals)
    tensors = _locals(layouts)
    at = find(layouts.ranks, fills.rank)
    receives = at >= 0
    receives[receives] = side.rank_class[at[receives]] >= 0
    if not receives.all() or len(np.unique(fills.rank)) < len(fills.rank):
        strangers = np.unique(fills.rank[~receives]).tolist()
        return [f"rank {rank}: the plan says it fills, but it wants no tensor" for rank in strangers] or [
            "plan: the fills of a rank are listed twice"
        ]
    kind_of_rank = np.full(len(layouts.ranks), -1, np.int64)
    kind_of_rank[at] = fills.kind
    padded = np.unique(side.entry_class[tensors.first[tensors.owed > 0]])
    concerned = np.flatnonzero((kind_of_rank >= 0) | (np.isin(side.rank_class, padded)))
    pairs, example = np.unique(
        np.stack([side.rank_class[concerned], kind_of_rank[concerned]], axis=1), axis=0, return_index=True
    )
    found: dict[str, str] = {}
    checked: dict[tuple[bytes, ...], str] = {}
    for (number, kind), rank in zip(pairs.tolist(), concerned[example].tolist(), strict=True):
        low, high = (int(fills.row_start[kind]), int(fills.row_start[kind + 1])) if kind >= 0 else (0, 0)
        rows = np.arange(low, high)
        wanted = tensors.first[tensors.owed > 0]
        wanted = side.entry_local[wanted[side.entry_class[wanted] == number]]
        for name in np.union1d(wanted, fills.local[rows]).tolist():
            row = int(find(tensors.key, np.array([number * names + name]))[0]) if name >= 0 else -1
            if row < 0:
                found.setdefault("", f"plan: {layouts.labels[rank]} would fill a tensor that it does not have")
                continue
            wrong = _wrong(layouts, tensors, int(tensors.row[row]), fills, rows[fills.local[rows] == name], checked)
            if wrong:
                subject = layouts.locals[name]
                found.setdefault(subject, f"{subject}: {layouts.labels[rank]} {wrong}")
    return list(found.values())


def _locals(layouts: Layouts) -> _Locals:
    side, geometries = layouts.destination, layouts.geometries
    boxes = np.concatenate([[0], np.cumsum(np.prod(geometries.box_size, axis=1)[geometries.tile_box])])
    in_tiles = boxes[geometries.tile_start[1:]] - boxes[geometries.tile_start[:-1]]
    total = np.array([int(np.prod(shape, dtype=object)) for shape in geometries.shapes], np.int64)
    # the entries of one local tensor are consecutive rows of its class
    opens = np.ones(len(side.entry_class), bool)
    opens[1:] = (np.diff(side.entry_class) != 0) | (np.diff(side.entry_local) != 0)
    first = np.flatnonzero(opens)
    inside = np.add.reduceat(in_tiles[side.entry_geometry], first) if len(first) else first
    owed = total[geometries.local_shape[side.entry_geometry[first]]] - inside
    key = side.entry_class[first] * len(layouts.locals) + side.entry_local[first]
    order = np.argsort(key, kind="stable")
    return _Locals(first, np.append(first[1:], len(opens)), owed, key[order], order)


def _wrong(
    layouts: Layouts, tensors: _Locals, row: int, fills: SharedFills, rows: Ints, checked: dict[tuple[bytes, ...], str]
) -> str:
    """Return what is wrong with these rows as the fill of one local tensor, or ""."""
    entries = np.arange(tensors.first[row], tensors.end[row])
    geometry = layouts.destination.entry_geometry[entries]
    columns = (fills.pattern, fills.element_size, fills.offset, fills.size, fills.stride)
    key = (geometry.tobytes(), *(column[rows].tobytes() for column in columns))
    if key not in checked:
        checked[key] = _problem(layouts, geometry, int(tensors.owed[row]), fills, rows)
    return checked[key]


def _problem(layouts: Layouts, geometry: Ints, owed: int, fills: SharedFills, rows: Ints) -> str:
    geometries = layouts.geometries
    shape = geometries.shapes[int(geometries.local_shape[geometry[0]])]
    filled = int(np.prod(fills.size[rows], axis=1).sum())
    if filled != max(owed, 0):
        return f"would fill {filled} elements of its local tensor {shape}, and {owed} belong to no tile"
    if owed <= 0:  # negative if tiles overlap, which is reported elsewhere
        return ""
    if (geometries.fill[geometry[:1]] < 0).any():
        return "would fill elements, and no value is declared for them"
    declared = fill_patterns(layouts, geometry[:1])[0]
    if (fills.pattern[rows] != declared).any() or (
        fills.element_size[rows] != geometries.element_size[geometry[0]]
    ).any():
        return f"would fill with other bits than those of {geometries.fills[int(geometries.fill[geometry[0]])]!r}"
    last = fills.offset[rows] + ((fills.size[rows] - 1) * fills.stride[rows]).sum(axis=1)
    if int(last.max()) >= int(np.prod(shape, dtype=object)) or int(fills.offset[rows].min()) < 0:
        return f"would fill elements outside its local tensor {shape}"
    boxes: list[StridedBox] = list(
        zip(fills.offset[rows].tolist(), fills.size[rows].tolist(), fills.stride[rows].tolist(), strict=True)
    )
    for number in geometry.tolist():
        tiles = slice(int(geometries.tile_start[number]), int(geometries.tile_start[number + 1]))
        boxes += zip(
            geometries.tile_offset[tiles].tolist(),
            geometries.box_size[geometries.tile_box[tiles]].tolist(),
            geometries.tile_stride[tiles].tolist(),
            strict=True,
        )
    return "would fill elements that belong to a tile, or one twice" if share_a_place(boxes) else ""
