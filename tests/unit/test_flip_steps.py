"""The choice of the poll at which the ranks of a replica flip."""

from __future__ import annotations

from collections import deque
from random import Random
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from refitd.client.commit_state import PollSteps
from refitd.commit.lockstep import (
    CALLERS_STEP,
    LOCKSTEP,
    MISSING_S,
    PATIENCE_S,
    ROUNDS,
    CommitAtStep,
    FlipSteps,
    Pass,
    Reached,
    Silent,
    meeting,
    meeting_late,
)
from refitd.errors import RefusedError

COUNTS = st.dictionaries(st.text(max_size=3), st.integers(0, 1 << 40), min_size=2, max_size=8)


def rank(
    number: int,
    world: int = 2,
    staged: str | None = "s",
    replica: str = "r",
) -> Any:
    added = SimpleNamespace(replica=replica, rank=number, world_size=world)
    return SimpleNamespace(
        id=f"{replica}{number}", added=added, in_lockstep=True, staged=staged, staged_version=2, version=1
    )


def polls(told: list[CommitAtStep | Pass | Silent]) -> dict[int, int]:
    return {one.member.added.rank: one.step for one in told if isinstance(one, CommitAtStep)}


@given(COUNTS)
def test_ranks_that_count_from_one_origin_share_the_poll_and_none_has_passed_it(counts: dict[str, int]) -> None:
    found = meeting({who: Reached(step, "before") for who, step in counts.items()})
    if max(counts.values()) - min(counts.values()) <= LOCKSTEP:
        assert found == dict.fromkeys(counts, max(counts.values()) + 1)
    else:
        assert found is None
    by_caller = meeting({who: Reached(step, CALLERS_STEP) for who, step in counts.items()})
    assert by_caller == dict.fromkeys(counts, max(counts.values()) + 1)


def test_counts_from_two_origins_name_no_poll_however_near_they_are() -> None:
    assert meeting({"a": Reached(41, "before"), "b": Reached(41)}) is None
    assert meeting({"a": Reached(41), "b": Reached(41)}) is None
    assert meeting({"a": Reached(41, "before", "poll"), "b": Reached(3, "", "poll")}) == {"a": 41, "b": 3}
    assert meeting({"a": Reached(41, "before", "poll"), "b": Reached(3, "", "wait")}) == {"a": 41, "b": 4}


def test_ranks_that_committed_in_a_wait_and_in_a_poll_count_alike_from_there() -> None:
    waited, polled, early = PollSteps(), PollSteps(), PollSteps()
    for steps in (waited, polled, early):
        steps.count(None)
        steps.flip(2, "s")
    polled.count(None)
    early.flip(3, "s")
    assert early.is_early() and not waited.is_early() and polled.is_due()
    for steps in (waited, polled, early):
        steps.flipped()
    waited.count(None)
    assert waited.reached("t", "m") == polled.reached("t", "m")
    assert early.reached("t", "m").origin == ""


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_that_always_wait_are_never_early(world: int) -> None:
    ranks = [PollSteps() for _ in range(world)]
    for swap in ("s", "t", "u"):
        said = {number: steps.reached(swap, "m", "wait") for number, steps in enumerate(ranks)}
        polls = meeting({str(number): Reached(one.step, one.origin, one.stands) for number, one in said.items()})
        for number, steps in enumerate(ranks):
            steps.flip(polls[str(number)], swap)
            assert not steps.is_early(), swap
            steps.flipped()


def test_ranks_are_told_once_all_of_their_replica_have_said_where_they_are() -> None:
    steps, ranks = FlipSteps(), [rank(0), rank(1)]
    other = [rank(0, world=1, replica="q")]
    steps.reached("s", ranks[0], Reached(41, "before"), now=0.0)
    assert steps.due([*ranks, *other], now=0.1) == []
    steps.reached("s", ranks[1], Reached(42, "before"), now=0.2)
    assert steps.due([*ranks, *other], now=0.2) == [
        CommitAtStep("s", ranks[0], 43, "s"),
        CommitAtStep("s", ranks[1], 43, "s"),
    ]
    assert steps.due([*ranks, *other], now=0.2) == []
    steps.reached(
        "s", ranks[1], Reached(43, "before", "poll"), now=0.3
    )  # the rank or its daemon has not received the first message
    assert steps.due([*ranks, *other], now=0.3) == [CommitAtStep("s", ranks[1], 43, "s")]


