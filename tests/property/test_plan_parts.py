"""Plans in parts: a node assembles byte for byte the plan that it would get in full, after any ranks joined or left."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from refitd.coordinator.plans import HeldParts, LoadedPlan, PlanMemory, make_plan, routed
from refitd.daemon.plans import KeptParts, Missing, NodeTables
from refitd.describe.metadata import ParameterMetadata, Roster
from refitd.plan.build import plan_copies
from refitd.plan.routes import routes_of
from refitd.plan.table import CopyTable
from refitd.protocol.base import Secret
from refitd.protocol.cluster import EpochPlan, LoadPlan
from tests.support.shares import Shares, rows_at

SHAPES = {"a": (8, 12), "b": (24,), "c": (4, 8, 8)}

Pool = tuple[int, int]  # (ranks, a dimension that they split)


def held(rank: int, group: list[int], dim: int) -> tuple[ParameterMetadata, ...]:
    found = []
    for name, shape in SHAPES.items():
        along = min(dim, len(shape) - 1) if len(group) > 1 else None
        rows = tuple(n // len(group) if d == along else n for d, n in enumerate(shape))
        found.append(
            ParameterMetadata(
                name,
                rows,
                "bfloat16",
                2,
                is_tp=along is not None,
                partition_dim=along or 0,
                owner_rank=rank,
                tensor_parallel_group_ranks=group if along is not None else None,
            )
        )
    return tuple(found)


def rosters(pools: list[Pool], nodes: list[int]) -> list[Roster]:
    """The first pool has the sources. Rank r is on node nodes[r]."""
    found: list[Roster] = []
    for number, (size, dim) in enumerate(pools):
        group = list(range(len(found), len(found) + size))
        for rank in group:
            metas, node = held(rank, group, dim), f"n{nodes[rank % len(nodes)]}"
            found.append(Roster(rank, source=metas, node=node) if not number else Roster(rank, (), metas, node))
    return found


POOLS = st.lists(st.tuples(st.sampled_from([1, 2, 2, 4]), st.sampled_from([0, 1])), min_size=2, max_size=6)
NODES = st.lists(st.integers(0, 4), min_size=1, max_size=24)


def same(found: CopyTable, want: CopyTable) -> bool:
    """Whether two tables are the same bytes; the dimensions of one without rows do not matter."""
    one, other = found.to_wire(), want.with_own_names().to_wire()
    return one == other if len(want) else len(found) == 0


@settings(max_examples=4, deadline=None)
@given(POOLS, NODES)
def test_parts_hold_no_more_rows_than_the_table(pools: list[Pool], nodes: list[int]) -> None:
    found = rosters(pools, nodes)
    plan = plan_copies(found)
    routes = routes_of(plan.few, {roster.rank: roster.node for roster in found}, least_bytes=0)
    tables = (routes.inner.table, routes.crossing.table, routes.onward.table)
    assert sum(len(table.whole()) for table in tables) == len(plan.table)
    assert sorted(i for table in tables for i in table.whole().task_id.tolist()) == sorted(plan.table.task_id.tolist())
    for table in tables:
        assert len(table.parts.rows) <= len(table.whole())


class Node:
    """A node's daemon as far as plans go, and the plan parts that the coordinator believes it has."""

    def __init__(self, max_bytes: int) -> None:
        self.held, self.kept, self.shares = HeldParts(), KeptParts(max_bytes), Shares()

    def load(self, plan: LoadedPlan, name: str) -> tuple[NodeTables, LoadPlan]:
        """Return the node's rows, and the message that the coordinator sent."""
        for _ in range(2):
            message = plan.message("m", (), name, self.held)
            found = self.kept.tables(message)
            if not isinstance(found, Missing):
                self.shares |= message.given
                return found, message
            self.held.forget()
        raise AssertionError("it lacks what it was given")


