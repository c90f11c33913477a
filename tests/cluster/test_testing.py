"""The promises of refitd.testing: parts are awaited, broken and mended, and leftovers are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from refitd.testing import Cluster, Daemon, ProcessFailed, eventually, stopped
from refitd.testing.daemon import joined
from tests.support.passed_on import Shelf


def test_a_daemon_that_cannot_start_is_named_with_its_reason_and_leaves_nothing() -> None:
    daemon = Daemon("[node]\nworker = 3\n")
    with pytest.raises(ProcessFailed, match=r"n0 did not start:\n.*did you mean `workers`"):
        daemon.start()
    assert not daemon.folder.exists()


def test_a_daemon_that_is_not_ready_in_time_is_ended(tmp_path: Path) -> None:
    daemon = Daemon(folder=tmp_path)
    with pytest.raises(ProcessFailed, match=r"n0 did not start within 0 s"):
        daemon.start(timeout=0.01)
    assert not daemon.is_running and not daemon.children()


def test_what_a_daemon_leaves_behind_is_named_and_what_a_block_raises_carries_its_log() -> None:
    said = r"left behind: \['file forgotten'\]\n--- log of n0\n(?s:.)*event=stopped"
    with pytest.raises(ProcessFailed, match=said), Daemon() as daemon:
        (daemon.directory / "forgotten").touch()
    with pytest.raises(ZeroDivisionError) as failure, Daemon(name="other") as daemon:
        assert daemon.status().nodes[0].node == "other" and len(daemon.workers()) == 1
        raise ZeroDivisionError
    assert "--- log of other\n" in failure.value.__notes__[0] and not daemon.folder.exists()


@pytest.mark.slow
def test_parts_of_a_cluster_are_killed_stopped_and_come_back() -> None:
    with Cluster(("n0", "n1")) as cluster:
        n0, n1 = cluster.daemons.values()
        with n0.connect() as client:
            n1.kill()
            n1.start()
            cluster.coordinator.kill()
            assert joined(client) == 0
            cluster.coordinator.start()
            eventually(lambda: joined(client) == 2, "every node is back")
        with stopped(n0.workers()):
            assert len(n0.workers()) == 1
        folder = cluster.folder
    assert not folder.exists()


def test_a_daemon_is_passed_on_unless_something_is_left_in_it(request: pytest.FixtureRequest) -> None:
    shelf, used, stays = Shelf(), [], []
    for what in ("a version", "a client", "nothing"):
        with shelf.lend(request.node) as take:
            used += take()
            stays.append(used[-1].connect())
            if what == "a version":  # which is forgotten
                stays[-1].register_source("m", {"w": torch.zeros(4)}).publish(1)
            if what != "a client":
                stays[-1].close()
    assert used[0] is used[1] is not used[2] and not used[0].is_running and used[2].is_running
    shelf.close()
    stays[1].close()
    assert not used[2].is_running
