"""Between hosts: who has an allowed key joins, nobody else is heard, and both ends' logs say why."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

import refitd
from refitd.protocol import keys
from tests.support.cluster import RunningDaemon, eventually

JOIN_S = 20.0


class Head:
    """`refitd coordinator` listening on tcp, with a key or without."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        # nobody else takes the port while it is bound, and little time passes until the coordinator binds it
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        self.pair = keys.generate("head")
        self._key, self.public_file = keys.write(self.pair, directory)
        self._allowed = directory / "allowed"
        self._log = directory / "head.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *allowed: keys.KeyPair) -> None:
        """Start with this list; without keys if it is empty."""
        text = f'[coordinator]\nendpoint = "{self.endpoint}"\n[node]\nruntime_dir = "{self._directory / "run"}"\n'
        if allowed:
            self._allowed.write_text("".join(f"{pair.public_line}\n" for pair in allowed))
            self._allowed.chmod(0o644)
            text += f'[security]\nkey = "{self._key}"\nallowed = "{self._allowed}"\n'
        config = self._directory / "head.toml"
        config.write_text(text)
        started = self.log().count("event=ready")
        command = [sys.executable, "-m", "refitd_cli.daemon", "coordinator", "--config", str(config)]
        env = {name: value for name, value in os.environ.items() if not name.startswith("REFITD_")}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        eventually(lambda: self.log().count("event=ready") > started, "the coordinator listens", JOIN_S)

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        assert self.process.wait(10) == 0

    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    head = Head(tmp_path)
    yield head
    print(f"--- log of the coordinator\n{head.log()}")
    if head.process is not None and head.process.poll() is None:
        head.process.kill()
        head.process.wait()


class Nodes:
    """Daemons that look for `head`, each with a key of its own."""

    def __init__(self, head: Head, directory: Path, start_daemon: Callable[..., RunningDaemon]) -> None:
        self._head, self._directory, self._start_daemon = head, directory, start_daemon

    def key(self, name: str) -> keys.KeyPair:
        pair = keys.generate(name)
        keys.write(pair, self._directory)
        return pair

    def start(
        self, name: str, *, key: keys.KeyPair | None, server_key: str = "", host: str = "", more: str = ""
    ) -> RunningDaemon:
        endpoint = self._head.endpoint.replace("127.0.0.1", host or "127.0.0.1")
        text = f'[node]\nname = "{name}"\nworkers = 1\n[coordinator]\nendpoint = "{endpoint}"\n'
        if key is not None:
            server_key = server_key or str(self._head.public_file)
            text += f'[security]\nkey = "{self._directory / key.name}.key"\nserver_key = "{server_key}"\n'
        return self._start_daemon(text + more, standalone=False)


@pytest.fixture
def nodes(head: Head, tmp_path: Path, start_daemon: Callable[..., RunningDaemon]) -> Nodes:
    return Nodes(head, tmp_path, start_daemon)


def joined(daemon: RunningDaemon) -> list[str]:
    """The nodes that this one's coordinator knows, once it has one."""
    with daemon.connect() as client:
        eventually(lambda: why_not(client) == "", f"a coordinator answers; log:\n{daemon.log()}", JOIN_S)
        return sorted(node.node for node in client.status().nodes)


def why_not(client: refitd.Client) -> str:
    try:
        client.status()
    except refitd.TransportError as exc:
        return str(exc)
    return ""


def says(daemon: RunningDaemon, text: str) -> None:
    """Wait until the daemon's log and its clients' errors say this of the coordinator."""
    eventually(lambda: text in daemon.log(), f"the log says {text!r}:\n{daemon.log()}", JOIN_S)
    with daemon.connect() as client:
        eventually(lambda: text in why_not(client), f"clients are told {text!r}", JOIN_S)


def test_daemons_with_allowed_keys_join(head: Head, nodes: Nodes) -> None:
    a, b = nodes.key("a"), nodes.key("b")
    head.start(a, b)
    first = nodes.start("a", key=a)
    second = nodes.start("b", key=b, server_key=head.pair.public)
    assert joined(first)
    eventually(lambda: joined(second) == ["a", "b"], "both nodes are known")
    assert "turned-away" not in head.log()


def test_key_that_is_not_on_the_list_does_not_join_and_both_logs_say_so(head: Head, nodes: Nodes) -> None:
    a, stranger = nodes.key("a"), nodes.key("stranger")
    head.start(a)
    refused = nodes.start("stranger", key=stranger)
    says(refused, f"add the line '{stranger.public_line}' to the file security.allowed of the coordinator")
    eventually(lambda: "turned-away" in head.log(), "the coordinator says whom it turned away")
    assert stranger.public in head.log() and "not in security.allowed" in head.log()
    assert joined(nodes.start("a", key=a)) == ["a"]


