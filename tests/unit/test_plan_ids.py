"""Task ids and choices stay the same under another order of rosters, and when a rank is appended."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from refitd import Roster
from refitd.plan.build import plan_copies
from refitd.plan.table import CopyTable
from tests.support.layouts import meta, replicated, rosters, tp


def fleet(engines: int = 3) -> list[Roster]:
    held = [tp("fc1", (8, 4), [0, 1], partition_stride=2), replicated("norm", (4,), [0, 1])]
    wanted = []
    for first in range(2, 2 + 2 * engines, 2):
        ranks = [first, first + 1]
        wanted += [tp("fc1", (8, 4), ranks, partition_stride=2), replicated("norm", (4,), ranks)]
    return rosters(held, wanted)


def ids(table: CopyTable) -> set[tuple[int, int, int, int]]:
    columns = (table.task_id, table.dst_rank, table.dst_local, table.dst_offset)
    return set(zip(*(column.tolist() for column in columns), strict=True))


def test_any_order_of_rosters_gives_the_same_bytes() -> None:
    found = fleet()
    expected = plan_copies(found)
    for seed in range(5):
        mixed = random.Random(seed).sample(found, len(found))
        again = plan_copies(mixed)
        assert again.table.to_wire() == expected.table.to_wire()
        assert again.digest == expected.digest


def test_any_order_of_tensors_gives_the_same_bytes() -> None:
    found = fleet()
    mixed = [replace(r, source=list(r.source)[::-1], destination=list(r.destination)[::-1]) for r in found[::2]]
    mixed += found[1::2]
    assert plan_copies(mixed).table.to_wire() == plan_copies(found).table.to_wire()


def test_task_ids_are_unique_and_not_negative() -> None:
    table = plan_copies(fleet(20)).table
    assert len(np.unique(table.task_id)) == len(table)
    assert table.task_id.min() >= 0


def test_an_appended_destination_keeps_existing_task_ids_and_sources() -> None:
    before, after = plan_copies(fleet(3)).table, plan_copies(fleet(4)).table
    assert ids(before) < ids(after)
    kept = after.select(after.dst_rank < 8)
    assert kept.src_rank.tolist() == before.src_rank.tolist()


def test_an_appended_source_keeps_existing_task_ids() -> None:
    found = fleet(3)
    extra = Roster(99, source=[meta("fc1", (16, 4), 99), meta("norm", (4,), 99)])
    before, after = plan_copies(found).table, plan_copies([*found, extra]).table
    assert 99 in after.src_rank
    # a place that is written under both plans has one id
    same = {row[1:]: row[0] for row in ids(before)}
    assert all(same[row[1:]] == row[0] for row in ids(after) if row[1:] in same)
    assert any(row[1:] in same for row in ids(after))


def test_task_ids_do_not_depend_on_the_source() -> None:
    one = plan_copies(rosters([replicated("w", (4,), [0])], [replicated("w", (4,), [5])])).table
    two = plan_copies(rosters([replicated("w", (4,), [1])], [replicated("w", (4,), [5])])).table
    assert one.task_id.tolist() == two.task_id.tolist()


def test_two_models_of_equal_sizes_have_different_plans() -> None:
    one = rosters([replicated("a", (4,), [0])], [replicated("a", (4,), [1])])
    two = rosters([replicated("b", (4,), [0])], [replicated("b", (4,), [1])])
    assert plan_copies(one).digest != plan_copies(two).digest
