"""The swap state machine: all paths, its refusals, and agreement of its table with its behaviour."""

from __future__ import annotations

import itertools
from collections import deque

import pytest
from msgspec.structs import replace

from refitd.commit import decision as m
from refitd.commit import swap_events as e
from refitd.commit.decision import FINAL, Limits, Phase
from refitd.errors import IllegalTransition
from refitd.text import BRIEF

LIMITS = Limits(plan_s=1.0, stage_s=10.0, commit_s=5.0)
NAMES = {"a": "engine a", "b": "engine b", "src": "source rank 0"}
READY = e.PlanReady({"a": "n0", "b": "n1"}, frozenset({"n0", "n1"}), 100)


def run(*events: e.Event, limits: Limits = LIMITS) -> tuple[m.Swap, list[e.Instruction]]:
    """Feed events one second apart; time is an argument, so this does not wait."""
    state, last = m.begin("s", "policy", 7, limits, NAMES, now=0.0), []
    for event in events:
        state, last = m.step(state, event, now=0.5)
    return state, last


STAGED = (READY, e.NodeLoaded("n0"), e.NodeLoaded("n1"), e.NodeStaged("n0", 2, 60), e.NodeStaged("n1", 1, 40))
DECIDED = (e.DecisionSubmitted(), e.Journalled())


def test_the_whole_way_gives_each_instruction_once_and_in_order() -> None:
    state = m.begin("s", "policy", 7, LIMITS, NAMES, now=0.0)
    seen: list[e.Instruction] = []
    for event in (*STAGED, *DECIDED, e.CommitReported("a", 0.1), e.CommitReported("b", 0.2)):
        state, instructions = m.step(state, event, now=0.5)
        seen += instructions
    assert seen == [
        e.SendPlan("n0"),
        e.SendPlan("n1"),
        e.StageOn("n0"),
        e.StageOn("n1"),
        e.ReleaseSources(),
        e.JournalDecision(),
        e.CommitOn("n0"),
        e.CommitOn("n1"),
        e.Finished(),
    ]
    assert (state.phase, state.copies, sum(state.progress.values())) == (Phase.COMMITTED, 3, 100)
    assert state.paused == {"a": 0.1, "b": 0.2}


@pytest.mark.parametrize("so_far", range(len(STAGED) + 1))
@pytest.mark.parametrize(
    "event", [e.MemberLost("a", "died"), e.AbortAsked("enough"), e.TimePassed()], ids=["lost", "asked", "late"]
)
def test_before_the_decision_anything_that_goes_wrong_aborts_every_node(so_far: int, event: e.Event) -> None:
    state, _ = run(*STAGED[:so_far])
    state, instructions = m.step(state, event, now=1000.0)
    assert state.phase is Phase.ABORTED
    assert instructions[-1] == e.Finished()
    assert {i.node for i in instructions if isinstance(i, e.AbortOn)} == state.nodes
    assert state.reason


def test_after_the_decision_nothing_aborts() -> None:
    committing, _ = run(*STAGED, *DECIDED)
    with pytest.raises(IllegalTransition):
        m.step(committing, e.AbortAsked("too late"), now=1.0)
    state, instructions = m.step(committing, e.MemberLost("b", "died"), now=1.0)
    assert (state.phase, instructions) == (Phase.COMMITTING, [])
    state, instructions = m.step(state, e.CommitReported("a", 0.0), now=1.0)
    assert (state.phase, instructions) == (Phase.INCOMPLETE, [e.Finished()])
    assert state.failed == {"b": "died"}
    assert "engine b: died" in state.reason


def test_a_plan_and_its_sources_are_needed_until_everything_is_staged() -> None:
    lost, gone = e.PlanLost("n1", "worker 3", "killed"), e.MemberLost("src", "left")
    asks = replace(READY, asked=frozenset("a"))
    for event in (lost, gone):
        assert run(READY, event)[0].phase is run(*STAGED[:3], event)[0].phase is Phase.ABORTED
        for staged in (run(*STAGED)[0], run(asks, *STAGED[1:])[0], run(*STAGED, *DECIDED)[0]):
            assert m.step(staged, event, now=1.0) == (staged, [])


def test_a_decision_that_is_held_has_the_commit_limit_left_after_that() -> None:
    state, instructions = run(*STAGED, e.DecisionHeld(60.0))
    assert (state.phase, state.deadline, instructions) == (Phase.STAGED, 60.0 + LIMITS.commit_s, [])


def test_a_refusal_says_what_was_tried_where_and_what_came_before() -> None:
    state, _ = run(READY, e.NodeLoaded("n0"))
    for event, why in (
        (READY, "it has no row"),
        (e.NodeStaged("n0", 1, 1), "it has no row"),
        (e.Journalled(), "it has no row"),
        (e.NodeLoaded("n9"), "no node of this swap is called 'n9'"),
        (e.MemberLost("x", "died"), "no member of this swap is called 'x'"),
    ):
        before = replace(state)
        with pytest.raises(IllegalTransition) as refused:
            m.step(state, event, now=0.5)
        assert f"{event} cannot happen in phase plan: {why}" in str(refused.value)
        assert "PlanReady(2 members on 2 nodes, 100 bytes) -> plan; 0.500 s: NodeLoaded(node='n0')" in str(
            refused.value
        )
        assert state == before


