"""Rosters in, one exact plan out."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from refitd.describe.layout import canonical_name, elements, global_shape_of, is_sharded, layout_problems, tiles_of
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.roster import Roster
from refitd.describe.tiles import Tile
from refitd.dtypes import dtype_name
from refitd.errors import PlanError
from refitd.plan.ops import ReshardPlan, TransferOp
from refitd.plan.table import CopyTable


@dataclass(frozen=True, slots=True)
class GlobalPlan:
    """Every copy of a refit.

    Attributes:
        table: one row per copy.
        unused_sources: canonical names that some rank offers and none wants.
        digest: identifies the plan's content.
    """

    table: CopyTable
    unused_sources: tuple[str, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Box:
    rank: int
    local: str
    tensor: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    local_offset: int
    local_stride: tuple[int, ...]
    element_size: int


def roster_digest(rosters: Sequence[Roster]) -> str:
    """Return a digest of the rosters' content, the same in any order of rosters and tensors."""
    parts = []
    for roster in rosters:
        sides = [
            sorted(repr((m.name, tuple(m.shape), dtype_name(m.dtype), m.is_tp, m.partition_dim, m.partition_stride,
                   m.partition_sizes, m.tensor_parallel_group_ranks, canonical_name(m), m.tiles, m.global_shape,
                   m.owner_rank)) for m in side)
            for side in (roster.source, roster.destination)
        ]
        parts.append(repr((roster.rank, roster.node, sides)))
    return xxhash.xxh3_128_hexdigest("\n".join(sorted(parts)).encode())


def plan_copies(rosters: Sequence[Roster]) -> GlobalPlan:
    """Plan every copy that fills every destination, each element once, from one chosen source.

    Raises:
        PlanError: with everything that stands in the way.
    """
    problems: list[str] = []
    by_rank: dict[int, Roster] = {}
    for roster in rosters:
        if roster.rank in by_rank:
            problems.append(f"rank {roster.rank} is in two rosters ({_label(by_rank[roster.rank])}, {_label(roster)})")
        by_rank[roster.rank] = roster
    ordered = [by_rank[rank] for rank in sorted(by_rank)]
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    dtypes: dict[str, tuple[str, str]] = {}
    sources: dict[str, list[Box]] = defaultdict(list)
    wanted: dict[str, list[Box]] = defaultdict(list)
    for side, into in (("source", sources), ("destination", wanted)):
        sizes: dict[tuple[str, tuple[int, ...]], dict[int, int]] = defaultdict(dict)
        for roster in ordered:
            for m in getattr(roster, side):
                if is_sharded(m) and isinstance(m.partition_dim, int) and 0 <= m.partition_dim < len(m.shape):
                    sizes[canonical_name(m), tuple(m.tensor_parallel_group_ranks or ())][roster.rank] = m.shape[m.partition_dim]
        for roster in ordered:
            seen = set()
            for m in getattr(roster, side):
                where = f"{_label(roster)} {side}"
                if m.name in seen:
                    problems.append(f"{where}: {m.name} is listed twice")
                seen.add(m.name)
                if m.owner_rank is None:
                    m = replace(m, owner_rank=roster.rank)
                if m.owner_rank != roster.rank:
                    problems.append(f"{where}: {m.name} says it belongs to rank {m.owner_rank}")
                    continue
                held = sizes.get((canonical_name(m), tuple(m.tensor_parallel_group_ranks or ())), {})
                uneven = None
                if is_sharded(m) and len(set(held.values())) > 1:
                    missing = [r for r in m.tensor_parallel_group_ranks or () if r not in held]
                    if missing:
                        problems.append(f"{where}: {m.name} is split unevenly and rank {missing[0]} of its group has not said how much it holds")
                        continue
                    uneven = [held[r] for r in m.tensor_parallel_group_ranks or ()]
                if bad := layout_problems(m, uneven):
                    problems += [f"{where}: {p}" for p in bad]
                    continue
                tiles = tiles_of(m, uneven)
                shape = global_shape_of(m, uneven)
                for name in {t.tensor for t in tiles} or {canonical_name(m)}:
                    dtype = dtype_name(m.dtype)
                    first = dtypes.setdefault(name, (dtype, where))
                    if first[0] != dtype:
                        problems.append(f"{name}: {where} has {dtype}, {first[1]} has {first[0]}; the dtypes must be equal")
                    if shape is not None:
                        known = shapes.setdefault(name, (shape, where))
                        if known[0] != shape:
                            problems.append(f"{name}: {where} has global shape {shape}, {known[1]} has {known[0]}; check the parallel groups")
                for tile in tiles:
                    into[tile.tensor] += [
                        Box(roster.rank, m.name, tile.tensor, offset, tile.size, local, tile.local_stride, m.element_size)
                        for offset, local in _occurrences(tile)
                    ]
    rows: list[tuple[Box, Box]] = []
    load: dict[int, int] = defaultdict(int)
    for name in sorted(wanted):
        holders: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Box]] = defaultdict(list)
        for cell in _cells(sources.get(name, [])):
            holders[cell.offset, cell.size].append(cell)
        for want in sorted(wanted[name], key=lambda b: (b.rank, b.local, b.local_offset)):
            covered = 0
            picked: list[tuple[Box, Box]] = []
            for (offset, size), boxes in sorted(holders.items()):
                both = _overlap(offset, size, want.offset, want.size)
                if both is None:
                    continue
                source = _choose(boxes, want.rank, by_rank, load)
                nbytes = elements(both[1]) * want.element_size
                covered += elements(both[1])
                load[source.rank] += nbytes if source.rank != want.rank else 0
                picked.append((_clip(source, *both), _clip(want, *both)))
            if covered != elements(want.size):
                what = "no source has it" if not holders else f"sources hold {covered} of the {elements(want.size)} elements wanted at {want.offset}"
                problems.append(f"{name}: {_label(by_rank[want.rank])} destination {want.local} wants it, but {what}; check the source's names and groups")
            rows += _coalesce(picked)
    if problems:
        raise PlanError(problems)
    table = _table(rows)
    digest = xxhash.xxh3_128()
    for value in table.to_wire().values():
        digest.update(value if isinstance(value, bytes) else repr(value).encode())
    return GlobalPlan(table, tuple(sorted(set(sources) - set(wanted))), digest.hexdigest())


