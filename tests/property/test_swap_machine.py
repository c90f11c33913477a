"""Whatever happens in whatever order, a swap either aborts whole or ends after its decision, and ends."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from refitd.commit import machine as m
from refitd.commit.machine import Limits, Phase
from refitd.errors import IllegalTransition

NODES, MEMBERS = ("n0", "n1"), ("a", "b", "c")
READY = m.PlanReady({"a": "n0", "b": "n0", "c": "n1"}, frozenset(NODES), 10)

events = st.one_of(
    st.just(READY),
    st.sampled_from(NODES).map(m.NodeLoaded),
    st.sampled_from(NODES).map(lambda n: m.NodeProgress(n, 5)),
    st.sampled_from(NODES).map(lambda n: m.NodeStaged(n, 1, 5)),
    st.sampled_from(NODES).map(lambda n: m.NodeFailed(n, n, "broken")),
    st.sampled_from(MEMBERS).map(lambda x: m.MemberLost(x, "died")),
    st.just(m.Journalled()),
    st.sampled_from(MEMBERS).map(lambda x: m.MemberCommitted(x, 0.0)),
    st.sampled_from(MEMBERS).map(lambda x: m.MemberFailed(x, "no")),
    st.just(m.AbortAsked("enough")),
    st.just(m.TimePassed()),
)


@given(st.lists(st.tuples(events, st.floats(0, 3)), max_size=40))
@settings(max_examples=400, deadline=None)
def test_any_order_of_events_keeps_the_promises(history: list[tuple[m.Event, float]]) -> None:
    state, now = m.begin("s", "model", 1, Limits(1, 2, 2), 0.0), 0.0
    journalled, finished, committing = False, 0, False
    for event, pause in history:
        now += pause
        before = state
        try:
            state, instructions = m.step(state, event, now)
        except IllegalTransition:
            assert state is before
            continue
        if any(isinstance(i, m.JournalDecision) for i in instructions):
            journalled = True
        if any(isinstance(i, m.CommitOn) for i in instructions):
            assert journalled, "a commit before its decision was journalled"
            committing = True
        if any(isinstance(i, m.AbortOn) for i in instructions):
            assert not committing, "an abort after a commit was sent"
        finished += sum(isinstance(i, m.Finished) for i in instructions)
        if state.phase is Phase.COMMITTED:
            assert set(state.paused) == set(MEMBERS)
        if state.phase is Phase.INCOMPLETE:
            assert set(state.paused) | set(state.failed) == set(MEMBERS) and state.failed
    # time alone always ends it
    for _ in range(6):
        now += 100
        state, instructions = m.step(state, m.TimePassed(), now)
        finished += sum(isinstance(i, m.Finished) for i in instructions)
    assert state.phase.is_final
    assert finished == 1
