"""Foreign connections to the workers' ports: workers meet, and swaps succeed."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import refitd
from refitd.copy_services import Epoch, Mailbox, gloo, wires
from refitd.copy_services.channels import HELLO, NONCE, PROOF, Channel, frame_of
from refitd.copy_services.wires import Wires
from refitd.errors import DeadlineExceeded
from refitd.testing import Daemon, Engine
from tests.support.names import policy
from tests.support.programs import ended
from tests.support.proxy import Proxies

Nodes = tuple[Daemon, ...]
KEY = bytes(range(32))

# Looks for listening ports of this test's processes, as any user of the host can, and takes every place there
# that it guesses. Other tests run in parallel: their ports are left alone.
ATTACKER = """
import os, signal, socket, struct, sys, time
mode, family, held, known, inodes, tried = sys.argv[1], {int(sys.argv[2])}, [], {}, {}, 0

def ours():
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(name)] = int(open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[1])
        except OSError:
            pass
    pids, found = set(family), set()
    while new := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= new
    for pid in pids:
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError:
            pass
    return found

def stop(*_):
    print(tried, flush=True)
    os._exit(0)

signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
while True:
    listed = {}
    for line in open("/proc/net/tcp").read().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and words[1].startswith("0100007F"):
            listed[words[9]] = int(words[1].split(":")[1], 16)
    if listed.keys() - inodes:
        mine = ours()
        inodes.update({inode: f"socket:[{inode}]" in mine for inode in listed.keys() - inodes})
    ports = {port for inode, port in listed.items() if inodes[inode]}
    known = {port: known.get(port, 0) for port in ports}
    for port in ports:
        for _ in range(8):
            peer = socket.socket()
            peer.setblocking(False)
            try:
                peer.connect(("127.0.0.1", port))
            except BlockingIOError:
                pass
            except OSError:
                continue
            peer.setblocking(True)
            peer.settimeout(0.05)
            try:
                peer.sendall(struct.pack("<q", known[port]))
                if mode == "noise":
                    peer.sendall(b"\\xff" * 64)
            except OSError:
                pass
            known[port] += 1
            tried += 1
            if mode == "leave":
                peer.close()
            else:
                held.append(peer)
    for peer in held[:-200]:
        peer.close()
    del held[:-200]