@settings(max_examples=3, deadline=None)
@given(
    st.lists(st.tuples(POOLS, NODES), min_size=2, max_size=4),
    st.sampled_from([0, 3000, 1 << 20]),
    st.data(),
)
def test_a_node_has_the_same_plan_whatever_it_had_and_has_lost(
    fleets: list[tuple[list[Pool], list[int]]], max_bytes: int, data: st.DataObject
) -> None:
    nodes: dict[str, Node] = {}
    for number, (pools, places) in enumerate(fleets):
        plan = plan_of(rosters(pools, places), number)
        for name in sorted(set(plan.routed.node_of.values())):
            node = nodes.setdefault(name, Node(max_bytes))
            if data.draw(st.booleans()):
                node.kept = KeptParts(max_bytes)  # as if its daemon had lost them without the coordinator's knowledge
            found, _ = node.load(plan, name)
            whole = KeptParts().tables(plan.message("m", (), name, HeldParts()))
            assert isinstance(whole, NodeTables)
            for table, shared in (("table", plan.routed.inner), ("fills", plan.routed.fills)):
                assert same_rows(getattr(whole, table), rows_at(shared, name))
            if found.epoch is not None:
                for table, shared in (("crossing", plan.routed.crossing), ("onward", plan.routed.onward)):
                    assert same_rows(getattr(whole, table), rows_at(shared, name))
            for field in fields(NodeTables):
                one, other = getattr(found, field.name), getattr(whole, field.name)
                if hasattr(one, "to_wire"):
                    one, other = one.to_wire(), other.to_wire()
                assert one == other, field.name


def same_rows(found: Any, want: Any) -> bool:
    """Whether a node's table, None without rows, has these rows."""
    return len(want) == 0 if found is None or not len(found) else found.to_wire() == want.with_own_names().to_wire()


def plan_of(found: list[Roster], number: int = 0) -> LoadedPlan:
    plan = make_plan(found)
    plan.belongs_to("m", {f"member {roster.rank}": roster.rank for roster in found})
    if plan.routed.links:
        nodes = tuple(sorted(plan.routed.links.nodes()))
        key = Secret(bytes(32))
        plan.epoch = EpochPlan(f"e{number}", "gloo", nodes, tuple(f"h {n}" for n in nodes), 1, 1, 1.0, key)
    return plan


def test_a_whole_message_has_the_rows_of_the_plan() -> None:
    found = rosters([(2, 0), (2, 1), (4, 0)], [0, 0, 1, 1, 1, 2])
    plan, whole = plan_of(found), plan_copies(found)
    shares = routed(whole, plan.routed.node_of, PlanMemory(), may_relay=True)
    for node in ("n0", "n1", "n2"):
        inner = [i for i in range(len(whole.table)) if {plan.routed.node_of[int(whole.table.src_rank[i])]} == {node}]
        inner = [i for i in inner if plan.routed.node_of[int(whole.table.dst_rank[i])] == node]
        assert same(rows_at(shares.inner, node), whole.table.select(np.array(inner, np.int64)))


def test_a_replica_that_joins_changes_little_of_what_is_sent() -> None:
    pools = [(2, 0), *[(2, 1)] * 12]
    before, after = (plan_of(rosters(some, [r // 2 for r in range(40)])) for some in (pools, [*pools, (2, 1)]))
    assert len(after.routed.crossing.table.parts.rows) == len(before.routed.crossing.table.parts.rows), (
        "a row for each kind of copy"
    )
    nodes = {name: Node(1 << 20) for name in set(after.routed.node_of.values())}
    first = {name: node.load(before, name) for name, node in nodes.items() if name != "n13"}
    again = {name: node.load(after, name) for name, node in nodes.items()}
    given = [sum(map(len, load.given.values())) for _, load in (*first.values(), *again.values())]
    assert sum(given[:13]) > 2 * sum(given[13:])
    pairs = [(first[name][1], again[name][1]) for name in first]
    same = [(one, other) for one, other in pairs if (one.share, one.ranks) == (other.share, other.ranks)]
    assert len(same) == 12, "all but the source's node"
    # a node without changes receives at most its peers of the new epoch
    assert all(set(other.given) <= {other.peers} for _, other in same)


def test_parts_name_no_rank() -> None:
    parts = make_plan(rosters([(1, 0), (2, 0), (4, 1)], [0, 1, 1, 2, 2, 2, 2])).routed.crossing.packed
    other = make_plan(rosters([(1, 0), (4, 1), (2, 0)], [0, 3, 3, 3, 3, 4, 4])).routed
    assert {part.digest for part in parts} & {part.digest for part in other.crossing.packed}
