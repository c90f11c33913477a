"""Random plans: every destination matches the oracle, and no other byte is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from refitd.testing.conformance.contestants import Contestant
from refitd.testing.conformance.orders import Orders
from refitd.testing.conformance.transfers import BLOCK_CASTS, CASTS, SIZES, Layout, Maker, Plan
from refitd.testing.conformance.world import ROOM, World

PROCESSES = st.integers(0, 2)
# few long dimensions: most plans are quick, and some exceed one message
LENGTHS = st.one_of(st.integers(1, 9), st.sampled_from((16, 17, 61, 255, 1000)))


@st.composite
def layouts(draw: Any, dims: int, skews: st.SearchStrategy[int]) -> Layout:
    order = tuple(draw(st.permutations(range(dims))))
    return Layout(order, draw(st.integers(0, 3)), draw(st.sampled_from((1, 1, 1, 2))), draw(skews))


@st.composite
def plans(draw: Any, contestant: Contestant) -> Plan:
    maker = Maker()
    any_address, converts = contestant.takes_any_address, contestant.converts
    on_cpus = BLOCK_CASTS if contestant.device == "cpu" else ()
    tasks = draw(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 5)), max_size=12, unique=True))
    for task, part in tasks:
        shape = draw(st.lists(LENGTHS, max_size=3).map(tuple))
        plain = st.sampled_from(sorted(SIZES)).map(lambda dtype: ("", dtype))
        cast_from, dtype = draw(st.one_of(plain, st.sampled_from(CASTS + on_cpus)) if converts else plain)
        skews = st.integers(0, 15) if any_address else st.just(0)
        before = maker.plan()
        maker.add(
            draw(PROCESSES),
            draw(PROCESSES),
            shape,
            dtype,
            read=draw(layouts(len(shape), skews)),
            write=draw(layouts(len(shape), skews)),
            cast_from=cast_from,
            task=task,
            part=part,
        )
        if maker.plan().room > ROOM:
            return before
    return maker.plan()


def test_any_plan_does_what_the_oracle_says(contestant: Contestant, joined: Callable[[Contestant], World]) -> None:
    @given(
        plans(contestant),
        st.sampled_from((True, True, False)),
    )
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    def check(plan: Plan, verify: bool) -> None:
        outcome = joined(contestant).run(plan, Orders(verify=verify))
        assert outcome.errors() == {""}, outcome.answers
        assert outcome.arrived

    check()
