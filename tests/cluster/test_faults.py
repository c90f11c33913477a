"""Bad input and deaths: a clear error, nothing hung, nothing lost, the old version still serves."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import pytest
import torch
import zmq

import refitd
from refitd.buffers import handoff
from refitd.testing import Daemon, Engine, ProcessFailed, RunningSwap, eventually, stopped
from tests.support import shards

Tensors = dict[str, torch.Tensor]


class Fleet:
    """One trainer rank, two whole replicas serving version 1."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.trainer, self.client = daemon.connect("trainer"), daemon.connect("engines")
        self.full = shards.whole(1)
        self.source = self.trainer.register_source("policy", self.full)
        self.live: list[Tensors] = [shards.zeros_like(self.full) for _ in range(2)]
        self.targets = [
            self.client.register_target("policy", live, replica=f"engine-{i}") for i, live in enumerate(self.live)
        ]
        self.source.publish(1)
        with Engine(*self.targets):
            self.trainer.swap("policy", 1, timeout=60)
        self.first = {name: t.clone() for name, t in self.full.items()}
        for tensor in self.full.values():
            tensor.add_(1)
        self.source.publish(2)

    def serves_first(self) -> bool:
        return all(shards.equal(live, self.first) for live in self.live)

    def swap_succeeds(self, version: int = 2) -> bool:
        with Engine(*self.targets):
            return self.trainer.swap("policy", version, timeout=60).outcome == "committed"

    def serves_second(self) -> bool:
        return all(shards.equal(live, self.full) for live in self.live)


@pytest.fixture
def fleet(daemon: Daemon) -> Iterator[Fleet]:
    fleet = Fleet(daemon)
    yield fleet
    fleet.trainer.close()
    fleet.client.close()


# --- refused before anything moves ------------------------------------------------------------------------


def refused_target(fleet: Fleet, tensors: Tensors, why: str) -> None:
    """A third replica with these tensors makes the swap refuse; without it everything goes on."""
    with fleet.daemon.connect("bad") as client:
        client.register_target("policy", tensors, replica="bad")
        with Engine(*fleet.targets), pytest.raises(refitd.RefitFailed, match=why) as failure:
            fleet.trainer.swap("policy", 2, timeout=10)
        assert failure.value.report is not None and failure.value.report.phase == "plan"
        assert "bad rank 0" in str(failure.value)
        with pytest.raises(refitd.PlanError, match=why):
            fleet.trainer.plan("policy")
        assert fleet.serves_first()
    eventually(lambda: all(t.replica != "bad" for t in fleet.trainer.status().models[0].targets), "it has left")
    assert fleet.swap_succeeds() and fleet.serves_second()


def test_a_target_parameter_no_source_has_is_named(fleet: Fleet) -> None:
    refused_target(fleet, {**fleet.full, "extra.bias": torch.zeros(3)}, "extra.bias")


def test_a_shape_that_does_not_match_is_named(fleet: Fleet) -> None:
    refused_target(fleet, {**fleet.full, "layers.0.norm.weight": torch.zeros(49).bfloat16()}, "layers.0.norm.weight")


def test_a_dtype_that_does_not_match_is_named(fleet: Fleet) -> None:
    refused_target(fleet, {**fleet.full, "layers.0.norm.weight": torch.zeros(48)}, "layers.0.norm.weight")


def test_a_source_that_covers_only_part_is_named(daemon: Daemon) -> None:
    full = shards.whole(1)
    half = shards.cut(full, 0, 2)
    with daemon.connect() as client:
        # one source rank that says it holds the first of two halves
        source = client.register_source("policy", half, metadata=shards.describe(half, 0, 2))
        target = client.register_target("policy", shards.zeros_like(full), replica="r")
        source.publish(1)
        with Engine(target), pytest.raises(refitd.RefitFailed, match=r"embedding\.weight"):
            client.swap("policy", timeout=10)
        assert target.version is None


def test_an_unfinished_source_pool_is_told_which_ranks_are_missing(daemon: Daemon) -> None:
    half = shards.cut(shards.whole(1), 0, 2)
    with daemon.connect() as client:
        source = client.register_source("policy", half, world_size=2, metadata=shards.describe(half, 0, 2))
        source.publish(1)
        with pytest.raises(refitd.RefusedError, match=r"source ranks \[1\] of 2"):
            client.swap("policy", timeout=10)


