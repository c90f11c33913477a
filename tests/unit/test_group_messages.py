"""Exchanges in a process group: messages, deadlines, and payloads of late senders."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta
from math import prod

import pytest
import torch

from refitd.caches import BoundedCache
from refitd.copy_services import Epoch, Mailbox, nccl, nvshmem
from refitd.copy_services.peers import Peers
from refitd.copy_services.pieces import ALIGNMENT, PieceSpan, boxes_between, lay_out
from refitd.copy_services.waits import Deadline, bounded, poll
from refitd.errors import ConfigError, DeadlineExceeded


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


# --- test_waits -----------------------------------------------------------------------------------------


def test_a_poll_ends_when_it_may_or_at_its_deadline_with_the_subject() -> None:
    answers = iter([False] * 3 + [True])
    poll(lambda: next(answers), Deadline.after(5), "rank 1 said nothing")
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"^rank 1 said nothing within 0.05 s$"):
        poll(lambda: False, Deadline.after(0.05), "rank 1 said nothing")
    assert time.monotonic() - started < 10


def test_a_call_that_never_returns_is_left_at_its_deadline() -> None:
    stuck = threading.Event()
    with pytest.raises(DeadlineExceeded, match=r"making communicators did not end within 0\.05 s"):
        bounded(stuck.wait, Deadline.after(0.05), "making communicators")
    stuck.set()


def test_a_bounded_call_gives_what_it_returns_or_raises() -> None:
    assert bounded(lambda: None, Deadline.after(5), "a call") is None
    assert bounded(lambda: 3, Deadline.after(5), "a call") == 3
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 // 0, Deadline.after(5), "a call")


@pytest.mark.parametrize("join", [nccl.join, nvshmem.join])
def test_a_worker_without_a_cuda_device_is_refused_by_name(join) -> None:
    class Nothing(Mailbox):
        def put(self, key: str, value: bytes) -> None:
            raise AssertionError

        def get(self, key: str, timeout: float) -> bytes:
            raise AssertionError

    epoch = Epoch("e", 1, ("n0/0", "n1/0"), "127.0.0.1", 1 << 20, Nothing(), 1.0, bytes(32))
    with pytest.raises(ConfigError, match=r"n1/0: .* needs a CUDA device, this worker has 'cpu'"):
        join(epoch)


# --- Peers use a received payload only after its transfer has ended, however late the sender is. --------


PAYLOADS = [b"layouts of rank 0", b"one", b"two, longer"]


class Late:
    """A transfer that ends while it is waited for: it fills its buffer then."""

    def __init__(self, buffer: torch.Tensor, payload: bytes) -> None:
        self._buffer, self._payload = buffer, payload

    def wait(self, timeout: timedelta) -> None:
        self._buffer.copy_(torch.frombuffer(bytearray(self._payload), dtype=torch.uint8))


class Group:
    """A process group of three, seen from position 0, whose other members send late."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return len(PAYLOADS)

    def recv(self, tensors: list[torch.Tensor], position: int, tag: int) -> Late:
        return Late(tensors[0], PAYLOADS[position])


def test_gathered_payloads_of_late_senders_are_complete() -> None:
    lengths = [len(payload) for payload in PAYLOADS]
    assert Peers(Group()).gather(PAYLOADS[0], lengths, Deadline.after(5.0), "gathering layouts") == PAYLOADS
