"""Ranks of a group (here: threads) relay received bytes over gloo or NIXL; a relay's changes are detected."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from refitd.copy_services import DigestMismatch, Route
from refitd.copy_services.pieces import ArenaPiece, Base
from refitd.errors import RefusedError
from tests.support.service_threads import SERVICES, ServiceThreads

Words = np.ndarray
SIZE = 4
MESSAGE_BYTES = 16 << 10


@pytest.fixture(scope="module", params=SERVICES)
def ranks(request: pytest.FixtureRequest) -> Iterator[ServiceThreads]:
    found = ServiceThreads(request.param, [f"rank {n}" for n in range(SIZE)], MESSAGE_BYTES)
    yield found
    found.close()


class OnItsWay:
    """Tensors that are relayed from the first of some ranks over the others; all ranks register their pieces."""

    def __init__(self, ranks: ServiceThreads, path: int, over: Sequence[int], new: Sequence[Words]) -> None:
        self.over, self.new = over, new
        self.held = {rank: [np.zeros_like(words) for words in new] for rank in over[1:]}
        for hop, (src, dst) in enumerate(itertools.pairwise(over)):
            for number in range(len(new)):
                task, route = 1000 * (path * SIZE + dst) + (-number if hop % 2 else number), Route(path, hop)
                ranks.services[src].send(task, self.piece(src, number), dst, route=route)
                ranks.services[dst].receive(task, self.piece(dst, number), src, route=route)

    def piece(self, rank: int, number: int) -> ArenaPiece:
        words = self.held[rank][number] if rank in self.held else self.new[number]
        return ArenaPiece(words, 0, words.itemsize)

    def check(self) -> None:
        for rank, held in self.held.items():
            for got, want in zip(held, self.new, strict=True):
                assert got.tobytes() == want.tobytes(), (self.over, rank)


class WithBases(OnItsWay):
    """A path where some ranks have the previous version as a base, in place or elsewhere."""

    def __init__(self, *args: Any, before: Sequence[Words], bases: Sequence[int], in_place: bool) -> None:
        self._before, self._bases, self._in_place = before, bases, in_place
        super().__init__(*args)

    def piece(self, rank: int, number: int) -> ArenaPiece:
        piece = super().piece(rank, number)
        if rank in self._bases:
            base = ArenaPiece(self._before[number], 0, piece.itemsize)
            if rank in self.held and self._in_place:
                self.held[rank][number][...] = self._before[number]
                base = piece
            piece.base = Base(base, "v1")
        return piece


@st.composite
def journeys(draw: st.DrawFn) -> list[tuple[list[int], list[Words], list[Words], list[int], bool]]:
    """Draw for each path: ranks, new tensors, previous tensors, ranks with a base, and whether it is in place."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        over = draw(st.permutations(range(SIZE)))[: draw(st.integers(2, SIZE))]
        shapes = draw(
            st.lists(st.sampled_from([(1,), (37,), (40, 30), (257, 131), (3, 30_000)]), min_size=1, max_size=4)
        )
        share = draw(st.sampled_from([0.0, 0.01, 0.5]))
        before = [random.integers(0, 1 << 16, shape, np.uint16) for shape in shapes]
        new = [(words ^ (random.random(words.shape) < share)).astype(np.uint16) for words in before]
        if draw(st.booleans()):
            new, before = ([np.asfortranarray(words) for words in these] for these in (new, before))
        bases = draw(st.lists(st.sampled_from(over), unique=True))
        found.append((list(over), new, before, bases, draw(st.booleans())))
    return found


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(journeys(), st.booleans())
def test_everybody_on_every_path_gets_what_its_first_rank_sends(
    ranks: ServiceThreads, cases: Any, verify: bool
) -> None:
    """Paths have any order, may be cyclic or share ranks; they carry full versions, or deltas to ranks with a base."""
    ways = [
        WithBases(ranks, path, over, new, before=before, bases=bases, in_place=in_place)
        for path, (over, new, before, bases, in_place) in enumerate(cases, 1)
    ]
    beside = np.arange(50_000, dtype=np.uint32)
    there = [np.zeros_like(beside) for _ in range(SIZE)]
    for rank, words in enumerate(there):  # direct transfers run at the same time
        ranks.services[rank].send(rank, ArenaPiece(beside, 0, 4), (rank + 1) % SIZE)
        ranks.services[(rank + 1) % SIZE].receive(rank, ArenaPiece(words, 0, 4), rank)
    results = ranks.run(verify=verify)
    assert not [each for each in results if isinstance(each, Exception)]
    for way in ways:
        way.check()
    assert all(words.tobytes() == beside.tobytes() for words in there)


