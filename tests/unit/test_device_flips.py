"""Flips between GPU arenas on the fake driver: each driver call fails in turn, captures, closing."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from refitd.buffers import cuda
from refitd.buffers.cuda_driver import Driver
from refitd.errors import ArenaError, RefusedError
from tests.support.fake_calls import THREAD_LOCAL, Calls, calls, failing
from tests.support.fake_cuda import PAGE

__all__ = ["calls"]

SIZE = 2 * PAGE - 5  # an arena's last page is not full
NOTHING = {"handles": 0, "reservations": 0, "mappings": 0, "contexts": 1}  # the context is the test's own

Pair = tuple[cuda.MappedDeviceArena, cuda.MappedDeviceArena]


def arena(value: int) -> cuda.MappedDeviceArena:
    fd = cuda.create(SIZE, f"arena {value}")
    try:
        made = cuda.MappedDeviceArena(fd, SIZE, write=True)
    finally:
        os.close(fd)
    ctypes.memset(made.address, value, SIZE)
    return made


def values(pair: Pair) -> tuple[set[int], ...]:
    found = [ctypes.string_at(one.address, SIZE) for one in pair]
    return tuple({data[0]} if data == data[:1] * SIZE else set(data) for data in found)


@pytest.fixture
def pair(calls: Calls) -> Iterator[Pair]:
    """Two arenas of one size, with ones and twos. At the end everything must be given back."""
    made = arena(1), arena(2)
    yield made
    for one in made:
        one.close()
    assert cuda.release_dropped() == 0
    assert calls.left() == NOTHING


def tried(rule: str, call: Callable[[], object]) -> Exception | None:
    with failing(rule):
        try:
            call()
        except (ArenaError, RefusedError) as exc:
            return exc
    return None


def test_a_flip_waits_for_queued_work_and_exchanges_the_memory(calls: Calls, pair: Pair) -> None:
    assert calls.queue(pair[0].address, 7, SIZE) == 0
    pair[0].exchange(pair[1])
    assert values(pair) == ({2}, {7}) and pair[0].exchanges == 1


# the calls of a flip: the context, the capture, the synchronise, two unmaps, and two maps with their access
EACH_CALL = [
    "cuDevicePrimaryCtxRetain:1",
    "cuStreamIsCapturing:1",
    "cuCtxSynchronize:1",
    *(f"cuMem:{number}" for number in range(1, 7)),
]


@pytest.mark.parametrize("rule", EACH_CALL)
def test_after_any_failed_call_both_arenas_have_their_old_version_and_the_next_flip_works(
    calls: Calls, pair: Pair, rule: str
) -> None:
    assert isinstance(tried(rule, lambda: pair[0].exchange(pair[1])), ArenaError)
    assert values(pair) == ({1}, {2}) and pair[0].exchanges == 0 and not pair[0].lost
    pair[0].exchange(pair[1])
    assert values(pair) == ({2}, {1})


def test_no_call_of_a_flip_is_left_out_above(calls: Calls, pair: Pair) -> None:
    assert tried("cuMem:7", lambda: pair[0].exchange(pair[1])) is None
    assert values(pair) == ({2}, {1})
    assert tried("cuDevicePrimaryCtxRelease_v2:1", lambda: pair[0].exchange(pair[1])) is None, "the flip has ended"
    assert values(pair) == ({1}, {2})
    Driver().call("cuDevicePrimaryCtxRelease_v2", 0)


def test_two_failed_calls_leave_one_version_in_both_arenas(calls: Calls, pair: Pair) -> None:
    for first in range(1, 8):
        for second in range(first + 1, first + 8):
            before, count = values(pair), pair[0].exchanges
            failed = tried(f"cuMem:{first},cuMem:{second}", lambda: pair[0].exchange(pair[1]))
            assert not pair[0].lost, "a retry must repair two failures"
            is_exchanged = pair[0].exchanges != count
            assert values(pair) == (before[::-1] if is_exchanged else before)
            assert is_exchanged == (failed is None)


@pytest.mark.parametrize(
    "rule", ["cuMemMap:1+", "cuMemMap:2+", "cuMemSetAccess:1+", "cuMemSetAccess:2+", "cuMemUnmap:2+"]
)
def test_a_driver_that_fails_for_good_loses_the_arenas_or_changes_nothing_and_close_leaks_nothing(
    calls: Calls, pair: Pair, rule: str
) -> None:
    before = values(pair)
    failed = tried(rule, lambda: pair[0].exchange(pair[1]))
    assert isinstance(failed, ArenaError) and pair[0].exchanges == 0
    if not pair[0].lost:
        assert "both arenas have their old contents" in str(failed)
        assert values(pair) == before
        return
    assert "restart this process, it can serve no version" in str(failed)
    for use in (lambda: pair[0].exchange(pair[1]), lambda: pair[1].exchange(pair[0]), lambda: pair[1].tensor):
        with pytest.raises(ArenaError, match="restart this process"):
            use()


@pytest.mark.parametrize(
    "function", ["cuMemMap", "cuMemSetAccess", "cuMemAddressReserve", "cuMemImport", "cuMemCreate"]
)
def test_an_arena_that_cannot_be_made_or_mapped_leaves_nothing(calls: Calls, function: str) -> None:
    assert isinstance(tried(f"{function}:1", lambda: arena(1)), ArenaError)
    assert calls.left() == NOTHING


@pytest.mark.parametrize("function", ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease", "cuCtxSynchronize"])
def test_a_close_that_fails_says_so_and_is_ended_later(calls: Calls, function: str) -> None:
    made = arena(1)
    assert isinstance(tried(f"{function}:1", made.close), ArenaError)
    made.close()
    assert made.address == 0 and calls.left() != NOTHING
    assert cuda.release_dropped() == 0
    assert calls.left() == NOTHING


def test_a_close_waits_for_queued_work(calls: Calls) -> None:
    made = arena(1)
    assert calls.queue(made.address, 7, SIZE) == 0
    made.close()
    assert calls.left() == NOTHING


def test_a_collected_arena_calls_no_driver_and_the_next_explicit_call_releases_it(calls: Calls) -> None:
    made = arena(1)
    assert calls.queue(made.address, 7, SIZE) == 0
    with failing("cu:1+"):
        del made
        gc.collect()
    assert calls.left()["mappings"] == 1
    with calls.capture(is_blocking=True):
        assert cuda.release_dropped() == 1
    other = arena(2)
    assert calls.left()["mappings"] == 1
    other.close()
    assert calls.left() == NOTHING


def test_a_collection_on_another_thread_during_a_capture_leaves_the_capture_whole(calls: Calls) -> None:
    kept = [arena(1)]
    with calls.capture():
        thread = threading.Thread(target=kept.clear)
        thread.start()
        thread.join(60)
        gc.collect()
        assert not kept
    assert cuda.release_dropped() == 0
    assert calls.left() == NOTHING


@pytest.mark.parametrize("is_blocking", [True, False])
def test_a_flip_and_a_close_during_a_capture_change_nothing_and_leave_the_capture_whole(
    calls: Calls, pair: Pair, monkeypatch: pytest.MonkeyPatch, is_blocking: bool
) -> None:
    third = arena(3)
    with calls.capture(is_blocking=is_blocking) as stream:
        # torch is asked for its streams; this torch has none
        monkeypatch.setattr(cuda, "torch_streams", lambda gpu: [] if is_blocking else [stream])
        assert cuda.is_capturing(0)
        with pytest.raises(RefusedError, match="is being captured on GPU 0, and nothing was changed"):
            pair[0].exchange(pair[1])
        assert values(pair) == ({1}, {2}) and pair[0].exchanges == 0
        third.close()
        assert calls.left()["mappings"] == 3
        # the memory of an arena may be made and mapped
        fourth = arena(4)
    assert not cuda.is_capturing(0)
    assert cuda.release_dropped() == 0
    fourth.close()
    pair[0].exchange(pair[1])
    assert values(pair) == ({2}, {1})


def test_a_flip_during_an_unseen_capture_of_another_thread_changes_nothing(calls: Calls, pair: Pair) -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), []

    def capture() -> None:
        calls.call("cuCtxPushCurrent_v2", calls.context)
        with suppress(AssertionError), calls.capture(mode=THREAD_LOCAL):
            begun.set()
            may_end.wait(60)
        ended.append(True)

    thread = threading.Thread(target=capture)
    thread.start()
    assert begun.wait(60)
    try:
        with pytest.raises(RefusedError, match=r"nothing was changed.*may have invalidated it"):
            pair[0].exchange(pair[1])
    finally:
        may_end.set()
        thread.join(60)
    assert values(pair) == ({1}, {2}) and ended == [True]


@pytest.mark.parametrize(
    ("rdma", "fabric", "types"),
    [("1", "", 257), ("0", "", 1), ("refused", "", 1), ("1", "1", 265), ("1", "refused", 257), ("0", "refused", 1)],
)
def test_memory_is_made_for_network_cards_and_the_fabric_where_the_driver_grants_it(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, rdma: str, fabric: str, types: int
) -> None:
    monkeypatch.setenv("FAKE_CUDA_RDMA", rdma)
    monkeypatch.setenv("FAKE_CUDA_FABRIC", fabric)
    fd = cuda.create(SIZE, "one")
    name = os.readlink(f"/proc/self/fd/{fd}").split()[0]
    with cuda.MappedDeviceArena(fd, SIZE, write=True):
        os.close(fd)
    assert int(name.rpartition(":")[2]) == types  # handle types, and 256 for gpuDirectRDMACapable


def test_lack_of_memory_is_not_taken_for_a_refusal(calls: Calls) -> None:
    with failing("cuMemCreate:1+"), pytest.raises(ArenaError, match="out of memory"):
        cuda.create(SIZE, "one")
    assert calls.left() == NOTHING and Driver().count() == 2