def test_a_rank_that_has_left_or_taken_the_version_over_is_not_waited_for_and_does_not_count_with_the_others() -> None:
    steps, ranks = FlipSteps(), [rank(0), rank(1)]
    steps.reached("s", ranks[0], Reached(41), now=0.0)
    ranks[1].staged, ranks[1].version = None, 2
    assert steps.due(ranks, now=0.1) == [CommitAtStep("s", ranks[0], 42)]
    ranks[0].staged = "t"
    steps.reached("t", ranks[0], Reached(50), now=1.0)
    assert steps.due(ranks[:1], now=1.1) == []  # a new coordinator may still learn of the second rank
    assert steps.next_deadline() == 1.0 + MISSING_S
    assert steps.due(ranks[:1], now=1.1 + MISSING_S) == []  # it is inside a step
    steps.reached("t", ranks[0], Reached(51, "", "poll"), now=5.0)
    assert steps.due(ranks[:1], now=5.0) == [Pass("t", ranks[0])]  # the second one may have begun that step
    assert steps.due(ranks[:1], now=6.0) == []
    steps.reached("t", ranks[0], Reached(52, "", "poll"), now=7.0)
    assert steps.due(ranks[:1], now=7.0) == [CommitAtStep("t", ranks[0], 52)]


def test_a_rank_that_does_not_answer_is_named_once_and_the_others_stand_until_it_does() -> None:
    steps, ranks = FlipSteps(), [rank(0), rank(1)]
    steps.reached("s", ranks[0], Reached(41, "before", "poll"), now=0.0)
    assert steps.due(ranks, now=0.0) == [] and steps.next_deadline() == MISSING_S
    assert steps.due(ranks, now=MISSING_S) == [Silent("s", ranks[1])]
    assert steps.due(ranks, now=900.0) == [] and steps.next_deadline() is None
    steps.reached("s", ranks[1], Reached(41, "before"), now=901.0)
    assert polls(steps.due(ranks, now=901.0)) == {0: 42, 1: 42}


def unregistered(*ranks: Any, origin: str = "before") -> FlipSteps:
    """Return steps where rank 0 must flip in its poll 42, because a new coordinator did not know the other ranks."""
    steps = FlipSteps()
    for poll, now in ((41, MISSING_S), (42, MISSING_S + 0.1)):
        steps.reached("s", ranks[0], Reached(poll, origin, "poll"), now=now - MISSING_S)
        told = steps.due(ranks[:1], now=now)
    assert polls(told) == {0: 42}
    return steps


def test_a_rank_that_registers_late_flips_with_the_others_if_it_has_not_passed_their_poll() -> None:
    for origin, count in (("before", 40), (CALLERS_STEP, 3)):
        ranks = [rank(0), rank(1)]
        steps = unregistered(*ranks, origin=origin)
        steps.reached("s", ranks[1], Reached(count, origin), now=9.0)
        assert steps.due(ranks, now=9.0) == [CommitAtStep("s", ranks[1], 42)]


@example(42 - LOCKSTEP, "", "before")
@example(41 - LOCKSTEP, "", "before")
@given(
    st.integers(0, 60), st.sampled_from(["", "poll", "wait"]), st.sampled_from(["", "before", "other", CALLERS_STEP])
)
def test_a_late_rank_shares_a_poll_only_with_those_that_count_alike(step: int, stands: str, origin: str) -> None:
    late = Reached(step, origin, stands)
    found = meeting_late(late, {"before": 43, CALLERS_STEP: 43, "": 43})
    both = meeting({"late": late, "told": Reached(42, origin)})
    may = origin in ("before", CALLERS_STEP) and both == {"late": 43, "told": 43}
    assert found == (43 if may else None)


def test_ranks_that_never_stand_at_once_are_let_through_a_few_times_and_then_told_apart_by_name() -> None:
    steps, ranks, now, passed = FlipSteps(), [rank(0), rank(1)], 0.0, 0
    steps.reached("s", ranks[1], Reached(3), now)
    for poll in range(41, 100):
        steps.reached("s", ranks[0], Reached(poll, "before", "poll"), now)
        assert steps.due(ranks, now) == []
        due_at = steps.next_deadline()
        assert due_at is not None and due_at == pytest.approx(now + PATIENCE_S * 2**passed)
        now = due_at
        told = steps.due(ranks, now)
        if told != [Pass("s", ranks[0])]:
            break
        passed += 1
    assert passed == ROUNDS - 1 and polls(told) == {0: 45, 1: 4}
    assert all(
        isinstance(flip, CommitAtStep) and not flip.origin and "rank 1 stood in no poll" in flip.apart for flip in told
    )