def _label(roster: Roster) -> str:
    return roster.label or f"rank {roster.rank}"


def _occurrences(tile: Tile) -> Iterator[tuple[tuple[int, ...], int]]:
    yield tile.offset, tile.local_offset
    if r := tile.repeat:
        for i in range(1, r.count):
            offset = list(tile.offset)
            offset[r.dim] += i * r.step
            yield tuple(offset), tile.local_offset + i * r.local_step


def _overlap(a, an, b, bn):  # type: ignore[no-untyped-def]
    lo = tuple(map(max, a, b))
    size = tuple(min(x + n, y + m) - s for x, n, y, m, s in zip(a, an, b, bn, lo, strict=True))
    return (lo, size) if all(s > 0 for s in size) else None


def _clip(box: Box, offset: tuple[int, ...], size: tuple[int, ...]) -> Box:
    at = box.local_offset + sum((o - b) * s for o, b, s in zip(offset, box.offset, box.local_stride, strict=True))
    return replace(box, offset=offset, size=size, local_offset=at)


def _cells(boxes: list[Box]) -> list[Box]:
    """Cut source boxes along each other's edges, so that any two are equal or disjoint."""
    distinct = {(b.offset, b.size) for b in boxes}
    if all(_overlap(*x, *y) is None for x, y in itertools.combinations(distinct, 2)):
        return boxes
    dims = len(boxes[0].offset)
    cuts = [sorted({e for o, s in distinct for e in (o[d], o[d] + s[d])}) for d in range(dims)]
    found = []
    for box in boxes:
        spans = []
        for d in range(dims):
            edges = [c for c in cuts[d] if box.offset[d] <= c <= box.offset[d] + box.size[d]]
            spans.append([(a, b - a) for a, b in itertools.pairwise(edges)])
        for cell in itertools.product(*spans):
            found.append(_clip(box, tuple(c[0] for c in cell), tuple(c[1] for c in cell)))
    return found


