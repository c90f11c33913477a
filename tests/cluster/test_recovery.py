"""Rollbacks, queued swaps, returning engines, and pauses before the decision."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import refitd
from refitd.testing import Engine, RunningSwap, eventually, stopped
from tests.support import shards
from tests.support.controls import controlled
from tests.support.names import policy
from tests.support.programs import Program, python
from tests.support.recovery import ENGINE, Fleet, Tensors, crash


def test_rollback_brings_the_version_before_back_and_history_tells_it(fleet: Fleet) -> None:
    with pytest.raises(refitd.RefusedError, match="rollback"):
        fleet.trainer.swap(policy(), 1, timeout=5)
    with Engine(fleet.target):
        report = fleet.trainer.rollback(policy(), timeout=60)
    assert (report.version, report.kind) == (1, "rollback")
    assert fleet.target.version == 1 and shards.equal(fleet.live, fleet.full[1])
    with pytest.raises(refitd.RefusedError, match="no version before 1"):
        fleet.trainer.rollback(policy(), timeout=5)
    past = [(s.version, s.state, s.report.kind if s.report else "") for s in fleet.trainer.history(policy()).swaps]
    assert past == [(1, "committed", "rollback"), (2, "committed", "asked"), (1, "committed", "asked")]
    with pytest.raises(refitd.RefusedError, match="no model 'nobody' is known"):
        fleet.trainer.history("nobody")


def test_history_outlives_the_coordinator(start_daemon) -> None:  # type: ignore[no-untyped-def]
    daemon = start_daemon("[deadlines]\nlease_s = 2.0\n", standalone=False)
    coordinator = daemon.start_coordinator()
    fleet = Fleet(daemon)
    before = fleet.trainer.history(policy())
    coordinator.kill()
    daemon.start_coordinator()
    eventually(fleet.knows_model, "a coordinator that knows the model")
    assert fleet.trainer.history(policy()) == before
    assert fleet.trainer.status().models[0].live == 2
    fleet.close()


def test_a_queued_swap_follows_the_running_one(fleet: Fleet) -> None:
    fleet.publish(3)
    running = RunningSwap(fleet.daemon.connect(), policy(), 3)
    running.wait_phase("commit")  # no target polls yet
    found: list[object] = []

    def ask() -> None:
        with fleet.daemon.connect("second") as client:
            found.append(client.swap(policy(), 3, timeout=20, queue=True))

    asking = threading.Thread(target=ask)
    asking.start()
    eventually(lambda: fleet.trainer.status().models[0].queued == 1, "the second swap waits")
    with pytest.raises(refitd.RefusedError, match="queue"):
        fleet.trainer.swap(policy(), 3, timeout=5)
    with Engine(fleet.target):
        assert running.result().outcome == "committed"
        asking.join(20)
    assert [getattr(report, "outcome", None) for report in found] == ["committed"]


def test_a_replica_that_died_in_the_commit_is_brought_up_to_date_when_it_returns(fleet: Fleet) -> None:
    fleet.publish(3)
    other_live = shards.zeros_like(fleet.tensors)
    other = fleet.daemon.connect("other")
    target = other.register_target(policy(), other_live, replica="b")
    target.wait(2, timeout=60)
    running = RunningSwap(fleet.daemon.connect(), policy(), 3)
    running.wait_phase("commit")
    other.close()  # decided, and it will not commit
    with Engine(fleet.target), pytest.raises(refitd.RefitFailed, match="incomplete"):
        running.result()
    assert fleet.target.version == 3 and target.version is None and shards.equal(other_live, fleet.full[2])
    with fleet.daemon.connect("back") as client:
        back = client.register_target(policy(), other_live, replica="b")
        assert back.version is None  # it must not serve the values in its memory
        assert back.wait(3, timeout=60) == 3
    assert shards.equal(other_live, fleet.full[3])


@pytest.mark.slow
def test_an_engine_that_was_stopped_for_long_still_hears_what_it_is_asked(fleet: Fleet) -> None:
    polling = ENGINE.replace("sys.stdin.readline()", "while True: target.poll(); time.sleep(0.001)")
    with Program(python(fleet.daemon, polling, "private")) as process:
        assert process.line() == "serves"
        with stopped((process.pid,)):
            time.sleep(13)  # longer than any heartbeat of past releases
        fleet.publish(3)
        with Engine(fleet.target):
            report = fleet.trainer.swap(policy(), 3, timeout=60)
        assert {m.replica: m.state for m in report.members} == {"a": "committed", "crashes": "committed"}


def test_what_an_engine_left_behind_is_not_served_when_another_version_is_live(fleet: Fleet) -> None:
    crash(fleet)
    fleet.publish(3)
    with Engine(fleet.target):
        fleet.trainer.swap(policy(), 3, timeout=60)
    with fleet.daemon.connect("back") as client:
        live = shards.zeros_like(fleet.tensors)
        target = client.register_target(policy(), live, replica="crashes")
        assert target.version is None and "3 is live" in target.fenced
        assert target.wait(3, timeout=60) == 3 and shards.equal(live, fleet.full[3])
        assert not target.fenced


def test_nothing_is_kept_for_other_tensors_or_after_an_orderly_end(fleet: Fleet) -> None:
    before = fleet.daemon.node().arenas
    crash(fleet)
    assert fleet.daemon.node().arenas == before + 1
    with fleet.daemon.connect("other") as client:
        other = {name: tensor[:1].clone() for name, tensor in fleet.tensors.items()}
        target = client.register_target(policy(), other, replica="crashes")
        assert target.version is None
    eventually(lambda: fleet.daemon.node().arenas == before, "its arena is free")
    crash(fleet, orderly=True)
    eventually(lambda: fleet.daemon.node().arenas == before, "nothing is kept")


@pytest.mark.slow
def test_what_engines_left_behind_makes_room_for_others_and_goes_in_time(start_daemon) -> None:  # type: ignore[no-untyped-def]
    daemon = start_daemon("[node]\nkeep_targets_s = 2.0\n")
    fleet = Fleet(daemon)
    before = daemon.node().arenas
    crash(fleet)
    assert daemon.node().arenas == before + 1
    eventually(lambda: daemon.node().arenas == before, "its time is over")
    fleet.close()

    size = 1 << 20
    daemon = start_daemon(f"[node]\nmax_arena_bytes = {8 * size}\n")
    fleet = Fleet(daemon)
    crash(fleet)
    kept = daemon.node()
    with daemon.connect("large") as client:
        client.allocate({"large": ((8 * size - kept.arena_bytes + 1,), torch.uint8)})
        assert daemon.node().arenas == kept.arenas
    fleet.close()


class Still:
    """An engine with a pause hook before the decision; `may_pause` lets it pause."""

    def __init__(self, client: refitd.Client, live: Tensors, **options: Any) -> None:
        self.may_pause = threading.Event()
        self.broken = ""
        self.events: list[tuple[str, int | None]] = []
        self.target = controlled(
            client, policy(), live, replica="still", pause=self._pause, resume=self._resume, **options
        )

    def _pause(self, version: int) -> None:
        self.events.append(("pause", version))
        if self.broken:
            raise RuntimeError(self.broken)
        assert self.may_pause.wait(30)

    def _resume(self, version: int | None) -> None:
        self.events.append(("resume", version))


def test_nothing_is_decided_before_an_engine_stands_still(fleet: Fleet) -> None:
    live = shards.zeros_like(fleet.tensors)
    with fleet.daemon.connect("still") as client:
        engine = Still(client, live)
        engine.may_pause.set()
        eventually(lambda: engine.target.version == 2, "it has caught up")
        engine.may_pause.clear()
        fleet.publish(3)
        with Engine(fleet.target):
            running = RunningSwap(fleet.daemon.connect(), policy(), 3)
            running.wait_phase("pause")
            time.sleep(0.2)  # the other replica polls all the time
            assert fleet.target.version == 2, "a replica went ahead while another one was still being asked"
            assert fleet.trainer.history(policy(), 1).swaps[0].version == 2, "decided too early"
            engine.may_pause.set()
            report = running.result()
        assert report.outcome == "committed" and shards.equal(live, fleet.full[3])
        assert report.pause_s > 0.1
        eventually(lambda: len(engine.events) == 4, "it goes on")
        assert engine.events == [("pause", 2), ("resume", 2), ("pause", 3), ("resume", 3)]
        assert next(m.paused_s for m in report.members if m.replica == "still") > 0


def test_an_engine_that_does_not_stand_still_aborts_the_swap_and_goes_on(start_daemon) -> None:  # type: ignore[no-untyped-def]
    daemon = start_daemon("[deadlines]\npause_s = 3.0\n")
    fleet = Fleet(daemon)
    live = shards.zeros_like(fleet.tensors)
    with daemon.connect("still") as client:
        engine = Still(client, live)
        engine.may_pause.set()
        eventually(lambda: engine.target.version == 2, "it has caught up")
        engine.may_pause.clear()
        fleet.publish(3)
        with Engine(fleet.target), pytest.raises(refitd.RefitFailed, match="controller of still") as failure:
            fleet.trainer.swap(policy(), 3, timeout=60)
        assert failure.value.report is not None and failure.value.report.phase == "pause"
        engine.may_pause.set()
        eventually(lambda: engine.events[-1] == ("resume", 2), "it goes on with what it had")
        assert shards.equal(live, fleet.full[2]) and shards.equal(fleet.live, fleet.full[2])

        engine.broken = "no room to stand"
        with Engine(fleet.target), pytest.raises(refitd.RefitFailed, match="no room to stand"):
            fleet.trainer.swap(policy(), 3, timeout=60)
        assert fleet.target.version == engine.target.version == 2
        engine.broken = ""
        with Engine(fleet.target):
            assert fleet.trainer.swap(policy(), 3, timeout=60).outcome == "committed"
        assert shards.equal(live, fleet.full[3])
    fleet.close()


def test_what_cannot_be_written_in_place_is_refused(fleet: Fleet) -> None:
    live = shards.zeros_like(fleet.tensors)
    with fleet.daemon.connect("engine") as client:
        with pytest.raises(refitd.RefusedError, match="must be in arenas"):
            client.register_target(policy(), live, replica="b", mode="in-place")
        inside = client.allocate({name: (t.shape, t.dtype) for name, t in live.items()})
        with pytest.raises(refitd.RefusedError, match="expected 'shadow' or 'in-place'"):
            client.register_target(policy(), inside, replica="b", mode="in place")  # type: ignore[arg-type]
        before = fleet.daemon.node().arenas
        client.register_target(policy(), inside, replica="b", mode="in-place")
        assert fleet.daemon.node().arenas == before, "there is nothing beside the live tensors"


def test_who_cannot_know_what_was_decided_serves_nothing(start_daemon) -> None:  # type: ignore[no-untyped-def]
    daemon = start_daemon("[deadlines]\nlease_s = 2.0\n", standalone=False)
    coordinator = daemon.start_coordinator()
    fleet = Fleet(daemon)
    live = shards.zeros_like(fleet.tensors)
    with daemon.connect("still") as client:
        engine = Still(client, live)
        engine.may_pause.set()
        eventually(lambda: engine.target.version == 2, "it has caught up")
        engine.may_pause.clear()
        fleet.publish(3)
        RunningSwap(daemon.connect(), policy(), 3).wait_phase("pause")
        coordinator.kill()
        eventually(lambda: bool(fleet.target.fenced) and bool(engine.target.fenced), "both are fenced")
        assert fleet.target.version is None and engine.target.version is None
        daemon.start_coordinator()
        engine.may_pause.set()
        # no decision was made: return to version 2
        eventually(lambda: fleet.target.version == 2 and engine.target.version == 2, "both serve again")
        with Engine(fleet.target):
            eventually(lambda: _swapped(fleet, 3), "the next swap")
        assert shards.equal(live, fleet.full[3])
    fleet.close()


def _swapped(fleet: Fleet, version: int) -> bool:
    try:
        return fleet.trainer.swap(policy(), version, timeout=60).outcome == "committed"
    except refitd.RefitdError:
        return False
