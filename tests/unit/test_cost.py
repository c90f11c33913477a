"""Cost: bytes per pair and tensor, balance, memory and seconds, by hand and against the written-out table."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from refitd.describe.metadata import Roster
from refitd.offline.files import read
from refitd.offline.layouts import Layout
from refitd.offline.rosters import rosters_of
from refitd.plan.build import plan_copies
from refitd.plan.cost import flows_of, traffic_of
from refitd.plan.routes import routes_of
from refitd_cli.layouts import balance_of, copies_of, in_a_swap, memory_of

WEIGHT = {"name": "w", "shape": [8, 4], "dtype": "float32", "split": {"dim": 0}, "stage": "every"}
NORM = {"name": "norm", "shape": [3], "dtype": "float32", "stage": "every"}


def layout(**degrees) -> Layout:
    model = {"name": "m", "tensors": [WEIGHT, NORM]}
    found = read({"kind": "layout", "name": "l", "model": model, **degrees}, "test")
    assert isinstance(found, Layout)
    return found


def case(source: dict, target: dict, *, collocated: bool = False):
    rosters = rosters_of(layout(**source), [layout(**target)], collocated=collocated)
    plan = plan_copies(rosters)
    return rosters, plan, traffic_of(plan)


def test_pairs_of_one_to_two():
    _, _, traffic = case({}, {"tp": 2})
    assert traffic.src.tolist() == [0, 0]
    assert traffic.dst.tolist() == [1, 2]
    assert traffic.bytes.tolist() == [64 + 12, 64 + 12]
    assert traffic.copies.tolist() == [2, 2]
    assert traffic.total_bytes == 152
    assert traffic.largest_tensors() == [("w", 128, 2), ("norm", 24, 2)]


@pytest.mark.parametrize("target", [{"tp": 1, "dp": 3}, {"tp": 4, "dp": 2}, {"tp": 8}])
def test_traffic_is_that_of_the_written_out_table(target):
    _, plan, traffic = case({"tp": 2, "dp": 3}, target)
    table = plan.table
    assert traffic.total_bytes == table.total_bytes
    assert traffic.total_copies == len(table)
    pairs = {}
    for src, dst, moved in zip(table.src_rank.tolist(), table.dst_rank.tolist(), table.row_bytes.tolist(), strict=True):
        pairs[src, dst] = pairs.get((src, dst), 0) + moved
    found = zip(traffic.src.tolist(), traffic.dst.tolist(), traffic.bytes.tolist(), strict=True)
    assert {(s, d): b for s, d, b in found} == pairs
    by_name = {table.tensors[i]: int(table.row_bytes[table.tensor == i].sum()) for i in range(len(table.tensors))}
    assert {name: moved for name, moved, _ in traffic.largest_tensors()} == by_name


@pytest.mark.parametrize("target", [{"tp": 1, "dp": 3}, {"tp": 4, "dp": 2}])
def test_flows_are_those_of_the_written_out_tables(target):
    rosters, plan, _ = case({"tp": 2, "dp": 3}, target)
    routes = routes_of(plan.few, {roster.rank: f"n{roster.rank % 2}" for roster in rosters})
    for routed in (routes.inner, routes.crossing, routes.onward):
        whole, flows = routed.table.whole(), flows_of(routed.table)
        wanted, found = Counter(), Counter()
        columns = (whole.src_rank, whole.dst_rank, whole.row_bytes)
        for src, dst, moved in zip(*(column.tolist() for column in columns), strict=True):
            wanted += Counter({(src, dst, "rows"): 1, (src, dst, "bytes"): moved})
        columns = (flows.src, flows.dst, flows.rows, flows.bytes)
        for src, dst, rows, moved in zip(*(column.tolist() for column in columns), strict=True):
            found += Counter({(src, dst, "rows"): rows, (src, dst, "bytes"): moved})
        assert found == wanted
    assert all(len(routed.table.uses) for routed in (routes.inner, routes.crossing, routes.onward))


def test_copies_of_a_tensor_are_the_tables_rows_of_it():
    _, plan, _ = case({"tp": 4, "dp": 2}, {"tp": 2, "dp": 3})
    whole = plan.table.select(plan.table.tensor == plan.table.tensors.index("w"))
    found = copies_of(plan, "w")
    for column in ("src_rank", "dst_rank", "size", "src_offset", "dst_offset", "src_stride", "dst_stride"):
        assert np.array_equal(getattr(found, column), getattr(whole, column)), column
    assert len(copies_of(plan, "unknown")) == 0


def test_local_copies_are_not_sent():
    rosters, _, traffic = case({"tp": 2}, {"tp": 2}, collocated=True)
    assert traffic.local_bytes == traffic.total_bytes == 152
    assert balance_of(traffic, rosters).max_bytes == 0
    assert balance_of(traffic, rosters).max_over_mean == 1.0


def test_balance_is_of_all_senders():
    rosters, _, traffic = case({"dp": 4}, {})
    balance = balance_of(traffic, rosters)
    assert (balance.senders, balance.max_bytes, balance.max_rank) == (4, 128, 2)
    assert balance.max_over_mean == 128 / 35
    assert balance_of(traffic, [Roster(0)]).senders == 0


def test_memory_is_each_sides_shard():
    rosters, _, _ = case({"tp": 2}, {"tp": 4})
    assert [(m.rank, m.source_bytes, m.staging_bytes) for m in memory_of(rosters)] == [
        (0, 76, 0),
        (1, 76, 0),
        *((rank, 0, 44) for rank in range(2, 6)),
    ]


def test_in_a_swap_what_ranks_of_a_node_need_alike_crosses_once():
    # rank 0 alone; ranks 1 to 3 on another node hold everything, rank 4 on a third one
    rosters, plan, traffic = case({"ranks_per_node": 1}, {"dp": 4, "ranks_per_node": 3})
    assert [r.node for r in rosters] == ["node0", *3 * ["node1"], "node2"]
    moved = in_a_swap(plan, rosters, traffic)
    pairs = zip(moved.src.tolist(), moved.dst.tolist(), moved.bytes.tolist(), moved.copies.tolist(), strict=True)
    assert sorted(pairs) == [(0, 1, 140, 2), (0, 4, 140, 2), (1, 2, 140, 2), (1, 3, 140, 2)]


@pytest.mark.parametrize("target", [{"tp": 4, "dp": 3, "ranks_per_node": 2}, {"tp": 2, "dp": 3, "ranks_per_node": 4}])
def test_in_a_swap_every_rank_gets_what_it_needs(target):
    rosters, plan, traffic = case({"tp": 2, "dp": 2, "ranks_per_node": 3}, target)
    moved = in_a_swap(plan, rosters, traffic)
    assert [int(moved.bytes[moved.dst == rank].sum()) for rank in range(20)] == [
        int(traffic.bytes[traffic.dst == rank].sum()) for rank in range(20)
    ]


def test_in_a_swap_on_one_node_nothing_changes():
    rosters, plan, traffic = case({"tp": 2}, {"tp": 4}, collocated=True)
    moved = in_a_swap(plan, rosters, traffic)
    assert np.array_equal(moved.bytes, traffic.bytes) and np.array_equal(moved.src, traffic.src)


def test_ranks_without_a_node_have_one_each():
    rosters, plan, traffic = case({}, {"dp": 2})
    bare = [Roster(r.rank, r.source, r.destination) for r in rosters]
    moved = in_a_swap(plan, bare, traffic)
    assert np.array_equal(moved.dst, traffic.dst) and np.array_equal(moved.bytes, traffic.bytes)


def test_nothing_to_move_has_no_bytes():
    assert traffic_of(plan_copies([Roster(0)])).total_bytes == 0
