"""Simulated flows: classes do not change the result, rates are max-min fair, and results match hand computation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refitd.simulate import TOGETHER, Flows, simulate


def flows_of(rows: list[tuple[float, list[int]]], slots: int = 3) -> Flows:
    resource = np.full((len(rows), slots), -1, np.int64)
    for number, (_, used) in enumerate(rows):
        resource[number, : len(used)] = used
    return Flows(np.array([nbytes for nbytes, _ in rows], float), resource, np.ones(resource.shape))


def one_by_one(rows: list[tuple[float, list[int]]], capacity: list[float]) -> float:
    """The same simulation, flow by flow, in plain Python."""
    left, now = {i: nbytes for i, (nbytes, used) in enumerate(rows) if used and nbytes}, 0.0
    while left:
        rate: dict[int, float] = {}
        room, rising = dict(enumerate(map(float, capacity))), set(left)
        while rising:
            shares = {r: room[r] / n for r in room if (n := sum(rows[i][1].count(r) for i in rising))}
            level = min(shares.values())
            full = {r for r, share in shares.items() if share <= level * (1 + 1e-6)}
            kept = {i for i in rising if full & set(rows[i][1])}
            for i in kept:
                rate[i] = level
                for r in rows[i][1]:
                    room[r] = max(0.0, room[r] - level)
            rising -= kept
        step = min(left[i] / rate[i] for i in left)
        now += step
        left = {i: v - rate[i] * step for i, v in left.items()}
        left = {i: v for i, v in left.items() if v > TOGETHER * rows[i][0]}
    return now


@given(st.data())
def test_classes_give_what_single_flows_give(data: st.DataObject) -> None:
    capacity = data.draw(st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=1, max_size=6))
    used = st.lists(st.integers(0, len(capacity) - 1), max_size=3, unique=True)
    rows = data.draw(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 3.0, 10.0]), used), max_size=12))
    usage = simulate(flows_of(rows), np.array(capacity))

    assert usage.seconds == pytest.approx(one_by_one(rows, capacity), rel=0.02)
    carried = [sum(nbytes for nbytes, used in rows if resource in used) for resource in range(len(capacity))]
    assert usage.moved() == pytest.approx(carried, rel=2 * TOGETHER, abs=1e-9)
    assert (usage.rates <= np.array(capacity).max() * (1 + 1e-6)).all()


def test_a_flow_that_is_held_elsewhere_leaves_its_share_to_the_others() -> None:
    # 0 and 1 share a cable of 10; 0 is limited to 2 by its own cable, so 1 gets 8
    usage = simulate(flows_of([(20, [0, 1]), (80, [1])]), np.array([2.0, 10.0]))
    assert usage.seconds == pytest.approx(10.0)
    assert usage.rates[0][usage.resource_class] == pytest.approx([2.0, 10.0])


def test_a_million_alike_flows_are_simulated_as_one() -> None:
    senders = np.repeat(np.arange(1000), 1000)
    receivers = 1000 + np.tile(np.arange(1000), 1000)
    flows = Flows(np.full(10**6, 4.0), np.stack([senders, receivers], axis=1), np.ones((10**6, 2)))
    usage = simulate(flows, np.full(2000, 2.0))
    assert usage.seconds == pytest.approx(2000.0)
    assert usage.rates.shape == (1, 1)
