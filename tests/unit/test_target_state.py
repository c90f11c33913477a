"""The state machine of a target rank: its table, its refusals, and the invariants of all reachable states."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress

import pytest

from refitd.commit import target_state as t
from refitd.commit.target_state import Live, Step, TargetState, fresh, restoring, step_of
from refitd.errors import IllegalTransition

SWAPS = ("s", "u")
EVENTS: tuple[t.Event, ...] = (
    t.ContentRestored(),
    t.ContentRefused(),
    *(t.StageFinished(swap) for swap in SWAPS),
    *(kind(swap) for swap in SWAPS for kind in (t.Committed, t.CommittedByCopy, t.Failed)),
    *(kind(swap, version) for swap in SWAPS for version in (1, 2) for kind in (t.StageBegan, t.Decided)),
    *(t.SpareStaged(swap, version) for swap in SWAPS for version in (1, 2)),
    *(t.Aborted(swap, "why") for swap in SWAPS),
    t.FellBehind("2 is live"),
    t.Suspended(),
    t.Woken(),
    t.WokenEmpty(),
)


def steps_from(state: TargetState) -> Iterator[tuple[t.Event, TargetState]]:
    """Yield every legal event in this state, with its next state."""
    for event in EVENTS:
        with suppress(IllegalTransition):
            yield event, step_of(state, event)


def reached(start: TargetState) -> set[TargetState]:
    """Return all reachable states."""
    found, left = {start}, deque([start])
    while left:
        state = left.popleft()
        for _, after in steps_from(state):
            if after not in found:
                found.add(after)
                left.append(after)
    return found


ALL = (
    reached(fresh(in_place=False))
    | reached(fresh(in_place=True))
    | reached(restoring(1))
    | reached(fresh(in_place=False, flips=True))
    | reached(restoring(1, flips=True))
)


def run(state: TargetState, *events: t.Event) -> TargetState:
    for event in events:
        state = step_of(state, event)
    return state


def test_what_is_written_in_place_serves_nothing_until_it_is_whole() -> None:
    serving = TargetState(in_place=True, live=Live.SERVING, version=1, holds=1)
    writing = run(serving, t.StageBegan("s", 2))
    assert writing.live is Live.WRITTEN and writing.version is None and not writing.may_serve
    poisoned = run(writing, t.Aborted("s", "a worker died"))
    assert poisoned.live is Live.POISONED and "a worker died" in poisoned.reason and not poisoned.may_serve
    again = t.StageBegan("u", 2), t.StageFinished("u"), t.Decided("u", 2)
    assert run(poisoned, *again, t.Committed("u")).live is Live.SERVING


def test_being_behind_ends_only_with_another_version() -> None:
    staged = run(TargetState(live=Live.SERVING, version=1), t.StageBegan("s", 2), t.StageFinished("s"))
    assert staged.may_serve and run(staged, t.Aborted("s", "x")).live is Live.SERVING
    behind = run(staged, t.FellBehind("3 is live"), t.Aborted("s", "x"))
    assert behind.live is Live.BEHIND and not behind.may_serve and behind.reason == "3 is live"


def test_a_rank_that_flips_holds_two_versions_until_it_is_staged_into() -> None:
    state = run(fresh(in_place=False, flips=True), t.StageBegan("s", 1, "r"), t.StageFinished("s"), t.Decided("s", 1))
    one = run(state, t.Committed("s"))
    assert (one.version, one.holds, one.spare) == (1, 1, None)
    staging = run(one, t.StageBegan("u", 2, "r"))
    assert (staging.version, staging.holds, staging.spare) == (1, 1, None)
    staged = run(staging, t.StageFinished("u"), t.Decided("u", 2))
    two = run(staged, t.Committed("u"))
    assert (two.version, two.holds, two.spare, two.spare_run) == (2, 2, 1, "r")
    assert run(staged, t.CommittedByCopy("u")).spare is None
    assert run(staged, t.Failed("u")).holds is None


def test_a_refusal_names_what_was_tried_and_from_where() -> None:
    state = run(fresh(in_place=False), t.StageBegan("s", 1))
    with pytest.raises(IllegalTransition, match=r"Committed\(swap='s'\) cannot happen while staging swap s, empty"):
        step_of(state, t.Committed("s"))
    staged = run(state, t.StageFinished("s"))
    with pytest.raises(IllegalTransition, match="version 1 is staged"):
        step_of(staged, t.Decided("s", 2))


def test_what_holds_in_every_state() -> None:
    for state in ALL:
        assert (state.swap is None) == (state.step in (Step.IDLE, Step.RESTORING)), state
        assert state.next is None or state.step is not Step.IDLE, state
        # `version` is the version in the live tensors; it is None if they contain no single version
        assert (state.version is None) == (state.live in (Live.EMPTY, Live.WRITTEN, Live.POISONED)), state
        assert state.in_place or state.live not in (Live.WRITTEN, Live.POISONED), state
        assert bool(state.reason) == (state.live in (Live.BEHIND, Live.POISONED)), state
        assert not state.may_serve or not state.live.is_fenced or state.step is Step.COMMITTING, state
        assert state.spare is None or state.flips, state


def test_every_row_of_the_table_is_used_and_every_state_is_reached() -> None:
    used, lives = set(), set()
    for state in ALL:
        for event, after in steps_from(state):
            used.add((type(event), state.step))
            lives.add((state.in_place, type(event), state.live, after.live))
    assert used == set(t.STEPS)
    table = {(False, *key): to for key, to in t.LIVES.items()}
    table |= {(True, *key): to for key, to in {**t.LIVES, **t.LIVES_IN_PLACE}.items()}
    assert lives == {(place, event, live, table.get((place, event, live), live)) for place, event, live, _ in lives}
    assert set(t.LIVES) <= {(event, live) for _, event, live, _ in lives}
    assert set(t.LIVES_IN_PLACE) <= {(event, live) for in_place, event, live, _ in lives if in_place}
    assert {state.step for state in ALL} == set(Step) and {state.live for state in ALL} == set(Live)
