"""Peers that forge, flood, stall or stop half way are refused or bounded, and swaps continue."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import refitd
from refitd.buffers import handoff
from refitd.protocol import cluster, local, plan_reports, reports, shards, sidecar
from refitd.protocol.base import PROTOCOL_VERSION, Decoder, encode
from refitd.testing import Daemon, Engine, eventually, processes
from tests.support.hostile import Figures, RawPeer, figures, fleet, refused
from tests.support.keyed import Head, Nodes, joined
from tests.support.names import policy
from tests.support.passed_on import Start

# The growth that a process may keep, because the allocator keeps freed memory.
ROOM_BYTES = 96 << 20


@pytest.fixture
def daemon(daemons: Start) -> Daemon:
    return daemons()[0]


@pytest.fixture
def nodes(head: Head, tmp_path: Path, start_daemon: Callable[..., Daemon]) -> Nodes:
    return Nodes(head, tmp_path, start_daemon)


class Watched:
    """The daemon and its coordinator, compared before and after."""

    def __init__(self, daemon: Daemon) -> None:
        self._pids = {"daemon": daemon.pid, "coordinator": daemon.status().coordinator_pid}
        self._before = {name: figures(pid) for name, pid in self._pids.items()}

    def check(self) -> None:
        """Check that neither process was replaced, grew beyond its bound or has an extra descriptor."""
        for name, pid in self._pids.items():
            before = self._before[name]
            eventually(
                lambda pid=pid, before=before: figures(pid).descriptors <= before.descriptors,
                f"{name} closes what the peer had open ({before.descriptors} before)",
            )
            after: Figures = figures(pid)
            grown = after.private_bytes - before.private_bytes
            assert grown < ROOM_BYTES, f"{name} grew by {grown} bytes"


def test_token_opens_one_session_once_from_its_own_process_while_its_socket_is_open(daemon: Daemon) -> None:
    with fleet(daemon), RawPeer(daemon.directory) as peer:
        second = peer.dealer()
        assert "opens no session" in refused(peer.hello(peer.token, second))  # used
        assert "opens no session" in refused(peer.hello(os.urandom(16), second))  # forged
        assert "opens no session" in refused(peer.hello(b"", second))
        assert "has a session already" in refused(peer.hello(os.urandom(16)))
        assert "say Hello" in refused(peer.ask(local.GetStatus(), second))
        held = processes.descriptors(daemon.pid)
        with RawPeer(daemon.directory, hello=False) as gone:
            token = gone.token
        eventually(lambda: processes.descriptors(daemon.pid) == held, "the daemon knows that the socket has closed")
        assert "opens no session" in refused(peer.hello(token, second))
        assert isinstance(peer.ask(local.GetStatus()), reports.StatusReport)


THIEF = """
import sys, zmq
from refitd.protocol import local
from refitd.protocol.base import PROTOCOL_VERSION
from refitd.protocol.base import Decoder, encode
dealer = zmq.Context().socket(zmq.DEALER)
dealer.linger = 0
dealer.connect(sys.argv[1])
dealer.send(encode(1, local.Hello(protocol=PROTOCOL_VERSION, token=bytes.fromhex(sys.argv[2]))))
assert dealer.poll(20000)
print(Decoder(local.ClientReply).decode(dealer.recv())[1])
"""


def test_token_that_another_process_has_got_hold_of_opens_nothing_for_it(shared_daemon: Daemon) -> None:
    with RawPeer(shared_daemon.directory, hello=False) as peer:
        command = [sys.executable, "-c", THIEF, f"ipc://{shared_daemon.directory / 'refitd.sock'}", peer.token.hex()]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert "this token opens no session here" in ran.stdout
        assert isinstance(peer.hello(peer.token), local.Welcome)  # and it is not used up


def test_nobody_speaks_for_the_members_of_another_session(daemon: Daemon) -> None:
    with fleet(daemon) as here, RawPeer(daemon.directory) as peer:
        for member in (here.source.member, here.target.member):
            for message in (
                local.Deregister(member=member),
                local.BeginPublish(member=member, version=99, timeout_s=1.0),
                local.Publish(member=member, version=99, slot=0),
                local.Publish(member=member, version=99),
                local.Withdraw(member=member, version=1),
                local.CommitDone(swap="s", member=member, paused_s=0.0),
                local.CommitFailed(swap="s", member=member, reason="no"),
            ):
                assert "is not a registration of this session" in refused(peer.ask(message)), message
        with daemon.connect() as other:
            weights = {"w": torch.zeros(64, 64)}
            with pytest.raises(refitd.RefusedError, match="already registered by pid"):
                other.register_source(policy(), weights)
            with pytest.raises(refitd.RefusedError, match="already registered by pid"):
                other.register_target(policy(), weights, replica="a")


def test_arenas_are_handed_to_their_own_session_and_for_reading_where_that_is_enough(daemon: Daemon) -> None:
    with fleet(daemon), RawPeer(daemon.directory) as peer:
        for arena in range(12):  # the fleet has some of these
            for write in (False, True):
                answer, fds = peer.fetch(arena, write=write)
                assert "is not one of this session's" in refused(answer) and fds == ()
        shard = shards.Shard((shards.WireTensor("w", (64, 64), "float32"),))
        mine = peer.ask(local.RegisterTarget(model="mine", replica="r", rank=0, world_size=1, shard=shard))
        assert isinstance(mine, local.Registered)
        assert "for reading only" in refused(peer.fetch(mine.staging, write=True)[0])
        answer, (fd,) = peer.fetch(mine.staging, write=False)
        assert isinstance(answer, local.ArenaDescriptor)
        try:
            assert mmap.mmap(fd, answer.nbytes, prot=mmap.PROT_READ)[:4] == bytes(4)
            for attempt in (
                lambda: mmap.mmap(fd, answer.nbytes, prot=mmap.PROT_READ | mmap.PROT_WRITE),
                lambda: os.pwrite(fd, b"x", 0),
                lambda: os.ftruncate(fd, 0),
            ):
                with pytest.raises(OSError):
                    attempt()
        finally:
            os.close(fd)


def test_an_arena_is_taken_back_once_and_from_whom_it_was(daemon: Daemon) -> None:
    """A forked child or a stranger with the descriptor cannot become a second owner of the arena."""
    with RawPeer(daemon.directory) as one, RawPeer(daemon.directory) as other, contextlib.ExitStack() as stack:
        made = one.ask(local.CreateArena(nbytes=1 << 18))
        assert isinstance(made, local.ArenaDescriptor)
        answer, (fd,) = one.fetch(made.arena, write=True)
        stack.callback(os.close, fd)
        assert isinstance(answer, local.ArenaDescriptor)
        before = daemon.node().arena_bytes
        for peer in (one, other):
            assert "has it already" in refused(peer.give(fd, answer.nbytes))
        page = os.memfd_create("refitd:evil", os.MFD_ALLOW_SEALING)
        stack.callback(os.close, page)
        os.ftruncate(page, 4096)
        null = os.open(os.devnull, os.O_RDWR)
        stack.callback(os.close, null)
        for wrong, nbytes in ((page, 4096), (fd, answer.nbytes + 1), (null, 4096)):
            found = other.give(wrong, nbytes)
            assert isinstance(found, local.Failure) and "not taken back" in found.message
            assert found.code == refitd.ArenaError.code
        assert daemon.node().arena_bytes == before


@pytest.mark.slow
def test_a_million_small_frames_stop_nobody(daemon: Daemon) -> None:
    with fleet(daemon) as here:
        watched = Watched(daemon)
        frames = [b"", b"\x00", b"\x92\x01\x80", os.urandom(30), encode(0, local.GetStatus())[:-1]]
        with RawPeer(daemon.directory) as peer:
            for number in range(1_000_000):
                peer.socket.send(frames[number % len(frames)])
                if number % 250_000 == 100_000:
                    here.swap()
            assert isinstance(peer.ask(local.GetPlan(model=policy())), plan_reports.PlanReport)
        watched.check()
        assert len(daemon.log()) < 1 << 20


@pytest.mark.slow
def test_a_peer_that_asks_and_never_reads_has_its_answers_dropped(daemon: Daemon) -> None:
    with fleet(daemon) as here:
        watched = Watched(daemon)
        with RawPeer(daemon.directory) as peer:
            silent = peer.dealer()
            assert silent is not None
            for request in (local.GetStatus(), local.GetDescription(model=policy()), local.StartSwap(model="none")):
                for _ in range(20_000):
                    peer.socket.send(encode(7, request))
            here.swap()
        watched.check()


@pytest.mark.slow
def test_messages_of_very_many_frames_are_dropped(daemon: Daemon) -> None:
    with fleet(daemon) as here:
        watched = Watched(daemon)
        with RawPeer(daemon.directory) as peer:
            for _ in range(4):
                peer.socket.send_multipart([b"x"] * 250_000)
                here.swap()
            assert isinstance(peer.ask(local.GetPlan(model=policy())), plan_reports.PlanReport)
        watched.check()


@pytest.mark.slow
def test_what_one_client_may_have_under_way_is_bounded(daemon: Daemon) -> None:
    with fleet(daemon) as here:
        watched = Watched(daemon)
        with RawPeer(daemon.directory) as peer:
            shard = shards.Shard((shards.WireTensor("w", (4,), "float32"),))
            registered = peer.ask(local.RegisterSource(model="mine", rank=0, world_size=1, shard=shard, slots=1))
            assert isinstance(registered, local.Registered)
            member = registered.member
            for version in range(16 + 1):
                peer.socket.send(encode(1, local.BeginPublish(member=member, version=version, timeout_s=1e9)))
            last = peer.ask(local.BeginPublish(member=member, version=99, timeout_s=1e9))
            assert "requests for a snapshot slot already" in refused(last)
            for _ in range(2000):
                peer.socket.send(encode(1, local.CreateArena(nbytes=1 << 50)))
            here.swap()
            assert len(daemon.log()) < 1 << 20
        watched.check()


@pytest.mark.slow
def test_a_flood_on_the_descriptor_socket_and_visitors_that_never_say_hello(daemon: Daemon) -> None:
    with fleet(daemon) as here:
        watched = Watched(daemon)
        clients = [RawPeer(daemon.directory, hello=False) for _ in range(100)]
        peer = clients.pop()
        # it asks and does not read: its connection is closed when its answers find no room
        peer.descriptors.settimeout(10)
        with pytest.raises((refitd.PeerLost, OSError)):
            for _ in range(100_000):
                handoff.send(peer.descriptors, encode(1, sidecar.FetchArena(arena=1)))
        for client, noise in zip(clients, (b"x", b"\xff" * 60_000, encode(1, local.GetStatus())) * 33, strict=True):
            client.descriptors.send(noise)
            with pytest.raises(refitd.PeerLost):
                handoff.receive(client.descriptors)
        here.swap()
        for client in [*clients, peer]:
            client.close()
        watched.check()


# --- between hosts ----------------------------------------------------------------------------------------


GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)


@pytest.mark.slow
def test_handshakes_that_are_never_finished_are_ended(head: Head, nodes: Nodes) -> None:
    a = nodes.key("a")
    head.start(a)
    assert head.process is not None
    coordinator = head.process.pid
    before = figures(coordinator)
    host, _, port = head.endpoint.removeprefix("tcp://").rpartition(":")
    half_open = []
    for number in range(300):
        peer = socket.create_connection((host, int(port)), timeout=60)
        # send: no bytes; a greeting; a greeting and a command other than HELLO; a greeting and half of a HELLO
        peer.sendall((b"", GREETING, GREETING + b"\x04\x04\x03ABC", GREETING + b"\x04\xc8\x05HELLO")[number % 4])
        half_open.append(peer)
    daemon = nodes.start("a", key=a)
    assert joined(daemon) == ["a"]
    with fleet(daemon):
        pass
    eventually(
        lambda: figures(coordinator).descriptors <= before.descriptors + 2,  # the daemon's connection
        "the coordinator closes what was never finished",
    )
    assert figures(coordinator).private_bytes - before.private_bytes < ROOM_BYTES
    for peer in half_open:
        peer.close()


def started_with(head: Head, *lines: str) -> None:
    """Start the coordinator with an allow-list of these lines."""

    class Line:
        def __init__(self, text: str) -> None:
            self.public_line = text

    head.start(*(Line(line) for line in lines))  # type: ignore[arg-type]


def test_key_is_bound_to_its_node_and_the_roles_of_its_clients(head: Head, nodes: Nodes) -> None:
    a, b, c = nodes.key("a"), nodes.key("b"), nodes.key("c")
    started_with(
        head,
        f"{a.public_line} node=a roles=trainer",
        f"{b.public_line} node=b roles=engine",
        f"{c.public_line} node=c",
    )
    trains, serves = nodes.start("a", key=a), nodes.start("b", key=b)
    assert joined(trains) and joined(serves)
    claims = nodes.start("b", key=c)  # c's key under b's name
    eventually(lambda: "may be node 'c', not 'b'" in head.log(), f"the coordinator says so:\n{head.log()}")
    eventually(lambda: "may be node 'c', not 'b'" in claims.log(), f"and so does the daemon:\n{claims.log()}")
    weights = {"w": torch.zeros(64, 64)}
    with trains.connect() as trainer, serves.connect() as engine:
        source = trainer.register_source(policy(), weights)
        target = engine.register_target(policy(), {"w": torch.zeros(64, 64)}, replica="r")
        source.publish(1)
        for act, role in (
            (lambda: trainer.register_target(policy(), weights, replica="x"), "engine"),
            (lambda: engine.register_source("other", weights), "trainer"),
            (lambda: engine.swap(policy()), "operator or trainer"),
            (lambda: engine.abort(policy()), "operator or trainer"),
        ):
            with pytest.raises(refitd.RefusedError, match=f"needs the role {role}.*security.allowed gives roles"):
                act()
        assert "needs the role" in head.log()
        with Engine(target):
            assert trainer.swap(policy(), timeout=60).outcome == "committed"


@pytest.mark.parametrize("role", ["engine", "trainer", "operator"])
def test_users_of_a_node_act_in_their_roles_only(start_daemon: Callable[..., Daemon], role: str) -> None:
    daemon = start_daemon(f'[node]\nroles = {{ "{os.getuid()}" = ["{role}"] }}\n')
    weights = {"w": torch.zeros(64, 64)}
    with daemon.connect() as client:
        attempts = {
            "register_source": (lambda: client.register_source(policy(), weights), {"trainer"}),
            "register_target": (lambda: client.register_target(policy(), weights, replica="r"), {"engine"}),
            "swap": (lambda: client.swap(policy()), {"trainer", "operator"}),
            "abort": (lambda: client.abort(policy()), {"trainer", "operator"}),
        }
        for what, (attempt, roles) in attempts.items():
            try:
                attempt()
                refusal = ""
            except refitd.RefusedError as exc:
                refusal = str(exc)
            assert ("needs the role" in refusal) == (role not in roles), f"{what} as {role}: {refusal}"
        assert client.status().nodes[0].node == "n0"


def test_users_that_are_not_allowed_are_turned_away_at_both_sockets(start_daemon, tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can start a process of another user")
    daemon = start_daemon('[node]\nallowed_uids = [65534]\nroles = { "65534" = ["engine"] }\n')
    for folder in (daemon.folder, daemon.directory):
        folder.chmod(0o711)
    for name in ("refitd.sock", "refitd.fds"):
        (daemon.directory / name).chmod(0o666)
    try:
        assert "needs the role trainer" in as_user(65534, daemon.directory)
        assert "may not use this daemon" in as_user(65533, daemon.directory)
        assert "no answer" in as_user(65533, daemon.directory, zmq_only=True)
    finally:
        daemon.directory.chmod(0o700)


STRANGER = """
import os, sys
sys.path[:0] = eval(sys.argv[1])
import zmq, refitd
from refitd.client.connection import Connection
from refitd.protocol import local, shards
from refitd.protocol.base import encode
from pathlib import Path
os.setgid(int(sys.argv[3])); os.setuid(int(sys.argv[3]))
if sys.argv[4] == "True":
    dealer = zmq.Context().socket(zmq.DEALER)
    dealer.linger = 0
    dealer.connect(f"ipc://{sys.argv[2]}/refitd.sock")
    dealer.send(encode(1, local.GetStatus()))
    print("an answer" if dealer.poll(2000) else "no answer")
    sys.exit()