def test_a_rank_that_waits_is_not_let_through_and_not_held_for_ever() -> None:
    steps, ranks, now = FlipSteps(), [rank(0), rank(1)], 0.0
    steps.reached("s", ranks[0], Reached(0, "before", "wait"), now)
    steps.reached("s", ranks[1], Reached(3), now)
    told: list[CommitAtStep | Pass] = []
    for _ in range(ROUNDS):
        assert told == steps.due(ranks, now) == []
        now = steps.next_deadline() or 0.0
        told = steps.due(ranks, now)
    assert polls(told) == {0: 1, 1: 4}


def test_nothing_is_kept_of_ranks_that_are_gone() -> None:
    steps = FlipSteps()
    steps.reached("s", rank(0), Reached(1), now=0.0)
    assert steps.due([], now=MISSING_S + 1) == [] and not steps.waiting


def test_a_callers_step_only_goes_up() -> None:
    steps = PollSteps()
    steps.count(7)
    steps.count(7)
    with pytest.raises(RefusedError, match="step is 6, after 7"):
        steps.count(6)
    assert steps.reached("s", "m").step == 8 and steps.reached("s", "m").origin == CALLERS_STEP
    steps.flip(9, "s")
    steps.flipped()
    assert steps.reached("t", "m").step == 8  # its caller continues to count
    with pytest.raises(RefusedError, match="step is 7, after 7"):
        steps.count(7, begin=False)  # it has begun
    for _ in range(2):
        steps.count(8, begin=False)
        steps.stay()
    assert steps.reached("t", "m").step == 8
    steps.count(8)
    assert steps.reached("t", "m").step == 9


def test_before_a_callers_step_0_nothing_has_begun() -> None:
    steps = PollSteps()
    steps.count(0, begin=False)
    steps.stay()
    assert steps.reached("s", "m").step == 0
    steps.flip(1, "s")
    steps.count(0)
    assert steps.is_due()


