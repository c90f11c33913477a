"""Deaths, stops and aborts: the other ranks learn in time who failed, and no byte is written afterwards.

In the plans of these tests all ranks exchange bytes with the failing rank, so each of them can name it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from refitd.testing.conformance.transfers import Answer, Maker, Orders, Plan
from refitd.testing.conformance.world import Contestant, Outcome, World

TIMEOUT_S = 1.2
SLACK_S = 5.0  # on busy processors, beside the other tests
CULPRIT, CULPRITS_LABEL = 2, "gamma"
SURVIVORS = (0, 1)
SENT = 700_001  # several messages


def between_culprit_and_others(sent: int = SENT) -> Plan:
    maker = Maker()
    for other in SURVIVORS:
        maker.add(CULPRIT, other, (sent,))
        maker.add(other, CULPRIT, (sent // 2,))
    return maker.plan()


def name_the_culprit(outcome: Outcome, *kinds: str) -> None:
    assert set(outcome.answers) == set(SURVIVORS)
    for answer in outcome.answers.values():
        assert answer.error in kinds, answer
        assert CULPRITS_LABEL in answer.said, answer
        assert not answer.is_usable and not answer.wrote_late
        assert answer.seconds < TIMEOUT_S + SLACK_S


def a_new_epoch_works(world: World) -> None:
    for process in SURVIVORS:
        again = world.run_one(process, between_culprit_and_others())
        assert "TransportError" in again.kinds and "cannot be used again" in again.said
    world.replace(CULPRIT)
    assert {answer.error for answer in world.join().values()} == {""}
    assert world.run(between_culprit_and_others()).arrived


def test_a_peer_that_died_before_a_run_is_named(two_sided: Contestant, fresh: Callable[..., World]) -> None:
    world = fresh(two_sided)
    world.join()
    assert world.run(between_culprit_and_others()).arrived
    world.actors.kill(CULPRIT)
    outcome = world.run(between_culprit_and_others(), Orders(timeout=TIMEOUT_S), answering=SURVIVORS)

    name_the_culprit(outcome, "PeerLost", "DeadlineExceeded")
    assert outcome.untouched
    a_new_epoch_works(world)


@pytest.mark.parametrize("so_far", [0, 1, 3 * SENT // 10], ids=["at-once", "after-a-message", "in-the-middle"])
def test_a_peer_that_dies_during_a_run_is_named(
    two_sided: Contestant, fresh: Callable[..., World], so_far: int
) -> None:
    world = fresh(two_sided)
    world.join()
    outcome = world.run(
        between_culprit_and_others(),
        Orders(timeout=TIMEOUT_S, linger_s=0.2),
        orders_of={CULPRIT: Orders(kill_at=so_far)},
        answering=SURVIVORS,
    )
    world.actors.wait_end(CULPRIT)

    name_the_culprit(outcome, "PeerLost", "DeadlineExceeded")
    a_new_epoch_works(world)


def test_a_peer_that_dies_after_a_run_leaves_what_it_sent(two_sided: Contestant, fresh: Callable[..., World]) -> None:
    world = fresh(two_sided)
    world.join()
    outcome = world.run(between_culprit_and_others())
    world.actors.kill(CULPRIT)
    assert outcome.arrived and world.still_is(outcome)

    after = world.run(Plan((), 4096), Orders(timeout=TIMEOUT_S), answering=SURVIVORS)
    name_the_culprit(after, "PeerLost", "DeadlineExceeded")
    a_new_epoch_works(world)


@pytest.mark.parametrize(
    "so_far", [pytest.param(None, id="before", marks=pytest.mark.slow), pytest.param(1, id="during")]
)
def test_a_peer_that_stops_is_named_at_the_deadline_and_what_it_sends_later_is_not_written(
    two_sided: Contestant, fresh: Callable[..., World], so_far: int | None
) -> None:
    world = fresh(two_sided)
    world.join()
    if so_far is None:
        world.actors.signal(CULPRIT, signal.SIGSTOP)

    def wake_up_too_late() -> None:
        time.sleep(TIMEOUT_S + 0.3)
        world.actors.signal(CULPRIT, signal.SIGCONT)

    outcome = world.run(
        between_culprit_and_others(),
        Orders(timeout=TIMEOUT_S, linger_s=1.0),
        orders_of={CULPRIT: Orders(timeout=TIMEOUT_S, stop_at=so_far)},
        answering=SURVIVORS,
        during=wake_up_too_late,
    )
    name_the_culprit(outcome, "DeadlineExceeded")
    assert min(answer.seconds for answer in outcome.answers.values()) >= 0.95 * TIMEOUT_S
    (late,) = world.actors.collect([CULPRIT], TIMEOUT_S + SLACK_S).values()
    assert "TransportError" in late.kinds and not late.is_usable
    world.actors.kill(CULPRIT)
    a_new_epoch_works(world)


ALTERED, ALTEREDS_LABEL = 1, "beta"


def altered(world: World, plan: Plan, how: str, timeout: float = SLACK_S) -> Outcome:
    """Run with a rank that alters what it receives; skip for services whose messages a test cannot reach."""
    outcome = world.run(plan, Orders(timeout=timeout), orders_of={ALTERED: Orders(timeout=timeout, meddles=how)})
    if outcome.answers[ALTERED].error == "NotImplementedError":
        pytest.skip(outcome.answers[ALTERED].said)
    return outcome


@pytest.mark.parametrize("how", ["flip", "swap", "replay"])
def test_bytes_altered_on_the_way_are_found_whatever_digest_comes_with_them(exchange: World, how: str) -> None:
    """Without a key, "flip" and "swap" come with the digest of the altered bytes, and "replay" with its own."""
    plan = between_culprit_and_others()
    assert exchange.run(plan).arrived
    outcome = altered(exchange, plan, how)

    assert outcome.errors() == {"DigestMismatch"}, outcome.answers
    for answer in outcome.answers.values():
        assert (
            f"the bytes that {ALTEREDS_LABEL} wrote differ from the bytes that {CULPRITS_LABEL} read" in answer.said
        ), answer
        assert answer.is_usable
    assert exchange.run(plan).arrived


def test_an_agreement_that_was_altered_on_the_way_is_found(exchange: World) -> None:
    plan = between_culprit_and_others()
    outcome = altered(exchange, plan, "say", TIMEOUT_S)

    assert outcome.untouched
    found = outcome.answers[ALTERED]
    assert found.error == "TransportError" and not found.is_usable
    assert f"the record from alpha to {ALTEREDS_LABEL} was altered on the way" in found.said
    assert {answer.error for answer in exchange.join().values()} == {""}
    assert exchange.run(plan).arrived


def test_what_progress_raises_ends_an_exchange_and_nothing_is_written_afterwards(
    two_sided: Contestant, fresh: Callable[..., World]
) -> None:
    """The other ranks pause after each message: when the culprit fails, it waits for messages not yet sent."""
    world = fresh(two_sided)
    world.join()
    outcome = world.run(
        between_culprit_and_others(),
        Orders(timeout=TIMEOUT_S, pause_s=0.2),
        orders_of={CULPRIT: Orders(timeout=TIMEOUT_S, raise_at=200_000, linger_s=1.0)},
    )
    given_up = outcome.answers.pop(CULPRIT)

    assert given_up.error == "Stop" and not given_up.is_usable and not given_up.wrote_late
    assert 200_000 <= given_up.progress[-1] < SENT // 2 * 2
    assert given_up.seconds < TIMEOUT_S
    name_the_culprit(outcome, "PeerLost", "DeadlineExceeded")
    world.actors.kill(CULPRIT)
    a_new_epoch_works(world)


def test_what_progress_raises_ends_copies_and_nothing_is_written_afterwards(mapped: World) -> None:
    """The same megabytes many times, more than any service copies before it reports."""
    maker = Maker()
    once = [maker.add(0, 1, (1_900_000,)), maker.add(1, 2, (1_800_001,)), maker.add(2, 0, (333_333,))]
    plan = Plan((once[0], once[1], *[once[1]] * 150, once[2]), maker.plan().room)
    outcome = mapped.run(plan, Orders(raise_at=1, linger_s=0.2))
    (answer,) = outcome.answers.values()

    assert answer.error == "Stop" and len(answer.progress) == 1
    assert answer.progress[0] < sum(t.nbytes for t in plan.transfers)
    assert not answer.wrote_late and not outcome.arrived
    assert mapped.run(Plan(tuple(once), plan.room)).arrived


def test_an_owner_that_dies_leaves_its_arena_to_be_read(contestant: Contestant, fresh: Callable[..., World]) -> None:
    """Arenas belong to no process: the client has all of them mapped, and its death has no effect."""
    world = fresh(contestant)
    world.join()
    world.actors.kill(world.client)

    assert world.run(between_culprit_and_others()).arrived


def test_copies_begun_by_a_process_that_died_are_done_by_another(
    one_sided: Contestant, fresh: Callable[..., World]
) -> None:
    world = fresh(one_sided)
    world.join()
    maker = Maker()
    once = [maker.add(source, (source + 1) % 3, (1_000_003,)) for source in range(3)]
    plan = Plan(tuple(once) * 50, maker.plan().room)
    world.tell_to_run(plan, Orders(kill_at=1))
    world.actors.wait_end(0)
    world.replace(0)
    world.join()

    assert world.run(plan).arrived


def answers_in_time(answers: dict[int, Answer], timeout: float) -> None:
    took = {rank: round(answer.seconds, 3) for rank, answer in answers.items()}
    assert all(timeout - 0.2 < seconds < timeout + SLACK_S for seconds in took.values()), (took, answers)


def test_joining_ends_at_its_deadline_and_names_who_never_came(
    two_sided: Contestant, fresh: Callable[..., World]
) -> None:
    world = fresh(two_sided)
    world.join()  # from here on every process has loaded torch, which takes seconds on busy processors
    answers = world.join(SURVIVORS, timeout=TIMEOUT_S)

    answers_in_time(answers, TIMEOUT_S)
    for answer in answers.values():
        assert answer.error == "DeadlineExceeded" and CULPRITS_LABEL in answer.said, answer
    assert {answer.error for answer in world.join().values()} == {""}
    assert world.run(between_culprit_and_others()).arrived


def test_joining_ends_when_the_epoch_is_given_up(two_sided: Contestant, fresh: Callable[..., World]) -> None:
    world = fresh(two_sided)
    world.join()
    epoch = world.new_epoch()
    started = time.monotonic()
    world.tell_to_join(SURVIVORS, epoch=epoch, timeout=20.0)
    time.sleep(0.3)
    world.actors.give_up(epoch)
    answers = world.actors.collect(SURVIVORS, 10)

    assert time.monotonic() - started < 10
    for answer in answers.values():
        assert answer.error == "PeerLost" and "given up" in answer.said, answer
    assert {answer.error for answer in world.join().values()} == {""}
    assert world.run(between_culprit_and_others()).arrived
