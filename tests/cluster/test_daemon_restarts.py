"""A daemon is killed or stopped and started again: special members return. test_go_live.py does it in each mode."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import refitd
from refitd.testing import Cluster, Daemon, Engine, eventually
from tests.support import shards
from tests.support.names import policy
from tests.support.ways import SHAPES, WAIT_S, Fleet, values

pytestmark = pytest.mark.slow


@pytest.fixture
def fleet(daemon: Daemon) -> Iterator[Fleet]:
    found = Fleet(daemon, reconnect=True)
    yield found
    found.close()


def restart(daemon: Daemon, how: str = "kill") -> None:
    if how == "kill":
        daemon.kill()
    else:
        os.kill(daemon.pid, signal.SIGTERM)
        eventually(lambda: not daemon.is_running, "the daemon has ended")
    daemon.start()


def test_a_trainer_publishes_and_swaps_on_while_its_daemon_is_restarted_again_and_again(fleet: Fleet) -> None:
    for mode in ("shadow", "flip", "copy"):
        fleet.add(mode, "poll")
    fleet.swap_whenever(1)
    for version, how in enumerate(("kill", "stop", "kill", "kill", "stop"), 2):
        thread = threading.Thread(target=restart, args=(fleet.daemon, how))
        thread.start()
        fleet.swap_whenever(version)
        thread.join()
    fleet.swap_whenever(version + 1)


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_one_node_of_two_is_restarted_while_the_coordinator_and_the_other_node_stay(how: str) -> None:
    with Cluster() as cluster:
        fleet = Fleet(cluster.daemons["n1"], reconnect=True)
        fleet.add("flip", "poll", "near")
        fleet.add("shadow", "poll", "far", daemon=cluster.daemons["n0"])
        for version in (1, 2, 3):
            fleet.swap_whenever(version)
            if version < 3:
                restart(fleet.daemon, how)
                eventually(fleet.is_known, "all have registered again", WAIT_S)
        said = cluster.coordinator.log()
        assert said.count("event=node-left node=n1") == (2 if how == "stop" else 0), "one that is stopped says goodbye"
        assert how == "kill" or ("is in use by the daemon" not in said and "event=node-lost" not in said)
        fleet.close()


def test_what_a_client_says_of_a_daemon_that_stays_away(daemon: Daemon) -> None:
    with daemon.connect(reconnect=True) as client:
        tensors = shards.whole(1)
        source = client.register_source(policy(), tensors)
        target = client.register_target(policy(), shards.zeros_like(shards.whole(1)), replica="r")
        daemon.kill()
        assert target.poll() is None

        def is_told() -> bool:
            with pytest.raises(refitd.DeadlineExceeded) as late:
                target.wait(1, timeout=0.1)
            return "has ended" in str(late.value)

        eventually(is_told, "the client knows that the daemon has ended")
        for ask in (
            lambda: source.publish(1, timeout=0.2),
            lambda: source.lend(1, timeout=0.2),
            lambda: client.status(timeout=0.2),
            lambda: target.suspend(timeout=0.2),
            lambda: client.register_target(policy(), shards.zeros_like(shards.whole(1)), replica="s", timeout=0.2),
        ):
            with pytest.raises(refitd.PeerLost, match=r"ended [\d.]+ s ago and is not back: .*start it"):
                ask()
        source.close()
        target.close()


def test_a_permit_ends_while_the_daemon_is_away_and_the_coordinator_confirms_the_version(
    start_daemon: Callable[..., Daemon],
) -> None:
    fleet = Fleet(start_daemon("[deadlines]\nlease_s = 2.0\n"), reconnect=True)
    target = fleet.add("flip", "poll").target
    fleet.swap_whenever(1)
    fleet.daemon.kill()
    eventually(lambda: target.version is None, "its permit has ended")
    assert "permit" in target.fenced and "has ended" in target.fenced
    fleet.daemon.start()
    fleet.serve(1)
    assert not target.fenced
    fleet.close()


def test_a_suspended_engine_comes_back_suspended(fleet: Fleet) -> None:
    one, two = fleet.add("shadow", "poll"), fleet.add("flip", "poll")
    fleet.swap_whenever(1)
    with one.resting() as target:
        target.suspend()
    restart(fleet.daemon)
    eventually(fleet.is_known, "all have registered again", WAIT_S)
    assert target.version is None and "suspended" in target.fenced
    assert fleet.swap(2).outcome == "committed"
    fleet.serve(2, two)
    target.resume()
    fleet.serve(2)


def test_a_version_that_was_lent_is_gone_with_the_daemon(daemon: Daemon) -> None:
    with daemon.connect(reconnect=True) as client:
        given = client.allocate({name: (shape, torch.bfloat16) for name, shape in SHAPES.items()})
        source = client.register_source(policy(), given)
        target = client.register_target(policy(), live := values(0), replica="r")
        lease = source.lend(1)
        daemon.kill()
        with pytest.raises(refitd.PeerLost, match="has ended"):
            lease.wait(10)
        daemon.start()
        eventually(lambda: bool(client.status().models), "it is back", WAIT_S)
        with pytest.raises(refitd.RefusedError, match=r"not newer|next_version"):
            source.lend(1)
        assert source.next_version == 2
        for name, tensor in values(2).items():
            given[name].copy_(tensor)
        with Engine(target), source.lend(2):
            client.swap(policy(), 2, timeout=WAIT_S)
        assert target.version == 2 and shards.equal(live, values(2))


def test_a_streamed_source_keeps_its_versions(fleet: Fleet) -> None:
    source = fleet.trainer.declare_source("other", {name: (shape, torch.bfloat16) for name, shape in SHAPES.items()})
    source.publish_from(1, values(1).items())
    restart(fleet.daemon)
    source.publish_from(2, values(2).items())
    eventually(
        lambda: any(m.model == "other" and m.complete_versions == (1, 2) for m in fleet.trainer.status().models),
        "both versions are known",
        WAIT_S,
    )


def test_a_client_that_is_closed_while_its_daemon_is_away_leaves_nothing(daemon: Daemon, tmp_path: Path) -> None:
    client = daemon.connect(reconnect=True)
    client.register_source(policy(), shards.whole(1)).publish(1)
    daemon.kill()
    client.close()
    daemon.start()
    time.sleep(1.5)
    assert not daemon.status().models and daemon.node().arenas == 0
    with pytest.raises(refitd.PeerLost):
        client.status()


@pytest.mark.parametrize("when", ["idle", "decided"])
def test_ranks_in_lockstep_still_commit_together(fleet: Fleet, when: str) -> None:
    slow, _ = (fleet.add("shadow", "poll", "ranks", rank=rank, world_size=2) for rank in range(2))
    fleet.add("flip", "poll")
    fleet.swap_whenever(1)
    for version in (2, 4):
        if when == "decided":
            slow.may_commit = False
            swap = fleet.running(version)
            eventually(lambda: slow.target.pending is not None, "it is decided")
            restart(fleet.daemon)
            with pytest.raises(refitd.RefitdError):
                swap.result()
            slow.may_commit = True
            fleet.serve(version)
        else:
            restart(fleet.daemon)
        eventually(fleet.is_known, "all have registered again", WAIT_S)
        fleet.swap_whenever(version + 1)


def test_a_controller_that_refused_while_its_daemon_was_away_is_told_what_its_replica_serves(fleet: Fleet) -> None:
    one = fleet.add("shadow", "controller")
    fleet.swap_whenever(1)
    one.paused = fleet.daemon.kill
    with pytest.raises(refitd.RefitdError):
        fleet.swap(2)
    eventually(lambda: one.calls[-1] == ("resume", None), f"{one.calls}", WAIT_S)
    one.paused = None
    fleet.daemon.start()
    eventually(fleet.is_known, "all have registered again", WAIT_S)
    eventually(lambda: one.calls[-2:] == [("resume", None), ("resume", 1)], f"{one.calls}", WAIT_S)
    fleet.serve(1)
