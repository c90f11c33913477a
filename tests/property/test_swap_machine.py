"""Whatever happens in whatever order, a swap either aborts whole or ends after its decision, and ends."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from refitd.coordinator import decision as m
from refitd.coordinator.decision import Limits, Phase
from refitd.errors import IllegalTransition

NODES, MEMBERS = frozenset({"n0", "n1"}), {"a": "n0", "b": "n0", "c": "n1"}
NAMES = dict.fromkeys((*MEMBERS, "src"), "somebody")

nodes, members = st.sampled_from(sorted(NODES)), st.sampled_from(sorted(MEMBERS))
some = st.frozensets(members)
ready = st.builds(m.PlanReady, st.just(MEMBERS), st.just(NODES), st.just(10), some, some)


def any_event(nodes: st.SearchStrategy[str], members: st.SearchStrategy[str]) -> st.SearchStrategy[m.Event]:
    """Events of these nodes and members, or of nobody."""
    return st.one_of(
        ready,
        st.builds(m.NodeLoaded, nodes),
        st.builds(m.NodeProgress, nodes, st.just(5)),
        st.builds(m.NodeStaged, nodes, st.just(1), st.just(5)),
        st.builds(m.NodeFailed, nodes, nodes, st.just("broken")),
        st.builds(m.PlanLost, nodes, nodes, st.just("broken")),
        st.builds(m.QuietReported, members),
        st.builds(m.MemberLost, members | st.sampled_from(["src"]), st.just("died")),
        st.builds(m.DecisionHeld, st.floats(0, 50)),
        st.just(m.DecisionSubmitted()),
        st.just(m.Journalled()),
        st.just(m.NotJournalled("disk full")),
        st.builds(m.CommitReported, members, st.just(0.0)),
        st.builds(m.MemberFailed, members, st.just("no")),
        st.just(m.AbortAsked("enough")),
        st.just(m.TimePassed()),
    )


# What takes a swap on is what random events rarely are: with it, most histories come to a decision.
onward = st.one_of(
    ready,
    st.builds(m.NodeLoaded, nodes),
    st.builds(m.NodeStaged, nodes, st.just(1), st.just(5)),
    st.builds(m.QuietReported, members),
    st.just(m.DecisionSubmitted()),
    st.just(m.Journalled()),
    st.builds(m.CommitReported, members, st.just(0.0)),
)
histories = st.lists(st.tuples(onward | onward | any_event(nodes, members), st.floats(0, 0.3)), max_size=60)


@given(histories, any_event(st.just("nobody"), st.just("nobody")))
@settings(max_examples=400, deadline=None)
def test_any_order_of_events_keeps_the_promises(history: list[tuple[m.Event, float]], strange: m.Event) -> None:
    state, now = m.begin("s", "model", 1, Limits(1, 2, 2), NAMES, 0.0), 0.0
    finished, journalling, staged, quiet = 0, False, set(), set()
    for event, pause in history:
        now += pause
        if isinstance(strange, m.OfNode | m.OfMember) and "nobody" in repr(strange):
            before = repr(state)
            with pytest.raises(IllegalTransition):
                m.step(state, strange, now)
            assert repr(state) == before
        was, before = state, repr(state)
        try:
            state, instructions = m.step(state, event, now)
        except IllegalTransition:
            assert state is was
            continue
        finally:
            assert repr(was) == before, "a state was changed in place"
        row = m.ROWS[type(event), was.phase]
        assert state.phase in row.to
        if was.phase.is_final:
            assert (state, instructions) == (was, [])
        match event:
            case m.NodeStaged(node):
                staged.add(node)
            case m.QuietReported(member):
                quiet.add(member)
        if m.JournalDecision() in instructions:
            assert staged == NODES and quiet >= state.asked | state.in_place and state.phase is Phase.STAGED
            journalling = True
        if state.phase is Phase.COMMITTING and was.phase is not Phase.COMMITTING:
            assert journalling and was.phase is Phase.DECIDING and event == m.Journalled()
        if was.phase is Phase.DECIDING and state.phase is not Phase.DECIDING:
            assert isinstance(event, m.Journalled | m.NotJournalled), f"{event} ended a decision under way"
        if any(isinstance(i, m.CommitOn) for i in instructions):
            assert event == m.Journalled(), "a commit before its decision was journalled"
        if any(isinstance(i, m.AbortOn) for i in instructions):
            assert Phase.COMMITTING not in was.entered, "an abort after a commit was sent"
        if any(isinstance(i, m.StageOn) for i in instructions):
            assert quiet >= state.in_place, "a member is written in place that does not stand still"
        finished += instructions.count(m.Finished())
        assert finished == state.phase.is_final
        if state.phase is Phase.COMMITTED:
            assert set(state.paused) == set(MEMBERS)
        if state.phase is Phase.INCOMPLETE:
            assert set(state.paused) | set(state.failed) == set(MEMBERS) and state.failed
    # time alone always ends it, once the journal has answered
    if state.phase is Phase.DECIDING:
        state, instructions = m.step(state, m.NotJournalled("disk full"), now)
        finished += instructions.count(m.Finished())
    for _ in range(6):
        now += 100
        state, instructions = m.step(state, m.TimePassed(), now)
        finished += instructions.count(m.Finished())
    assert state.phase.is_final
    assert finished == 1
