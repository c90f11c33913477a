"""Access to a daemon's directory and sockets, and requests that it refuses; test_hostile.py has tokens and arenas."""

from __future__ import annotations

import os
import subprocess
import sys

import msgpack
import pytest

import refitd
from refitd.testing import Daemon
from tests.support import programs
from tests.support.hostile import RawPeer, fleet
from tests.support.names import named, policy
from tests.support.trainer import ANSWER_S


def test_connecting_without_a_daemon_says_how_to_start_one(tmp_path: object) -> None:
    with pytest.raises(refitd.TransportError, match=r"no refitd daemon is running in .*`refitd serve"):
        refitd.connect(str(tmp_path))


def served_beside(daemon: Daemon, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "REFITD_NODE__RUNTIME_DIR": str(daemon.directory)}
    return programs.run([sys.executable, "-m", "refitd_cli.daemon", "serve", *words], env=env)


def test_a_directory_that_others_may_enter_is_refused(shared_daemon: Daemon) -> None:
    shared_daemon.directory.chmod(0o755)
    second = served_beside(shared_daemon)
    shared_daemon.directory.chmod(0o700)
    assert second.returncode == 2
    assert "mode 0700" in second.stderr


NONSENSE: list[tuple[object, str]] = [
    ({"type": "Explode"}, "'Explode' refused: it is not one that protocol 5."),
    ({"type": "StartSwap"}, "missing required field `model`"),
    ({"type": "StartSwap", "model": 5}, "Expected `str`, got `int`"),
    ({"type": "StartSwap", "model": policy(), "version": 1 << 62 | 1}, "version"),
    ({"type": "CreateArena", "nbytes": -1}, "nbytes"),
    ({"type": "CreateArena", "nbytes": 1 << 60}, "limit"),
    ({"type": "Deregister", "member": "policy/a:0@n0#4"}, "not a registration of this session"),
    ({"type": "RegisterTarget", "model": named("m"), "replica": "r", "rank": 3, "world_size": 2,
      "shard": {"tensors": [{"name": "w", "shape": [1], "dtype": "float32"}]}}, "rank 3 is not in"),
    ({"type": "RegisterTarget", "model": named("m"), "replica": "r", "rank": 0, "world_size": 1,
      "shard": {"tensors": [{"name": "w", "shape": [1 << 40, 1 << 40], "dtype": "float32"}]}}, "the limit is"),
    ({"type": "RegisterTarget", "model": named("m"), "replica": "r", "rank": 0, "world_size": 1,
      "shard": {"tensors": [{"name": "w", "shape": [1], "dtype": "float7"}]}}, "unknown dtype 'float7'"),
    ([1, 2], "refused"),
    ("hello", "refused"),
]  # fmt: skip


def test_sockets_are_private(shared_daemon: Daemon) -> None:
    directory = shared_daemon.directory
    assert directory.stat().st_mode & 0o777 == 0o700
    names = {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir() if not path.is_file()}
    assert names == {"refitd.sock": 0o600, "refitd.fds": 0o600, "coordinator.sock": 0o600}


def said(peer: RawPeer, frame: bytes) -> dict[str, object]:
    peer.socket.send(frame)
    assert peer.socket.poll(ANSWER_S * 1000), frame[:40]
    return msgpack.unpackb(peer.socket.recv())[1]


def test_messages_and_frames_that_make_no_sense_are_refused_and_change_nothing(daemon: Daemon) -> None:
    with fleet(daemon), RawPeer(daemon.directory) as peer:
        before = daemon.node().arenas
        for body, why in NONSENSE:
            answer = said(peer, msgpack.packb([7, body]))
            assert answer["type"] == "Failure" and why in str(answer["message"]), (body, answer)
        for frame in (b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x92\x01" + b"\x91" * 5000, os.urandom(1000)):
            assert said(peer, frame)["type"] == "Failure"
        assert daemon.node().arenas == before


def test_another_protocol_version_is_refused_with_both_numbers(shared_daemon: Daemon) -> None:
    with RawPeer(shared_daemon.directory, hello=False) as peer:
        answer = said(peer, msgpack.packb([7, {"type": "Hello", "protocol": 99, "token": b""}]))
        assert "this client speaks protocol 99, the daemon 5." in str(answer["message"])


def test_a_message_of_absurd_size_ends_the_connection_not_the_daemon(daemon: Daemon) -> None:
    with fleet(daemon), RawPeer(daemon.directory) as peer:
        peer.socket.send(b"\x00" * (65 << 20))
        assert not peer.socket.poll(500)
