"""Prove a plan, or say everything that is wrong with it. Shares nothing with planning but how rosters are read.

Two things are proven. *Content*: every row is taken back, at both ends, from places in local tensors to
coordinates of the canonical tensor, and both ends must name the same box. That bounds it as well: a place
outside what a rank described has no coordinates. *Coverage*: the boxes that a rank receives must make up exactly
what it wants, nothing twice and nothing left out. For that each box gets a number that adds up:

    number(box) = product over dimensions of (h(high edge) - h(low edge))   modulo 2**64, h a hash

Where boxes tile a larger one, the hashes of inner edges cancel and their numbers add up to its number; where an
element is missing or doubled they do not (but for one chance in some 2**60). So the rows that many ranks share
are looked at once, and each rank costs one sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from refitd.describe.roster import Roster
from refitd.plan.coalesce import Rows
from refitd.plan.columns import Hashes, Ints, hashed, numbered, ranges
from refitd.plan.layouts import Layouts, Side, read_rosters
from refitd.plan.places import Places, Spans, doubly_placed
from refitd.plan.shared import GlobalPlan, SharedPlan, shared_from
from refitd.plan.table import CopyTable

MAX_ROUNDS = 1024
MAX_PIECES = 2**23


def violations(plan: GlobalPlan | CopyTable, rosters: Sequence[Roster]) -> list[str]:
    """Return everything that keeps a plan from filling these rosters' destinations exactly.

    An empty list proves: every row lies within what both ranks described, carries the elements it should, every
    destination element is written once, the ranks at both ends are there, and task ids are unique.
    """
    layouts, problems = read_rosters(rosters)
    if problems:
        return problems
    if isinstance(plan, GlobalPlan):
        return shared_violations(plan.shared, layouts)
    found = [] if len(np.unique(plan.task_id)) == len(plan) else ["plan: a task id is used by several copies"]
    if len(plan) and int(plan.task_id.min()) < 0:
        found.append("plan: a task id is negative")
    return found + shared_violations(shared_from(plan), layouts)


@dataclass(frozen=True, eq=False)
class _Uses:
    """Which rows are used between which classes: use u is (rows kind[u], source class, destination class)."""

    kind: Ints
    source_class: Ints
    destination_class: Ints
    job: Ints  # [uses] an example
    use_of_job: Ints


def shared_violations(plan: SharedPlan, layouts: Layouts) -> list[str]:
    """Return everything that is wrong with a plan for these layouts, none of which has a problem of its own."""
    tensors, names = _renamed(plan.tensors, layouts.tensors), _renamed(plan.locals, layouts.locals)
    rows = replace(
        plan.rows,
        tensor=tensors[plan.rows.tensor],
        src_local=names[plan.rows.src_local],
        dst_local=names[plan.rows.dst_local],
    )
    src, dst = (_positions(layouts.ranks, column) for column in (plan.job_src, plan.job_dst))
    if strangers := _strangers(plan, layouts, src, dst):
        return strangers
    found = doubly_placed(layouts, layouts.destination)
    uses = _uses(plan, layouts.source.rank_class[src], layouts.destination.rank_class[dst])
    use, at = ranges(plan.row_start[uses.kind], plan.row_start[uses.kind + 1] - plan.row_start[uses.kind])
    used = replace(rows.select(at), owner=use)
    spans, wrong = _matched(used, uses, layouts, plan)
    found += wrong
    found += _uncovered(spans, uses, src, dst, layouts)
    found += _ambiguous_ids(plan, at, uses.destination_class[use])
    return found


def _renamed(names: Sequence[str], known: Sequence[str]) -> Ints:
    """Return each name's position among the known ones, or -1."""
    position = {name: i for i, name in enumerate(known)}
    return np.array([position.get(name, -1) for name in names], np.int64)


def _positions(ranks: Ints, wanted: Ints) -> Ints:
    at = np.minimum(np.searchsorted(ranks, wanted), max(0, len(ranks) - 1))
    return np.where(ranks[at] == wanted, at, -1) if len(ranks) else np.full(len(wanted), -1)


def _strangers(plan: SharedPlan, layouts: Layouts, src: Ints, dst: Ints) -> list[str]:
    """Return the ranks that the plan names and that have nothing to send or to receive."""
    found = []
    for side, at, ranks, what in (
        (layouts.source, src, plan.job_src, "sends, and offers nothing"),
        (layouts.destination, dst, plan.job_dst, "receives, and wants nothing"),
    ):
        stranger = at < 0
        stranger[~stranger] = side.rank_class[at[~stranger]] < 0
        found += [f"rank {rank}: the plan says it {what}" for rank in np.unique(ranks[stranger]).tolist()]
    return found


def _uses(plan: SharedPlan, source_class: Ints, destination_class: Ints) -> _Uses:
    key = hashed([plan.job_rows, source_class, destination_class])
    example, number = numbered(key)
    return _Uses(plan.job_rows[example], source_class[example], destination_class[example], example, number)