def test_registering_twice_is_refused_and_names_the_holder(fleet: Fleet) -> None:
    with pytest.raises(refitd.RefusedError, match=rf"rank 0 is already registered by pid {os.getpid()}"):
        fleet.trainer.register_source("policy", fleet.full)
    with pytest.raises(refitd.RefusedError, match="replica 'engine-0' rank 0 is already registered"):
        fleet.client.register_target("policy", fleet.live[0], replica="engine-0")
    assert fleet.swap_succeeds() and fleet.serves_second()


def test_publishing_an_older_version_is_refused(fleet: Fleet) -> None:
    for version in (1, 2):
        with pytest.raises(refitd.RefusedError, match=f"version {version} is not newer than 2"):
            fleet.source.publish(version)
    assert fleet.swap_succeeds() and fleet.serves_second()


def test_swapping_an_older_version_than_is_served_is_refused(fleet: Fleet) -> None:
    assert fleet.swap_succeeds()
    with pytest.raises(refitd.RefusedError, match="serves version 2, which is newer than 1"):
        fleet.trainer.swap("policy", 1, timeout=5)
    assert fleet.serves_second()


def test_unknown_models_and_versions_are_refused_with_what_there_is(fleet: Fleet) -> None:
    with pytest.raises(refitd.RefusedError, match=r"no model 'polcy' is registered; registered models: policy"):
        fleet.trainer.swap("polcy")
    with pytest.raises(refitd.RefusedError, match=r"version 7 is not held .* complete versions: \[1, 2\]"):
        fleet.trainer.swap("policy", 7)
    assert fleet.serves_first()


def test_metadata_that_does_not_fit_the_tensors_is_refused_at_once(fleet: Fleet) -> None:
    described = shards.describe(fleet.full, 0, 1)
    with pytest.raises(refitd.RefusedError, match="name different parameters"):
        fleet.client.register_target("policy", {"other": torch.zeros(1)}, replica="x", metadata=described)
    described[0].shape = (1, 1)
    with pytest.raises(refitd.RefusedError, match=r"embedding\.weight: described as \(1, 1\)"):
        fleet.client.register_target("policy", fleet.live[0], replica="x", metadata=described)


def test_a_second_swap_while_one_runs_is_refused(fleet: Fleet) -> None:
    workers = fleet.trainer.status().nodes[0].workers
    with stopped(workers):
        running = RunningSwap(fleet.daemon.connect(), "policy", 2)
        running.wait_phase("stage")
        with pytest.raises(refitd.RefusedError, match=r"swap \w+ to version 2 is running"):
            fleet.trainer.swap("policy", 2)
    with Engine(*fleet.targets):
        assert running.result().outcome == "committed"


def test_more_memory_than_there_is_is_refused_with_the_numbers(shared_daemon: Daemon, tmp_path: Path) -> None:
    with shared_daemon.connect() as client:
        # a file of nothing but holes
        huge = torch.from_file(str(tmp_path / "holes"), shared=True, size=1 << 40, dtype=torch.uint8)
        with pytest.raises(refitd.ArenaError, match=r"1099511627776 bytes asked for, \d+ bytes available under \w+"):
            client.register_target("policy", {"w": huge}, replica="r")
        assert client.status().nodes[0].arenas == 0


def test_a_tensor_that_was_replaced_fails_the_commit_and_is_named(fleet: Fleet) -> None:
    module = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
    source_module = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
    source = fleet.trainer.register_source("linear", source_module)
    target = fleet.client.register_target("linear", module, replica="r")
    source.publish(1)
    module.weight = torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False)
    engine = Engine(target)
    with engine, pytest.raises(refitd.RefitFailed, match="weight: its storage has changed") as failure:
        fleet.trainer.swap("linear", timeout=60)
    assert failure.value.report is not None and failure.value.report.outcome == "incomplete"
    assert target.version is None
    assert isinstance(engine.errors[0], refitd.CommitError)


# --- deaths -----------------------------------------------------------------------------------------------


def test_a_worker_killed_while_staging_aborts_the_swap_and_is_named(fleet: Fleet) -> None:
    workers = fleet.trainer.status().nodes[0].workers
    with stopped(workers):
        running = RunningSwap(fleet.daemon.connect(), "policy", 2)
        eventually(lambda: "version=2 phase=stage plan=" in fleet.daemon.log(), "the worker is told to stage")
        os.kill(workers[0], signal.SIGKILL)
        with pytest.raises(refitd.RefitFailed) as failure:
            running.result()
    text = str(failure.value)
    assert f"worker 0 (pid {workers[0]}) on node n0" in text and "SIGKILL" in text
    assert failure.value.report is not None
    assert (failure.value.report.outcome, failure.value.report.phase) == ("aborted", "stage")
    assert fleet.serves_first()
    assert fleet.swap_succeeds() and fleet.serves_second()
    assert not set(workers) & set(fleet.daemon.node().workers), "the workers of the failed epoch are gone"