def test_what_is_said_twice_is_refused_where_no_race_explains_it() -> None:
    quiet = replace(READY, halts=frozenset("ab"), asked=frozenset("ab"))
    for so_far in ((*STAGED[:4], STAGED[3]), (quiet, *STAGED[1:3], e.QuietReported("a"), e.QuietReported("a"))):
        state, _ = run(*so_far[:-1])
        with pytest.raises(IllegalTransition, match="reported before"):
            m.step(state, so_far[-1], now=0.5)


def test_the_history_keeps_the_last_events_and_no_progress() -> None:
    state, _ = run(*STAGED[:3], *(e.NodeProgress("n0", n) for n in range(100)), e.AbortAsked("x" * 5000))
    assert [told.split("(")[0] for told in state.history] == [
        "0.500 s: PlanReady",
        "0.500 s: NodeLoaded",
        "0.500 s: NodeLoaded",
        "0.500 s: AbortAsked",
    ]
    assert len(state.history[-1]) == BRIEF
    members = {f"m{i}": "n0" for i in range(100)}
    state = m.begin("s", "policy", 7, LIMITS, members, now=0.0)
    ready = e.PlanReady(members, frozenset({"n0"}), 1)
    for event in (ready, *STAGED[1:4:2], *DECIDED, *(e.CommitReported(who, 0.0) for who in members)):
        state, _ = m.step(state, event, now=0.5)
    assert state.phase is Phase.COMMITTED and len(state.history) == m.MAX_EVENTS
    assert "m99" in state.history[-1]


EVENTS: tuple[e.Event, ...] = (
    *(
        replace(
            READY,
            asked=frozenset(asked),
            halts=frozenset(halts),
            in_place=frozenset(halts),
            loaded=loaded,
            publishing=publishing,
        )
        for publishing in (frozenset[str](), frozenset({"src"}))
        for asked, halts in (("", ""), ("ab", ""), ("ab", "a"), ("ab", "ab"))
        for loaded in (frozenset[str](), READY.nodes)
    ),
    *(kind(node) for node in ("n0", "n1") for kind in (e.NodeLoaded, lambda n: e.NodeProgress(n, 5))),
    *(e.NodeStaged(node, 1, 5) for node in ("n0", "n1")),
    *(kind(node, "w", "r") for node in ("n0", "n1") for kind in (e.NodeFailed, e.PlanLost)),
    *(e.QuietReported(member) for member in "ab"),
    *(e.CommitReported(member, 0.0) for member in "ab"),
    *(kind(member, "r") for member in ("a", "b") for kind in (e.MemberFailed, e.MemberLost)),
    e.MemberLost("src", "r"),
    e.SourceFinished("src"),
    e.DecisionHeld(1.0),
    e.DecisionSubmitted(),
    e.Journalled(),
    e.NotJournalled("r"),
    e.AbortAsked("r"),
    e.TimePassed(),
)


def test_every_row_leads_to_each_of_its_phases_and_nothing_else_happens() -> None:
    first = m.begin("s", "policy", 7, LIMITS, NAMES, now=0.0)
    moves: dict[tuple[type[e.Event], Phase], set[Phase]] = {}
    seen, left = set(), deque([first])
    while left:
        state = left.popleft()
        for event, late in itertools.product(EVENTS, (False, True)):
            try:
                after, _ = m.step(state, event, state.deadline if late else 0.0)
            except IllegalTransition:
                continue
            moves.setdefault((type(event), state.phase), set()).add(after.phase)
            # times and byte counts do not affect any transition
            after = replace(
                after, history=(), progress={}, copies=0, reason="", culprit="", paused={}, failed_phase=None
            )
            still = sorted(after.waiting), sorted(after.publishing)
            key = repr((after.phase, still, after.asked, after.in_place, sorted(after.failed)))
            if key not in seen:
                seen.add(key)
                left.append(after)
    assert moves == {key: set(row.to) for key, row in m.ROWS.items()}
    assert {phase for _, phase in moves} == {phase for phase in Phase if phase not in FINAL}


def test_staging_lasts_until_the_version_is_published_in_full() -> None:
    early = replace(READY, publishing=frozenset({"src"}))
    state, told = run(early, *STAGED[1:])
    assert (state.phase, state.waiting, told) == (Phase.STAGING, {"src"}, [])
    assert m.step(state, e.SourceFinished("src"), 0.5)[1] == [e.ReleaseSources(), e.JournalDecision()]
    for ends in (e.TimePassed(), e.MemberLost("src", "it withdrew the version")):
        ended, _ = m.step(state, ends, state.deadline)
        assert ended.phase is Phase.ABORTED and NAMES["src"] in ended.reason
    whole, _ = run(early, e.SourceFinished("src"), *STAGED[1:])
    assert whole.phase is Phase.STAGED
