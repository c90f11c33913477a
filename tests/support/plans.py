"""Verify plans that came as tables, possibly damaged: the planner itself verifies only plans in its own form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from refitd.describe.metadata import Roster
from refitd.plan.coalesce import Rows
from refitd.plan.columns import Ints, distinct, hashed, numbered, offsets_of, ranges
from refitd.plan.layouts import Layouts
from refitd.plan.read_rosters import read_rosters
from refitd.plan.shared import GlobalPlan, SharedFills, SharedPlan
from refitd.plan.table import CopyTable, FillTable
from refitd.plan.validate import shared_violations


def violations(plan: GlobalPlan | CopyTable, rosters: Sequence[Roster], fills: FillTable | None = None) -> list[str]:
    """Return every reason why a plan does not write these rosters' destinations correctly.

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
    return found + shared_violations(_shared_from(plan, fills, layouts), layouts)


def _shared_from(table: CopyTable, fills: FillTable | None, layouts: Layouts) -> SharedPlan:
    """Return tables as a shared plan with the names of `layouts`; rows of unknown tensors get the number -1."""
    order = np.lexsort((np.arange(len(table)), table.src_rank, table.dst_rank))
    table = table.select(order)
    tensors, names = _positions(table.tensors, layouts.tensors), _positions(table.locals, layouts.locals)
    src, dst = (column.astype(np.int64) for column in (table.src_rank, table.dst_rank))
    rows = Rows(
        owner=np.zeros(len(table), np.int64),
        tensor=tensors[table.tensor],
        src_local=names[table.src_local],
        dst_local=names[table.dst_local],
        element_size=table.element_size.astype(np.int64),
        cast=table.cast.astype(np.int64),
        origin=np.zeros_like(table.size),
        size=table.size,
        src_offset=table.src_offset,
        src_stride=table.src_stride,
        dst_offset=table.dst_offset,
        dst_stride=table.dst_stride,
    )
    job_start = np.flatnonzero(np.append(True, (np.diff(src) != 0) | (np.diff(dst) != 0))[: len(src)])
    count = np.diff(np.append(job_start, len(src)))
    content = hashed([getattr(rows, f.name) for f in fields(rows)])
    example, kind = numbered(np.add.reduceat(content, job_start) if len(content) else content)
    owner, at = ranges(job_start[example], count[example])
    return SharedPlan(
        tensors=layouts.tensors,
        locals=layouts.locals,
        rows=replace(rows.select(at), owner=owner),
        row_start=offsets_of(owner, len(example)),
        job_rows=kind,
        job_src=src[job_start],
        job_dst=dst[job_start],
        fills=SharedFills() if fills is None else _fills_from(fills, layouts),
    )


def _fills_from(table: FillTable, layouts: Layouts) -> SharedFills:
    table = table.select(np.argsort(table.rank, kind="stable"))
    ranks, start = np.unique(table.rank, return_index=True)
    return SharedFills(
        rank=ranks.astype(np.int64),
        kind=np.arange(len(ranks)),
        row_start=np.append(start, len(table)),
        local=_positions(table.locals, layouts.locals)[table.local],
        element_size=table.element_size.astype(np.int64),
        pattern=table.pattern,
        size=table.size,
        offset=table.offset,
        stride=table.stride,
    )


def _positions(names: Sequence[str], known: Sequence[str]) -> Ints:
    """Return each name's position in `known`, or -1."""
    position = {name: i for i, name in enumerate(known)}
    return np.array([position.get(name, -1) for name in names], np.int64)