def test_a_stopped_worker_ends_the_swap_at_its_deadline(fleet: Fleet) -> None:
    workers = fleet.trainer.status().nodes[0].workers
    with stopped(workers):
        running = RunningSwap(fleet.daemon.connect(), "policy", 2, timeout=1.0)
        with pytest.raises(refitd.RefitFailed, match=r"phase stage ended at its deadline .* waiting for n0"):
            running.result()
        # those that did not answer have been replaced: the next swap needs nobody's help
        assert fleet.swap_succeeds() and fleet.serves_second()


def in_other_process(daemon: Daemon, code: str) -> subprocess.Popen[bytes]:
    """Run a client in a process of its own; it says "there" on stdout when it has come that far."""
    head = f"""
        import os, sys, torch, refitd
        client = refitd.connect({str(daemon.directory)!r}, name="victim")
        def there(): os.write(1, b"there")
    """
    program = textwrap.dedent(head) + textwrap.dedent(code)
    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@contextmanager
def victim(daemon: Daemon, code: str) -> Iterator[subprocess.Popen[bytes]]:
    process = in_other_process(daemon, code)
    try:
        assert process.stdout is not None
        assert process.stdout.read(5) == b"there"
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


VICTIM_TARGET = """
    sizes = {"embedding.weight": (64, 48), "layers.0.fc1.weight": (96, 48),
             "layers.0.fc2.weight": (48, 96), "layers.0.norm.weight": (48,)}
    tensors = {n: torch.zeros(s, dtype=torch.bfloat16) for n, s in sizes.items()}
    target = client.register_target("policy", tensors, replica="victim")
    target.wait(1, timeout=30)  # it catches up with the others
    there()
    sys.stdin.read()
"""


def test_a_client_that_dies_while_staging_aborts_the_swap_and_is_named(fleet: Fleet) -> None:
    workers = fleet.trainer.status().nodes[0].workers
    with victim(fleet.daemon, VICTIM_TARGET) as process:
        with stopped(workers):
            running = RunningSwap(fleet.daemon.connect(), "policy", 2)
            running.wait_phase("stage")
            process.kill()
            with pytest.raises(refitd.RefitFailed, match=rf"victim rank 0 \(host \S+, pid {process.pid}\)") as failure:
                running.result()
        assert failure.value.report is not None and failure.value.report.outcome == "aborted"
    assert fleet.serves_first()
    assert fleet.swap_succeeds() and fleet.serves_second()


def test_a_client_that_dies_after_the_decision_is_named_and_the_others_commit(fleet: Fleet) -> None:
    with victim(fleet.daemon, VICTIM_TARGET) as process:
        running = RunningSwap(fleet.daemon.connect(), "policy", 2)
        running.wait_phase("commit")
        process.kill()
        with Engine(*fleet.targets), pytest.raises(refitd.RefitFailed, match="incomplete in phase commit") as failure:
            running.result()
    report = failure.value.report
    assert report is not None
    states = {m.replica: m.state for m in report.members}
    assert states == {"engine-0": "committed", "engine-1": "committed", "victim": "failed"}
    assert fleet.serves_second()


def test_a_client_that_dies_while_registering_leaves_nothing(fleet: Fleet) -> None:
    before = fleet.daemon.node()
    code = """
        import threading
        tensors = {"w": torch.zeros(64 << 20, dtype=torch.uint8)}
        threading.Thread(target=client.register_target, args=("policy", tensors), kwargs={"replica": "v"}).start()
        there()
        os.kill(os.getpid(), 9)
    """
    with victim(fleet.daemon, code) as process:
        process.wait(10)
        eventually(
            lambda: (fleet.daemon.node().arenas, fleet.daemon.node().clients) == (before.arenas, before.clients),
            "the dead client's arenas are freed",
        )
    assert fleet.swap_succeeds() and fleet.serves_second()


def test_a_coordinator_that_dies_beside_its_daemon_is_started_again_and_loses_nothing(fleet: Fleet) -> None:
    def pid() -> int:
        try:
            return fleet.trainer.status().coordinator_pid
        except refitd.TransportError:
            return first

    first = fleet.trainer.status().coordinator_pid
    eventually(lambda: fleet.trainer.status().uptime_s > 3.5, "it has run for a while")
    os.kill(first, signal.SIGKILL)
    eventually(lambda: pid() != first, "another coordinator answers", timeout=60)
    assert fleet.swap_succeeds() and fleet.serves_second()


