"""The validator finds what is wrong with a plan, and names it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from refitd import Roster
from refitd.plan.build import plan_copies
from refitd.plan.table import CopyTable
from tests.support.layouts import replicated, rosters, tp
from tests.support.plans import violations

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


@pytest.mark.parametrize(
    ("tensor", "columns", "said"),
    [
        ("w", {"src_offset": 4}, "would put other elements there"),  # though every place is written
        ("w", {"src_rank": 1}, "would put other elements there"),
        ("norm", {"element_size": 4}, "would put other elements there"),
        ("norm", {"dst_offset": 1}, "outside"),
        ("w", {"src_rank": 77}, "rank 77: the plan says it sends, but it offers no tensor"),
        ("w", {"dst_rank": 0}, "rank 0: the plan says it receives, but it wants no tensor"),
    ],
)
def test_a_row_that_is_wrong_is_found_and_named(tensor: str, columns: dict[str, int], said: str) -> None:
    found = violations(changed(row_of(tensor), **columns), FLEET)
    assert any(said in line and (tensor in line or "the plan says" in line) for line in found)
    assert len(found) == 1 or said in ("outside", "rank 0: the plan says it receives, but it wants no tensor")
