"""Tensors that are alike at both ends are planned as one, and every plan, part and report has all of them."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

from refitd.plan.build import plan_copies
from refitd.plan.cost import flows_of, traffic_of
from refitd.plan.families import joined, unlike, whole
from refitd.plan.read_rosters import read_rosters
from refitd.plan.routes import routes_of
from refitd.testing import oracle
from tests.support.layouts import replicated, rosters, tp

COUNT = 5
SHAPES = {f"w{i}": (8, 4) for i in range(COUNT)} | {"odd": (8, 4), "norm": (3,)}
# "odd" is cut along another dimension
SOURCES = [
    *(tp(f"w{i}", (4, 4), [0, 1]) for i in range(COUNT)),
    tp("odd", (8, 2), [0, 1], 1),
    replicated("norm", (3,), [0]),
]
WANTED = [
    *(tp(name, (2, 4), [2, 3, 4, 5]) for name in SHAPES if name != "norm"),
    replicated("norm", (3,), [2, 3, 4, 5]),
]
NODES = {rank: f"n{rank // 2}" for rank in range(6)}


def test_a_plan_of_families_is_the_plan_of_all_their_tensors() -> None:
    found = rosters(SOURCES, WANTED, NODES)
    plan = plan_copies(found)
    with patch("refitd.plan.build.joined", lambda layouts: layouts):
        want = plan_copies(found)
    assert plan.few.families is not None and want.few.families is None
    assert len(plan.few.rows) == len(want.few.rows) - 4 * (COUNT - 1) and plan.shared.digest() == want.few.digest()
    assert plan.digest != want.digest and plan.regions.digest == want.regions.digest
    oracle.check(plan.table, found, SHAPES)
    one, other = traffic_of(plan), traffic_of(want)
    assert all(np.array_equal(value, getattr(other, name)) for name, value in vars(one).items())
    for kind in ("inner", "crossing", "onward"):
        mine, full = (getattr(routes_of(each.few, NODES, least_bytes=0), kind).table for each in (plan, want))
        rows, expected = (table.whole() for table in (mine, full))
        assert sorted(rows.task_id.tolist()) == sorted(expected.task_id.tolist())
        for table in (mine, full):
            flows = flows_of(table)
            assert flows.bytes.sum() == rows.total_bytes == expected.total_bytes and flows.rows.sum() == len(rows)


def test_a_family_that_several_ranks_can_send_is_divided() -> None:
    shapes = {f"w{i:03}": (16,) for i in range(100)}
    sources = [replicated(name, shape, [0, 1, 2]) for name, shape in shapes.items()]
    found = rosters(sources, [replicated(name, shape, [3]) for name, shape in shapes.items()])
    plan = plan_copies(found)
    assert len(plan.few.rows) == 50
    sent = traffic_of(plan).bytes
    assert len(sent) == 3 and sent.max() <= 1.05 * sent.mean()
    oracle.check(plan.table, found, shapes)


@pytest.mark.parametrize("damage", ["tensor", "local", "count", "geometry"])
def test_layouts_that_do_not_stand_for_all_tensors_are_refused(damage: str) -> None:
    layouts, _ = read_rosters(rosters(SOURCES, WANTED))
    few = joined(layouts)
    families = few.families
    assert unlike(few, layouts) == [] and families is not None and len(few.tensors) == 3
    assert [len(each.entry_local) for each in (whole(few).source, few.source)] == [2 * COUNT + 3, 5]
    if damage == "geometry":
        wrong = replace(few, source=replace(few.source, entry_geometry=few.source.entry_geometry[::-1]))
    elif damage == "count":
        start = families.tensor_start.copy()
        start[-1] -= 1
        wrong = replace(few, families=replace(families, tensor_start=start))
    else:
        column = np.roll(getattr(families, damage), 1)
        wrong = replace(few, families=replace(families, **{damage: column}))
    assert unlike(wrong, layouts)