"""


@contextlib.contextmanager
def attack(mode: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", ATTACKER, mode, str(os.getpid())], stdout=subprocess.PIPE)
    with ended(process):
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield
        assert process.poll() is None, "the attacker has ended"
        process.terminate()
        assert int(process.stdout.readline()) > 0, "the attacker has found no port"


def swapped(nodes: Callable[..., Nodes], mode: str, rounds: int) -> list[str]:
    """Swap this many times, each in a new epoch, and return the reasons of failed swaps."""
    deadlines = "[deadlines]\nplan_s = 40.0\nstage_s = 10.0\ncommit_s = 10.0\n"
    n0, n1 = nodes(2, f"{deadlines}[models.{policy()}]\ncatch_up = false\n")
    failures = []
    with n0.connect() as trainer, attack(mode):
        full = {"w": torch.zeros(300, 1000)}
        source = trainer.register_source(policy(), full)
        for version in range(1, rounds + 1):
            with n1.connect() as client:  # a new registration: a new plan and a new epoch
                mine = {"w": torch.zeros(300, 1000)}
                target = client.register_target(policy(), mine, replica=f"r{version}")
                full["w"].fill_(version)
                source.publish(version)
                with Engine(target):
                    try:
                        assert trainer.swap(policy(), version, timeout=60).outcome == "committed"
                    except refitd.RefitFailed as exc:
                        failures.append(str(exc))
                    else:
                        assert torch.equal(mine["w"], full["w"])
    return failures


@pytest.mark.parametrize(
    "mode", ["hold", pytest.param("noise", marks=pytest.mark.slow), pytest.param("leave", marks=pytest.mark.slow)]
)
@pytest.mark.timeout(300)
def test_swaps_succeed_while_a_stranger_connects_to_every_port_in_a_loop(
    nodes: Callable[..., Nodes],
    mode: str,
) -> None:
    assert swapped(nodes, mode, 20 if mode == "hold" else 5) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["flip", "swap", "replay", "say"])
def test_what_somebody_alters_between_two_nodes_never_goes_live(
    nodes: Callable[..., Nodes], meddle: Callable[[str], None], how: str
) -> None:
    n0, n1 = nodes(
        2,
        "[transport]\ndeltas = false\n[deadlines]\nplan_s = 40.0\nstage_s = 10.0\n",
        workers=(1, 1),
    )
    with n0.connect() as trainer, n1.connect() as client:
        full, mine = {"w": torch.zeros(3000, 1000)}, {"w": torch.zeros(3000, 1000)}
        source = trainer.register_source(policy(), full)
        with Engine(client.register_target(policy(), mine, replica="far")):
            for version, meddles in ((1, ""), (2, how), (3, "")):
                meddle(meddles)
                full["w"].copy_(torch.randn(3000, 1000))
                before = mine["w"].clone()
                source.publish(version)
                if not meddles:
                    assert trainer.swap(policy(), version, timeout=60).outcome == "committed"
                    assert torch.equal(mine["w"], full["w"])
                    continue
                with pytest.raises(refitd.RefitFailed, match="worker 0 on node n1") as caught:
                    trainer.swap(policy(), version, timeout=60)
                assert "worker 0 on node n0" in str(caught.value)
                assert torch.equal(mine["w"], before), "the old version serves"


# --- the meeting itself -------------------------------------------------------------------------------------


class Board:
    """The mailbox that the workers of one epoch share."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()


class OnBoard(Mailbox):
    def __init__(self, board: Board) -> None:
        self._board = board

    def put(self, key: str, value: bytes) -> None:
        with self._board.changed:
            assert key not in self._board.values, f"{key} is left twice"
            self._board.values[key] = value
            self._board.changed.notify_all()

    def get(self, key: str, timeout: float) -> bytes:
        with self._board.changed:
            if not self._board.changed.wait_for(lambda: key in self._board.values, timeout):
                raise DeadlineExceeded(f"nobody left {key!r}")
            return self._board.values[key]


