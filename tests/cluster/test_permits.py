"""An engine serves a version only while its permit is renewed, and commits only complete, decided versions."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import pytest

import refitd
from refitd.client.arenas import Arena
from refitd.client.take_over import ArenaPair
from refitd.client.target import Target
from refitd.client.target_tensors import TargetTensors
from refitd.testing import Daemon, Engine, RunningSwap, eventually, stopped
from tests.support import programs, shards
from tests.support.fleet import go_live
from tests.support.names import policy
from tests.support.recovery import Fleet, crash

COORDINATED = "[deadlines]\nlease_s = 2.0\ncommit_s = 5.0\n"


class Served:
    """Records the version that a target reports, polled in a tight loop."""

    def __init__(self, target: Target) -> None:
        self.versions: list[int | None] = []
        self._target = target
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.002):
            self.versions.append(self._target.version)

    def end(self) -> list[int | None]:
        self._stop.set()
        self._thread.join(10)
        return self.versions


@pytest.mark.slow
def test_an_engine_on_a_stopped_node_serves_nothing_once_the_fleet_goes_on(start_daemon: Callable[..., Daemon]) -> None:
    """Its daemon is stopped after version 2 was decided; when it wakes, its engine commits 2, which is not live."""
    deadlines = "[deadlines]\ncommit_s = 4.0\n"
    n0 = start_daemon(deadlines)
    n1 = start_daemon(name="n1", joins=n0.endpoint)
    eventually(lambda: len(n0.connect().status().nodes) == 2, "both nodes are there")
    with n0.connect() as here, n1.connect() as there:
        tensors = shards.whole(1)
        source = here.register_source(policy(), tensors)
        near = here.register_target(policy(), shards.zeros_like(tensors), replica="near")
        live = shards.zeros_like(tensors)
        far = there.register_target(policy(), live, replica="far")
        go_live(here, source, 1, near, far)
        assert far.version == 1
        source.publish(2)
        with stopped((n1.pid,)):
            with Engine(near), pytest.raises(refitd.RefitFailed):
                here.swap(policy(), 2, timeout=30)  # aborted, or decided and incomplete: far does not know
            eventually(lambda: len(here.status().nodes) == 1, "the node is lost")
            go_live(here, source, 3, near)
            assert far.version is None and "permit" in far.fenced
            served = Served(far)
        with Engine(near, far):
            eventually(lambda: far.version == 3, "it has caught up")
        assert set(served.end()) <= {None, 3}, "it has served a version that is not live"
        for version in (1, 2, 3):
            assert (version == 3) == shards.equal(live, tensors if version == 3 else shards.zeros_like(tensors))


def test_engines_stop_serving_when_no_coordinator_has_answered_in_time(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(COORDINATED, standalone=False)
    coordinator = daemon.start_coordinator()
    fleet = Fleet(daemon)
    eventually(lambda: fleet.target.version == 2 and not fleet.target.fenced, "it serves version 2")
    coordinator.kill()
    eventually(lambda: fleet.target.version is None, "nobody vouches for its version")
    assert "not heard of the coordinator" in fleet.target.fenced
    assert fleet.target.poll() is None, "its loop goes on"
    daemon.start_coordinator()
    eventually(lambda: fleet.target.version == 2, "a coordinator says that it is live")
    assert not fleet.target.fenced
    fleet.close()


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_engines_serve_without_a_gap_across_a_take_over(start_daemon: Callable[..., Daemon], end: str) -> None:
    daemon = start_daemon("[deadlines]\nlease_s = 60.0\n", standalone=False)
    coordinator = daemon.start_coordinator()
    fleet = Fleet(daemon)
    served = Served(fleet.target)
    for _ in range(2):
        (coordinator.kill if end == "killed" else coordinator.stop)()
        coordinator = daemon.start_coordinator()
        eventually(fleet.knows_model, "it is admitted again")
    fleet.publish(3)
    with Engine(fleet.target):
        assert fleet.trainer.swap(policy(), 3, timeout=60).outcome == "committed"
    eventually(lambda: 3 in served.versions, "it was seen to serve version 3")
    versions = served.end()
    del versions[versions.index(3) :]
    while versions and versions[-1] is None:
        del versions[-1]  # while it committed version 3
    assert set(versions) == {2} and fleet.target.version == 3
    fleet.close()


@pytest.mark.slow
def test_a_rank_with_a_staged_version_serves_on_while_no_coordinator_answers(
    start_daemon: Callable[..., Daemon],
) -> None:
    """The decision waited for a lost node; then the coordinator is killed, and its successor aborts the swap."""
    daemon = start_daemon("[deadlines]\nlease_s = 60.0\n[models.policy]\ncatch_up = false\n", standalone=False)
    coordinator = daemon.start_coordinator()
    other = start_daemon(name="n1", joins=daemon.endpoint)
    fleet = Fleet(daemon)
    with other.connect() as lost:
        engine = lost.register_target(policy(), shards.zeros_like(fleet.tensors), replica="b")
        fleet.publish(3)
        with Engine(fleet.target, engine):
            assert fleet.trainer.swap(policy(), 3, timeout=60).outcome == "committed"
        other.kill()
        eventually(lambda: len(fleet.trainer.status().nodes) == 1, "the node is lost")
        fleet.publish(4)
        served = Served(fleet.target)
        running = RunningSwap(daemon.connect(), policy(), 4, timeout=90)
        eventually(lambda: "event=held" in daemon.log(), "the decision waits for the permit of b")
        coordinator.kill()
        eventually(lambda: "event=coordinator-silent" in daemon.log(), "the daemon has missed it")
        daemon.start_coordinator()
        eventually(fleet.knows_model, "it is admitted again")
        with pytest.raises(refitd.RefitdError):
            running.result()
        assert set(served.end()) == {3}
    fleet.close()


def test_engines_stop_serving_when_their_daemon_is_gone(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(COORDINATED)
    fleet = Fleet(daemon)
    daemon.kill()
    eventually(lambda: fleet.target.version is None, "nobody vouches for its version")
    assert "the daemon is gone" in fleet.target.fenced
    fleet.close()


def test_nothing_new_is_decided_while_an_engine_out_of_reach_may_serve(start_daemon: Callable[..., Daemon]) -> None:
    """Its daemon is replaced immediately; the old daemon's engine has a permit for some time yet."""
    daemon = start_daemon("[deadlines]\nlease_s = 6.0\ncommit_s = 5.0\n")
    old = start_daemon(name="n1", joins=daemon.endpoint)
    fleet = Fleet(daemon)
    lost = old.connect()
    engine = lost.register_target(policy(), shards.zeros_like(fleet.tensors), replica="b")
    with Engine(engine):
        assert engine.wait(2, timeout=60) == 2
    old.kill()
    start_daemon(name="n1", joins=daemon.endpoint)
    eventually(lambda: "b" not in {t.replica for t in fleet.trainer.status().models[0].targets}, "it is lost")
    fleet.publish(3)
    served: list[int | None] = []
    with Engine(fleet.target):
        running = RunningSwap(daemon.connect(), policy(), 3, timeout=90)
        eventually(lambda: bool(served.append(engine.version)) or fleet.target.version == 3, "version 3 is live", 90)
        assert engine.version is None, "two versions are served"
        assert running.result().outcome == "committed"
    lost.close()
    fleet.close()


