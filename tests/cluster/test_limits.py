"""Real kernel limits: a request that does not fit is refused with figures and undone, and smaller ones work."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

import refitd
from refitd.testing import Coordinator, Daemon, Engine, eventually
from refitd.testing.processes import own_memory_files
from tests.support import programs, shards
from tests.support.fleet import go_live
from tests.support.names import policy

pytestmark = pytest.mark.own_daemon

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


def test_a_node_that_the_coordinator_has_no_descriptors_for_is_refused_with_the_limit(
    start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    """A coordinator keeps 64 descriptors free of nodes."""
    endpoint = f"ipc://{tmp_path}/c.sock"
    few = Coordinator(f'[coordinator]\nendpoint = "{endpoint}"\n', prefix=("prlimit", "--nofile=64:64"))
    try:
        few.start()
        daemon = start_daemon(joins=endpoint)
        with daemon.connect() as client:
            refused = r"node 'n0': 0 nodes .* only 64 files \(RLIMIT_NOFILE\), .* raise LimitNOFILE of its "
            eventually(lambda: "event=coordinator-refused" in daemon.log(), "it is refused")
            with pytest.raises(refitd.TransportError, match=f"node n0 has no coordinator at present; {refused}"):
                client.register_source(policy(), tensors(1))
        assert few.stop() == []
    finally:
        few.remove()


def test_a_registration_that_needs_too_many_descriptors_is_refused_and_a_smaller_one_works(
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon = start_daemon(prepare=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (90, 90)), workers=2)
    with daemon.connect() as client:
        daemon.node_of("n0")  # all workers have connected
        before = descriptors(daemon)
        wanted = r"16 arenas .*: 48 more file descriptors needed .* \d+ are open, .* the limit is 90 \(RLIMIT_NOFILE\)"
        for _ in range(10):
            with pytest.raises(refitd.ArenaError, match=wanted):
                client.register_source(policy(), tensors(1), slots=16)
        assert daemon.node().arenas == 0
        eventually(lambda: descriptors(daemon) <= before, "all descriptors are closed")
        assert swap_succeeds(client, policy())


def test_clients_beyond_the_descriptors_are_turned_away_and_the_others_go_on(
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon = start_daemon(prepare=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80)), workers=2)
    with daemon.connect() as client:
        crowd: list[refitd.Client] = []
        with pytest.raises(refitd.RefusedError, match=r"can open only \d+ more files \(RLIMIT_NOFILE\)"):
            for _ in range(80):
                crowd.append(daemon.connect())
        eventually(lambda: client.status().nodes[0].clients == len(crowd) + 1, "the refused one has left")
        for other in crowd:
            other.close()
        eventually(lambda: client.status().nodes[0].clients == 1, "the crowd has left")
        assert swap_succeeds(client, policy())


def test_the_soft_limit_on_descriptors_is_raised_and_the_log_says_so(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(prepare=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300)))
    assert resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE) == (300, 300)
    assert "event=descriptor-limit-raised was=100 now=300" in daemon.log()


def test_an_arena_larger_than_files_may_be_is_refused_and_a_smaller_one_works(
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon = start_daemon(prepare=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, 4 * MIB)))
    with daemon.connect() as client:
        daemon.node_of("n0")  # all workers have connected
        before = descriptors(daemon)
        wanted = rf"{8 * MIB} bytes asked for, {4 * MIB} bytes available under RLIMIT_FSIZE"
        with pytest.raises(refitd.ArenaError, match=wanted):
            client.register_source(policy(), tensors(8))
        with pytest.raises(refitd.ArenaError, match=wanted):
            client.register_target(policy(), tensors(8), replica="r")
        with pytest.raises(refitd.ArenaError, match=wanted):
            client.allocate({"w": ((8 * MIB,), torch.uint8)})
        assert daemon.node().arenas == 0
        eventually(lambda: descriptors(daemon) <= before, "all descriptors are closed")
        assert swap_succeeds(client, policy())


def test_the_configured_limit_on_arenas_says_what_is_left_of_it(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(f"[node]\nmax_arena_bytes = {8 * MIB}\n")
    with daemon.connect() as client:
        client.register_source("first", tensors(2), slots=1)
        wanted = rf"{8 * MIB} bytes of arenas asked for, {6 * MIB} are available .* \(node\.max_arena_bytes\); raise it"
        with pytest.raises(refitd.ArenaError, match=wanted):
            client.register_source(policy(), tensors(4), slots=2)
        client.register_source(policy(), tensors(3), slots=2)


def test_a_client_that_cannot_map_its_arenas_leaves_no_registration(daemon: Daemon) -> None:
    weights = tensors(64)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with daemon.connect() as client:
        resource.setrlimit(resource.RLIMIT_AS, (mapped + 32 * MIB, hard))
        try:
            with pytest.raises(refitd.ArenaError, match=rf"arena of {64 * MIB} bytes cannot be mapped"):
                client.register_source(policy(), weights, slots=1)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        assert daemon.node().arenas == 0 and not own_memory_files()
        client.register_source(policy(), weights, slots=1)


def test_a_decision_that_cannot_be_written_aborts_and_the_next_swap_works_once_there_is_room(daemon: Daemon) -> None:
    full, live = shards.whole(1), shards.zeros_like(shards.whole(1))
    with daemon.connect() as client:
        source = client.register_source(policy(), full)
        target = client.register_target(policy(), live, replica="r")
        source.publish(1)
        coordinator = client.status().coordinator_pid
        with Engine(target):
            client.swap(policy(), 1, timeout=60)
            first = {name: tensor.clone() for name, tensor in live.items()}
            full["layers.0.norm.weight"].add_(1)
            source.publish(2)
            before = resource.prlimit(coordinator, resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
            for _ in range(2):
                with pytest.raises(refitd.RefitFailed, match="the decision could not be journalled") as failure:
                    client.swap(policy(), 2, timeout=60)
                assert failure.value.report is not None and failure.value.report.outcome == "aborted"
                assert "files may grow to 1024 bytes (RLIMIT_FSIZE)" in str(failure.value)
                assert shards.equal(live, first) and target.version == 1
            resource.prlimit(coordinator, resource.RLIMIT_FSIZE, before)
            assert client.swap(policy(), 2, timeout=60).outcome == "committed"
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
    """The daemon cannot receive descriptors for the workers: every one below the limit is in use."""
    full, live = shards.whole(1), shards.zeros_like(shards.whole(1))
    with daemon.connect() as client:
        source = client.register_source(policy(), full)
        target = client.register_target(policy(), live, replica="r")
        source.publish(1)
        with Engine(target):  # the first swap does the imports that swaps need
            client.swap(policy(), 1, timeout=60)
        for tensor in full.values():
            tensor.add_(1)
        source.publish(2)  # into the other slot; the workers do not know its copies yet
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
                client.swap(policy(), 2, timeout=60)
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        assert daemon.is_running and target.version == 1
        with Engine(target):
            assert client.swap(policy(), 2, timeout=60).outcome == "committed"
        assert shards.equal(live, full)


@pytest.mark.parametrize("limit", [80, 128])
def test_slow_http_clients_take_no_descriptor_that_a_swap_needs(
    start_daemon: Callable[..., Daemon], limit: int
) -> None:
    daemon = start_daemon(
        "[metrics]\nendpoint = '127.0.0.1:0'\n",
        prepare=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
    )
    found = re.search(r"process=daemon event=metrics endpoint=127\.0\.0\.1:(\d+)", daemon.log())
    assert found is not None
    place = "127.0.0.1", int(found[1])
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(place, timeout=30))
        eventually(lambda: descriptors(daemon) > 33, "some of them are connections")
        with daemon.connect() as client:
            assert swap_succeeds(client, policy())
        with socket.create_connection(place, timeout=60) as scrape:
            scrape.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert scrape.recv(100).startswith(b"HTTP/1.1 200 OK")


# Connects with a limit of open files, and swaps three versions.
FEW = """
import resource, sys
import refitd
from tests.support.fleet import go_live
from tests.support import shards
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]),) * 2)
full, live = shards.whole(1), shards.zeros_like(shards.whole(1))
with refitd.connect(sys.argv[1]) as client:
    source = client.register_source("few", full)
    target = client.register_target("few", live, replica="r")
    for version in (1, 2, 3):
        for tensor in full.values():
            tensor.fill_(version)
        go_live(client, source, version, target, model="few")
        assert shards.equal(live, full)
