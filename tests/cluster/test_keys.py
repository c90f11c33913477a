"""Between hosts: only allowed keys are admitted, and both ends' logs give the reason of a refusal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zmq

import refitd
from refitd.protocol import keys, local
from refitd.protocol.base import encode
from refitd.protocol.channel import Dealer
from refitd.testing import Daemon, Engine, eventually
from tests.support.fleet import go_live
from tests.support.keyed import JOIN_S, Head, Nodes, joined, why_not


@pytest.fixture
def nodes(head: Head, tmp_path: Path, start_daemon: Callable[..., Daemon]) -> Nodes:
    return Nodes(head, tmp_path, start_daemon)


def says(daemon: Daemon, text: str) -> None:
    """Wait until the daemon's log and its clients' errors contain this about the coordinator."""
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


def test_peer_without_a_key_is_not_heard_not_even_over_loopback(head: Head, nodes: Nodes) -> None:
    a = nodes.key("a")
    head.start(a)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        stranger = Dealer(context, head.endpoint)
        stranger.send_frame(encode(1, local.GetStatus()))
        said = set()

        def both_have_said_it() -> bool:
            # The end that reads the other's greeting first hangs up, and the other may see only the hang-up. It then
            # retries, as a daemon does.
            said.add(stranger.failure())
            stranger.retry()
            return "a peer uses no keys" in head.log() and any(
                text is not None and "set security.key and security.server_key here" in text for text in said
            )

        eventually(both_have_said_it, "both ends say what the peer lacks", JOIN_S)
        assert stranger.receive() is None
        stranger.close()
    finally:
        context.destroy(linger=0)
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


def test_daemon_whose_coordinator_does_not_answer_says_what_may_be_the_reason(head: Head, nodes: Nodes) -> None:
    daemon = nodes.start("a", key=nodes.key("a"), more="[deadlines]\nconnect_s = 0.5\n")
    eventually(lambda: "event=no-coordinator" in daemon.log(), "the log says that nobody answers", JOIN_S)
    assert head.endpoint in daemon.log() and "firewalls and keys" in daemon.log()


@pytest.mark.parametrize("command", [["coordinator"], ["serve"], ["serve", "--standalone"]])
def test_nothing_starts_on_loopback_tcp_without_keys(command: list[str], head: Head, tmp_path: Path) -> None:
    config = tmp_path / "plain.toml"
    config.write_text(f'[node]\nruntime_dir = "{tmp_path / "run"}"\n[coordinator]\nendpoint = "{head.endpoint}"\n')
    env = {name: value for name, value in os.environ.items() if not name.startswith("REFITD_")}
    arguments = [sys.executable, "-m", "refitd_cli.daemon", *command, "--config", str(config)]
    ended = subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 2, ended.stderr
    assert "refitctl keygen HEAD" in ended.stderr and "refitctl keygen NODE" in ended.stderr
    assert "ipc://" in ended.stderr and len(ended.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


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
        f'[coordinator]\nendpoint = "{head.endpoint}"\n[security]\n'
        f'key = "{tmp_path / "head.key"}"\nserver_key = "{head.public_file}"\nallowed = "{allowed}"\n',
        name="head",
    )
    assert joined(alone)
    assert joined(nodes.start("a", key=a)) == ["a", "head"]


def test_replica_that_nobody_expects_is_refused_and_neither_gets_weights_nor_blocks_a_swap(
    head: Head, nodes: Nodes
) -> None:
    a, b = nodes.key("a"), nodes.key("b")
    head.start(a, b, more='[models.policy]\nreplicas = ["engine-*", "canary"]\n')
    trains, serves = nodes.start("a", key=a), nodes.start("b", key=b)
    assert joined(trains) and joined(serves)
    with trains.connect() as trainer, serves.connect() as stranger:
        source = trainer.register_source("policy", {"w": torch.ones(64, 64)})
        source.publish(1)
        mine = torch.zeros(64, 64)
        target = trainer.register_target("policy", {"w": mine}, replica="engine-0")
        with Engine(target):
            assert trainer.swap("policy", 1, timeout=60).outcome == "committed"
        for name in ("stranger", "engine", "Engine-1", "canary2"):
            with pytest.raises(
                refitd.RefusedError, match=rf"nobody expects replica '{name}'.*models\.policy\.replicas.*'engine-\*'"
            ):
                stranger.register_target("policy", {"w": torch.zeros(64, 64)}, replica=name)
        report = go_live(trainer, source, 2, target)
        assert [member.replica for member in report.members] == ["engine-0"]
        late = torch.zeros(64, 64)
        # an expected replica is caught up as before
        with Engine(joins := stranger.register_target("policy", {"w": late}, replica="canary")):
            eventually(lambda: joins.version == 2, "the replica that is expected is caught up")
        # another model has no list of expected replicas
        stranger.register_target("other", {"w": torch.zeros(8)}, replica="any").close()


def test_key_that_may_not_act_as_an_engine_is_given_no_weights_by_catch_up(head: Head, nodes: Nodes) -> None:
    a, b = nodes.key("a"), nodes.key("b")

    class Line:
        public_line = f"{b.public_line} node=b roles=trainer,operator"

    head.start(a, Line)  # type: ignore[arg-type]
    trains, looks = nodes.start("a", key=a), nodes.start("b", key=b)
    assert joined(trains) and joined(looks)
    with trains.connect() as trainer, looks.connect() as stranger:
        source = trainer.register_source("policy", {"w": torch.ones(64, 64)})
        source.publish(1)
        with Engine(trainer.register_target("policy", {"w": torch.zeros(64, 64)}, replica="r")):
            assert trainer.swap("policy", 1, timeout=60).outcome == "committed"
            with pytest.raises(refitd.RefusedError, match=r"needs the role engine.*security\.allowed"):
                stranger.register_target("policy", {"w": torch.zeros(64, 64)}, replica="s")
            go_live(trainer, source, 2)
