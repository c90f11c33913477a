"""Relays and onward copies: each row crosses to a node once, and every rank gets the elements that it needs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refitd.describe.layout import tiles_of
from refitd.describe.metadata import ParameterMetadata, Roster, Tile
from refitd.plan import boxes
from refitd.plan.between_nodes import ONCE
from refitd.plan.build import plan_copies
from refitd.plan.cost import EQUAL, Cables
from refitd.plan.relays import Relays
from refitd.plan.routes import Routes, routes_of
from refitd.plan.table import CopyTable, CrossingTable
from refitd.testing import oracle
from tests.property.layouts import random_fleet, random_side
from tests.support.layouts import meta

SHAPES = {"a": (12, 12), "b": (24,), "c": (2, 12, 12)}


def held(rank: int, group: list[int], dims: dict[str, int | None]) -> list[ParameterMetadata]:
    found = []
    for name, shape in SHAPES.items():
        dim = dims[name] if len(group) > 1 else None
        local = tuple(n // len(group) if d == dim else n for d, n in enumerate(shape))
        found.append(
            ParameterMetadata(
                name=name,
                shape=local,
                dtype=torch.int16,
                element_size=2,
                is_tp=dim is not None,
                partition_dim=dim or 0,
                owner_rank=rank,
                tensor_parallel_group_ranks=group if dim is not None else None,
            )
        )
    return found


DIMS = st.fixed_dictionaries({"a": st.sampled_from([0, 1, None]), "b": st.just(0), "c": st.sampled_from([1, 2])})
SPEEDS = st.sampled_from([1e8, 2.5e7, 3e9])


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[Roster], dict[int, str], Cables]:
    """Sources and replicas, each with its own number of shards, over nodes with their own cables."""
    rosters: list[Roster] = []
    sizes = [draw(st.sampled_from([1, 2])), *draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=6))]
    usual = draw(DIMS)
    sources, nodes = draw(st.integers(1, min(3, len(sizes) - 1))), draw(st.integers(1, 6))
    for number, size in enumerate(sizes):
        group = list(range(len(rosters), len(rosters) + size))
        dims = draw(st.one_of(st.just(usual), DIMS))
        for rank in group:
            metas, node = held(rank, group, dims), f"n{draw(st.integers(0, nodes - 1))}"
            is_source = number < sources
            rosters.append(
                Roster(rank, source=metas, node=node) if is_source else Roster(rank, destination=metas, node=node)
            )
    ways = [draw(st.dictionaries(st.sampled_from([f"n{i}" for i in range(nodes)]), SPEEDS)) for _ in range(2)]
    cables = draw(st.sampled_from([EQUAL, Cables("drawn", 1e8, *ways)]))
    return rosters, {roster.rank: roster.node for roster in rosters}, cables


def perform(
    table: CopyTable, read: dict[tuple[int, str], np.ndarray], written: dict[tuple[int, str], np.ndarray]
) -> None:
    for i in range(len(table)):
        source = read[int(table.src_rank[i]), table.locals[table.src_local[i]]]
        target = written[int(table.dst_rank[i]), table.locals[table.dst_local[i]]]
        box = np.indices(table.size[i]).reshape(len(table.size[i]), -1)
        there = int(table.src_offset[i]) + table.src_stride[i] @ box
        here = int(table.dst_offset[i]) + table.dst_stride[i] @ box
        target.reshape(-1)[here] = source.reshape(-1)[there]


def check_paths(rows: CrossingTable, relays: Relays, crossing: CopyTable, node_of: dict[int, str]) -> None:
    """Check that paths use each cable as predicted, and that all hops of a path have the same rows in one order."""
    assert sorted(rows.task_id.tolist()) == sorted(crossing.task_id.tolist())
    for path, said in enumerate(relays.paths, 1):
        on = rows.select(rows.path == path)
        nodes = (said.source, *said.nodes)
        sizes = [on.size[on.hop == hop].tolist() for hop in range(len(said.nodes))]
        assert all(each == sizes[0] for each in sizes)
        for src, dst, hop in zip(on.src_rank.tolist(), on.dst_rank.tolist(), on.hop.tolist(), strict=True):
            assert (node_of[src], node_of[dst]) == nodes[hop : hop + 2]
        assert on.total_bytes == said.nbytes * len(said.nodes)
    assert set(rows.path.tolist()) <= set(range(len(relays.paths) + 1))
    assert not rows.is_relayed[rows.path == 0].any()
    for busiest, found in ((relays.bytes, rows), (relays.direct_bytes, crossing)):
        if not busiest:  # no row is needed by several nodes
            assert not relays.paths
            continue
        through: Counter[tuple[str, str]] = Counter()
        for src, dst, nbytes in zip(found.src_rank.tolist(), found.dst_rank.tolist(), found.row_bytes, strict=True):
            through[node_of[src], "out"] += int(nbytes)
            through[node_of[dst], "in"] += int(nbytes)
        assert max(through.values()) == busiest


def elements(crossing: CopyTable, i: int) -> list[int]:
    """The elements of the source's tensor that a row reads."""
    box = np.indices(crossing.size[i]).reshape(len(crossing.size[i]), -1)
    return (int(crossing.src_offset[i]) + crossing.src_stride[i] @ box).tolist()


