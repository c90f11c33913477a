"""Read rosters into columns, and collect all their problems, within one rank and between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from refitd.describe.layout import (
    canonical_name,
    elements,
    global_shape_of,
    is_sharded,
    layout_problems,
    nameless,
    occurrences,
    spot_of,
    tile_elements,
    tiles_of,
)
from refitd.describe.metadata import Alike, Names, ParameterMetadata, Roster, Tile
from refitd.dtypes import Offered, cast_number, dtype_name
from refitd.errors import PlanError
from refitd.plan.boxes import left_out
from refitd.plan.columns import Ints, in_order, offsets_of, padded, sorted_names
from refitd.plan.completion import SIDES, Uneven, completed, uneven_sizes
from refitd.plan.layouts import (
    NO_PADDING,
    UNCLEAR_PADDING,
    Geometries,
    Layouts,
    Paddings,
    RosterProblems,
    Side,
    alias_problem,
    mismatches_of,
    padding_problems,
    resolve_aliases,
    tied_name,
    untied_sources,
)

MAX_RANK = 2**20 - 1
_FIELDS = attrgetter(
    "name",
    "shape",
    "dtype",
    "element_size",
    "is_tp",
    "partition_dim",
    "partition_stride",
    "partition_sizes",
    "owner_rank",
    "tensor_parallel_group_ranks",
    "resolved_name",
    "tiles",
    "global_shape",
    "fill",
    "aliases",
    "cast_from",
    "cast_to",
)


def label_of(roster: Roster) -> str:
    """Return the roster's name in messages."""
    return roster.label or f"rank {roster.rank}"


def nodes_of(ordered: Sequence[Roster]) -> Ints:
    """Return the number of each roster's node, by order of first rank; -1 if it has none."""
    nodes = [roster.node for roster in ordered]
    numbers = {node: i for i, node in enumerate(filter(None, dict.fromkeys(nodes)))} | {"": -1}
    return np.array([*map(numbers.__getitem__, nodes)], np.int64)


def read_rosters(rosters: Sequence[Roster]) -> tuple[Layouts, list[str]]:
    """Return the rosters as columns, and all their problems.

    Tensors with problems are not in the columns.
    """
    problems = RosterProblems()
    unique: dict[int, Roster] = {}
    for roster in rosters:
        if not isinstance(roster.rank, int) or not 0 <= roster.rank <= MAX_RANK:
            problems.add(label_of(roster), f"rank is {roster.rank!r}, expected 0 to {MAX_RANK}")
        elif roster.rank in unique:
            first = label_of(unique[roster.rank])
            problems.add(label_of(roster), f"rank {roster.rank} is also that of {first}; number ranks across all pools")
        else:
            unique[roster.rank] = roster
    ordered, incomplete = completed([unique[rank] for rank in sorted(unique)])
    before = problems.messages()
    reader = _Reader(ordered, {})
    layouts = reader.layouts()
    mismatches = mismatches_of(layouts, reader.offered)
    tied = [name for name, other in reader.fed_by.items() if other in mismatches]
    if mismatches and (uneven := uneven_sizes(ordered, [*mismatches, *tied])):
        reader = _Reader(ordered, uneven)
        layouts = reader.layouts()
        mismatches = mismatches_of(layouts, reader.offered)
    for name, other in reader.fed_by.items():
        if other in mismatches:
            mismatches[other] = [f"{line}; {name} is fed from it as its alias" for line in mismatches[other]]
    for found in (padding_problems(layouts), reader.untied, incomplete):
        for name, lines in found.items():
            mismatches.setdefault(name, []).extend(lines)
    wrong = before + reader.problems.messages() + [line for lines in mismatches.values() for line in lines]
    # with invalid or duplicate ranks, every later message would be unreliable
    bad = set(layouts.tensors) if before else reader.bad_tensors | mismatches.keys()
    if bad:
        keep = np.array([name not in bad for name in layouts.tensors], bool)
        layouts = replace(layouts, source=_only(layouts.source, keep), destination=_only(layouts.destination, keep))
    return layouts, wrong


def _only(side: Side, keep: npt.NDArray[np.bool_]) -> Side:
    """Return the side with the entries of the tensors in `keep` only."""
    rows = keep[side.entry_tensor]
    entry_class = side.entry_class[rows]
    return Side(
        rank_class=side.rank_class,
        class_start=offsets_of(entry_class, side.classes),
        entry_class=entry_class,
        entry_local=side.entry_local[rows],
        entry_tensor=side.entry_tensor[rows],
        entry_geometry=side.entry_geometry[rows],
    )


