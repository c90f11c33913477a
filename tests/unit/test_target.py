"""A target whose daemon's messages come late, twice or not at all."""

from __future__ import annotations

import pytest
import torch

from refitd.client.target_tensors import TargetTensors
from refitd.errors import RefusedError
from refitd.protocol import local
from tests.support.target_daemon import Daemon, target_on


class Engine:
    """A target of one tensor that is written in place; a commit does not copy."""

    def __init__(self) -> None:
        self.daemon = Daemon()
        tensors = TargetTensors({"w": torch.zeros(4)}, 0, None, None, None)
        self.target = target_on(self.daemon, tensors, in_place=True)

    def commit(self, swap: str, version: int) -> None:
        prepare = local.PrepareCommit(swap=swap, member="m", version=version, in_place=True)
        self.daemon.hears(prepare)


def test_a_decided_version_is_committed_by_the_next_poll() -> None:
    engine = Engine()
    engine.commit("s1", 1)
    assert engine.target.pending == 1 and engine.target.version is None
    assert engine.target.poll() == 1 and engine.target.version == 1
    done = engine.daemon.next()
    assert isinstance(done, local.CommitDone) and done.swap == "s1"
    assert engine.target.poll() is None and engine.daemon.said.empty()
    engine.target.release()


def test_a_poisoned_engine_serves_nothing_until_a_swap_succeeds() -> None:
    engine = Engine()
    engine.commit("s1", 1)
    assert engine.target.poll() == 1
    engine.daemon.hears(local.Poisoned(swap="s2", member="m", reason="a worker died"))
    assert engine.target.version is None and "nothing can be served: a worker died" in str(engine.target.error)
    engine.commit("s3", 3)
    assert engine.target.poll() == 3 and engine.target.version == 3
    engine.target.release()


def test_nobody_polls_a_daemon_that_has_ended() -> None:
    engine = Engine()
    engine.daemon.hears(local.Failure(code="transport", message="the daemon has ended"))
    with pytest.raises(Exception, match="the daemon has ended"):
        engine.target.poll()


def test_a_closed_target_serves_nothing_and_says_so() -> None:
    engine = Engine()
    engine.commit("s1", 1)
    assert engine.target.poll() == 1
    assert engine.target.version == 1 and not engine.target.fenced
    engine.target.release()
    assert engine.target.version is None and "closed" in engine.target.fenced
    with pytest.raises(RefusedError, match="closed; register_target again"):
        engine.target.wait(1)


def test_a_decision_that_was_on_its_way_when_it_was_closed_is_not_answered() -> None:
    engine = Engine()
    heard = engine.target._notified
    engine.target.release()
    heard(local.PrepareCommit(swap="s1", member="m", version=1, lockstep=True))
    assert engine.daemon.said.empty() and engine.target.version is None