try:
    connection = Connection(Path(sys.argv[2]), "stranger", 10.0)
    shard = shards.Shard((shards.WireTensor("w", (4,), "float32"),))
    connection.request(local.RegisterSource(model="m", rank=0, world_size=1, shard=shard), local.Registered, 10.0)
except refitd.RefitdError as exc:
    print(exc)
finally:
    if "connection" in globals():
        connection.close()
"""


def as_user(uid: int, directory: Path, *, zmq_only: bool = False) -> str:
    command = [sys.executable, "-c", STRANGER, repr(sys.path), str(directory), str(uid), str(zmq_only)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return ran.stdout + ran.stderr


def peak_bytes(pid: int) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return int(fields["VmHWM"].split()[0]) << 10


def test_who_is_not_let_in_yet_may_say_one_small_hello_and_nothing_is_built_of_the_rest(daemon: Daemon) -> None:
    count = 62 << 20
    nested = b"\x92\x01\xdd" + count.to_bytes(4, "big") + b"\x90" * count
    with fleet(daemon) as here, RawPeer(daemon.directory, hello=False) as stranger, RawPeer(daemon.directory) as client:
        pids = {"daemon": daemon.pid, "coordinator": daemon.status().coordinator_pid}
        before = {name: peak_bytes(pid) for name, pid in pids.items()}
        # the daemon, before and after Hello, and the coordinator
        stranger.socket.send(nested)
        client.socket.send(nested)
        knocks = stranger.dealer("coordinator.sock")
        knocks.send(nested)
        assert knocks.poll(20_000)
        _, answer = Decoder(cluster.CoordinatorMessage).decode(knocks.recv())
        assert isinstance(answer, local.Failure) and "NodeHello" in answer.message
        assert "say Hello" in refused(stranger.ask(local.GetStatus(), number=9))
        assert isinstance(client.ask(local.GetStatus(), number=9), reports.StatusReport)
        here.swap()
        # the received frame, one copy as bytes, and the memory of counting; it was 4.6 GiB before the fix
        grown = {name: peak_bytes(pid) - before[name] for name, pid in pids.items()}
        assert all(nbytes < 5 * len(nested) for nbytes in grown.values()), grown
        # small frames of strangers are not decoded either, for any message type
        shard = shards.Shard((shards.WireTensor("w", (4,), "float32"),))
        register = local.RegisterSource(model="x", rank=0, world_size=1, shard=shard)
        assert "say Hello" in refused(stranger.ask(register))
        long = local.Hello(protocol=PROTOCOL_VERSION, token=b"x" * 5000)
        stranger.socket.send(encode(0, long))
        assert isinstance(stranger.hello(stranger.token), local.Welcome)


# python itself may be out of another user's reach: everything is loaded before
COORDINATE = """
import os, sys
import refitd.coordinator.main
from refitd.config import load