def test_a_coordinator_that_cannot_start_ends_the_daemon_with_the_reason(
    start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    with pytest.raises(ProcessFailed, match=r"journal .* check coordinator\.journal") as failure:
        start_daemon(f'[coordinator]\njournal = "{tmp_path}"\n')
    assert "as soon as it had started" in str(failure.value)


def test_a_client_notices_at_once_that_the_daemon_is_gone(daemon: Daemon) -> None:
    with daemon.connect() as client:
        target = client.register_target("policy", shards.whole(1), replica="r")
        called = client.register_target("policy", shards.whole(1), replica="c", on_commit=lambda commit: commit.apply())
        daemon.kill()
        with pytest.raises(refitd.PeerLost, match="daemon of node n0 has ended"):
            target.wait(1, timeout=10)
        with pytest.raises(refitd.PeerLost):
            client.status()
        eventually(lambda: isinstance(called.error, refitd.PeerLost), "the engine with a callback is told as well")


# --- doors ------------------------------------------------------------------------------------------------


def test_connecting_without_a_daemon_says_how_to_start_one(tmp_path: object) -> None:
    with pytest.raises(refitd.TransportError, match=r"no refitd daemon is running in .*`refitd serve"):
        refitd.connect(str(tmp_path))


def test_a_second_daemon_in_the_same_directory_is_refused(shared_daemon: Daemon) -> None:
    env = {**os.environ, "REFITD_NODE__RUNTIME_DIR": str(shared_daemon.directory)}
    command = [sys.executable, "-m", "refitd_cli.daemon", "serve", "--standalone"]
    second = subprocess.run(command, env=env, capture_output=True, text=True, timeout=20, check=False)
    assert second.returncode != 0
    assert re.search("already listening", second.stderr), second.stderr
    assert shared_daemon.node().pid == shared_daemon.pid


def test_a_directory_that_others_may_enter_is_refused(shared_daemon: Daemon) -> None:
    shared_daemon.directory.chmod(0o755)
    env = {**os.environ, "REFITD_NODE__RUNTIME_DIR": str(shared_daemon.directory)}
    command = [sys.executable, "-m", "refitd_cli.daemon", "serve"]
    second = subprocess.run(command, env=env, capture_output=True, text=True, timeout=20, check=False)
    shared_daemon.directory.chmod(0o700)
    assert second.returncode == 2
    assert "mode 0700" in second.stderr


def test_sockets_are_private_and_arenas_are_sealed(fleet: Fleet) -> None:
    directory = fleet.daemon.directory
    assert directory.stat().st_mode & 0o777 == 0o700
    names = {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir() if not path.is_file()}
    assert names == {"refitd.sock": 0o600, "refitd.fds": 0o600, "coordinator.sock": 0o600}


class RawClient:
    """A peer that says what it likes."""

    def __init__(self, daemon: Daemon) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 5000)
        self.socket.connect(f"ipc://{daemon.directory / 'refitd.sock'}")
        self.number = 0

    def say(self, body: object) -> dict[str, object]:
        self.number += 1
        return self.raw(msgpack.packb([self.number, body]))

    def raw(self, frame: bytes) -> dict[str, object]:
        self.socket.send(frame)
        return msgpack.unpackb(self.socket.recv())[1]

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def raw(fleet: Fleet) -> Iterator[RawClient]:
    client = RawClient(fleet.daemon)
    yield client
    client.close()


def open_session(daemon: Daemon, raw: RawClient) -> socket.socket:
    descriptors = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptors.connect(str(daemon.directory / "refitd.fds"))
    greeting = msgpack.unpackb(handoff.receive(descriptors)[0])[1]
    assert raw.say({"type": "Hello", "protocol": 1, "token": greeting["token"]})["type"] == "Welcome"
    return descriptors


NONSENSE: list[tuple[object, str]] = [
    ({"type": "Explode"}, "Invalid value 'Explode'"),
    ({"type": "StartSwap"}, "missing required field `model`"),
    ({"type": "StartSwap", "model": "policy", "force": True}, "unknown field `force`"),
    ({"type": "StartSwap", "model": 5}, "Expected `str`, got `int`"),
    ({"type": "StartSwap", "model": "policy", "version": 1 << 62 | 1}, "version"),
    ({"type": "CreateArena", "nbytes": -1}, "nbytes"),
    ({"type": "CreateArena", "nbytes": 1 << 60}, "limit"),
    ({"type": "Deregister", "member": "policy/engine-0:0@n0#4"}, "not a registration of this session"),
    ({"type": "RegisterTarget", "model": "m", "replica": "r", "rank": 3, "world_size": 2,
      "shard": {"tensors": [{"name": "w", "shape": [1], "dtype": "float32"}]}}, "rank 3 is not in"),
    ({"type": "RegisterTarget", "model": "m", "replica": "r", "rank": 0, "world_size": 1,
      "shard": {"tensors": [{"name": "w", "shape": [1 << 40, 1 << 40], "dtype": "float32"}]}}, "the limit is"),
    ({"type": "RegisterTarget", "model": "m", "replica": "r", "rank": 0, "world_size": 1,
      "shard": {"tensors": [{"name": "w", "shape": [1], "dtype": "float7"}]}}, "unknown dtype 'float7'"),
    ([1, 2], "refused"),
    ("hello", "refused"),
]  # fmt: skip