class Lockstep:
    """Ranks that poll before every step, and their coordinator. No rank ends a step before all ranks have begun it.

    Messages arrive in order, at any time. `pick(n)` chooses which of n things happens next. If `waits` is set,
    ranks may also call `wait` before a step, which returns with or without a version.
    """

    def __init__(self, counts: list[int], pick: Any, *, by_caller: bool, in_time: bool, waits: bool = False) -> None:
        world = len(counts)
        self.pick, self.by_caller, self.in_time, self.waits = pick, by_caller, in_time, waits
        self.members = [rank(number, world, None) for number in range(world)]
        self.counters = [PollSteps() for _ in counts]
        for number, count in enumerate(counts):
            self.come_back(number, count)
        self.steps = FlipSteps()
        self.now = 0.0
        self.step = [0] * world  # the step that the rank is in or polls before
        self.where = ["before"] * world
        self.to_rank: list[deque[Any]] = [deque() for _ in counts]
        self.to_coordinator: list[deque[Any]] = [deque() for _ in counts]
        self.is_pending = [False] * world

    def come_back(self, number: int, count: int = 0) -> None:
        self.counters[number] = PollSteps()
        for _ in range(0 if self.by_caller else count):
            self.counters[number].count(None)

    def swap(self, name: str) -> tuple[set[int], bool]:
        """Return the steps before which ranks flipped, and whether a warning said that they may differ."""
        self.name, self.flipped, self.apart = name, {}, False
        for number, member in enumerate(self.members):
            member.staged = name
            self.to_rank[number].append("decided")
        while any(member.staged for member in self.members):
            acts = [act for number in range(len(self.members)) for act in self.enabled(number)]
            if not acts or (not self.in_time and self.pick(8) == 0):
                acts = [(self.tick, 0)]
            act, number = acts[self.pick(len(acts))]
            act(number)
        for queue in (*self.to_rank, *self.to_coordinator):
            queue.clear()
        return set(self.flipped.values()), self.apart

    def enabled(self, r: int) -> list[tuple[Any, int]]:
        found = [(self.deliver, r)] if self.to_rank[r] else []
        found += [(self.hear, r)] if self.to_coordinator[r] else []
        if self.where[r] == "before":
            found += [(self.poll, r), *([(self.wait, r)] if self.waits else [])]
        elif self.where[r] == "waits":
            found.append((self.leave, r))
        elif self.where[r] == "inside" and all(
            self.step[other] > self.step[r] or (self.step[other] == self.step[r] and self.where[other] == "inside")
            for other in range(len(self.members))
        ):
            found.append((self.end, r))
        return found

    def poll(self, r: int) -> None:
        self.counters[r].count(self.step[r] if self.by_caller else None)
        if self.is_pending[r] and self.counters[r].flip_at is None:
            self.to_coordinator[r].append(self.counters[r].reached(self.name, "", "poll"))
            self.where[r] = "held"
        else:
            self.go_on(r)

    def wait(self, r: int) -> None:
        self.where[r] = "waits"
        if self.is_pending[r] and self.counters[r].flip_at is None:
            self.to_coordinator[r].append(self.counters[r].reached(self.name, "", "wait"))
        self.take_over(r)

    def leave(self, r: int) -> None:
        if self.is_pending[r] and self.counters[r].stands:
            self.to_coordinator[r].append(self.counters[r].reached(self.name, ""))
        self.where[r] = "before"

    def take_over(self, r: int) -> None:
        """Commit in a wait, unless others may have begun a step that this rank has not."""
        if self.is_pending[r] and self.counters[r].flip_at is not None and not self.counters[r].is_early():
            self.committed(r)

    def committed(self, r: int) -> None:
        self.flipped[r], self.is_pending[r] = self.step[r], False
        self.counters[r].flipped()
        self.to_coordinator[r].append(None)

    def go_on(self, r: int) -> None:
        if self.is_pending[r] and self.counters[r].is_due():
            self.committed(r)
        self.where[r] = "inside"

    def end(self, r: int) -> None:
        self.step[r], self.where[r] = self.step[r] + 1, "before"

    def deliver(self, r: int) -> None:
        message, counter = self.to_rank[r].popleft(), self.counters[r]
        if message == "decided":
            self.is_pending[r] = True
            counter.decided()
            self.to_coordinator[r].append(counter.reached(self.name, "", "wait" if self.where[r] == "waits" else ""))
        elif self.is_pending[r]:
            counter.flip(message.step, message.origin) if isinstance(message, CommitAtStep) else counter.passed()
            if self.where[r] == "held":
                self.go_on(r)
            elif self.where[r] == "waits":
                self.take_over(r)

    def hear(self, r: int) -> None:
        said = self.to_coordinator[r].popleft()
        if said is None:
            self.members[r].staged = None
        elif self.members[r].staged:
            self.steps.reached(self.name, self.members[r], Reached(said.step, said.origin, said.stands), self.now)
        self.tell()

    def tick(self, _: int) -> None:
        self.now = self.now + 0.3 if not self.in_time else (self.steps.next_deadline() or self.now + 1)
        self.tell()

    def tell(self) -> None:
        for told in self.steps.due(self.members, self.now):
            self.apart |= isinstance(told, CommitAtStep) and bool(told.apart)
            self.to_rank[told.member.added.rank].append(told)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=2, max_size=4), st.integers(0, 1 << 32), st.booleans(), st.booleans())
def test_ranks_in_lock_step_flip_before_the_same_step_wherever_their_counts_begin(
    counts: list[int], seed: int, by_caller: bool, waits: bool
) -> None:
    """One of them returns alone before every third swap."""
    random = Random(seed)
    run = Lockstep(counts, random.randrange, by_caller=by_caller, in_time=True, waits=waits)
    for number in range(6):
        if number % 3 == 2:
            run.come_back(random.randrange(len(counts)))
        steps, apart = run.swap(f"s{number}")
        assert len(steps) == 1 and not apart


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=2, max_size=4), st.integers(0, 1 << 32), st.booleans())
def test_ranks_that_flip_before_different_steps_because_messages_are_late_are_never_silent(
    counts: list[int], seed: int, waits: bool
) -> None:
    random = Random(seed)
    run = Lockstep(counts, random.randrange, by_caller=False, in_time=False, waits=waits)
    for number in range(6):
        steps, apart = run.swap(f"s{number}")
        assert len(steps) == 1 or apart