def check_once(
    crossing: CopyTable, rosters: list[Roster], node_of: dict[int, str], shapes: dict[str, tuple[int, ...]]
) -> Counter[tuple[str, int, int]]:
    """Check that hardly any byte crosses to a node twice. Return how often each (node, rank, element) is sent."""
    whole = oracle.canonical_tensors(shapes)
    canonical = {(r.rank, m.name): oracle.local_tensor(m, r.rank, whole) for r in rosters for m in r.source}
    sent: Counter[tuple[str, int, int]] = Counter()
    needed: set[tuple[str, int]] = set()
    for i in range(len(crossing)):
        src, name, node = (
            int(crossing.src_rank[i]),
            crossing.locals[crossing.src_local[i]],
            node_of[crossing.dst_rank[i]],
        )
        for element in canonical[src, name].reshape(-1)[elements(crossing, i)].tolist():
            sent[node, src, element] += 1
            needed.add((node, element))
    assert ONCE * sent.total() <= len(needed), "bytes cross to a node twice"
    return sent


@settings(max_examples=60, deadline=None)
@given(fleets())
def test_every_rank_gets_its_slices(fleet: tuple[list[Roster], dict[int, str], Cables]) -> None:
    rosters, node_of, cables = fleet
    plan = plan_copies(rosters, cables=cables)
    assert plan.digest == plan_copies(rosters[::-1], cables=cables).digest
    table = plan.table
    crosses = np.array([node_of[s] != node_of[d] for s, d in zip(table.src_rank, table.dst_rank, strict=True)], bool)
    routes = routes_of(plan.few, node_of, least_bytes=0, cables=cables)
    crossing = routes_of(plan.few, node_of, may_relay=False).crossing.table.whole()
    rows, relays, onward = routes.crossing.table.whole(), routes.relays, routes.onward.table.whole()
    assert len(routes.inner.table.whole()) == (~crosses).sum()
    assert sum(routes.links.by_nodes().values()) == rows.total_bytes
    check_paths(rows, relays, crossing, node_of)
    assert relays.seconds <= relays.direct_seconds
    rows = CrossingTable.from_wire(rows.with_own_names().to_wire())
    assert len(crossing) + len(onward) == crosses.sum()
    sent = check_once(crossing, rosters, node_of, SHAPES)
    assert set(sent.values()) <= {1}, "a rank sends a byte to a node twice"
    for src, dst in zip(onward.src_rank.tolist(), onward.dst_rank.tolist(), strict=True):
        assert node_of[src] == node_of[dst] and src != dst
    check_written(routes, rosters, SHAPES)