# --- what a returning engine restores -------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["private", "arena"])
def test_a_returning_engine_is_not_swappable_before_it_holds_its_weights(
    fleet: Fleet, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash(fleet, way)
    kind = ArenaPair if way == "arena" else TargetTensors
    restore = kind.restore
    others: list[list[str]] = []

    def slow(self: object, *arena: object) -> None:
        fleet.publish(3)
        others.append([t.replica for t in fleet.trainer.status().models[0].targets])
        with Engine(fleet.target):
            fleet.trainer.swap(policy(), 3, timeout=60)
        restore(self, *arena)  # type: ignore[arg-type]

    monkeypatch.setattr(kind, "restore", slow)
    with fleet.daemon.connect("back") as client:
        live = shards.zeros_like(fleet.tensors)
        if way == "arena":
            live = client.allocate({name: (t.shape, t.dtype) for name, t in fleet.tensors.items()})
        target = client.register_target(policy(), live, replica="crashes")
        assert others == [["a"]], "nobody may stage into an arena that is still being read"
        # it has restored 2 completely, and 3 is live: it gets no permit before it has loaded 3
        assert target.version in (None, 3)
        assert shards.equal(live, fleet.full[2]) or target.version == 3
        assert target.wait(3, timeout=60) == 3 and shards.equal(live, fleet.full[3])
        assert fleet.trainer.verify(policy(), timeout=60).outcome == "proven"


def test_a_restore_that_did_not_land_is_refused_and_what_was_kept_is_kept(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash(fleet)
    copy = TargetTensors.copy

    def loses(self: TargetTensors, arena: Arena, *, into_arena: bool) -> None:
        copy(self, arena, into_arena=into_arena)
        self.tensors[0].view(-1)[3] += 1

    monkeypatch.setattr(TargetTensors, "copy", loses)
    with fleet.daemon.connect("back") as client, pytest.raises(refitd.CommitError, match="restored"):
        client.register_target(policy(), shards.zeros_like(fleet.tensors), replica="crashes")
    monkeypatch.undo()
    assert [t.replica for t in fleet.trainer.status().models[0].targets] == ["a"]


DIES = """
from tests.support.names import policy
import os, sys, refitd
from refitd.client.target_tensors import TargetTensors
from tests.support import shards
TargetTensors.restore = lambda *_: os._exit(9)
client = refitd.connect(sys.argv[1], name="dies")
client.register_target(policy(), shards.zeros_like(shards.whole(1)), replica="crashes")
"""


def test_an_engine_that_dies_while_it_restores_finds_its_weights_again(fleet: Fleet) -> None:
    crash(fleet)
    kept = fleet.daemon.node().arenas
    assert programs.run(programs.python(fleet.daemon, DIES)).returncode == 9
    eventually(lambda: re.search("session-closed .*name=dies", fleet.daemon.log()) is not None, "it is known")
    assert fleet.daemon.node().arenas == kept
    with fleet.daemon.connect("back") as again:
        live = shards.zeros_like(fleet.tensors)
        target = again.register_target(policy(), live, replica="crashes")
        assert target.version == 2 and shards.equal(live, fleet.full[2])
