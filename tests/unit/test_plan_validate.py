"""The validator finds what is wrong with a plan, and names it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from refitd import Roster
from refitd.plan.build import plan_copies
from refitd.plan.table import CopyTable
from refitd.plan.validate import violations
from tests.support.layouts import replicated, rosters, tp

FLEET = rosters(
    [tp("w", (8, 4), [0, 1], partition_stride=2), replicated("norm", (4,), [0, 1])],
    [tp("w", (4, 4), [2, 3, 4, 5], partition_stride=2), replicated("norm", (4,), [2, 3, 4, 5])],
)


def changed(row: int, **columns: Any) -> CopyTable:
    table = plan_copies(FLEET).table
    for name, value in columns.items():
        column = getattr(table, name).copy()
        column[row] = value
        table = replace(table, **{name: column})
    return table


def row_of(name: str) -> int:
    table = plan_copies(FLEET).table
    return int(np.flatnonzero(table.tensor == table.tensors.index(name))[0])


def only(table: CopyTable, fleet: list[Roster] = FLEET) -> str:
    found = violations(table, fleet)
    assert len(found) == 1, found
    return found[0]


def test_a_sound_plan_has_no_violations() -> None:
    plan = plan_copies(FLEET)
    assert violations(plan, FLEET) == []
    assert violations(plan.table, FLEET) == []
    assert violations(CopyTable.from_wire(plan.table.to_wire()), FLEET) == []


def test_a_lost_copy_leaves_its_place_unwritten() -> None:
    table = plan_copies(FLEET).table
    said = only(table.select(np.arange(len(table)) != row_of("norm")))
    assert said.startswith("norm: rank 2 would be sent 0 elements for the 4")


def test_a_copy_twice_is_written_twice() -> None:
    table = plan_copies(FLEET).table
    twice = table.select(np.append(np.arange(len(table)), row_of("norm")))
    found = violations(twice, FLEET)
    assert found[0] == "plan: a task id is used by several copies"
    assert found[1].startswith("norm: rank 2 would be sent 8 elements for the 4")


def test_a_place_outside_the_tensor_is_out_of_bounds() -> None:
    found = violations(changed(row_of("norm"), dst_offset=1), FLEET)
    assert any("norm" in line and "outside" in line for line in found)


def test_elements_from_the_wrong_place_are_found_though_every_place_is_written() -> None:
    row = row_of("w")
    assert "would put other elements there" in only(changed(row, src_offset=4))


def test_elements_from_the_wrong_rank_are_found() -> None:
    assert "would put other elements there" in only(changed(row_of("w"), src_rank=1))


def test_a_wrong_element_size_is_found() -> None:
    assert "would put other elements there" in only(changed(row_of("norm"), element_size=4))


def test_ranks_without_a_roster_are_found() -> None:
    assert only(changed(0, src_rank=77)) == "rank 77: the plan says it sends, and offers nothing"
    assert "rank 0: the plan says it receives, and wants nothing" in violations(changed(0, dst_rank=0), FLEET)


def test_every_violation_is_reported() -> None:
    table = plan_copies(FLEET).table
    damaged = table.select(~np.isin(np.arange(len(table)), [row_of("norm"), row_of("w")]))
    assert [line.split(":")[0] for line in violations(damaged, FLEET)] == ["norm", "w", "w"]


def test_a_plan_for_other_rosters_is_refused() -> None:
    other = rosters([replicated("v", (4,), [0])], [replicated("v", (4,), [2])])
    found = violations(plan_copies(FLEET).table, other)
    assert any("wants nothing" in line for line in found)
    assert violations(plan_copies(other).table, FLEET)