def check_written(routes: Routes, rosters: list[Roster], shapes: dict[str, tuple[int, ...]]) -> None:
    """Check that every rank has its slices after all copies on its node."""
    inner, rows, onward = (each.table.whole() for each in (routes.inner, routes.crossing, routes.onward))
    whole = oracle.canonical_tensors(shapes)
    sources = {(r.rank, m.name): oracle.local_tensor(m, r.rank, whole) for r in rosters for m in r.source}
    wanted = {(r.rank, m.name): oracle.local_tensor(m, r.rank, whole) for r in rosters for m in r.destination}
    written = {key: np.full(value.shape, -1, value.dtype) for key, value in wanted.items()}
    perform(inner, sources, written)
    for hop in range(int(rows.hop.max(initial=0)) + 1):
        perform(rows.select(rows.hop == hop), written if hop else sources, written)
    perform(onward, written, written)
    for key, value in wanted.items():
        np.testing.assert_array_equal(written[key], value, err_msg=str(key))


def with_more(rng: Random, roster: Roster, shapes: dict[str, tuple[int, ...]], node: str) -> Roster:
    """Return the roster on a node; some of its tensors may be needed a second time, in another layout."""
    more = []
    for m in roster.destination:
        if rng.random() < 0.3:
            again = random_side(rng, m.name, shapes[m.name], [roster.rank])[roster.rank]
            tiles = tuple(tiles_of(again))
            more.append(
                replace(meta(f"{m.name} again", again.shape), tiles=tiles, global_shape=shapes[m.name], fill=again.fill)
            )
    return replace(roster, destination=[*roster.destination, *more], node=node)


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False))
def test_whatever_is_cut_in_whatever_way_and_wanted_however_often_crosses_once(rng: Random) -> None:
    fleet = random_fleet(rng)
    nodes = rng.randint(1, 4)
    rosters = [with_more(rng, roster, fleet.shapes, f"n{rng.randrange(nodes)}") for roster in fleet.rosters]
    node_of = {roster.rank: roster.node for roster in rosters}
    with mock.patch.object(boxes, "FEW", 1 << 20):
        plan = plan_copies(rosters)
        assert plan.digest == plan_copies(rosters[::-1]).digest
    oracle.check(plan.table, rosters, fleet.shapes, plan.fills)
    check_once(routes_of(plan.few, node_of, may_relay=False).crossing.table.whole(), rosters, node_of, fleet.shapes)
    check_written(routes_of(plan.few, node_of, least_bytes=0), rosters, fleet.shapes)


def test_what_one_engine_holds_in_a_row_and_another_in_pieces_crosses_once() -> None:
    """Regression: the engines have rows of different lengths, which were coalesced differently and both sent."""
    pieces = tuple(Tile("w", (4 * i, 0), (4, 8), 32 * at, (8, 1)) for i, at in enumerate((2, 0, 1)))
    rosters = [
        *(Roster(rank, source=[meta("w", (12, 8), rank)], node="t") for rank in range(2)),
        Roster(
            2,
            (),
            [meta("w", (12, 8), 2), meta("w, twice", (4, 8), 2, tiles=(Tile("w", (8, 0), (4, 8), 0, (8, 1)),))],
            "e",
        ),
        Roster(3, (), [meta("w", (96,), 3, tiles=pieces)], "e"),
    ]
    plan = plan_copies(rosters)
    links = routes_of(plan.few, {roster.rank: roster.node for roster in rosters}).links
    assert links.by_nodes() == {("t", "e"): 12 * 8 * 2}
    oracle.check(plan.table, rosters, {"w": (12, 8)})


def test_tensors_whose_numbers_and_sizes_lie_in_line_cross_once() -> None:
    """Number and rows of two tensors, (0, 256) and (448, 64), give one sum if weighted with multiples of a constant."""
    heights = {f"t{i:03d}": 256 if i == 0 else 64 for i in range(449)}
    rosters = [Roster(0, source=tall(heights, 0)), *(Roster(i, destination=tall(heights, i)) for i in range(1, 5))]
    node_of = {0: "n0", 1: "n1", 2: "n1", 3: "n2", 4: "n2"}
    routes = routes_of(plan_copies(rosters).few, node_of, least_bytes=0)
    rows, onward = routes.crossing.table.whole(), routes.onward.table.whole()
    assert len(rows) == len(onward) == 2 * len(heights)
    assert [path.nodes for path in routes.relays.paths] == [("n1", "n2")]
    assert sorted(zip(rows.src_rank.tolist(), rows.dst_rank.tolist(), strict=True)) == [(0, 1)] * 449 + [(1, 3)] * 449