def test_deltas_are_passed_on_as_they_came(ranks: ServiceThreads) -> None:
    before = np.arange(2_000_000, dtype=np.uint16)
    new = before.copy()
    new[::100] ^= 7
    way = WithBases(ranks, 1, [2, 0, 3, 1], [new], before=[before], bases=[0, 1, 2, 3], in_place=True)
    results = ranks.run()
    way.check()
    for rank in (0, 3, 1):
        assert results[rank].delta_bytes == 4_000_000
        assert results[rank].crossed_bytes <= 0.017 * 4_000_000


def test_what_a_relay_alters_fails_everybody(ranks: ServiceThreads) -> None:
    """The relay's memory is read back before the change, so only the first sender's digest detects it."""
    way = OnItsWay(ranks, 1, [0, 1, 2], [np.arange(300_000, dtype=np.uint32)])
    liar = ranks.services[1]
    held = way.held[1][0]
    land, number = liar._land, iter(range(100))

    def altered(done: Any, verify: bool) -> str:
        said = land(done, verify)
        if next(number) == 7:
            held[7 * MESSAGE_BYTES // 4 + 5] ^= 1
        return said

    liar._land = altered  # type: ignore[method-assign]
    try:
        results = ranks.run()
    finally:
        liar._land = land  # type: ignore[method-assign]
    assert all(isinstance(each, DigestMismatch) for each in results)
    assert "rank 2" in str(results[0]), results[0]


@pytest.mark.parametrize("old", ["of this run", "of the last run"])
def test_a_relay_that_passes_on_an_old_message_fails_everybody(ranks: ServiceThreads, old: str) -> None:
    """Both are genuine: the first sender sent them at another position or at another time."""
    words = np.arange(300_000, dtype=np.uint32)
    OnItsWay(ranks, 1, [0, 1, 2], [words])
    assert not [each for each in ranks.run() if isinstance(each, Exception)]
    before, words = words, words + 1
    way = OnItsWay(ranks, 1, [0, 1, 2], [words])
    liar, held, step = ranks.services[1], way.held[1][0], MESSAGE_BYTES // 4
    land, number = liar._land, iter(range(100))

    def replayed(done: Any, verify: bool) -> str:
        said = land(done, verify)
        if next(number) == 7:
            at = slice(7 * step, 8 * step)
            held[at] = before[at] if old == "of the last run" else words[6 * step : 7 * step]
        return said

    liar._land = replayed  # type: ignore[method-assign]
    try:
        results = ranks.run()
    finally:
        liar._land = land  # type: ignore[method-assign]
    assert all(isinstance(each, DigestMismatch) for each in results), results


def test_a_relay_that_does_not_receive_what_it_passes_on_is_refused(ranks: ServiceThreads) -> None:
    words = np.arange(1000, dtype=np.uint32)
    OnItsWay(ranks, 1, [0, 1], [words])
    here, there = ArenaPiece(words[:500].copy(), 0, 4), ArenaPiece(words[:500].copy(), 0, 4)
    ranks.services[1].send(7, here, 2, route=Route(1, 1))
    ranks.services[2].receive(7, there, 1, route=Route(1, 1))
    results = ranks.run()
    assert all(isinstance(each, RefusedError) for each in results)
    assert "pass on over path 1" in str(results[2])
