"""Work that may hang runs in order on separate threads, and overtakes a task that makes no progress."""

from __future__ import annotations

import threading
import time

from refitd.daemon.arena_files import PATIENCE_S, Moved, SlowWork
from refitd.errors import ArenaError, DeadlineExceeded
from refitd.testing import eventually


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_pieces_are_done_in_turn_and_one_that_hangs_is_passed_over_and_named() -> None:
    clock, told = Clock(), threading.Event()
    maker = SlowWork(clock, told.set)
    release, begun, given_back = threading.Event(), [], []

    def hangs(moved: Moved) -> str:
        begun.append("hangs")
        release.wait(30)
        return "late"

    def quick(moved: Moved) -> str:
        moved()
        begun.append("quick")
        return "done"

    maker.submit(1, "arena 'a'", 30.0, hangs, given_back.append, in_turn=True)
    eventually(lambda: begun == ["hangs"], "it has begun")
    maker.submit(2, "arena 'b'", 30.0, quick, in_turn=True)
    maker.submit(3, "a measurement", 30.0, lambda _: "measured", in_turn=False)
    found = {}

    def collected(key: int) -> bool:
        found.update(maker.collect())
        return key in found

    eventually(lambda: collected(3), "what needs no turn is done")
    assert found == {3: "measured"} and begun == ["hangs"]
    clock.now += PATIENCE_S + 0.1
    eventually(lambda: collected(2), "the second is done past the first")
    assert found[2] == "done"
    clock.now = 30.1
    assert collected(1)
    late = found[1]
    assert isinstance(late, DeadlineExceeded) and "arena 'a'" in str(late) and "nothing has moved for 30 s" in str(late)
    release.set()
    eventually(lambda: given_back == ["late"], "what came too late is given back")


def test_pieces_that_move_keep_their_turn_and_give_up_when_nobody_waits() -> None:
    clock = Clock()
    maker = SlowWork(clock, lambda: None)
    steps, begun = threading.Semaphore(0), []

    def moves(moved: Moved) -> None:
        while True:
            assert steps.acquire(timeout=30)
            moved()
            begun.append(clock.now)

    maker.submit(1, "a", 5.0, moves, in_turn=True)
    maker.submit(2, "b", 50.0, lambda _: begun.append("b"), in_turn=True)
    for second in range(1, 5):
        clock.now = float(second)
        steps.release()
        eventually(lambda: begun[-1:] == [clock.now], "it moves")
        assert list(maker.collect()) == []
    assert "b" not in begun
    clock.now = 5.5
    ((key, late),) = [pair for pair in maker.collect() if pair[0] == 1]
    assert key == 1 and isinstance(late, DeadlineExceeded)
    steps.release()
    deadline = time.monotonic() + 10
    while "b" not in begun:
        assert time.monotonic() < deadline
        clock.now += PATIENCE_S
        list(maker.collect())
    assert begun.count("b") == 1


def test_pieces_that_hang_for_good_are_bounded() -> None:
    clock, release = Clock(), threading.Event()
    maker = SlowWork(clock, lambda: None)
    for number in range(16):
        maker.submit(number, f"a{number}", 1.0, lambda _: release.wait(30), in_turn=False)
    clock.now = 2.0
    assert len(list(maker.collect())) == 16
    maker.submit(99, "arena 'z'", 1.0, lambda _: None, in_turn=False)
    ((_, refused),) = maker.collect()
    assert isinstance(refused, ArenaError) and "arena 'z'" in str(refused) and "hang in the kernel" in str(refused)
    release.set()

    def works() -> bool:
        maker.submit(100, "a", 10.0, lambda _: "done", in_turn=False)
        return any(result == "done" for _, result in maker.collect())

    eventually(works, "there is room again")