def tall(heights: dict[str, int], rank: int) -> list[ParameterMetadata]:
    made = {"dtype": torch.int16, "element_size": 2, "is_tp": False, "partition_dim": 0, "owner_rank": rank}
    return [ParameterMetadata(name=name, shape=(height, 128), **made) for name, height in heights.items()]  # type: ignore[arg-type]


def test_little_goes_directly() -> None:
    heights = {f"t{i}": 4 for i in range(10)}
    rosters = [Roster(0, source=tall(heights, 0)), *(Roster(i, destination=tall(heights, i)) for i in range(1, 5))]
    routes = routes_of(plan_copies(rosters).few, {rank: f"n{rank}" for rank in range(5)})
    assert routes.relays.paths == () and not routes.crossing.table.uses.path.any()


def test_nodes_that_hold_no_base_come_last() -> None:
    """Nodes behind them on the path would also get full versions."""
    rosters = [
        Roster(0, source=tall({"t": 2048}, 0)),
        *(Roster(i, destination=tall({"t": 2048}, i)) for i in range(1, 5)),
    ]
    node_of = {rank: f"n{rank}" for rank in range(5)}
    routes = routes_of(plan_copies(rosters).few, node_of, last={"n1", "n3"})
    assert [path.nodes for path in routes.relays.paths] == [("n2", "n4", "n1", "n3")]


@pytest.mark.parametrize("sources", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 2])
def test_replicas_of_a_node_get_it_once_however_many_replicas_of_the_trainer_hold_it(sources: int, size: int) -> None:
    dims: dict[str, int | None] = {"a": 0, "b": 0, "c": 1}
    rosters: list[Roster] = []
    for number in range(sources + 3):
        group = list(range(len(rosters), len(rosters) + (1 if number < sources else size)))
        for rank in group:
            metas = held(rank, group, dims)
            is_source = number < sources
            rosters.append(
                Roster(rank, source=metas, node=f"t{number % 2}")
                if is_source
                else Roster(rank, destination=metas, node="e")
            )
    plan = plan_copies(rosters)
    links = routes_of(plan.few, {roster.rank: roster.node for roster in rosters}).links
    assert sum(links.by_nodes().values()) == sum(2 * int(np.prod(shape)) for shape in SHAPES.values())


@pytest.mark.parametrize(("trainer", "copies"), [(1, 4), (2, 2), (2, 4), (4, 1)])
@pytest.mark.parametrize("engines", [(1, 1, 1, 1), (1, 2, 4), (2, 2, 1, 4, 1)])
def test_a_trainers_cable_carries_one_copy_however_many_of_its_ranks_hold_the_same(
    trainer: int, copies: int, engines: tuple[int, ...]
) -> None:
    rosters: list[Roster] = []
    for node, size in [*[("train", trainer)] * copies, *((f"n{i}", size) for i, size in enumerate(engines))]:
        group = list(range(len(rosters), len(rosters) + size))
        for rank in group:
            made = {"dtype": torch.int16, "element_size": 2, "is_tp": size > 1, "partition_dim": 0, "owner_rank": rank}
            made |= {"tensor_parallel_group_ranks": group if size > 1 else None, "shape": (64 // size, 128)}
            metas = [ParameterMetadata(name=name, **made) for name in "abcdefgh"]  # type: ignore[arg-type]
            is_source = node == "train"
            rosters.append(Roster(rank, metas if is_source else (), () if is_source else metas, node))
    node_of = {roster.rank: roster.node for roster in rosters}
    plan = plan_copies(rosters)
    routes = routes_of(plan.few, node_of, least_bytes=0)
    whole = 8 * 64 * 128 * 2
    assert sum(nbytes for (src, _), nbytes in routes.links.by_nodes().items() if src == "train") == whole
    assert routes.relays.bytes == whole and routes.relays.direct_bytes == len(engines) * whole
    rows = routes.crossing.table.whole()
    sent: Counter[int] = Counter()
    for rank, nbytes in zip(rows.src_rank.tolist(), rows.row_bytes.tolist(), strict=True):
        sent[rank] += nbytes * (node_of[rank] == "train")
    assert {sent[rank] for rank in range(trainer * copies)} == {whole // (trainer * copies)}
