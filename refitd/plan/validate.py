"""Prove a plan correct, or list everything that is wrong with it. Shares only the reading of rosters with planning.

Two things are proven. *Content*: at both ends, each row's places in local tensors are mapped back to canonical
coordinates, and both ends must give the same box. This also checks bounds: a place outside what a rank described has
no coordinates. *Coverage*: the boxes that a rank receives must make up exactly what it wants, nothing twice and nothing
left out. For this each box gets an additive number:

    number(box) = product over dimensions of (h(high edge) - h(low edge))   modulo 2**64, h a hash

If boxes tile a larger box, the hashes of inner edges cancel and the numbers add up to that box's number. If an element
is missing or doubled they do not (except with a probability of about 2**-60). So rows that many ranks share are checked
once, and each rank costs one sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from refitd.describe.casts import SOURCE_SIZES
from refitd.describe.roster import Roster
from refitd.plan.coalesce import Rows
from refitd.plan.columns import Hashes, Ints, below, distinct, find, hashed, numbered, ranges
from refitd.plan.coordinates import Spans, TileIndex, doubly_placed
from refitd.plan.fills import FillTable
from refitd.plan.layouts import Layouts
from refitd.plan.read_rosters import read_rosters
from refitd.plan.shared import GlobalPlan, SharedPlan, shared_from
from refitd.plan.table import CopyTable
from refitd.plan.validate_fills import fill_violations

MAX_ROUNDS = 1024
MAX_PIECES = 2**23


def violations(plan: GlobalPlan | CopyTable, rosters: Sequence[Roster], fills: FillTable | None = None) -> list[str]:
    """Return every reason why a plan does not write these rosters' destinations correctly.

    An empty list proves that every row lies within what both ranks described and carries the right elements, that every
    element of every destination's local tensor is written once, by a copy or by its declared fill, that the ranks at
    both ends exist, and that task ids are unique.

    Args:
        plan: the plan.
        rosters: the rosters that it was made for.
        fills: the fills that belong to a CopyTable; a GlobalPlan has its own.
    """
    layouts, problems = read_rosters(rosters)
    if problems:
        return problems
    if isinstance(plan, GlobalPlan):
        return shared_violations(plan.shared, layouts)
    found = [] if len(distinct(plan.task_id)) == len(plan) else ["plan: a task id is used by several copies"]
    if len(plan) and int(plan.task_id.min()) < 0:
        found.append("plan: a task id is negative")
    return found + shared_violations(shared_from(plan, fills), layouts)


@dataclass(frozen=True, eq=False)
class _Uses:
    """Distinct (rows, source class, destination class) of jobs: use u performs rows kind[u] between its classes."""

    kind: Ints
    source_class: Ints
    destination_class: Ints
    job: Ints  # [uses] an example job
    use_of_job: Ints

    def is_like(self, other: _Uses) -> bool:
        """Return whether both are of the same rows and classes, whatever their jobs."""
        columns = ((u.kind, u.source_class, u.destination_class) for u in (self, other))
        return all(map(np.array_equal, *columns))


class CoverageProof:
    """What was proven of the rows of a plan: what each use of them brings, and what each class is owed.

    It holds for the same rows between the same classes, whichever ranks these have.
    """

    def __init__(self) -> None:
        self._rows: Rows | None = None
        self._uses: _Uses | None = None
        self._received = self._owed = np.zeros(0, np.uint64)

    def keep(self, rows: Rows, uses: _Uses, received: Hashes, owed: Hashes) -> None:
        """Remember this proof instead of any other."""
        self._rows, self._uses, self._received, self._owed = rows, uses, received, owed

    def holds(self, rows: Rows, uses: _Uses, dst: Ints, layouts: Layouts) -> bool:
        """Return whether these rows are proven, and bring every rank what its class is owed."""
        known = self._uses
        if known is None or rows is not self._rows or not known.is_like(uses):
            return False
        return not len(_lacking(self._received, self._owed, uses, dst, layouts))


def shared_violations(plan: SharedPlan, layouts: Layouts, proof: CoverageProof | None = None) -> list[str]:
    """Return everything that is wrong with a plan for these layouts, which must be free of problems.

    Rows of which `proof` has been given are not looked at again, if the layouts' classes are the same.
    """
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
    uses = _uses(plan, layouts.source.rank_class[src], layouts.destination.rank_class[dst])
    found = fill_violations(plan.fills, names[plan.fills.local], layouts)
    if not found and proof is not None and proof.holds(plan.rows, uses, dst, layouts):
        return []
    held, wanted = TileIndex(layouts, layouts.source), TileIndex(layouts, layouts.destination)
    found = doubly_placed(layouts, wanted, layouts.destination) + found
    use, at = ranges(plan.row_start[uses.kind], plan.row_start[uses.kind + 1] - plan.row_start[uses.kind])
    spans, wrong = _traced(replace(rows.select(at), owner=use), uses, held, wanted, layouts, plan)
    found += wrong
    found += _ambiguous_ids(plan, at, uses.destination_class[use])
    owed, received = _owed(wanted, layouts), _received(spans, uses)
    if len(lacking := _lacking(received, owed, uses, dst, layouts)):
        found += _uncovered(spans, uses, wanted, dst, layouts, lacking)
    elif not found and proof is not None:
        proof.keep(plan.rows, uses, received, owed)
    return found


def _renamed(names: Sequence[str], known: Sequence[str]) -> Ints:
    """Return each name's position in `known`, or -1."""
    if names is known:
        return np.arange(len(known))
    position = {name: i for i, name in enumerate(known)}
    return np.array([position.get(name, -1) for name in names], np.int64)


def _positions(ranks: Ints, wanted: Ints) -> Ints:
    bound = below(ranks)
    if not bound or wanted.min(initial=0) < 0:
        return find(ranks, wanted)
    at = np.full(bound + 1, -1)
    at[ranks] = np.arange(len(ranks))
    found: Ints = at[np.minimum(wanted, bound)]
    return found


def _strangers(plan: SharedPlan, layouts: Layouts, src: Ints, dst: Ints) -> list[str]:
    """Return a message for each rank of the plan that offers nothing to send or wants nothing to receive."""
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
            name = layouts.tensors[tensor] if tensor >= 0 else "a tensor that nobody has"
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


def _received(spans: Spans, uses: _Uses) -> Hashes:
    """Return the number of all elements that each use brings."""
    of_use = np.zeros(len(uses.kind), np.uint64)
    np.add.at(of_use, spans.owner, _numbers(spans.tile, spans.offset, spans.size))
    return of_use


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
    by_id = distinct(hashed([destination_class, plan.places[at]]))
    by_place = distinct(hashed([destination_class, rows.tensor, rows.dst_local, rows.dst_offset]))
    if len(by_id) == len(by_place):
        return []
    return ["plan: two copies to one rank have the same task id; rename one of the destination's tensors"]