class _Reader:
    """Reads rosters, and numbers names, boxes, geometries and classes in the order it meets them."""

    def __init__(self, ordered: Sequence[Roster], uneven: Uneven) -> None:
        self.ordered = ordered
        self.uneven = uneven
        self.problems = RosterProblems()
        self.bad_tensors: set[str] = set()
        self.tensors: dict[str, int] = {}
        self.locals: dict[str, int] = {}
        self.boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self.shapes: dict[tuple[int, ...], int] = {}
        self.dtypes: dict[str, int] = {}
        self.geometries: dict[Any, tuple[int, ...] | None] = {}
        self.tile_rows: list[tuple[int, int, tuple[int, ...]]] = []
        self.tile_start: list[int] = [0]
        self.geometry_rows: list[tuple[int, ...]] = []
        self.fills: dict[str, int] = {}
        self.ties: dict[tuple[str, ...], str] = {}
        self.tied_sources: set[tuple[str, ...]] = set()
        self.fed_by: dict[str, str] = {}
        self.untied: dict[str, list[str]] = {}
        self.padding_rows: list[tuple[int, list[int], list[int]]] = []
        self.padding_start: list[int] = [0]
        # by the id of the names: they, and (local, tensor, kind) of each tensor of a kind of several
        self.numbers: dict[int, tuple[Names, Ints]] = {}
        self.offered: dict[str, Offered] = {}  # the tensors that sources round, or let others round

    def layouts(self) -> Layouts:
        """Read both sides."""
        return self._finish(*(self._side(side) for side in SIDES))

    def _side(self, side: str) -> Side:
        """Read one side of all rosters; a list that several rosters share and that names no rank is read once."""
        classes: dict[bytes, int] = {}  # by a digest of the entries
        columns = [np.zeros((0, 3), np.int64)]
        shared: dict[int, int] = {}
        rank_class = []
        for roster in self.ordered:
            metas = getattr(roster, side)
            number = shared.get(id(metas))
            if number is None:
                # rounding sources are looked up by name
                if isinstance(metas, Alike) and not (self.offered and side == "destination"):
                    rows, names_no_rank = self._alike(roster, side, metas), True
                else:
                    found, names_no_rank = self._entries(roster, side, metas)
                    rows = np.array(found, np.int64).reshape(-1, 3)
                rows = rows[in_order(*rows.T)]
                number = classes.setdefault(xxhash.xxh3_128_digest(rows.data), len(classes)) if len(rows) else -1
                if number == len(columns) - 1:
                    columns.append(rows)
                if names_no_rank:
                    shared[id(metas)] = number
            rank_class.append(number)
        sizes = [len(rows) for rows in columns[1:]]
        rows = np.concatenate(columns)
        return Side(
            rank_class=np.array(rank_class, np.int64),
            class_start=np.cumsum([0, *sizes]).astype(np.int64),
            entry_class=np.repeat(np.arange(len(sizes)), sizes),
            entry_local=rows[:, 0],
            entry_tensor=rows[:, 1],
            entry_geometry=rows[:, 2],
        )

    def _alike(self, roster: Roster, side: str, metas: Alike) -> Ints:
        """Return what `_entries` finds, from one description of each kind."""
        names = metas.names
        if id(names) not in self.numbers:
            of_kind = np.array(names.kind, np.int64)
            several = np.bincount(of_kind)[of_kind] > 1 if len(of_kind) else of_kind > 0
            local = [self.locals.setdefault(name, len(self.locals)) for name in names.local]
            tensor = [
                self.tensors.setdefault(name, len(self.tensors)) if alike else -1
                for name, alike in zip(names.canonical, several.tolist(), strict=True)
            ]
            self.numbers[id(names)] = names, np.array([local, tensor, names.kind], np.int64).T[several]
        rows = self.numbers[id(names)][1].copy()
        geometry = np.full(len(names.first), -1, np.int64)
        alone: list[tuple[int, int, int]] = []
        several_kinds = set(rows[:, 2].tolist())
        for kind, meta in enumerate(metas.kinds):
            found, _ = self._entries(roster, side, (meta,))
            if kind not in several_kinds:
                alone += found
            elif found:
                geometry[kind] = found[0][2]
        bad = {kind for kind in several_kinds if geometry[kind] < 0}
        for number, kind in enumerate(names.kind if bad else ()):
            if kind in bad and names.first[kind] != number:
                self._report(roster, side, metas[number])
        rows[:, 2] = geometry[rows[:, 2]]
        return np.concatenate([np.array(alone, np.int64).reshape(-1, 3), rows[rows[:, 2] >= 0]])

    def _entries(
        self, roster: Roster, side: str, metas: Iterable[ParameterMetadata]
    ) -> tuple[list[tuple[int, int, int]], bool]:
        """Return (local, tensor, geometry) of every tensor of one rank, and whether the list names no rank.

        Invalid tensors are reported as problems and skipped.
        """
        found: list[tuple[int, int, int]] = []
        spots: dict[int, tuple[Any, tuple[int, int]]] = {}
        seen: set[str] = set()
        names_no_rank = True
        tensors, local_names, geometries = self.tensors, self.locals, self.geometries
        for m in metas:
            (
                name, shape, dtype, esize, is_tp, dim, stride, sizes, owner, group, resolved, tiles, whole,
                fill, aliases, cast, cast_to,
            ) = _FIELDS(m)  # fmt: skip
            names: Sequence[str] = (name if resolved is None else resolved,)
            key: Any
            if tiles is not None:
                names, parts = nameless(tiles, names)
                key = (shape, dtype, esize, whole, parts)
            elif is_tp and group is not None and len(group) > 1:
                names_no_rank = False
                spot = spots.get(id(group))
                if spot is None:
                    # keeping the group prevents the reuse of its id
                    spot = spots[id(group)] = (group, spot_of(group, roster.rank))
                key = (shape, dtype, esize, whole, dim, stride, sizes and tuple(sizes), *spot[1])
                if self.uneven:
                    key = (*key, self.uneven.get((side, canonical_name(m), tuple(group))))
            elif sizes is not None:  # blocks of an unsplit tensor, which may contradict its shape
                key = (shape, dtype, esize, whole, dim, tuple(sizes))
            else:
                key = (shape, dtype, esize, whole)
            if fill is not None or cast is not None or cast_to is not None:
                key = (*key, repr(fill), cast, cast_to)  # repr, because 0.0 == -0.0 and NaN != NaN
            if side == "source" and (cast is not None or cast_to is not None):
                self._offer(m, names)
            if self.offered and side == "destination":
                key = (*key, self._offers_of(names, aliases))
            names_no_rank = names_no_rank and owner is None
            if name in seen or (owner is not None and owner != roster.rank):
                self._report_owner(roster, side, m)
                continue
            seen.add(name)
            if aliases and not self._tie(roster, side, m):
                continue
            try:
                numbers = geometries[key]
            except (KeyError, TypeError):
                numbers = self._learn(key, roster, side, m)
            if numbers is None:
                self._report(roster, side, m)
                continue
            local = local_names.setdefault(name, len(local_names))
            for tensor, geometry in zip(names, numbers):  # noqa: B905 equal by construction, and strict costs
                found.append((local, tensors.setdefault(tensor, len(tensors)), geometry))
        return found, names_no_rank

    def _offer(self, m: ParameterMetadata, names: Iterable[str]) -> None:
        """Note the other dtype that a source's description names."""
        exact = None if m.cast_from is None else dtype_name(m.cast_from)
        offered = Offered(dtype_name(m.dtype), exact, None if m.cast_to is None else dtype_name(m.cast_to))
        for name in (*names, *m.aliases):
            self.offered.setdefault(name, offered)

    def _offers_of(self, names: Iterable[str], aliases: Iterable[str]) -> tuple[Offered | None, ...]:
        """Return the offers that feed a destination's canonical tensors."""
        offered = self.offered
        tied = next((offered[alias] for alias in aliases if alias in offered), None)
        return tuple(offered.get(name, tied) for name in names)

    def _tie(self, roster: Roster, side: str, m: ParameterMetadata) -> bool:
        """Note a tensor's aliases; return False if they are invalid."""
        if problem := alias_problem(m):
            self.problems.add(f"{label_of(roster)} {side}", problem)
            self._spoil(m)
        else:
            names = (tied_name(m), *m.aliases)
            self.ties.setdefault(names, f"{label_of(roster)} ({side})")
            if side == "source":
                self.tied_sources.add(names)
        return not problem

    def _sizes(self, side: str, m: ParameterMetadata) -> tuple[int, ...] | None:
        if not self.uneven or not is_sharded(m):
            return None
        return self.uneven.get((side, canonical_name(m), tuple(m.tensor_parallel_group_ranks or ())))

    def _learn(self, key: Any, roster: Roster, side: str, m: ParameterMetadata) -> tuple[int, ...] | None:
        """Add the geometries of a new kind of tensor, one per canonical tensor in it; None if it is invalid."""
        owned = replace(m, owner_rank=roster.rank)
        sizes = self._sizes(side, m)
        bad = bool(layout_problems(owned, sizes))
        numbers: tuple[int, ...] | None = None
        if not bad:
            tiles: dict[str, list[Tile]] = {canonical_name(m): []} if not m.tiles else {}
            for tile in m.tiles or ():
                tiles.setdefault(tile.tensor, [])
            for tile in tiles_of(owned, sizes):
                tiles[tile.tensor].append(tile)
            padding = self._padding(owned, tiles)
            offers = (
                self._offers_of(tiles, m.aliases) if self.offered and side == "destination" else (None,) * len(tiles)
            )
            numbers = tuple(
                self._add(owned, sizes, part, padding, offer)
                for part, offer in zip(tiles.values(), offers, strict=True)
            )
        with suppress(TypeError):  # unhashable: a description with lists instead of tuples is not cached
            self.geometries[key] = numbers
        return numbers

    def _padding(self, m: ParameterMetadata, tiles: dict[str, list[Tile]]) -> int:
        """Return the number of the padding that the tiles leave in the local tensor."""
        total = elements(m.shape)
        if m.tiles is None or sum(tile_elements(tile) for part in tiles.values() for tile in part) >= total:
            return NO_PADDING
        boxes = [
            (local, tile.size, tile.local_stride)
            for part in tiles.values()
            for tile in part
            for _, local in occurrences(tile)
        ]
        rest = left_out(boxes, total)
        if rest is None:
            return UNCLEAR_PADDING
        self.padding_rows += zip(rest.dst_offset.tolist(), rest.size.tolist(), rest.dst_stride.tolist(), strict=True)
        self.padding_start.append(len(self.padding_rows))
        return len(self.padding_start) - 2

    def _add(
        self,
        m: ParameterMetadata,
        sizes: tuple[int, ...] | None,
        tiles: list[Tile],
        padding: int,
        offered: Offered | None,
    ) -> int:
        whole = global_shape_of(m, sizes)
        shape = whole if m.tiles is None or whole is not None else tiles[0].size if tiles else None
        dtype = dtype_name(m.dtype)
        held = dtype if m.cast_from is None else dtype_name(m.cast_from)
        if offered is not None:
            held = offered.read_as(dtype, held)
        self.geometry_rows.append(
            (
                m.element_size,
                self.shapes.setdefault(tuple(m.shape), len(self.shapes)),
                -1 if whole is None else self.shapes.setdefault(whole, len(self.shapes)),
                -1 if shape is None else len(shape),
                self.dtypes.setdefault(dtype, len(self.dtypes)),
                self.dtypes.setdefault(held, len(self.dtypes)),
                cast_number(held, dtype) or 0,
                padding,
                -1 if m.fill is None else self.fills.setdefault(repr(float(m.fill)), len(self.fills)),
            )
        )
        for tile in tiles:
            for offset, local in occurrences(tile):
                box = self.boxes.setdefault((offset, tuple(tile.size)), len(self.boxes))
                self.tile_rows.append((box, local, tuple(tile.local_stride)))
        self.tile_start.append(len(self.tile_rows))
        return len(self.geometry_rows) - 1

    def _report_owner(self, roster: Roster, side: str, m: ParameterMetadata) -> None:
        if m.owner_rank is not None and m.owner_rank != roster.rank:
            what = f"{m.name}: owner_rank is {m.owner_rank}, expected {roster.rank}, the rank of its roster"
        else:
            what = f"{m.name}: it is listed twice as a {side}; local names must be unique"
        self.problems.add(label_of(roster), what)
        self._spoil(m)

    def _spoil(self, m: ParameterMetadata) -> None:
        """Exclude an invalid tensor from all later checks, which would report it again."""
        self.bad_tensors |= {canonical_name(m), *(tile.tensor for tile in m.tiles or ())}

    def _report(self, roster: Roster, side: str, m: ParameterMetadata) -> None:
        owned = replace(m, owner_rank=roster.rank)
        self._spoil(m)
        for what in layout_problems(owned, self._sizes(side, m)):
            self.problems.add(f"{label_of(roster)} {side}", what)

    def _finish(self, source: Side, destination: Side) -> Layouts:
        """Return the layouts, with names sorted."""
        ordered = self.ordered
        dims = max([1, *(len(offset) for offset, _ in self.boxes)])
        columns = np.array(self.geometry_rows, np.int64).reshape(-1, 9)
        padding_dims = max([1, *(len(size) for _, size, _ in self.padding_rows)])
        tensors, tensor_at = sorted_names(self.tensors)
        local_names, local_at = sorted_names(self.locals)
        geometries = Geometries(
            tile_start=np.array(self.tile_start, np.int64),
            tile_box=np.array([row[0] for row in self.tile_rows], np.int64),
            tile_offset=np.array([row[1] for row in self.tile_rows], np.int64),
            tile_stride=padded([row[2] for row in self.tile_rows], dims, 0),
            box_offset=padded([offset for offset, _ in self.boxes], dims, 0),
            box_size=padded([size for _, size in self.boxes], dims, 1),
            element_size=columns[:, 0],
            local_shape=columns[:, 1],
            global_shape=columns[:, 2],
            dims=columns[:, 3],
            dtype=columns[:, 4],
            held_dtype=columns[:, 5],
            cast=columns[:, 6],
            padding=columns[:, 7],
            fill=columns[:, 8],
            shapes=tuple(self.shapes),
            dtypes=tuple(self.dtypes),
            paddings=Paddings(
                start=np.array(self.padding_start, np.int64),
                offset=np.array([row[0] for row in self.padding_rows], np.int64),
                size=padded([row[1] for row in self.padding_rows], padding_dims, 1),
                stride=padded([row[2] for row in self.padding_rows], padding_dims, 0),
            ),
            fills=tuple(float(value) for value in self.fills),
        )
        fed_at = tensor_at
        if self.ties:
            # exclude tensors tied to an invalid one: they would be reported for the same reason
            for names in self.ties:
                self.bad_tensors |= set(names) if self.bad_tensors.intersection(names) else set()
            held, wanted = ({tensors[i] for i in tensor_at[side.entry_tensor]} for side in (source, destination))
            self.fed_by, untied = resolve_aliases(self.ties, held, wanted)
            for name, lines in untied_sources(self.ties, self.tied_sources, held).items():
                untied.setdefault(name, []).extend(lines)
            self.untied = {name: lines for name, lines in untied.items() if name not in self.bad_tensors}
            fed_at = tensor_at.copy()
            for name, other in self.fed_by.items():
                fed_at[self.tensors[name]] = tensor_at[self.tensors[other]]
        sides = [
            replace(side, entry_local=local_at[side.entry_local], entry_tensor=at[side.entry_tensor])
            for side, at in ((source, tensor_at), (destination, fed_at))
        ]
        return Layouts(
            ranks=np.array([r.rank for r in ordered], np.int64),
            labels=tuple(label_of(r) for r in ordered),
            nodes=nodes_of(ordered),
            tensors=tensors,
            locals=local_names,
            source=sides[0],
            destination=sides[1],
            geometries=geometries,
            tied=self._roots(tensor_at),
        )

    def _roots(self, tensor_at: Ints) -> Ints:
        """Return, for each tensor, the first tensor that it is tied to (itself if none)."""
        roots = np.arange(len(tensor_at))
        for names in self.ties:
            tied = roots[[tensor_at[self.tensors[name]] for name in names if name in self.tensors]]
            if len(tied):
                roots[np.isin(roots, tied)] = tied.min()
        return roots


def offered_tensors(rosters: Sequence[Roster]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return what `Layouts.offered` returns for these source ranks.

    Raises:
        PlanError: the ranks' descriptions contradict each other.
    """
    layouts, wrong = read_rosters(rosters)
    if wrong:
        raise PlanError(f"{len(wrong)} problems: " + "; ".join(wrong[:5]))
    return layouts.offered()