def _choose(boxes: list[Box], rank: int, by_rank: dict[int, Roster], load: dict[int, int]) -> Box:
    node = by_rank[rank].node
    return min(boxes, key=lambda b: (b.rank != rank, not node or by_rank[b.rank].node != node, load[b.rank], b.rank, b.local))


def _coalesce(pairs: list[tuple[Box, Box]]) -> list[tuple[Box, Box]]:
    merged = True
    while merged:
        merged = False
        for d in range(len(pairs[0][1].offset) if pairs else 0):
            out: list[tuple[Box, Box]] = []
            pairs.sort(key=lambda p: (p[1].offset[:d], p[1].offset[d + 1:], p[1].offset[d]))
            for src, dst in pairs:
                if out:
                    psrc, pdst = out[-1]
                    n = pdst.size[d]
                    if (
                        psrc.rank == src.rank and psrc.local == src.local and psrc.local_stride == src.local_stride
                        and pdst.size[:d] == dst.size[:d] and pdst.size[d + 1:] == dst.size[d + 1:]
                        and pdst.offset[:d] == dst.offset[:d] and pdst.offset[d + 1:] == dst.offset[d + 1:]
                        and pdst.offset[d] + n == dst.offset[d]
                        and psrc.local_offset + n * src.local_stride[d] == src.local_offset
                    ):
                        size = (*dst.size[:d], n + dst.size[d], *dst.size[d + 1:])
                        out[-1] = (replace(psrc, size=size), replace(pdst, size=size))
                        merged = True
                        continue
                out.append((src, dst))
            pairs = out
    return sorted(pairs, key=lambda p: p[1].local_offset)


def _table(rows: list[tuple[Box, Box]]) -> CopyTable:
    tensors = sorted({dst.tensor for _, dst in rows})
    names = sorted({b.local for row in rows for b in row})
    t_index, n_index = {n: i for i, n in enumerate(tensors)}, {n: i for i, n in enumerate(names)}
    rows = sorted(rows, key=lambda p: (p[1].rank, p[1].local, p[1].local_offset))
    dims = max((len(dst.size) for _, dst in rows), default=1) or 1

    def pad(values: tuple[int, ...], fill: int) -> list[int]:
        return [fill] * (dims - len(values)) + list(values)

    def ids(src: Box, dst: Box) -> int:
        key = repr((dst.tensor, dst.rank, dst.local, dst.local_offset, dst.size, dst.local_stride))
        return xxhash.xxh3_64_intdigest(key.encode()) >> 1

    i4 = lambda values: np.array(list(values), dtype=np.int32)  # noqa: E731
    i8 = lambda values, *shape: np.array(list(values), dtype=np.int64).reshape(len(rows), *shape)  # noqa: E731
    return CopyTable(
        tensors=tuple(tensors),
        locals=tuple(names),
        tensor=i4(t_index[d.tensor] for _, d in rows),
        src_rank=i4(s.rank for s, _ in rows),
        dst_rank=i4(d.rank for _, d in rows),
        src_local=i4(n_index[s.local] for s, _ in rows),
        dst_local=i4(n_index[d.local] for _, d in rows),
        element_size=i4(d.element_size for _, d in rows),
        task_id=i8(ids(s, d) for s, d in rows),
        size=i8((pad(d.size, 1) for _, d in rows), dims),
        src_offset=i8(s.local_offset for s, _ in rows),
        src_stride=i8((pad(s.local_stride, 0) for s, _ in rows), dims),
        dst_offset=i8(d.local_offset for _, d in rows),
        dst_stride=i8((pad(d.local_stride, 0) for _, d in rows), dims),
    )


def plan_reshard(rosters: Sequence[Roster]) -> dict[int, ReshardPlan]:
    """Return each rank's plan (placeholder until the slice views exist)."""
    raise NotImplementedError
