"""Turns: other threads wait for theirs, the thread that has it is refused."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

import pytest

from refitd.client.reentrant_lock import Turn, check_process
from refitd.errors import DeadlineExceeded, RefusedError

WAIT_S = 20.0


def test_a_thread_that_has_its_turn_is_refused_and_keeps_it() -> None:
    turn = Turn("work is under way")
    for _ in range(2):
        with turn.taken(WAIT_S), pytest.raises(RefusedError, match="work is under way"), turn.taken(WAIT_S):
            pass


def test_a_signal_handler_is_refused_what_it_interrupts() -> None:
    turn = Turn("work is under way")
    found: list[str] = []

    def handler(_: int, __: FrameType | None) -> None:
        try:
            with turn.taken(WAIT_S):
                found.append("taken")
        except RefusedError:
            found.append("refused")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with turn.taken(WAIT_S):
            os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == ["refused", "taken"]


def test_other_threads_wait_until_their_time_is_over() -> None:
    turn, entered, leave = Turn("work is under way"), threading.Event(), threading.Event()

    def work() -> None:
        with turn.taken(WAIT_S):
            entered.set()
            leave.wait(WAIT_S)

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(WAIT_S)
    with pytest.raises(DeadlineExceeded, match="on another thread"), turn.taken(0.01):
        pass
    leave.set()
    with turn.taken(WAIT_S):
        pass
    thread.join(WAIT_S)


def test_a_client_belongs_to_the_process_that_made_it() -> None:
    check_process(os.getpid())
    with pytest.raises(RefusedError, match="connect again after fork"):
        check_process(os.getppid())
