"""Plans of a changing fleet: the memory of earlier plans does not change the next plan."""

from __future__ import annotations

from functools import cache

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from refitd.coordinator.plans import LoadedPlan, PlanMemory, make_plan
from refitd.describe.layout import without_ranks
from refitd.describe.metadata import ParameterMetadata, Roster
from tests.support.shares import rows_at

SHAPES = {"a": (1024, 1536), "b": (24,), "c": (4, 1024, 512)}  # large enough for paths

Pool = tuple[int, int, int]  # (ranks, a dimension that they split, its first node)


@cache  # cached, because `ShardReader` also shares one description between ranks
def described(position: int, size: int, dim: int) -> tuple[ParameterMetadata, ...]:
    found = []
    for name, shape in SHAPES.items():
        along = min(dim, len(shape) - 1) if size > 1 else None
        rows = tuple(n // size if d == along else n for d, n in enumerate(shape))
        group = list(range(size)) if along is not None else None
        found.append(
            ParameterMetadata(
                name,
                rows,
                "bfloat16",
                2,
                is_tp=along is not None,
                partition_dim=along or 0,
                owner_rank=position,
                tensor_parallel_group_ranks=group,
            )
        )
    return tuple(without_ranks(found))


def rosters(trainers: list[Pool], engines: list[Pool]) -> list[Roster]:
    """Ranks are numbered through; two of a pool are on one node, which may have ranks of other pools."""
    found: list[Roster] = []
    for is_source, pools in ((True, trainers), (False, engines)):
        for size, dim, node in pools:
            for position in range(size):
                held = described(position, size, dim)
                source, destination = (held, ()) if is_source else ((), held)
                found.append(Roster(len(found), source, destination, node=f"n{node + position // 2}"))
    return found


def shown(plan: LoadedPlan) -> dict[str, object]:
    """Return the contents of the plan's messages and reports."""
    routed, found = plan.routed, dict[str, object]()
    for name in ("inner", "crossing", "onward", "fills"):
        table = getattr(routed, name)
        found[f"{name}: parts"] = [part.digest for part in table.packed]
        found[f"{name}: uses"] = {node: table.at(node).to_wire() for node in set(routed.node_of.values())}
        found[f"{name}: rows"] = {node: rows_at(table, node).to_wire() for node in set(routed.node_of.values())}
    traffic = {name: value.tolist() for name, value in vars(plan.traffic).items() if isinstance(value, np.ndarray)}
    links = routed.links.by_nodes()
    into = {(source, node): n for _, node in links for source, n in routed.links.into(node).items()}
    assert into == links and routed.links.nodes() == {node for link in links for node in link}
    return found | traffic | {
        "id": plan.id,
        "links": links,
        "relays": routed.relays,
        "senders": plan.senders,
        "regions": plan.regions.digest,
    }  # fmt: skip


POOL = st.tuples(st.sampled_from([2, 2, 1, 4]), st.sampled_from([0, 0, 1]), st.integers(0, 5))


@settings(max_examples=20, deadline=None)
@given(
    st.lists(POOL, min_size=1, max_size=3),
    st.lists(POOL, min_size=4, max_size=8),
    st.lists(st.sets(st.integers(0, 7), max_size=3), min_size=2, max_size=6),
    st.booleans(),
)
def test_a_plan_is_the_same_whatever_was_planned_before(
    trainers: list[Pool], engines: list[Pool], without: list[set[int]], are_apart: bool
) -> None:
    memory = PlanMemory()
    trainers = [(size, trainers[0][1], node) for size, _, node in trainers]
    if are_apart:
        engines = [(size, dim, 10 * (1 + number)) for number, (size, dim, _) in enumerate(engines)]
    for gone in without:
        there = [pool for number, pool in enumerate(engines) if number not in gone]
        fleet = rosters(trainers, there)
        assert shown(make_plan(fleet, memory)) == shown(make_plan(fleet))


def test_what_is_made_of_rows_is_made_once_while_engines_come_and_go() -> None:
    memory, trainers = PlanMemory(), [(4, 0, 0)]
    engines = [(2, 1, 10 + node) for node in range(6)]
    before = make_plan(rosters(trainers, engines), memory)
    make_plan(rosters(trainers, [(2, 0, 10)]), memory)  # a rank joins, and is planned for alone
    after = make_plan(rosters(trainers, engines[:2] + engines[3:]), memory)
    assert after.routed.crossing.table.parts is before.routed.crossing.table.parts