def test_daemon_without_a_key_does_not_join_and_both_logs_say_so(head: Head, nodes: Nodes) -> None:
    a = nodes.key("a")
    head.start(a)
    says(nodes.start("plain", key=None), "set security.key and security.server_key here")
    eventually(lambda: "a peer uses no keys" in head.log(), "the coordinator says what the daemon lacks")
    assert joined(nodes.start("a", key=a)) == ["a"]


def test_daemon_that_expects_another_coordinator_does_not_join_and_both_logs_say_so(head: Head, nodes: Nodes) -> None:
    a, other = nodes.key("a"), keys.generate("other")
    head.start(a)
    says(
        nodes.start("a", key=a, server_key=other.public),
        f"the coordinator's key is security.server_key here, {other.public}",
    )
    text = f"security.server_key must be {head.pair.public}"
    eventually(lambda: text in head.log(), "the coordinator says which key is its own")


def test_daemon_with_a_key_does_not_talk_to_a_coordinator_without(head: Head, nodes: Nodes) -> None:
    head.start()
    says(nodes.start("a", key=nodes.key("a")), "set security.key and security.allowed for the coordinator, too")
    eventually(lambda: "a peer uses keys and there are none here" in head.log(), "the coordinator says what it lacks")


def test_daemon_whose_coordinator_does_not_answer_says_what_may_be_the_reason(head: Head, nodes: Nodes) -> None:
    daemon = nodes.start("a", key=nodes.key("a"), more="[deadlines]\nconnect_s = 0.5\n")
    eventually(lambda: "event=no-coordinator" in daemon.log(), "the log says that nobody answers", JOIN_S)
    assert head.endpoint in daemon.log() and "firewalls and keys" in daemon.log()


def test_loopback_without_keys_works_as_before(head: Head, nodes: Nodes) -> None:
    head.start()
    assert joined(nodes.start("a", key=None)) == ["a"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_daemon_whose_key_is_added_joins_without_being_started_again(head: Head, nodes: Nodes, host: str) -> None:
    a, late = nodes.key("a"), nodes.key("late")
    head.start(a)
    daemon = nodes.start("late", key=late, host=host)
    says(daemon, "the other end does not allow our key")
    head.stop()
    head.start(a, late)
    assert joined(daemon) == ["late"]


@pytest.mark.slow
def test_daemon_that_was_let_in_finds_a_coordinator_that_comes_back(head: Head, nodes: Nodes) -> None:
    a = nodes.key("a")
    head.start(a)
    daemon = nodes.start("a", key=a)
    assert joined(daemon) == ["a"]
    head.stop()
    with daemon.connect() as client:
        eventually(lambda: why_not(client) != "", "the daemon misses its coordinator", JOIN_S)
    head.start(a)
    assert joined(daemon) == ["a"]


def test_coordinator_answers_no_key_but_those_on_its_list(head: Head, nodes: Nodes) -> None:
    head.start(nodes.key("a"))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        stranger = keys.generate("stranger")
        peer = context.socket(zmq.DEALER)
        peer.curve_publickey, peer.curve_secretkey = stranger.public.encode(), stranger.secret.encode()
        peer.curve_serverkey = head.pair.public.encode()
        monitor = peer.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        peer.connect(head.endpoint)
        assert monitor.poll(int(JOIN_S * 1000))
        event = int.from_bytes(monitor.recv_multipart()[0][:2], sys.byteorder)
        assert event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    finally:
        context.destroy(linger=0)


def test_refused_configuration_leaves_nothing_behind_and_names_the_command(head: Head, tmp_path: Path) -> None:
    config = tmp_path / "node.toml"
    config.write_text(f'[coordinator]\nendpoint = "{head.endpoint}"\n[security]\nkey = "{tmp_path / "head.key"}"\n')
    env = {**os.environ, "REFITD_NODE__RUNTIME_DIR": str(tmp_path / "run")}
    for command, missing in (("serve", "security.server_key"), ("coordinator", "security.allowed")):
        arguments = [sys.executable, "-m", "refitd_cli.daemon", command, "--config", str(config)]
        ended = subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=30, check=False)
        assert ended.returncode == 2, ended.stderr
        assert missing in ended.stderr and "refitctl keygen" in ended.stderr
    assert not (tmp_path / "run").exists()


def test_standalone_daemon_lets_others_in_by_key(head: Head, nodes: Nodes, start_daemon, tmp_path: Path) -> None:
    a = nodes.key("a")
    allowed = tmp_path / "allowed"
    allowed.write_text(f"{a.public_line}\n{head.pair.public_line}\n")
    allowed.chmod(0o644)
    alone = start_daemon(
        f'[node]\nname = "head"\nworkers = 1\n[coordinator]\nendpoint = "{head.endpoint}"\n[security]\n'
        f'key = "{tmp_path / "head.key"}"\nserver_key = "{head.public_file}"\nallowed = "{allowed}"\n'
    )
    assert joined(alone)
    assert joined(nodes.start("a", key=a)) == ["a", "head"]
