"""Access to a daemon's sockets and arenas: who is admitted, what is refused, and which descriptors are handed out."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator

import msgpack
import pytest
import zmq

import refitd
from refitd.buffers import handoff
from refitd.protocol.base import PROTOCOL_VERSION
from refitd.testing import Daemon
from tests.support import programs
from tests.support.two_replicas import Fleet


def test_connecting_without_a_daemon_says_how_to_start_one(tmp_path: object) -> None:
    with pytest.raises(refitd.TransportError, match=r"no refitd daemon is running in .*`refitd serve"):
        refitd.connect(str(tmp_path))


def served_beside(daemon: Daemon, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "REFITD_NODE__RUNTIME_DIR": str(daemon.directory)}
    return programs.run([sys.executable, "-m", "refitd_cli.daemon", "serve", *words], env=env)


def test_a_second_daemon_in_the_same_directory_is_refused(shared_daemon: Daemon) -> None:
    second = served_beside(shared_daemon, "--standalone")
    assert second.returncode != 0
    assert re.search("already listening", second.stderr), second.stderr
    assert shared_daemon.node().pid == shared_daemon.pid


def test_a_directory_that_others_may_enter_is_refused(shared_daemon: Daemon) -> None:
    shared_daemon.directory.chmod(0o755)
    second = served_beside(shared_daemon)
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
    assert raw.say({"type": "Hello", "protocol": PROTOCOL_VERSION, "token": greeting["token"]})["type"] == "Welcome"
    return descriptors


NONSENSE: list[tuple[object, str]] = [
    ({"type": "Explode"}, "'Explode' refused: it is not one that protocol 3."),
    ({"type": "StartSwap"}, "missing required field `model`"),
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
    refusal = raw.say({"type": "Hello", "protocol": PROTOCOL_VERSION, "token": b"0" * 16})
    assert refusal["type"] == "Failure" and "token" in str(refusal["message"])
    with open_session(fleet.daemon, raw):
        assert raw.say({"type": "GetStatus"})["type"] == "StatusReport"


def test_another_protocol_version_is_refused_with_both_numbers(fleet: Fleet, raw: RawClient) -> None:
    answer = raw.say({"type": "Hello", "protocol": 99, "token": b""})
    assert "this client speaks protocol 99, the daemon 3." in str(answer["message"])


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
                stranger._connection.current.map_arena(arena, write=False)


def test_a_staging_arena_is_handed_out_for_reading_only(fleet: Fleet) -> None:
    arenas = [a for a in range(1, 6) if _mappable(fleet.client, a)]
    assert arenas
    for arena in arenas:
        with pytest.raises(refitd.RefusedError, match="for reading only"):
            fleet.client._connection.current.map_arena(arena, write=True)
        assert not fleet.client._connection.current.map_arena(arena, write=False).bytes.flags.writeable


def _mappable(client: refitd.Client, arena: int) -> bool:
    try:
        client._connection.current.map_arena(arena, write=False)
    except refitd.RefusedError:
        return False
    return True
