"""Cables of different speed: the senders, the order of relays, and the estimated time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refitd.describe.metadata import ParameterMetadata, Roster
from refitd.plan.build import Remembered, plan_copies
from refitd.plan.cost import EQUAL, Cables, loads_of
from refitd.plan.relays import Relays
from refitd.plan.replicas import origins_by_speed
from refitd.plan.routes import routes_of
from refitd.plan.table import CrossingTable

MB = 1e6
TENSORS = 32


def whole(rank: int) -> list[ParameterMetadata]:
    """Return the description of a rank that has all of 8 MiB."""
    return [
        ParameterMetadata(name=f"t{i:02}", shape=(1024, 128), dtype=torch.int16, element_size=2, owner_rank=rank)
        for i in range(TENSORS)
    ]


def rosters_of(sources: int, targets: int) -> list[Roster]:
    """Return sources on nodes s0, s1, ... and targets on nodes n0, n1, ..., each with everything."""
    made = [Roster(i, source=whole(i), node=f"s{i}") for i in range(sources)]
    return made + [Roster(i, destination=whole(i), node=f"n{i - sources}") for i in range(sources, sources + targets)]


def routed(rosters: list[Roster], cables: Cables) -> tuple[CrossingTable, Relays, dict[str, int]]:
    """Return the rows between nodes, the relays, and the bytes that each node sends."""
    node_of = {roster.rank: roster.node for roster in rosters}
    routes = routes_of(plan_copies(rosters, cables=cables).few, node_of, cables=cables)
    rows, relays = routes.crossing.table.whole(), routes.relays
    sent: dict[str, int] = {}
    for rank, nbytes in zip(rows.src_rank.tolist(), rows.row_bytes.tolist(), strict=True):
        sent[node_of[rank]] = sent.get(node_of[rank], 0) + nbytes
    return rows, relays, sent


ALL = TENSORS * 1024 * 128 * 2


def test_who_sends_slowly_ends_a_path() -> None:
    rosters = rosters_of(1, 4)
    _, relays, sent = routed(rosters, Cables("x", 100 * MB, send={"n1": 25 * MB}))
    assert [path.nodes for path in relays.paths] == [("n0", "n2", "n3", "n1")]
    assert "n1" not in sent
    assert relays.seconds == pytest.approx(ALL / (100 * MB), rel=0.06)
    assert relays.direct_seconds == pytest.approx(4 * ALL / (100 * MB))


def test_two_slow_senders_end_a_path_each() -> None:
    _, relays, sent = routed(rosters_of(1, 6), Cables("x", 100 * MB, send={"n0": 20 * MB, "n1": 20 * MB}))
    assert sorted(path.nodes[-1] for path in relays.paths) == ["n0", "n1"]
    assert sent["s0"] == 2 * ALL and not {"n0", "n1"} & sent.keys()


def test_slow_receivers_come_after_fast_ones() -> None:
    cables = Cables("x", 400 * MB, send={"s0": 100 * MB}, receive={"n0": 50 * MB, "n3": 80 * MB})
    _, relays, _ = routed(rosters_of(1, 5), cables)
    assert [path.nodes for path in relays.paths] == [("n1", "n2", "n3"), ("n4", "n0")]


def test_what_a_fast_sender_does_directly_is_not_relayed() -> None:
    rosters = rosters_of(1, 4)
    _, relays, _ = routed(rosters, Cables("x", 100 * MB, send={"s0": 400 * MB}))
    assert not relays.paths and relays.seconds == pytest.approx(ALL / (100 * MB))
    assert routed(rosters, EQUAL)[1].paths


def test_replicated_sources_send_by_their_speed() -> None:
    rosters = rosters_of(2, 4)
    _, _, sent = routed(rosters, Cables("x", 100 * MB, send={"s1": 70 * MB}))
    assert sent["s0"] + sent["s1"] == ALL, "each byte leaves the trainers' nodes once"
    assert sent["s1"] == pytest.approx(ALL / 2, abs=ALL / TENSORS)
    _, relays, sent = routed(rosters, Cables("x", 100 * MB, send={"s1": 25 * MB}))
    assert "s1" not in sent and sent["s0"] == ALL, "it would hold the other up"
    assert relays.seconds == pytest.approx(ALL / (100 * MB), rel=0.06)
    alike = routed(rosters, Cables("x", 100 * MB))[2]
    assert alike == routed(rosters, EQUAL)[2], "where all are alike, nothing changes"


def test_ranks_of_one_node_share_its_cable() -> None:
    rosters = [Roster(i, source=whole(i), node="s0" if i < 3 else "s1") for i in range(4)]
    rosters += [Roster(4, destination=whole(4), node="n0")]
    sent = routed(rosters, Cables("x", 100 * MB))[2]
    assert sent["s0"] == pytest.approx(3 * ALL / 4, abs=ALL / TENSORS), "a cable's third each is worth their while"


def test_the_remembered_plan_follows_the_speeds() -> None:
    shared = [tuple(ParameterMetadata(name=m.name, shape=m.shape, dtype=m.dtype, element_size=2) for m in whole(0))] * 2
    rosters = [Roster(i, source=shared[0], node=f"s{i}") for i in range(2)]
    rosters += [Roster(i, destination=shared[1], node=f"n{i}") for i in range(2, 4)]
    remembered = Remembered()
    before = plan_copies(rosters, remembered)
    slow = Cables("x", 100 * MB, send={"s1": 10 * MB})
    assert remembered.again(rosters) is not None
    changed = plan_copies(rosters, remembered, slow)
    assert changed.digest == plan_copies(rosters, cables=slow).digest != before.digest
    assert plan_copies(rosters, remembered).digest == before.digest


@settings(max_examples=20, deadline=None)
@given(
    speeds=st.lists(st.floats(1e6, 1e11), min_size=1, max_size=12),
    pieces=st.lists(st.lists(st.integers(1, 1 << 30), min_size=1, max_size=20), min_size=1, max_size=4),
    needs=st.lists(st.integers(0, 3), min_size=1, max_size=12),
)
def test_every_piece_of_a_demand_has_one_origin(speeds: list[float], pieces: list[list[int]], needs: list[int]) -> None:
    bundle = np.array([need % len(pieces) for need in needs], np.int64)
    start = np.cumsum([0, *map(len, pieces)])
    nbytes = np.array([size for each in pieces for size in each], np.int64)
    who, turn = np.arange(len(speeds)), np.zeros(len(needs), np.int64)
    demand, low, high, holder = origins_by_speed(turn, bundle, [who], start, nbytes, np.array(speeds))
    of: dict[int, int] = {}
    for number, need in enumerate(bundle.tolist()):
        mine = sorted(zip(low[demand == number].tolist(), high[demand == number].tolist(), strict=True))
        assert [each[0] for each in mine] == [start[need], *(each[1] for each in mine[:-1])]
        assert mine[-1][1] == start[need + 1]
    for first, end, origin in zip(low.tolist(), high.tolist(), holder.tolist(), strict=True):
        assert all(of.setdefault(piece, origin) == origin for piece in range(first, end))
    load = np.zeros(len(speeds))
    np.add.at(load, [of[piece] for piece in sorted(of)], nbytes[sorted(of)])
    # at most the time if the fastest sent all of it
    longest = load.sum() / max(speeds) + len(pieces) * nbytes.max() / min(speeds)
    assert (load / speeds).max() <= longest * (1 + 1e-9)


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_speeds_are_refused(speed: float) -> None:
    for made in ({"default": speed}, {"send": {"a": speed}}, {"receive": {"a": speed}}):
        with pytest.raises(ValueError, match="above 0"):
            Cables("x", **made)  # type: ignore[arg-type]


def test_loads_name_the_cable_that_takes_longest() -> None:
    cables = Cables("x", 100 * MB, receive={"b": 10 * MB})
    loads = loads_of([("a", "b", 50_000_000), ("a", "c", 200_000_000)], cables)
    assert [(load.node, load.is_send, load.nbytes) for load in loads][:2] == [
        ("b", False, 50_000_000),
        ("a", True, 250_000_000),
    ]
    assert loads[0].seconds == pytest.approx(5.0)
