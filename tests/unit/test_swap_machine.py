"""The swap state machine: every way through it, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from refitd.commit import machine as m
from refitd.commit.machine import Limits, Phase
from refitd.errors import IllegalTransition

LIMITS = Limits(plan_s=1.0, stage_s=10.0, commit_s=5.0)
READY = m.PlanReady({"a": "n0", "b": "n1"}, frozenset({"n0", "n1"}), 100)


def run(*events: m.Event, limits: Limits = LIMITS) -> tuple[m.Swap, list[m.Instruction]]:
    """Feed events one second apart... at no cost: time is an argument."""
    state, last = m.begin("s", "policy", 7, limits, now=0.0), []
    for event in events:
        state, last = m.step(state, event, now=0.5)
    return state, last


STAGED = (READY, m.NodeLoaded("n0"), m.NodeLoaded("n1"), m.NodeStaged("n0", 2, 60), m.NodeStaged("n1", 1, 40))


def test_the_whole_way_gives_each_instruction_once_and_in_order() -> None:
    state = m.begin("s", "policy", 7, LIMITS, now=0.0)
    seen: list[m.Instruction] = []
    for event in (*STAGED, m.Journalled(), m.MemberCommitted("a", 0.1), m.MemberCommitted("b", 0.2)):
        state, instructions = m.step(state, event, now=0.5)
        seen += instructions
    assert seen == [
        m.LoadPlan("n0"),
        m.LoadPlan("n1"),
        m.StageOn("n0"),
        m.StageOn("n1"),
        m.ReleaseSources(),
        m.JournalDecision(),
        m.CommitOn("n0"),
        m.CommitOn("n1"),
        m.Finished(),
    ]
    assert (state.phase, state.copies, state.bytes_done) == (Phase.COMMITTED, 3, 100)
    assert state.paused == {"a": 0.1, "b": 0.2}


def test_nobody_commits_before_the_decision_is_on_disk() -> None:
    state, instructions = run(*STAGED)
    assert state.phase is Phase.STAGED
    assert not any(isinstance(i, m.CommitOn) for i in instructions)


@pytest.mark.parametrize("so_far", range(len(STAGED) + 1))
@pytest.mark.parametrize(
    "event", [m.MemberLost("a", "died"), m.AbortAsked("enough"), m.TimePassed()], ids=["lost", "asked", "late"]
)
def test_before_the_decision_anything_that_goes_wrong_aborts_every_node(so_far: int, event: m.Event) -> None:
    state, _ = run(*STAGED[:so_far])
    state, instructions = m.step(state, event, now=1000.0)
    assert state.phase is Phase.ABORTED
    assert instructions[-1] == m.Finished()
    assert {i.node for i in instructions if isinstance(i, m.AbortOn)} == state.nodes
    assert state.reason


def test_after_the_decision_nothing_aborts() -> None:
    committing, _ = run(*STAGED, m.Journalled())
    with pytest.raises(IllegalTransition):
        m.step(committing, m.AbortAsked("too late"), now=1.0)
    state, instructions = m.step(committing, m.MemberLost("b", "died"), now=1.0)
    assert (state.phase, instructions) == (Phase.COMMITTING, [])
    state, instructions = m.step(state, m.MemberCommitted("a", 0.0), now=1.0)
    assert (state.phase, instructions) == (Phase.INCOMPLETE, [m.Finished()])
    assert state.failed == {"b": "died"}
    assert "b: died" in state.reason


def test_members_that_miss_the_commit_deadline_are_named() -> None:
    state, _ = run(*STAGED, m.Journalled(), m.MemberCommitted("a", 0.0))
    state, _ = m.step(state, m.TimePassed(), now=state.deadline)
    assert state.phase is Phase.INCOMPLETE
    assert list(state.failed) == ["b"]


def test_a_deadline_in_staging_names_the_node_that_is_waited_for() -> None:
    state, _ = run(*STAGED[:4])
    state, _ = m.step(state, m.TimePassed(), now=state.deadline)
    assert state.phase is Phase.ABORTED
    assert state.culprit == "n1"
    assert "phase stage" in state.reason


def test_a_failed_node_aborts_and_its_words_are_the_reason() -> None:
    state, instructions = run(*STAGED[:3], m.NodeFailed("n1", "worker 3", "killed"))
    assert (state.phase, state.reason, state.failed_phase) == (Phase.ABORTED, "worker 3: killed", "stage")
    assert m.AbortOn("n0", "worker 3: killed") in instructions


def test_an_illegal_event_raises_and_changes_nothing() -> None:
    state, _ = run(READY)
    for event in (READY, m.NodeStaged("n0", 1, 1), m.Journalled(), m.MemberCommitted("a", 0.0), m.NodeLoaded("n9")):
        before = replace(state)
        with pytest.raises(IllegalTransition, match="cannot happen in phase plan"):
            m.step(state, event, now=0.5)
        assert state == before


def test_echoes_of_a_finished_swap_are_answered_with_nothing() -> None:
    state, _ = run(m.AbortAsked("enough"))
    for event in (m.NodeStaged("n0", 1, 1), m.MemberCommitted("a", 0.0), m.MemberLost("a", "x"), m.TimePassed()):
        assert m.step(state, event, now=1e9) == (state, [])


def test_the_whole_timeout_bounds_the_phases_before_the_decision() -> None:
    state, _ = run(*STAGED[:3], limits=replace(LIMITS, total_s=2.0))
    assert state.deadline == 2.0
    state, _ = run(*STAGED, m.Journalled(), limits=replace(LIMITS, total_s=2.0))
    assert state.deadline == 0.5 + LIMITS.commit_s
