"""For any layouts, the plan gives each destination exactly the slice of the whole tensor."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from unittest.mock import patch

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from refitd import ParameterMetadata, PlanError, ReshardPlan, Roster, plan_reshard
from refitd.inprocess.one_parameter import Transfer, plan_lcm_transfers, sharding_descriptors
from refitd.plan.build import plan_copies
from refitd.plan.shared import GlobalPlan, Planner
from refitd.plan.table import CopyTable, FillTable
from refitd.testing import oracle
from tests.property.layouts import Fleet, fleets
from tests.support.layouts import rosters, tp
from tests.support.plans import violations


def some(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


@some(120)
@given(fleets())
def test_every_destination_gets_what_slicing_gives(fleet: Fleet) -> None:
    with patch("refitd.plan.families.DIVIDED", 1):  # families of several holders are not divided
        joint = plan_copies(fleet.rosters)
    oracle.check(joint.table, fleet.rosters, fleet.shapes, joint.fills)
    assert violations(joint, fleet.rosters) == []
    plan = plan_copies(fleet.rosters)
    oracle.check(plan.table, fleet.rosters, fleet.shapes, plan.fills)
    assert violations(plan, fleet.rosters) == []
    assert violations(plan.table, fleet.rosters, plan.fills) == []


@some(50)
@given(fleets())
def test_slices_say_what_the_table_says(fleet: Fleet) -> None:
    whole = oracle.canonical_tensors(fleet.shapes)
    plans = plan_reshard(fleet.rosters)
    held = {(r.rank, m.name): oracle.local_tensor(m, r.rank, whole) for r in fleet.rosters for m in r.source}
    for roster in fleet.rosters:
        for m in roster.destination:
            want = oracle.local_tensor(m, roster.rank, whole)
            got = np.full(want.shape, oracle.EMPTY, np.int64)
            for op in plans[roster.rank].recv_ops:
                if op.param_name == m.name:
                    send = next(s for s in plans[op.peer_rank].send_ops if s.task_id == op.task_id)
                    sent = held[op.peer_rank, send.param_name][op.peer_slice]
                    assert sent.size == got[op.my_slice].size
                    got[op.my_slice] = sent.reshape(got[op.my_slice].shape)
            np.testing.assert_array_equal(got, want)


@some(50)
@given(fleets(), st.integers())
def test_order_changes_nothing(fleet: Fleet, seed: int) -> None:
    mixed = Random(seed).sample(fleet.rosters, len(fleet.rosters))
    one, two = plan_copies(fleet.rosters), plan_copies(mixed)
    assert one.table.to_wire() == two.table.to_wire()
    assert one.fills == two.fills
    assert one.digest == two.digest


@some(60)
@given(fleets(), st.integers())
def test_an_alias_is_fed_whichever_end_declares_it(fleet: Fleet, seed: int) -> None:
    rng = Random(seed)
    name = rng.choice(sorted(fleet.shapes))
    at_source, twin = rng.random() < 0.5, f"{name}.twin"
    found = []
    for roster in fleet.rosters:
        source, destination = list(roster.source), list(roster.destination)
        if at_source:
            source = [replace(m, aliases=(twin,)) if m.name == name else m for m in source]
        for m in roster.destination:
            if m.name == name:
                tiles = None if m.tiles is None else tuple(replace(tile, tensor=twin) for tile in m.tiles)
                aliases = () if at_source else (name,)
                destination.append(replace(m, name=twin, resolved_name=twin, tiles=tiles, aliases=aliases))
                if rng.random() < 0.3:
                    destination.remove(m)
        found.append(replace(roster, source=source, destination=destination))
    plan = plan_copies(found)
    oracle.check(plan.table, found, fleet.shapes, plan.fills, {twin: name})
    assert violations(plan, found) == []


@some(50)
@given(fleets(), st.integers())
def test_a_declared_cast_changes_sizes_and_nothing_else(fleet: Fleet, seed: int) -> None:
    rng = Random(seed)
    cast = {name for name in fleet.shapes if rng.random() < 0.5}
    found = [
        replace(
            roster,
            source=[replace(m, dtype="float32", element_size=4) if m.name in cast else m for m in roster.source],
            destination=[replace(m, cast_from="float32") if m.name in cast else m for m in roster.destination],
        )
        for roster in fleet.rosters
    ]
    plan, plain = plan_copies(found), plan_copies(fleet.rosters)
    oracle.check(plan.table, found, fleet.shapes, plan.fills)
    assert violations(plan, found) == violations(CopyTable.from_wire(plan.table.to_wire()), found, plan.fills) == []
    is_cast = np.array([plan.table.tensors[i] in cast for i in plan.table.tensor], bool)
    assert plan.table.cast.tolist() == is_cast.astype(int).tolist()
    assert plan.table.src_element_size.tolist() == np.where(is_cast, 4, 2).tolist()
    assert np.array_equal(plan.table.row_bytes, plain.table.row_bytes)
    assert (plan.digest == plain.digest) == (not is_cast.any())


@some(60)
@given(fleets(), st.integers())
def test_a_damaged_fill_never_passes_as_sound(fleet: Fleet, seed: int) -> None:
    rng, plan = Random(seed), plan_copies(fleet.rosters)
    fills = FillTable.from_wire(plan.fills.to_wire())
    assume(len(fills))
    row = rng.randrange(len(fills))
    name = rng.choice(["rank", "offset", "stride", "size", "pattern", "element_size", "lost"])
    if name == "lost":
        fills = fills.select(np.arange(len(fills)) != row)
    else:
        column = getattr(fills, name).copy()
        place = (row, rng.randrange(column.shape[1])) if column.ndim > 1 else (row,)
        column[place] = max(1 if "size" in name else 0, int(column[place]) + rng.choice([-1, 1, 2]))
        fills = replace(fills, **{name: column})
    try:
        oracle.check(plan.table, fleet.rosters, fleet.shapes, fills)
    except (AssertionError, KeyError):
        assert violations(plan.table, fleet.rosters, fills)


@some(120)
@given(fleets(), st.integers())
def test_a_damaged_plan_never_passes_as_sound(fleet: Fleet, seed: int) -> None:
    rng = Random(seed)
    plan = plan_copies(fleet.rosters)
    table, fills = plan.table, plan.fills
    assume(len(table))
    row = rng.randrange(len(table))
    name = rng.choice(["src_rank", "dst_rank", "src_offset", "dst_offset", "src_stride", "dst_stride", "size"])
    column = getattr(table, name)
    place = (row, rng.randrange(column.shape[1])) if column.ndim > 1 else (row,)
    column[place] = max(1 if name == "size" else 0, int(column[place]) + rng.choice([-1, 1, 2]))
    try:
        oracle.check(table, fleet.rosters, fleet.shapes)
    except (AssertionError, KeyError):
        assert violations(table, fleet.rosters, fills)


def intersected(found: list[Roster]) -> tuple[GlobalPlan, dict[int, ReshardPlan]]:
    """Plan without the closed form: every tensor by tile intersection."""
    with patch("refitd.plan.match.lcm_tiling", return_value=None):
        plan, plans = plan_copies(found), plan_reshard(found)
    assert {plan.planner_of(name) for name in plan.table.tensors} <= {Planner.INTERSECT, None}
    return plan, plans


def assert_same_bytes(plan: GlobalPlan, other: GlobalPlan) -> None:
    assert plan.table.to_wire() == other.table.to_wire()
    assert plan.fills == other.fills
    assert plan.digest == other.digest


@some(100)
@given(fleets())
def test_a_plan_does_not_depend_on_what_planned_its_tensors(fleet: Fleet) -> None:
    assert_same_bytes(plan_copies(fleet.rosters), intersected(fleet.rosters)[0])


worlds, strides = st.integers(1, 4), st.integers(1, 3)


@some(120)
@given(worlds, strides, worlds, strides, st.integers(1, 3), st.sampled_from([0, 1]))
def test_lcm_tiling_and_tile_intersection_agree(
    src_world: int, src_stride: int, dst_world: int, dst_stride: int, unit: int, dim: int
) -> None:
    extent = math.lcm(src_world * src_stride, dst_world * dst_stride) * unit

    def side(first: int, world: int, stride: int) -> dict[int, ParameterMetadata]:
        local = (extent // world, 3) if dim == 0 else (3, extent // world)
        return tp("w", local, range(first, first + world), dim, partition_stride=stride)

    def elements(transfers: list[Transfer]) -> set[tuple[int, int, int]]:
        """Every (source rank, element there, element here) along the dimension."""
        assert all(t[1][1 - dim] == t[2][1 - dim] == slice(0, 3) for t in transfers)
        pairs = [(rank, range(e)[src[dim]], range(e)[dst[dim]]) for rank, src, dst in transfers for e in [extent]]
        return {(rank, a, b) for rank, src, dst in pairs for a, b in zip(src, dst, strict=True)}

    source, destination = side(0, src_world, src_stride), side(10, dst_world, dst_stride)
    found = rosters([source], [destination])
    plan, (swept_plan, swept_plans) = plan_copies(found), intersected(found)
    assert plan.planner_of("w") is Planner.LCM
    assert_same_bytes(plan, swept_plan)
    for rank, wanted in destination.items():
        if src_world == dst_world == 1:
            assert sharding_descriptors(source[0], wanted) == []  # neither side is split
            continue
        closed = plan_lcm_transfers("w", source[0], wanted, sharding_descriptors(source[0], wanted), rank)
        swept = [(op.peer_rank, op.peer_slice, op.my_slice) for op in swept_plans[rank].recv_ops]
        assert elements(closed) == elements(swept)


@some(50)
@given(fleets(), st.integers())
def test_a_lost_rank_is_refused_or_not_needed(fleet: Fleet, seed: int) -> None:
    lost = Random(seed).choice(fleet.rosters)
    rest = [roster for roster in fleet.rosters if roster is not lost]
    try:
        plan = plan_copies(rest)
    except PlanError as refused:
        assert all(violation.startswith("t") for violation in refused.violations)
        return
    oracle.check(plan.table, rest, fleet.shapes)
