"""Real kernel limits: a request that does not fit is refused with figures, leaves nothing, and smaller ones work."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine, eventually
from refitd.testing.leaks import own_memory_files
from tests.support import programs, shards

MIB = 1 << 20


def tensors(mebibytes: int) -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(mebibytes * MIB, dtype=torch.uint8)}


def descriptors(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


def swap_succeeds(client: refitd.Client, model: str) -> bool:
    full = shards.whole(1)
    live = shards.zeros_like(full)
    client.register_source(model, full, slots=1).publish(1)
    with Engine(client.register_target(model, live, replica="r")):
        return client.swap(model, 1, timeout=60).outcome == "committed" and shards.equal(live, full)


def test_a_registration_that_needs_too_many_descriptors_is_refused_and_a_smaller_one_works(
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon = start_daemon(prepare=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (90, 90)), workers=2)
    with daemon.connect() as client:
        before = descriptors(daemon)
        wanted = r"16 arenas .*: 48 more file descriptors needed .* \d+ are open, .* the limit is 90 \(RLIMIT_NOFILE\)"
        for _ in range(10):
            with pytest.raises(refitd.ArenaError, match=wanted):
                client.register_source("policy", tensors(1), slots=16)
        assert (descriptors(daemon), daemon.node().arenas) == (before, 0)
        assert swap_succeeds(client, "policy")


def test_clients_beyond_the_descriptors_are_turned_away_and_the_others_go_on(
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon = start_daemon(prepare=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80)), workers=2)
    with daemon.connect() as client:
        crowd: list[refitd.Client] = []
        with pytest.raises(refitd.RefusedError, match=r"can open only \d+ more files \(RLIMIT_NOFILE\)"):
            for _ in range(80):
                crowd.append(daemon.connect())
        assert client.status().nodes[0].clients == len(crowd) + 1
        for other in crowd:
            other.close()
        eventually(lambda: client.status().nodes[0].clients == 1, "the crowd has left")
        assert swap_succeeds(client, "policy")


def test_the_soft_limit_on_descriptors_is_raised_and_the_log_says_so(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(prepare=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300)))
    assert resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE) == (300, 300)
    assert "event=descriptor-limit-raised was=100 now=300" in daemon.log()


def test_an_arena_larger_than_files_may_be_is_refused_and_a_smaller_one_works(
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon = start_daemon(prepare=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, 4 * MIB)))
    with daemon.connect() as client:
        before = descriptors(daemon)
        wanted = rf"{8 * MIB} bytes asked for, {4 * MIB} bytes available under RLIMIT_FSIZE"
        with pytest.raises(refitd.ArenaError, match=wanted):
            client.register_source("policy", tensors(8))
        with pytest.raises(refitd.ArenaError, match=wanted):
            client.register_target("policy", tensors(8), replica="r")
        with pytest.raises(refitd.ArenaError, match=wanted):
            client.allocate({"w": ((8 * MIB,), torch.uint8)})
        assert (descriptors(daemon), daemon.node().arenas) == (before, 0)
        assert swap_succeeds(client, "policy")


def test_the_configured_limit_on_arenas_says_what_is_left_of_it(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(f"[node]\nmax_arena_bytes = {8 * MIB}\n")
    with daemon.connect() as client:
        client.register_source("first", tensors(2), slots=1)
        wanted = rf"{8 * MIB} bytes of arenas asked for, {6 * MIB} are available .* \(node\.max_arena_bytes\); raise it"
        with pytest.raises(refitd.ArenaError, match=wanted):
            client.register_source("policy", tensors(4), slots=2)
        client.register_source("policy", tensors(3), slots=2)


def test_a_client_that_cannot_map_its_arenas_leaves_no_registration(daemon: Daemon) -> None:
    weights = tensors(64)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with daemon.connect() as client:
        resource.setrlimit(resource.RLIMIT_AS, (mapped + 32 * MIB, hard))
        try:
            with pytest.raises(refitd.ArenaError, match=rf"arena of {64 * MIB} bytes cannot be mapped"):
                client.register_source("policy", weights, slots=1)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        assert daemon.node().arenas == 0 and not own_memory_files()
        client.register_source("policy", weights, slots=1)


def test_a_decision_that_cannot_be_written_aborts_and_the_next_swap_works_once_there_is_room(daemon: Daemon) -> None:
    full, live = shards.whole(1), shards.zeros_like(shards.whole(1))
    with daemon.connect() as client:
        source = client.register_source("policy", full)
        target = client.register_target("policy", live, replica="r")
        source.publish(1)
        coordinator = client.status().coordinator_pid
        with Engine(target):
            client.swap("policy", 1, timeout=60)
            first = {name: tensor.clone() for name, tensor in live.items()}
            full["layers.0.norm.weight"].add_(1)
            source.publish(2)
            before = resource.prlimit(coordinator, resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
            for _ in range(2):
                with pytest.raises(refitd.RefitFailed, match="the decision could not be journalled") as failure:
                    client.swap("policy", 2, timeout=60)
                assert failure.value.report is not None and failure.value.report.outcome == "aborted"
                assert "files may grow to 1024 bytes (RLIMIT_FSIZE)" in str(failure.value)
                assert shards.equal(live, first) and target.version == 1
            resource.prlimit(coordinator, resource.RLIMIT_FSIZE, before)
            assert client.swap("policy", 2, timeout=60).outcome == "committed"
        assert shards.equal(live, full)


@pytest.mark.parametrize("existing", [False, True])
def test_a_coordinator_whose_journal_cannot_be_written_does_not_start(tmp_path: Path, existing: bool) -> None:
    from refitd.coordinator.journals.file import FileJournal

    path = tmp_path / "journal.sqlite"
    if existing:
        FileJournal(path).close()
    places = {"REFITD_NODE__RUNTIME_DIR": str(tmp_path / "run"), "REFITD_COORDINATOR__JOURNAL": str(path)}
    ran = programs.run(
        [sys.executable, "-m", "refitd_cli.daemon", "coordinator"],
        env={**os.environ, **places},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024)),
    )
    assert ran.returncode != 0
    assert f"journal {path}: disk I/O error" in ran.stderr and "check coordinator.journal and the disk" in ran.stderr
    assert "event=ready" not in ran.stderr


def test_a_daemon_that_runs_out_of_descriptors_while_it_swaps_names_it_and_the_next_swap_works(daemon: Daemon) -> None:
    """Nothing can be handed to the workers: every descriptor below the limit is taken."""
    full, live = shards.whole(1), shards.zeros_like(shards.whole(1))
    with daemon.connect() as client:
        source = client.register_source("policy", full)
        target = client.register_target("policy", live, replica="r")
        source.publish(1)
        with Engine(target):  # whatever is imported at the first swap has been
            client.swap("policy", 1, timeout=60)
        for tensor in full.values():
            tensor.add_(1)
        source.publish(2)  # into the other slot: its copies are not known to the workers yet
        eventually(lambda: all(client.status().nodes[0].workers), "the workers are there")
        pid = daemon.pid
        taken = {int(fd) for fd in os.listdir(f"/proc/{pid}/fd")}
        first_free = min(set(range(max(taken) + 2)) - taken)
        before = resource.prlimit(
            pid, resource.RLIMIT_NOFILE, (first_free, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1])
        )
        try:
            says = (
                r"worker \d on node n0.*could not be given its part of the copies: Too many open files; raise `ulimit"
            )
            with Engine(target), pytest.raises(refitd.RefitFailed, match=says):
                client.swap("policy", 2, timeout=60)
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        assert daemon.is_running and target.version == 1
        with Engine(target):
            assert client.swap("policy", 2, timeout=60).outcome == "committed"
        assert shards.equal(live, full)