config, uid = load(sys.argv[1]), int(sys.argv[2])
os.setgroups([]); os.setgid(uid); os.setuid(uid)
refitd.coordinator.main.run(config)
"""


def test_a_daemon_obeys_no_coordinator_of_a_user_that_it_was_not_told_of(start_daemon) -> None:  # type: ignore[no-untyped-def]
    """Another user bound the coordinator's endpoint first, in a world-writable directory."""
    if os.getuid() != 0:
        pytest.skip("only root can start processes of other users")
    other = 64_002
    with tempfile.TemporaryDirectory(prefix="rfd") as folder:
        os.chmod(folder, 0o1777)
        endpoint = f"ipc://{folder}/c.sock"
        config = Path(folder, "theirs.toml")
        config.write_text(
            f'[node]\nruntime_dir = "{folder}/theirs"\nallowed_uids = [0]\n[coordinator]\nendpoint = "{endpoint}"\n'
        )
        theirs = subprocess.Popen(
            [sys.executable, "-c", COORDINATE, str(config), str(other)], stderr=subprocess.DEVNULL
        )
        try:
            eventually(Path(folder, "c.sock").exists, "theirs listens")
            ours = f'[node]\nname = "n0"\n[coordinator]\nendpoint = "{endpoint}"\n'
            daemon = start_daemon(ours, standalone=False)
            eventually(lambda: f"belongs to uid {other}" in daemon.log(), "the daemon has looked at who it is")
            with daemon.connect() as client, pytest.raises(refitd.TransportError, match=f"belongs to uid {other}"):
                client.register_source(policy(), {"w": torch.zeros(4)})
            assert "event=coordinator " not in daemon.log()
        finally:
            theirs.terminate()
            theirs.wait(20)
