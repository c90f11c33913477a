"""Each way to go live, a mode with a commit point, shows the same behaviour; tests/support/ways.py has the table."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import refitd
from refitd.testing import Daemon, eventually
from refitd.testing.processes import stopped
from tests.support.flips import kill_workers
from tests.support.ways import FLIPS, POINTS, WAYS, Engines, Fleet, modes_of, refusing


@pytest.fixture
def fleet(shared_daemon: Daemon) -> Iterator[Fleet]:
    """Without engines yet. `shared_daemon` fails a test that leaves an arena, a registration or a client."""
    found = Fleet(shared_daemon)
    yield found
    found.close()


@pytest.mark.parametrize("point", POINTS)
def test_versions_go_live_whole_at_the_same_addresses_and_nothing_is_left(shared_daemon: Daemon, point: str) -> None:
    before = 1000

    def descriptors() -> int:
        return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in (shared_daemon.pid, os.getpid()))

    for _ in range(2):  # the first turn opens connections that stay
        with contextlib.closing(Fleet(shared_daemon)) as fleet:
            members = fleet.add_all(point)
            for version in range(1, 5):
                report = fleet.swap(version)
                assert report.outcome == "committed" and len(report.members) == len(members)
                fleet.serve(version)
                fleet.verify()
            assert all(one.target.last_pause_s > 0 for one in members)
            assert {one.mode for one in members if one.target.flips} == {*FLIPS}
            for one in members:
                with one.resting():
                    one.live["n"][3] += 8
                    fleet.verify("differs")
                    one.live["n"][3] -= 8
        eventually(lambda: shared_daemon.status().nodes[0].clients == 1, "all clients have left")
        eventually(lambda most=before: descriptors() <= most, "no descriptor is left")
        before = descriptors()


@pytest.mark.parametrize("point", POINTS)
def test_a_rollback_brings_the_version_before_back_and_forth(fleet: Fleet, point: str) -> None:
    members = fleet.add_all(point)
    for version in (1, 2):
        fleet.swap(version)
    for version in (1, 2):
        report = fleet.rollback(version)
        assert (report.version, report.kind, report.outcome) == (version, "rollback", "committed")
        fleet.serve(version)
        fleet.verify()
    for one in members:
        if one.mode not in FLIPS:
            one.leave()
    fleet.source.close()
    report = fleet.rollback()
    assert (report.version, report.bytes) == (1, 0), "engines that flip need no source"
    fleet.serve(1, *(one for one in members if one.mode in FLIPS))
    with pytest.raises(refitd.RefusedError, match="no source"):
        fleet.rollback(7)


@pytest.mark.parametrize("point", POINTS)
def test_an_aborted_swap_leaves_the_old_version_and_the_next_one_works(fleet: Fleet, point: str) -> None:
    members = fleet.add_all(point)
    refused: list[int] = []
    refuses = refusing(fleet, lambda version: version in refused and not refused.remove(version))
    for version in (1, 2):
        fleet.swap(version)
    refused.append(3)
    with pytest.raises(refitd.SwapFailed, match="not 3") as failure:
        fleet.swap(3)
    assert failure.value.report is not None
    for one in members:
        if one.mode == "in-place":  # staging has written it
            states = {member.replica: member.state for member in failure.value.report.members}
            assert one.target.version is None and states[one.replica] == "poisoned"
            eventually(lambda one=one: one.calls[-1] == ("resume", None), "its engine is told to serve nothing")
            assert fleet.states()[one.replica] == "poisoned"
        else:
            fleet.serve(2, one)
    refused.append(1)
    with pytest.raises(refitd.SwapFailed, match="not 1"):
        fleet.rollback(1)
    report = fleet.rollback(1)
    assert report.outcome == "committed" and refuses.version == 1
    fleet.serve(1)
    assert fleet.trainer.swap(fleet.model, 3, timeout=60).outcome == "committed"
    fleet.serve(3)
    fleet.verify()
    for one in members:
        if one.mode not in FLIPS:
            one.leave()
    fleet.swap(4)
    refused.append(5)
    with pytest.raises(refitd.SwapFailed, match="not 5"):
        fleet.swap(5)
    assert fleet.rollback(3).bytes > 0, "staging has overwritten what engines that flip had of it"
    fleet.serve(3, *(one for one in members if one.mode in FLIPS))


@pytest.mark.parametrize("point", POINTS)
def test_a_rank_whose_commit_fails_serves_nothing_until_a_commit_succeeds(fleet: Fleet, point: str) -> None:
    members = fleet.add_all(point)
    version = 1
    fleet.swap(version)
    for one in members:
        version += 1

        def fails() -> None:
            raise RuntimeError("no room")

        one.hook = fails
        with pytest.raises(refitd.SwapFailed, match=f"{one.replica}.*no room"):
            fleet.swap(version)
        assert one.target.version is None
        fleet.serve(version, *(other for other in members if other is not one))
        one.hook = None
        if version % 2:
            fleet.serve(version)  # it catches up by itself
        version += 1
        assert fleet.swap(version, queue=True).outcome == "committed"
        fleet.serve(version)
    fleet.verify()


@pytest.mark.parametrize("point", POINTS)
def test_a_sleeping_engine_is_left_out_and_gets_the_live_version_when_it_wakes(fleet: Fleet, point: str) -> None:
    awake = fleet.add("shadow", "poll", "awake")
    members = fleet.add_all(point)
    fleet.swap(1)
    for one in members:
        with one.resting() as target:
            target.suspend()
            assert target.version is None and "suspended" in target.fenced
            assert fleet.states()[one.replica] == "suspended"
            assert target.resume() == 1, "it kept its contents"
            target.suspend()
            one.fill(77)
            assert target.resume(kept=False) is None
    fleet.serve(1)
    fleet.swap(2)
    fleet.serve(2)
    fleet.rollback()  # what the engine has lost does not come back
    fleet.serve(1)
    for one in (*members, awake):
        with one.resting() as target:
            target.suspend()
    fleet.verify("unknown")
    with pytest.raises(refitd.RefusedError, match=r"every replica is left out \(suspended: "):
        fleet.swap(3)
    assert awake.target.resume() == 1
    report = fleet.trainer.swap(fleet.model, 3, timeout=60)
    assert {*report.suspended} == {one.replica for one in members} and len(report.members) == 1
    fleet.serve(3, awake)
    for one in members:
        assert one.holds(1)
        # another version is live; a thread that waits may have committed it before `resume` returns
        assert one.target.resume() in (None, 3)
    fleet.serve(3)
    fleet.verify()


@pytest.mark.parametrize("point", POINTS)
def test_a_replica_that_joins_late_or_again_catches_up_and_disturbs_nobody(fleet: Fleet, point: str) -> None:
    first = fleet.add("shadow", "poll", "first")
    fleet.swap(1)
    first.may_commit = False
    for mode in modes_of(point):
        one = fleet.add(mode, point)
        fleet.serve(1, one)
        assert first.target.pending is None
        last = fleet.trainer.history(fleet.model, 1).swaps[0].report
        assert last is not None and (last.kind, [m.replica for m in last.members]) == ("catch-up", [one.replica])
        one.leave()
        assert one.target.version is None and one.holds(1), "its tensors keep their values"
    first.may_commit = True
    fleet.swap(2)
    for one in fleet.members.values():
        if one is not first:
            one.register()
    fleet.serve(2)
    fleet.verify()


@pytest.mark.parametrize("point", [point for point in POINTS if point != "controller"])
def test_nothing_is_written_before_the_commit_point(fleet: Fleet, point: str) -> None:
    members = fleet.add_all(point)
    fleet.swap(1)
    fleet.serve(1)
    for one in members:
        with one.resting():
            one.may_commit = False
    swap = fleet.running(2)
    eventually(lambda: all(one.target.pending == 2 for one in members), "it is decided")
    fleet.serve(1)
    for one in members:
        one.may_commit = True
    assert swap.result().outcome == "committed"
    fleet.serve(2)


@pytest.mark.parametrize("mode", [mode for mode, points in WAYS.items() if points == ("controller",)])
def test_a_mode_that_needs_a_controller_is_refused_without_one(fleet: Fleet, mode: str) -> None:
    fleet.add(mode, "poll")
    with pytest.raises(refitd.RefusedError, match="control_replica"):
        fleet.swap(1)


def test_workers_that_die_are_replaced_and_write_the_right_memory(fleet: Fleet) -> None:
    for point in ("poll", "controller"):
        fleet.add_all(point)
    for version in range(1, 5):
        fleet.swap(version)
        fleet.serve(version)
        if version == 3:
            kill_workers(fleet.daemon)
        fleet.verify()


def test_engines_that_crash_have_their_version_when_they_return(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon("[node]\nkeep_targets_s = 60.0\n")
    fleet = Fleet(daemon)
    engines = Engines(fleet)
    try:
        assert engines.start() == dict.fromkeys(modes_of("poll"))
        for version in (1, 2):
            fleet.swap(version)
        fleet.verify()
        before = daemon.node().arenas
        swaps = len(fleet.trainer.history(fleet.model, 100).swaps)
        for number in range(2):
            engines.kill()
            assert engines.start() == dict.fromkeys(modes_of("poll"), 2 + number)
            assert len(fleet.trainer.history(fleet.model, 100).swaps) == swaps + number
            assert daemon.node().arenas == before
            fleet.verify()
            fleet.swap(3 + number, queue=True)
            fleet.verify()
        assert not engines.stop().strip()
    finally:
        engines.kill()
        fleet.close()


def end(daemon: Daemon, how: str) -> None:
    if how == "kill":
        daemon.kill()
    else:
        os.kill(daemon.pid, signal.SIGTERM)
        eventually(lambda: not daemon.is_running, "it has ended")


ENDS = ["kill", pytest.param("stop", marks=pytest.mark.slow)]


@pytest.fixture
def restarted(start_daemon: Callable[..., Daemon]) -> Iterator[Fleet]:
    """All modes, with clients that wait for the next daemon; version 1 is live."""
    found = Fleet(start_daemon(), reconnect=True)
    for point in ("poll", "controller"):
        found.add_all(point)
    found.swap(1)
    found.serve(1)
    yield found
    found.close()


@pytest.mark.parametrize("how", ENDS)
def test_engines_serve_on_while_their_daemon_is_restarted(restarted: Fleet, how: str) -> None:
    """Published versions stay, and no memory is allocated twice."""
    fleet, daemon = restarted, restarted.daemon
    before = daemon.node().arena_bytes
    for version in (2, 3):
        fleet.publish(version)
        end(daemon, how)
        assert all(one.target.version == version - 1 for one in fleet.members.values())
        daemon.start()
        eventually(fleet.is_known, "all have registered again", 60)
        fleet.serve(version - 1)
        assert version in fleet.trainer.status().models[0].complete_versions
        assert daemon.node().arena_bytes == before
        assert fleet.trainer.swap(fleet.model, version, timeout=60).outcome == "committed"
        fleet.serve(version)
        fleet.verify()


@pytest.mark.parametrize("how", ENDS)
def test_a_daemon_that_ends_while_a_version_is_staged_leaves_the_old_one(restarted: Fleet, how: str) -> None:
    fleet, daemon = restarted, restarted.daemon
    with stopped(tuple(daemon.workers())):
        swap = fleet.running(2)
        swap.wait_phase("stage")
        end(daemon, how)
    with pytest.raises(refitd.RefitdError):
        swap.result()
    daemon.start()
    eventually(fleet.is_known, "all have registered again", 60)
    fleet.swap(3)
    fleet.serve(3)
    fleet.verify()
    assert {version for one in fleet.members.values() for version in one.versions} <= {None, 1, 2, 3}


@pytest.mark.parametrize("how", ENDS)
def test_a_version_that_was_decided_when_the_daemon_ended_goes_live_everywhere(restarted: Fleet, how: str) -> None:
    fleet, daemon = restarted, restarted.daemon
    late = [one for one in fleet.members.values() if one.point == "poll" and one.mode != "shadow"]
    for one in late:
        one.may_commit = False
    swap = fleet.running(2)
    eventually(lambda: all(one.target.pending == 2 for one in late), "it is decided")
    fleet.serve(2, *(one for one in fleet.members.values() if one not in late))
    end(daemon, how)
    with pytest.raises(refitd.RefitdError):
        swap.result()
    for one in late:
        eventually(lambda one=one: one.target.pending is None, "a commit that cannot be reported is dropped")
        assert one.target.version in (1, None) and one.holds(1)
        one.may_commit = True
    daemon.start()
    fleet.serve(2)
    fleet.swap(3)
    fleet.serve(3)
    fleet.verify()
