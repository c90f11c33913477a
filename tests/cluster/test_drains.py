"""A node is drained and resumed under real swaps, and over restarts of its daemon and of the coordinator."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import refitd
from refitd.testing import Cluster, Daemon, Engine, RunningSwap, eventually
from tests.support.programs import refitctl

JOIN_S = 60.0


def filled(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((64, 32), value)}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(("n0", "n1"), "[deadlines]\nlease_s = 2.0\n") as found:
        yield found


@pytest.mark.slow
def test_a_running_swap_is_waited_for_and_the_next_one_leaves_the_node_out(cluster: Cluster) -> None:
    n0, n1 = cluster.daemons["n0"], cluster.daemons["n1"]
    with n0.connect() as trainer, n1.connect() as far:
        given, there = filled(1.0), filled(0.0)
        source = trainer.register_source("policy", given)
        a = trainer.register_target("policy", filled(0.0), replica="a")
        b = far.register_target("policy", there, replica="b")
        source.publish(1)
        swap = RunningSwap(n0.connect(), "policy", 1)
        eventually(lambda: a.pending == b.pending == 1, "it is decided")
        late = refitctl(n0, "drain", "n1", "--timeout", "0.2")
        assert (late.returncode, "still takes part in swap" in late.stderr) == (1, True), late
        drained: list[subprocess.CompletedProcess[str]] = []
        waits = threading.Thread(target=lambda: drained.append(refitctl(n0, "drain", "n1")))
        waits.start()
        time.sleep(1.5)
        assert not drained, "it waits"
        with Engine(a, b):
            assert swap.result().outcome == "committed"
            waits.join(JOIN_S)
            assert (drained[0].returncode, "it was drained already" in drained[0].stdout) == (0, True)
            assert "to version 1, in which it took part, has ended" in drained[0].stdout
            given["w"].fill_(2.0)
            source.publish(2)
            eventually(lambda: b.version == 1, "it serves on while its version is live")
            swapped = refitctl(n0, "swap", "policy")
            assert "left out, because their nodes are drained: b" in swapped.stdout
            eventually(lambda: b.version is None and a.version == 2, "b serves nothing: another version is live")
            assert there["w"].unique() == 1.0
            shown = refitctl(n0, "status").stdout
            assert "node n1: drained; swaps leave its replicas out until refitctl resume n1" in shown
            assert "behind, drained" in shown
            resumed = json.loads(refitctl(n0, "resume", "n1", "--json").stdout)
            assert (resumed["changed"], resumed["replicas"]) == (True, [{"model": "policy", "replica": "b"}])
            eventually(lambda: b.version == 2, "it is caught up", JOIN_S)
        assert there["w"].unique() == 2.0 and trainer.verify("policy").outcome == "proven"


@pytest.mark.slow
def test_a_drain_outlives_the_coordinator_and_the_daemon(cluster: Cluster) -> None:
    n0, n1 = cluster.daemons["n0"], cluster.daemons["n1"]
    refitctl(n0, "drain", "n1")
    cluster.coordinator.kill()
    n1.kill()
    cluster.coordinator.start()
    eventually(lambda: drained(n0) == ("n1",), "the journal has it", JOIN_S)
    assert "node n1: drained, not connected" in refitctl(n0, "status").stdout
    n1.start()
    with n0.connect() as trainer, n1.connect() as far:
        eventually(lambda: len(trainer.status().nodes) == 2, "both are back", JOIN_S)
        source = trainer.register_source("policy", filled(1.0))
        a = trainer.register_target("policy", filled(0.0), replica="a")
        b = far.register_target("policy", filled(0.0), replica="b")
        source.publish(1)
        with Engine(a, b):
            assert [m.replica for m in trainer.swap("policy", 1, timeout=JOIN_S).members] == ["a"]
            # a trainer that moves to the drained node can publish there, but swaps do not read it
            source.close()
            moved = far.register_source("policy", filled(2.0))
            moved.publish(2)
            with pytest.raises(refitd.RefusedError, match="is on drained node 'n1', and no source can be left out"):
                trainer.swap("policy", 2, timeout=JOIN_S)
            far.resume("n1")
            assert len(trainer.swap("policy", 2, timeout=JOIN_S, queue=True).members) == 2


def drained(daemon: Daemon) -> tuple[str, ...]:
    """Return the drained nodes, () while no coordinator answers."""
    try:
        return daemon.status().drained
    except refitd.RefitdError:
        return ()


def test_a_node_that_is_all_there_is_says_so(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    with daemon.connect() as client:
        source = client.register_source("policy", filled(1.0))
        target = client.register_target("policy", filled(0.0), replica="a")
        (node,) = [found.node for found in client.status().nodes]
        report = client.drain(node)
        assert (report.stranded, len(report.sources)) == (("policy",), 1)
        source.publish(1)
        with pytest.raises(refitd.RefusedError, match="every replica is left out"):
            client.swap("policy", 1, timeout=60)
        assert client.resume(node).changed and not client.resume(node).changed
        with Engine(target):
            assert client.swap("policy", 1, timeout=60).outcome == "committed"
        with pytest.raises(refitd.RefusedError, match="no node 'other' is connected"):
            client.drain("other")
