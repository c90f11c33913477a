from __future__ import annotations

import random
from math import prod

import pytest

from refitd.addressing.messages import ALIGNMENT, PieceSpan, boxes_between, lay_out
from refitd.caches import BoundedCache


def test_small_pieces_share_a_message_and_large_ones_are_cut() -> None:
    messages = lay_out([40, 30, 250, 10, 0], 96)

    assert [message.nbytes for message in messages] == [78, 96, 96, 58, 10]
    assert messages[0].spans == (PieceSpan(0, 0, 40, 0), PieceSpan(1, 0, 30, 48))
    assert [message.spans for message in messages[1:4]] == [
        (PieceSpan(2, 0, 96, 0),),
        (PieceSpan(2, 96, 192, 0),),
        (PieceSpan(2, 192, 250, 0),),
    ]
    assert messages[4].spans == (PieceSpan(3, 0, 10, 0),)


def test_nothing_needs_no_message() -> None:
    assert lay_out([], 64) == [] == lay_out([0, 0], 64)


@pytest.mark.parametrize("seed", range(50))
def test_every_byte_is_in_one_message_within_the_limit(seed: int) -> None:
    rng = random.Random(seed)
    limit = rng.choice([16, 48, 160])
    sizes = [rng.randrange(3 * limit) for _ in range(rng.randrange(30))]
    seen = [bytearray(size) for size in sizes]
    for message in lay_out(sizes, limit):
        assert 0 < message.nbytes <= limit
        end = 0
        for span in message.spans:
            assert span.at >= end and span.at % ALIGNMENT == 0
            end = span.at + span.end - span.start
            for i in range(span.start, span.end):
                seen[span.piece][i] += 1
        assert end == message.nbytes
    assert all(set(piece) <= {1} for piece in seen)


def test_boxes_of_a_run_of_elements_by_hand() -> None:
    assert list(boxes_between((4, 10), 5, 27)) == [
        ((slice(0, 1), slice(5, 10)), 5),
        ((slice(1, 2), slice(0, 10)), 10),
        ((slice(2, 3), slice(0, 7)), 7),
    ]
    assert list(boxes_between((), 0, 1)) == [((), 1)]
    assert list(boxes_between((3,), 2, 2)) == []


@pytest.mark.parametrize("seed", range(50))
def test_boxes_are_the_elements_in_order(seed: int) -> None:
    rng = random.Random(seed)
    shape = [rng.randint(1, 4) for _ in range(rng.randrange(5))]
    start, end = sorted(rng.randint(0, prod(shape)) for _ in range(2))
    flat = []
    for index, count in boxes_between(shape, start, end):
        before = len(flat)
        _flatten(shape, index, 0, flat)
        assert len(flat) - before == count
    assert flat == list(range(start, end))


def _flatten(shape: list[int], index: tuple[slice, ...], base: int, out: list[int]) -> None:
    if not index:
        out.append(base)
        return
    for i in range(index[0].start, index[0].stop):
        _flatten(shape[1:], index[1:], base + i * prod(shape[1:]), out)


def test_a_cache_keeps_what_was_used_last_and_tells_the_rest_good_bye() -> None:
    gone: list[str] = []
    cache: BoundedCache[int, str] = BoundedCache(2, release=gone.append)
    cache.put(1, "a")
    cache.put(2, "b")
    assert cache.get(1) == "a"
    cache.put(3, "c")
    assert gone == ["b"] and cache.get(2) is None and len(cache) == 2
    cache.put(3, "d")
    assert gone == ["b", "c"]
    cache.clear()
    assert sorted(gone) == ["a", "b", "c", "d"] and not len(cache)
