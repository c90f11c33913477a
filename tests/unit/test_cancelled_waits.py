"""A cancelled wait whose commit has begun: the commit ends first, and later calls report how."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from refitd.client.target_tensors import Derived, TargetTensors
from refitd.errors import CommitError
from refitd.protocol import local
from tests.support.target_daemon import WAIT_S, Daemon, target_on


class Engine:
    """A target written in place; the hook of a derived tensor blocks each commit until `may_end`."""

    def __init__(self) -> None:
        self.daemon = Daemon()
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.raises: Exception | None = None
        derived = {"d": Derived(torch.zeros(1), ("w",), self._refresh)}
        tensors = TargetTensors({"w": torch.zeros(4)}, 0, None, None, None, derived=derived)
        self.target = target_on(self.daemon, tensors)

    def _refresh(self, tensor: torch.Tensor) -> None:
        self.begun.set()
        assert self.may_end.wait(WAIT_S)
        if self.raises is not None:
            raise self.raises

    def decide(self, version: int) -> None:
        self.daemon.hears(local.PrepareCommit(f"s{version}", "m", version, in_place=True))

    async def begin(self) -> asyncio.Task[int]:
        """Return a wait whose commit of version 1 has begun."""
        waiting = asyncio.create_task(self.target.wait_async(1, WAIT_S))
        self.decide(1)
        assert await asyncio.to_thread(self.begun.wait, WAIT_S)
        return waiting


class WatchedLock:
    """The state's lock; says when a thread waits for a change."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits = threading.Event()
        changed = engine.target._state.changed
        wait = changed.wait

        def watched(*args: object) -> object:
            self.waits.set()
            return wait(*args)

        monkeypatch.setattr(changed, "wait", watched)


@pytest.mark.parametrize("fails", [False, True])
def test_a_poll_beside_a_commit_on_another_thread_reports_how_it_ends(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    engine = Engine()
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(engine.target.wait, 1, WAIT_S)
        engine.decide(1)
        assert engine.begun.wait(WAIT_S)
        engine.raises = ValueError("no") if fails else None
        lock = WatchedLock(engine, monkeypatch)
        polled = threads.submit(engine.target.poll)
        assert lock.waits.wait(WAIT_S) and not polled.done()
        engine.may_end.set()
        if fails:
            for call in (waiting, polled):
                with pytest.raises(CommitError, match="refresh hook raised ValueError"):
                    call.result(WAIT_S)
            assert engine.target.version is None
        else:
            assert (waiting.result(WAIT_S), polled.result(WAIT_S), engine.target.version) == (1, 1, 1)
    outcome = engine.daemon.next()
    assert isinstance(outcome, local.CommitFailed if fails else local.CommitDone)
    assert engine.daemon.said.empty() and engine.target.pending is None
    engine.target.release()


@pytest.mark.parametrize("cancels", [1, 2, 3])
def test_a_cancelled_wait_returns_after_its_commit_however_often_it_is_cancelled(cancels: int) -> None:
    engine = Engine()

    async def main() -> None:
        waiting = await engine.begin()
        for _ in range(cancels):
            waiting.cancel()
            for _ in range(5):
                await asyncio.sleep(0)  # lets the task handle the cancellation
            assert not waiting.done()
        engine.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert engine.target.version == 1 and engine.target.poll() is None

    asyncio.run(main())
    assert isinstance(engine.daemon.next(), local.CommitDone) and engine.daemon.said.empty()
    engine.target.release()


def test_a_poll_after_an_event_loop_that_was_abandoned_in_a_commit_reports_the_version() -> None:
    engine = Engine()
    loop = asyncio.new_event_loop()
    waiting = loop.run_until_complete(engine.begin())
    waiting.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    # the loop has stopped, as after an interrupt of `run_until_complete`; the commit continues in its thread
    with ThreadPoolExecutor() as threads:
        polled = threads.submit(engine.target.poll)
        engine.may_end.set()
        assert polled.result(WAIT_S) in (1, None) and engine.target.wait(1, WAIT_S) == 1
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(waiting)
    loop.close()
    assert isinstance(engine.daemon.next(), local.CommitDone) and engine.daemon.said.empty()
    engine.target.release()
