"""An engine is interrupted (Ctrl-C) during a commit: it reports the outcome to the swap immediately."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
import torch

from refitd.client import commit_state, take_over
from refitd.client.target_tensors import Derived, TargetTensors
from refitd.errors import CommitError
from refitd.protocol import local
from refitd.protocol.base import Message
from tests.support.arenas import arena_of
from tests.support.target_daemon import WAIT_S, Daemon, target_on

OUTCOMES = (local.CommitDone, local.CommitFailed)


class Engine:
    """A target of one tensor with its own memory, and a tensor derived from it by a hook."""

    def __init__(self, refresh: Callable[[], object] = lambda: None) -> None:
        self.daemon = Daemon()
        self.live = torch.zeros(4)
        self.derived = torch.zeros(1)
        self.staging = arena_of(16)

        def made(tensor: torch.Tensor) -> None:
            refresh()
            tensor.fill_(self.live[0])

        derived = {"d": Derived(self.derived, ("w",), made)}
        tensors = TargetTensors({"w": self.live}, 0, None, None, None, derived=derived)
        self.target = target_on(self.daemon, tensors, self.staging)

    def decide(self, version: int, **more: Any) -> None:
        self.staging.bytes[:] = torch.full((4,), float(version)).view(torch.uint8).numpy()
        self.daemon.hears(local.PrepareCommit(f"s{version}", "m", version, **more))

    def said(self) -> list[Message]:
        return [self.daemon.said.get() for _ in range(self.daemon.said.qsize())]

    def serves(self, version: int) -> bool:
        held = {*self.live.tolist(), *self.derived.tolist()}
        return self.target.version == version and held == {float(version)}


def test_an_interrupted_commit_is_finished_first() -> None:
    raised: list[BaseException] = [KeyboardInterrupt("now")]

    def refresh() -> None:
        if raised:
            raise raised.pop()

    engine = Engine(refresh)
    engine.decide(1)
    with pytest.raises(KeyboardInterrupt, match="now"):
        engine.target.poll()
    assert engine.serves(1) and [type(said) for said in engine.said()] == [local.CommitDone]
    assert engine.target.poll() is None and engine.target.pending is None


@pytest.mark.parametrize("way", ["poll", "wait"])
def test_a_commit_that_is_interrupted_again_is_reported_as_failed(way: str) -> None:
    def refresh() -> None:
        sys.exit(3)

    engine = Engine(refresh)
    engine.decide(1)
    with pytest.raises(SystemExit):
        engine.target.poll() if way == "poll" else engine.target.wait(1, timeout=WAIT_S)
    failed = engine.daemon.next()
    assert isinstance(failed, local.CommitFailed) and "SystemExit" in failed.reason
    assert engine.target.version is None and engine.target.pending is None
    assert engine.target.poll() is None
    engine.target.release()
    assert not engine.said()


def test_an_interrupt_before_anything_is_written_leaves_the_version_pending() -> None:
    engine = Engine()
    engine.decide(1)
    engine.target.poll()
    engine.said()
    engine.decide(2, lockstep=True)

    def interrupt(*_: object) -> bool:
        raise KeyboardInterrupt

    state = engine.target._state
    state.changed.wait_for = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.target.poll()
    reached = engine.said()
    assert [one.stands for one in reached if isinstance(one, local.StepReached)] == ["", "poll", ""]
    assert engine.serves(1) and engine.target.pending == 2
    engine.daemon.hears(local.FlipAt("s2", "m", 1, ""))
    assert engine.target.poll() == 2 and engine.serves(2)
    engine.daemon.said.get_nowait()


def test_an_interrupt_anywhere_ends_with_one_outcome_and_lets_the_next_version_be_taken() -> None:
    """Ctrl-C before every line that a commit executes, one after the other."""
    watched = {take_over.__file__, commit_state.__file__}
    line = 0
    while True:
        line += 1
        engine, left, where = Engine(), [line], ""

        def trace(frame: FrameType, event: str, arg: Any, left: list[int] = left) -> Any:
            nonlocal where
            if frame.f_code.co_filename not in watched:
                return None
            if event == "line":
                left[0] -= 1
                if left[0] == 0:
                    where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
                    raise KeyboardInterrupt
            return trace

        engine.decide(1)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            engine.target.poll()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        if not where:
            break
        if engine.target.pending is not None:  # the interrupt came before the commit began
            assert engine.target.poll() == 1, where
        said = [one for one in engine.said() if isinstance(one, OUTCOMES)]
        assert said and {type(one) for one in said} == {local.CommitDone}, (where, said)
        assert engine.serves(1), where
        engine.decide(2)
        assert engine.target.poll() == 2 and engine.serves(2), where
        engine.target.release()
    assert line > 40


def test_a_failure_whose_report_is_interrupted_stays_a_failure() -> None:
    engine = Engine()
    engine.decide(1)
    tell, calls = engine.daemon.tell, [0]

    def interrupted(message: Message) -> None:
        tell(message)
        calls[0] += 1
        if calls[0] == 1:
            raise KeyboardInterrupt

    engine.daemon.tell = interrupted
    engine.target._tensors.check_unmoved = _moved
    with pytest.raises(KeyboardInterrupt):
        engine.target.poll()
    assert {type(one) for one in engine.said()} == {local.CommitFailed}
    assert engine.target.version is None and engine.target.pending is None


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_a_report_that_is_interrupted_twice_is_sent_by_the_next_poll(lockstep: bool, fails: bool) -> None:
    engine = Engine()
    engine.decide(1, lockstep=lockstep)
    if lockstep:
        engine.daemon.hears(local.FlipAt("s1", "m", 1, ""))
    tell, interrupts = engine.daemon.tell, [0, 0]

    def interrupted(message: Message) -> None:
        if isinstance(message, OUTCOMES) and interrupts:
            interrupts.pop()
            raise KeyboardInterrupt
        tell(message)

    engine.daemon.tell = interrupted
    if fails:
        engine.target._tensors.check_unmoved = _moved
    with pytest.raises(KeyboardInterrupt):
        engine.target.poll()
    assert not interrupts and not any(isinstance(one, OUTCOMES) for one in engine.said())
    engine.live.fill_(5.0)  # the next poll does not write
    if fails:
        with pytest.raises(CommitError, match="it moved"):
            engine.target.poll()
    else:
        assert engine.target.poll() == 1
    assert [type(one) for one in engine.said()] == [local.CommitFailed if fails else local.CommitDone]
    assert engine.live[0] == 5.0 and engine.target.pending is None
    assert engine.target.version == (None if fails else 1) and engine.target.poll() is None


def test_an_interrupt_in_a_condition_leaves_its_lock_free() -> None:
    engine = Engine()
    state = engine.target._state
    line = 0
    while True:
        line += 1
        left, where = [line], ""

        def trace(frame: FrameType, event: str, arg: Any, left: list[int] = left) -> Any:
            nonlocal where
            if frame.f_locals.get("self") is not state.changed:
                return trace
            left[0] -= event == "line"
            if left[0] == 0 and not where:
                where = f"threading.py:{frame.f_lineno}"
                raise KeyboardInterrupt
            return trace

        engine.decide(line)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            engine.target.poll()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        while engine.target.pending is not None:
            engine.target.poll()
        with ThreadPoolExecutor(1) as other:
            assert other.submit(state.lock.acquire, timeout=0.5).result(), where
            other.submit(state.lock.release).result()
        if not where:
            break
    assert line > 3


def _moved(*_: object, **__: object) -> None:
    raise CommitError("w: it moved")
