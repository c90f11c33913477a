"""A target asked to pause, whose daemon's messages come late, twice or not at all."""

from __future__ import annotations

import queue
import threading
from typing import Any

import numpy as np
import pytest
import torch

from refitd.client.mxfp8 import TargetTensors
from refitd.client.target import Target
from refitd.errors import CommitError, RefusedError
from refitd.protocol import local
from refitd.protocol.shards import shard_of
from tests.support.target_daemon import WAIT_S, Daemon


class Engine:
    """A target of one tensor that is written in place: nothing is copied at a commit."""

    def __init__(self) -> None:
        self.daemon = Daemon()
        self.events: queue.Queue[tuple[str, int | None]] = queue.Queue()
        self.broken = False
        self.may_pause = threading.Event()
        self.may_pause.set()
        tensors = TargetTensors({"w": torch.zeros(4)}, 0, None, None, None)
        registered = local.TargetRegistered(member="m", staging=0, nbytes=16, version=None)
        self.target = Target(
            self.daemon,  # type: ignore[arg-type]
            self.daemon,  # type: ignore[arg-type]
            local.RegisterTarget(model="policy", replica="a", rank=0, world_size=1, shard=shard_of(tensors.wire)),
            tensors,
            registered,
            None,
            None,
            None,
            self._pause,
            lambda version: self.events.put(("resume", version)),
        )

    def _pause(self, version: int) -> None:
        self.events.put(("pause", version))
        if self.broken:
            raise RuntimeError("no")
        assert self.may_pause.wait(WAIT_S)

    def ask(self, swap: str, version: int) -> None:
        self.daemon.hears(local.AskPause(swap=swap, member="m", version=version))

    def commit(self, swap: str, version: int) -> None:
        prepare = local.PrepareCommit(swap=swap, member="m", version=version, by_worker=False, in_place=True)
        self.daemon.hears(prepare)

    def resume(self, swap: str, *, is_poisoned: bool = False) -> None:
        self.daemon.hears(local.Resume(swap=swap, member="m", reason="aborted", is_poisoned=is_poisoned))

    def event(self) -> tuple[str, int | None]:
        return self.events.get(timeout=WAIT_S)


def test_it_stands_still_commits_and_goes_on() -> None:
    engine = Engine()
    engine.ask("s1", 1)
    assert engine.daemon.next() == local.Paused(swap="s1", member="m")
    assert engine.event() == ("pause", 1)
    engine.commit("s1", 1)
    done = engine.daemon.next()
    assert isinstance(done, local.CommitDone) and done.swap == "s1"
    assert engine.event() == ("resume", 1) and engine.target.version == 1
    engine.target.release()


def test_it_answers_the_next_swap_though_it_has_not_heard_the_end_of_the_one_before() -> None:
    engine = Engine()
    engine.ask("s1", 1)
    assert engine.daemon.next() == local.Paused(swap="s1", member="m")
    engine.ask("s2", 2)  # s1 was aborted, and that is still on its way, or lost
    assert engine.daemon.next() == local.Paused(swap="s2", member="m")
    engine.resume("s1")  # it comes late, and says nothing about s2
    engine.commit("s2", 2)
    done = engine.daemon.next()
    assert isinstance(done, local.CommitDone) and done.swap == "s2"
    events = [engine.event() for _ in range(4)]
    assert events == [("pause", 1), ("resume", None), ("pause", 2), ("resume", 2)]
    assert engine.target.version == 2 and engine.daemon.said.empty()
    engine.target.release()


def test_it_hears_that_a_swap_is_over_while_it_is_still_coming_to_a_standstill() -> None:
    engine = Engine()
    engine.may_pause.clear()
    engine.ask("s1", 1)
    assert engine.event() == ("pause", 1)
    engine.resume("s1")
    engine.ask("s2", 2)
    engine.may_pause.set()
    # that it stands still for s1 may be said, and is of no use to anybody; what counts is the answer for s2
    while (said := engine.daemon.next()) != local.Paused(swap="s2", member="m"):
        assert said == local.Paused(swap="s1", member="m")
    engine.commit("s2", 2)
    assert isinstance(engine.daemon.next(), local.CommitDone)
    assert engine.target.wait(2, timeout=WAIT_S) == 2
    engine.target.release()


