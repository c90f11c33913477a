"""Rounds of group calls and slots of puts: both ends derive equal schedules from numbers alone."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from refitd.copy_services.nccl import MAX_OPERATIONS, rounds
from refitd.copy_services.nvshmem import SlotLayout, has_arrived, may_put
from refitd.copy_services.packed import WINDOW

Counts = dict[tuple[int, int], int]


def calls_of(size: int, counts: Counts) -> list[list[list[tuple[int, bool]]]]:
    return [
        list(
            rounds(
                me,
                size,
                {t: n for (s, t), n in counts.items() if s == me},
                {s: n for (s, t), n in counts.items() if t == me},
            )
        )
        for me in range(size)
    ]


def test_a_round_holds_every_streams_next_message() -> None:
    counts = {(0, 1): 2, (1, 0): 1, (2, 0): 3}
    zero, one, two = calls_of(3, counts)
    first, second, third = [sorted(call) for call in zero]
    assert first == [(1, False), (1, True), (2, False)]
    assert second == [(1, True), (2, False)]
    assert third == [(2, False)]
    assert [sorted(call) for call in one] == [[(0, False), (0, True)], [(0, False)]]
    assert two == [[(0, True)]] * 3
    assert list(rounds(0, 1, {}, {})) == []


@pytest.mark.parametrize("seed", range(12))
def test_no_rank_waits_in_a_circle_and_no_call_is_too_long(seed: int) -> None:
    """Each rank performs its calls in order; a call ends when all its messages are matched."""
    rng = random.Random(seed)
    size = rng.choice([2, 3, 5, 8, 129, 130, 300])
    density = rng.choice([0.02, 0.3, 1.0]) if size < 100 else rng.choice([0.05, 1.0])
    counts = {
        (s, t): rng.choice([1, 2, 5]) for s in range(size) for t in range(size) if s != t and rng.random() < density
    }
    calls = calls_of(size, counts)
    assert all(len(call) <= MAX_OPERATIONS for rank in calls for call in rank)
    pending: list[deque[list[Half]]] = [deque(numbered(me, rank)) for me, rank in enumerate(calls)]
    assert sum(is_send for rank in pending for call in rank for _, _, is_send, _ in call) == sum(counts.values())

    posted: set[Half] = set()
    ready = deque(range(size))
    waiting_for: dict[Half, int] = {}  # other half -> who waits for it
    while ready:
        me = ready.popleft()
        if not pending[me]:
            continue
        for half in pending[me][0]:
            if half not in posted:
                posted.add(half)
                if half in waiting_for:
                    ready.append(waiting_for.pop(half))
        others = [(peer, rank, not is_send, number) for rank, peer, is_send, number in pending[me][0]]
        missing = next((half for half in others if half not in posted), None)
        if missing is None:
            pending[me].popleft()
            ready.append(me)
        else:
            waiting_for[missing] = me
    assert not any(pending), f"{sum(map(len, pending))} calls wait for each other"


Half = tuple[int, int, bool, int]  # rank, peer, whether it sends, number of the message


def numbered(me: int, calls: list[list[tuple[int, bool]]]) -> list[list[Half]]:
    seen: Counter[tuple[int, bool]] = Counter()
    found = []
    for call in calls:
        assert len(set(call)) == len(call), "two messages of one stream in one call"
        found.append([(me, *turn, seen[turn]) for turn in call])
        seen.update(call)
    return found


def test_slots_of_all_pairs_lie_apart_and_both_ends_name_the_same() -> None:
    size, limit = 5, 48
    slots = SlotLayout(size, limit)
    for me in range(size):
        others = [i for i in range(size) if i != me]
        landing = {(s, k): slots.landing(s, me, k) for s in others for k in range(WINDOW)}
        leaving = {(t, k): slots.leaving(me, t, k) for t in others for k in range(WINDOW)}
        places = [*landing.values(), *leaving.values()]
        assert sorted(places) == list(range(0, slots.nbytes, limit))
        words = [slots.arrived(s, me, k) for s in others for k in range(WINDOW)]
        words += [slots.freed(me, t, k) for t in others for k in range(WINDOW)]
        assert sorted(words) == list(range(slots.words))
    assert slots.landing(1, 3, WINDOW) == slots.landing(1, 3, 0), "a slot is used again"
    assert SlotLayout(1, limit).nbytes == SlotLayout(1, limit).words == 0


def test_a_message_waits_for_room_and_is_seen_once_it_is_there() -> None:
    assert [may_put(number, 0) for number in range(WINDOW + 1)] == [True] * WINDOW + [False]
    assert not has_arrived(0, 0) and has_arrived(0, 1) and not has_arrived(WINDOW, 1)


@pytest.mark.parametrize("seed", range(20))
def test_no_message_is_overwritten_or_lost_in_whatever_order_puts_and_signals_arrive(seed: int) -> None:
    """One pair; puts and credits are delayed and overtake each other at random."""
    rng, slots, total = random.Random(seed), SlotLayout(2, 16), 40
    memory: dict[int, int] = {}
    arrived, freed = [0] * slots.words, [0] * slots.words
    puts: list[tuple[int, int]] = []
    credits: list[tuple[int, int]] = []
    sent = taken = 0
    while taken < total:
        kind = rng.randrange(4)
        if kind == 0 and sent < total and may_put(sent, freed[slots.freed(0, 1, sent)]):
            puts.append((sent, slots.landing(0, 1, sent)))
            sent += 1
        elif kind == 1 and puts:
            number, place = puts.pop(rng.randrange(len(puts)))
            assert place not in memory, "a slot was written before it was free"
            memory[place] = number
            arrived[slots.arrived(0, 1, number)] = number + 1
        elif kind == 2 and has_arrived(taken, arrived[slots.arrived(0, 1, taken)]):
            assert memory.pop(slots.landing(0, 1, taken)) == taken
            credits.append((slots.freed(0, 1, taken), taken + 1))
            taken += 1
        elif kind == 3 and credits:
            word, value = credits.pop(rng.randrange(len(credits)))
            assert freed[word] < value
            freed[word] = value
    assert sent == total