print("three versions")
"""


@pytest.mark.parametrize("limit", [12, 64, 256])
def test_a_client_of_few_descriptors_works_or_says_what_it_needs(daemon: Daemon, limit: int) -> None:
    command = [sys.executable, "-c", FEW, str(daemon.directory), str(limit)]
    root = Path(__file__).parents[2]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, cwd=root)
    if limit == 12:
        assert ran.returncode and "needs 12 file descriptors, 3 are open and the limit is 12" in ran.stderr
    else:
        assert ran.stdout == "three versions\n", ran.stderr[-2000:]
    with daemon.connect() as client:
        assert swap_succeeds(client, policy())


@pytest.mark.real_starts  # a forked worker is larger, and ends too slowly to say that it got no memory
def test_a_worker_without_address_space_fails_the_swap_by_name_and_the_next_one_works(daemon: Daemon) -> None:
    full, live = tensors(64), tensors(64)
    with daemon.connect() as client:
        target = client.register_target(policy(), live, replica="r")
        source = client.register_source(policy(), full)
        full["w"].fill_(1)
        go_live(client, source, 1, target)
        full["w"].fill_(2)
        source.publish(2)  # into the other slot: its job needs new memory in the worker
        (worker,) = daemon.workers()
        resource.prlimit(worker, resource.RLIMIT_AS, (MIB, resource.RLIM_INFINITY))  # below its size: it cannot grow
        with (
            Engine(target),
            pytest.raises(refitd.RefitFailed, match=r"worker 0 .* got no memory \(the machine, a cgroup, RLIMIT_AS"),
        ):
            client.swap(policy(), 2, timeout=60)
        assert target.version == 1 and bool((live["w"] == 1).all())
        with Engine(target):  # with the replaced worker
            assert client.swap(policy(), 2, timeout=60).outcome == "committed"
        assert bool((live["w"] == 2).all())


def test_six_hundred_clients_of_one_daemon_delay_no_swap_and_leave_nothing(daemon: Daemon) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"this process may open {hard} files; six hundred clients need 4,096")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with daemon.connect() as client, contextlib.ExitStack() as crowd:
            assert swap_succeeds(client, "before")
            for _ in range(600):
                crowd.enter_context(daemon.connect(timeout=60))
            assert client.status().nodes[0].clients == 601
            assert swap_succeeds(client, "beside")
            crowd.close()
            eventually(lambda: client.status().nodes[0].clients == 1, "the crowd has left")
            assert swap_succeeds(client, "after")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_five_hundred_models_of_one_coordinator_swap_one_by_one(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon("[metrics]\nendpoint = '127.0.0.1:0'\n")
    count = 500
    with daemon.connect() as client:
        targets, lives = [], []
        for i in range(count):
            lives.append({"w": torch.zeros(16)})
            client.register_source(f"model{i}", {"w": torch.full((16,), float(i))}, slots=1).publish(1)
            targets.append(client.register_target(f"model{i}", lives[i], replica="r"))
        for i in (0, count // 2, count - 1):
            with Engine(targets[i]):
                assert client.swap(f"model{i}", 1, timeout=60).outcome == "committed"
            assert bool((lives[i]["w"] == i).all())
        status = client.status()
        assert len(status.models) == count and len(msgspec.json.encode(status)) < 1000 * count
        assert sum(target.version == 1 for target in targets) == 3