def test_what_is_decided_without_its_being_asked_is_taken_over_standing_still() -> None:
    engine = Engine()
    engine.commit("s1", 1)  # the coordinator that has asked is gone
    assert isinstance(engine.daemon.next(), local.CommitDone)
    assert [engine.event(), engine.event()] == [("pause", 1), ("resume", 1)]
    engine.target.release()


def test_polls_beside_a_callback_leave_the_commit_to_its_thread() -> None:
    engine = Engine()
    engine.may_pause.clear()
    engine.commit("s1", 1)
    assert engine.event() == ("pause", 1) and engine.target.pending == 1
    assert engine.target.poll() is None and engine.target.pending == 1
    engine.may_pause.set()
    assert isinstance(engine.daemon.next(), local.CommitDone)
    assert engine.event() == ("resume", 1)
    engine.target.release()


def test_an_engine_that_cannot_stand_still_says_so_and_goes_on() -> None:
    engine = Engine()
    engine.broken = True
    engine.ask("s1", 1)
    failed = engine.daemon.next()
    assert isinstance(failed, local.CommitFailed) and "on_pause raised" in failed.reason
    assert [engine.event(), engine.event()] == [("pause", 1), ("resume", None)]
    assert isinstance(engine.target.error, CommitError)
    engine.broken = False
    engine.ask("s2", 2)
    assert engine.daemon.next() == local.Paused(swap="s2", member="m")
    engine.target.release()


def test_a_poisoned_engine_is_told_to_serve_nothing() -> None:
    engine = Engine()
    engine.ask("s1", 1)
    assert isinstance(engine.daemon.next(), local.Paused)
    engine.resume("s1", is_poisoned=True)
    assert [engine.event(), engine.event()] == [("pause", 1), ("resume", None)]
    assert engine.target.version is None and "nothing can be served" in str(engine.target.error)
    engine.target.release()


def test_nobody_polls_a_daemon_that_has_ended() -> None:
    engine = Engine()
    engine.daemon.hears(local.Failure(code="transport", message="the daemon has ended"))
    with pytest.raises(Exception, match="the daemon has ended"):
        engine.target.poll()


def test_a_closed_target_serves_nothing_and_says_so() -> None:
    engine = Engine()
    engine.commit("s1", 1)
    while engine.event() != ("resume", 1):
        pass
    assert engine.target.version == 1 and not engine.target.fenced
    engine.target.release()
    assert engine.target.version is None and "closed" in engine.target.fenced
    with pytest.raises(RefusedError, match="closed; register_target again"):
        engine.target.wait(1)


@pytest.mark.parametrize("wrong", [None, "1", np.array([1, 2]), [], b"1"])
def test_an_agree_that_agrees_on_no_number_is_refused(wrong: Any) -> None:
    engine = Engine()
    with pytest.raises(RefusedError, match="agree returned"):
        engine.target.poll(lambda pending: wrong)


@pytest.mark.parametrize("wrong", [3, "x", np.array([1, 2])])
def test_an_agree_that_cannot_be_called_is_refused(wrong: Any) -> None:
    with pytest.raises(RefusedError, match="agree is"):
        Engine().target.poll(wrong)


@pytest.mark.parametrize("none", [-1, np.int64(-1), torch.tensor([-1]), -1.0])
def test_an_agree_may_agree_in_numbers_of_all_kinds(none: Any) -> None:
    assert Engine().target.poll(lambda pending: none) is None


def test_a_decision_that_was_on_its_way_when_it_was_closed_is_not_answered() -> None:
    engine = Engine()
    heard = engine.target._notified
    engine.target.release()
    heard(local.PrepareCommit(swap="s1", member="m", version=1, by_worker=False, lockstep=True))
    assert engine.daemon.said.empty() and engine.target.version is None