def meet(
    size: int,
    timeout: float,
    put: Callable[[bytes], bytes | None] = lambda address: None,
    keys: dict[int, bytes] | None = None,
) -> list[Any]:
    """Have threads meet; return the result of each, a service or an error.

    `put` is called with each address that a thread tells the others, and may return a replacement. `keys` has the keys
    of threads that do not use KEY.
    """
    labels, board = tuple(f"worker 0 on node n{i}" for i in range(size)), Board()
    found: list[object] = [None] * size

    class Watched(OnBoard):
        def put(self, key: str, value: bytes) -> None:
            super().put(key, put(value) or value)

    def join(index: int) -> None:
        epoch = Epoch("e", index, labels, "127.0.0.1", 1 << 20, Watched(board), timeout, (keys or {}).get(index, KEY))
        try:
            found[index] = gloo.join(epoch)
        except refitd.RefitdError as exc:
            found[index] = exc

    threads = [threading.Thread(target=join, args=(index,), daemon=True) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


@pytest.mark.parametrize("says", ["nothing", "noise", "hello", "proof"])
def test_workers_meet_although_strangers_connect_first_and_come_as_one_of_them(says: str) -> None:
    channel = Channel(Wires(None), "e", 0, ("worker 0 on node n1", "worker 0 on node n0"), KEY).id
    hello = frame_of(HELLO, bytes(8), 0, 0, b"worker 0 on node n1\0worker 0 on node n0").parts[0]
    proof = b"".join(frame_of(kind, channel, 0, 0, bytes(size)).parts[0] for kind, size in ((NONCE, 32), (PROOF, 16)))
    said = {"nothing": b"", "noise": b"\xff" * 64, "hello": bytes(hello), "proof": bytes(hello) + proof}[says]
    held: list[socket.socket] = []

    def stranger(address: bytes) -> None:
        for _ in range(100):  # more than a worker keeps
            held.append(socket.create_connection(("127.0.0.1", int(address.rpartition(b":")[2]))))
            with contextlib.suppress(ConnectionError):
                held[-1].sendall(said)

    services = meet(2, 30.0, stranger)
    assert all(isinstance(service, gloo.TcpService) for service in services), services
    sent = torch.arange(1 << 18)
    found, errors = run_both(services, sent)
    assert errors == ["", ""] and torch.equal(found, sent)
    for end in (*held, *services):
        end.close()


def test_workers_whose_keys_differ_move_nothing_and_name_each_other() -> None:
    found = meet(2, 2.0, keys={1: bytes(32)})
    for error, other in zip(found, ("n1", "n0"), strict=True):
        assert isinstance(error, refitd.TransportError), error
        assert f"the process that came as worker 0 on node {other} does not hold the key of epoch e" in str(error)


def run_both(services: Sequence[gloo.TcpService], sent: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
    """Have the first service send; return the second one's tensors, and the class of each error."""
    found, errors = torch.zeros_like(sent), ["", ""]
    services[0].send(0, sent, 1)
    services[1].receive(0, found, 0)

    def run(index: int) -> None:
        try:
            services[index].run(20.0)
        except refitd.RefitdError as exc:
            errors[index] = f"{type(exc).__name__}: {exc}"

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return found, errors


def test_bits_that_somebody_on_the_path_flips_are_found_and_the_next_run_works() -> None:
    between = Proxies()
    try:
        services = meet(2, 40.0, between.instead)
        assert all(isinstance(service, gloo.TcpService) for service in services), services
        sent = torch.arange(1 << 18)
        for flips in (False, True, False):
            if flips:
                between.flips.set()
            found, errors = run_both(services, sent)
            assert torch.equal(found, sent) is not flips
            if flips:
                said = "DigestMismatch: the bytes that worker 0 on node n1 wrote differ from the bytes that worker 0"
                assert [error.startswith(said) for error in errors] == [True, True], errors
            else:
                assert errors == ["", ""]
        assert between.passed > 3 * sent.nbytes and not between.flips.is_set()
        for service in services:
            service.close()
    finally:
        between.close()


@pytest.mark.parametrize(
    ("is_full", "within", "why"), [(False, 20.0, "Connection ref"), (True, 0.5, "no answer within 0.5 s")]
)
def test_a_worker_that_cannot_be_reached_is_named_with_the_address(
    monkeypatch: pytest.MonkeyPatch, is_full: bool, within: float, why: str
) -> None:
    """The kernel drops what asks for a connection while a listener has its fill."""
    monkeypatch.setattr(wires, "UNREACHABLE_S", 0.3)
    labels = "worker 0 on node n1", "worker 0 on node n0"
    mine = Wires(None)
    with socket.socket() as door, contextlib.ExitStack() as filling:
        door.bind(("127.0.0.1", 0))
        there = f"127.0.0.1:{door.getsockname()[1]}"
        if is_full:
            door.listen(0)
            filling.enter_context(socket.create_connection(door.getsockname()))
        with pytest.raises(refitd.TransportError, match=f"{labels[0]} cannot reach {labels[1]} at {there}: {why}"):
            mine.join(Channel(mine, "e", 0, labels, KEY), ["", there], within)
    mine.close()


def test_a_worker_that_does_not_come_is_named() -> None:
    labels = ("worker 0 on node n0", "worker 0 on node n1")
    with pytest.raises(DeadlineExceeded, match=r"worker 0 on node n1 did not come to epoch e within 0\.5 s$"):
        gloo.join(Epoch("e", 0, labels, "127.0.0.1", 1 << 20, OnBoard(Board()), 0.5, KEY))