def test_messages_that_make_no_sense_are_refused_and_change_nothing(fleet: Fleet, raw: RawClient) -> None:
    with open_session(fleet.daemon, raw):
        before = fleet.daemon.node().arenas
        for body, why in NONSENSE:
            answer = raw.say(body)
            assert answer["type"] == "Failure" and why in str(answer["message"]), (body, answer)
        assert fleet.daemon.node().arenas == before
    assert fleet.serves_first()
    assert fleet.swap_succeeds() and fleet.serves_second()


def test_nobody_is_heard_without_a_token(fleet: Fleet, raw: RawClient) -> None:
    assert "Hello" in str(raw.say({"type": "GetStatus"})["message"])
    refusal = raw.say({"type": "Hello", "protocol": 1, "token": b"0" * 16})
    assert refusal["type"] == "Failure" and "token" in str(refusal["message"])
    with open_session(fleet.daemon, raw):
        assert raw.say({"type": "GetStatus"})["type"] == "StatusReport"


def test_another_protocol_version_is_refused_with_both_numbers(fleet: Fleet, raw: RawClient) -> None:
    answer = raw.say({"type": "Hello", "protocol": 99, "token": b""})
    assert "protocol 99" in str(answer["message"]) and "the daemon 1" in str(answer["message"])


def test_frames_that_are_no_messages_are_refused(fleet: Fleet, raw: RawClient) -> None:
    for frame in (b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x92\x01" + b"\x91" * 5000, os.urandom(1000)):
        assert raw.raw(frame)["type"] == "Failure"
    assert fleet.swap_succeeds() and fleet.serves_second()


def test_a_message_of_absurd_size_ends_the_connection_not_the_daemon(fleet: Fleet, raw: RawClient) -> None:
    raw.socket.send(b"\x00" * (65 << 20))
    with pytest.raises(zmq.Again):
        raw.socket.setsockopt(zmq.RCVTIMEO, 500)
        raw.socket.recv()
    assert fleet.swap_succeeds() and fleet.serves_second()


def test_a_client_cannot_fetch_the_arenas_of_another(fleet: Fleet) -> None:
    with fleet.daemon.connect() as stranger:
        for arena in range(1, 5):
            with pytest.raises(refitd.RefusedError, match="not one of this session's"):
                stranger._connection.map_arena(arena, write=False)


def test_a_staging_arena_is_handed_out_for_reading_only(fleet: Fleet) -> None:
    arenas = [a for a in range(1, 6) if _mappable(fleet.client, a)]
    assert arenas
    for arena in arenas:
        with pytest.raises(refitd.RefusedError, match="for reading only"):
            fleet.client._connection.map_arena(arena, write=True)
        assert not fleet.client._connection.map_arena(arena, write=False).bytes.flags.writeable


def _mappable(client: refitd.Client, arena: int) -> bool:
    try:
        client._connection.map_arena(arena, write=False)
    except refitd.RefusedError:
        return False
    return True


def test_a_coordinator_that_is_killed_and_comes_back_is_told_everything_again(
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon = start_daemon(standalone=False)
    coordinator = daemon.start_coordinator()
    with daemon.connect() as client:
        full = shards.whole(1)
        source = client.register_source("policy", full)
        live = shards.zeros_like(full)
        target = client.register_target("policy", live, replica="r")
        source.publish(1)
        with Engine(target):
            client.swap("policy", 1, timeout=60)
            coordinator.kill()
            with pytest.raises(refitd.TransportError, match="coordinator"):
                client.swap("policy", 1, timeout=60)
            daemon.start_coordinator()
            eventually(lambda: bool(client.status().models), "members are known again")
            status = client.status().models[0]
            assert status.complete_versions == (1,)
            assert status.targets[0].version == 1
            full["layers.0.norm.weight"].add_(1)
            source.publish(2)
            assert client.swap("policy", 2, timeout=60).outcome == "committed"
        assert shards.equal(live, full)