def _matched(rows: Rows, uses: _Uses, layouts: Layouts, plan: SharedPlan) -> tuple[Spans, list[str]]:
    """Take every row back to canonical boxes; return those of the destination side, owner being the use."""
    sides = (Places(layouts, layouts.source), Places(layouts, layouts.destination))
    classes = (uses.source_class, uses.destination_class)
    done: list[Spans] = []
    wrong: dict[str, str] = {}

    def complain(some: Rows, what: str) -> None:
        for i in range(len(some.owner)):
            job = int(uses.job[some.owner[i]])
            name = layouts.tensors[some.tensor[i]] if some.tensor[i] >= 0 else "a tensor nobody has"
            ends = f"the copy from rank {plan.job_src[job]} to rank {plan.job_dst[job]}"
            wrong.setdefault(name, f"{name}: {ends} {what}")

    for _ in range(MAX_ROUNDS):
        if not len(rows.owner):
            break
        ends = [
            places.spans(classes[i][rows.owner], rows, is_source=i == 0) for i, places in enumerate(sides)
        ]
        lost = (ends[0].tile < 0) | (ends[1].tile < 0)
        complain(rows.select(lost), "reaches outside what these ranks have described")
        whole = ~lost & ends[0].is_whole & ends[1].is_whole
        same = (
            (ends[0].offset == ends[1].offset).all(axis=1)
            & (ends[0].size == ends[1].size).all(axis=1)
            & (ends[0].along == ends[1].along).all(axis=1)
        )
        sized = sides[0].element_size[ends[0].tile] == rows.element_size
        sized &= sides[1].element_size[ends[1].tile] == rows.element_size
        complain(rows.select(whole & ~(same & sized)), "would put other elements there than belong there")
        done.append(ends[1].select(whole))
        part = ~lost & ~whole
        # the end that does not fit says where to cut; the other end follows
        blocked = np.where(ends[1].is_whole, 0, 1)
        dim = np.where(blocked, ends[1].cut_dim, ends[0].cut_dim)
        count = np.where(blocked, ends[1].cut_at, ends[0].cut_at)
        rows = _cut(rows.select(part), dim[part], count[part])
        if len(rows.owner) > MAX_PIECES:
            break
    complain(rows, "is cut too finely to be checked")
    return Spans.joined(done, len(layouts.geometries.box_offset.T)), list(wrong.values())


def _cut(rows: Rows, dim: Ints, count: Ints) -> Rows:
    """Cut each row along a dimension into the first `count` and the rest."""
    index = np.arange(len(dim))
    size, rest = rows.size.copy(), rows.size.copy()
    size[index, dim] = count
    rest[index, dim] -= count
    first = replace(rows, size=size)
    second = replace(
        rows,
        size=rest,
        src_offset=rows.src_offset + count * rows.src_stride[index, dim],
        dst_offset=rows.dst_offset + count * rows.dst_stride[index, dim],
    )
    both = np.concatenate([index, index + len(index)])
    return Rows(
        **{
            name: np.concatenate([getattr(first, name), getattr(second, name)])[both]
            for name in Rows.__dataclass_fields__
        }
    )


def _numbers(tile: Ints, offset: Ints, size: Ints) -> Hashes:
    """Return the number of each box of a tile: it adds up where boxes are put together."""
    result = np.ones(len(tile), np.uint64)
    for d in range(offset.shape[1]):
        dims = np.full(len(tile), d)
        low, high = offset[:, d], offset[:, d] + size[:, d]
        result *= hashed([tile, dims, high]) - hashed([tile, dims, low])
    return result


def _uncovered(spans: Spans, uses: _Uses, src: Ints, dst: Ints, layouts: Layouts) -> list[str]:
    """Return the destination tensors that a rank does not receive exactly once."""
    del src
    side = layouts.destination
    places = Places(layouts, side)
    wanted = np.zeros(side.classes, np.uint64)
    np.add.at(wanted, places.layout_class, _numbers(places.number, places.offset, places.size))
    of_use = np.zeros(len(uses.kind), np.uint64)
    np.add.at(of_use, spans.owner, _numbers(spans.tile, spans.offset, spans.size))
    received = np.zeros(len(layouts.ranks), np.uint64)
    np.add.at(received, dst, of_use[uses.use_of_job])
    receives = side.rank_class >= 0
    wrong = np.flatnonzero(receives & (received != wanted[side.rank_class]))
    found: dict[str, str] = {}
    for rank in wrong.tolist():
        mine = np.flatnonzero(dst == rank)
        spent = np.concatenate([np.flatnonzero(spans.owner == use) for use in uses.use_of_job[mine]] or [mine])
        for line in _uncovered_tiles(places, spans.select(spent), int(side.rank_class[rank]), layouts):
            found.setdefault(line, layouts.labels[rank])
    return [f"{line.split(':')[0]}: {label} {line.split(': ', 1)[1]}" for line, label in found.items()]


def _uncovered_tiles(places: Places, spans: Spans, layout_class: int, layouts: Layouts) -> list[str]:
    mine = np.flatnonzero(places.layout_class == layout_class)
    numbers, count = np.zeros(len(places.number), np.uint64), np.zeros(len(places.number), np.int64)
    np.add.at(numbers, spans.tile, _numbers(spans.tile, spans.offset, spans.size))
    np.add.at(count, spans.tile, np.prod(spans.size, axis=1))
    want = _numbers(places.number[mine], places.offset[mine], places.size[mine])
    found = []
    for tile in mine[numbers[mine] != want].tolist():
        total = int(np.prod(places.size[tile]))
        found.append(
            f"{layouts.tensors[places.tensor[tile]]}: would be sent {int(count[tile])} elements for a place of "
            f"{total} in {layouts.locals[places.local[tile]]}; each must be written exactly once"
        )
    return found


def _ambiguous_ids(plan: SharedPlan, at: Ints, destination_class: Ints) -> list[str]:
    """Return a message if two copies of one destination class derive the same task id."""
    rows = plan.rows.select(at)
    by_id = np.unique(hashed([destination_class, plan.places[at]]))
    by_place = np.unique(hashed([destination_class, rows.tensor, rows.dst_local, rows.dst_offset]))
    if len(by_id) == len(by_place):
        return []
    return ["plan: two copies to one rank have the same task id; rename one of the destination's tensors"]


def side_name(side: Side, layouts: Layouts) -> str:
    """Return "source" or "destination"."""
    return "source" if side is layouts.source else "destination"
