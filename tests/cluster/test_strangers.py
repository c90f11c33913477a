"""Foreign connections to the workers' ports during a meeting: it is repeated, and swaps succeed."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import refitd
from refitd.copy_services import Epoch, Mailbox, gloo
from refitd.copy_services.peers import MailboxStore, Peers
from refitd.copy_services.waits import Deadline
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
    board: Board,
    size: int,
    timeout: float,
    put: Callable[[int, str, bytes], bytes | None] = lambda index, key, value: None,
    keys: dict[int, bytes] | None = None,
) -> list[Any]:
    """Have threads meet; return the result of each, a service or an error.

    `put` is called with each value that a thread posts, and may return a replacement. `keys` has the keys of threads
    that do not use KEY.
    """
    labels = tuple(f"worker 0 on node n{i}" for i in range(size))
    found: list[object] = [None] * size

    class Watched(OnBoard):
        def __init__(self, index: int) -> None:
            super().__init__(board)
            self._index = index

        def put(self, key: str, value: bytes) -> None:
            if not key.startswith("here/"):
                value = put(self._index, key, value) or value
            super().put(key, value)

    def join(index: int) -> None:
        epoch = Epoch("e", index, labels, "127.0.0.1", 1 << 20, Watched(index), timeout, (keys or {}).get(index, KEY))
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


def test_no_port_is_open_before_all_have_come() -> None:
    board = Board()
    epoch = Epoch(
        "e", 0, ("worker 0 on node n0", "worker 0 on node n1"), "127.0.0.1", 1 << 20, OnBoard(board), 0.2, KEY
    )
    before = gloo.listening()
    with pytest.raises(DeadlineExceeded, match="worker 0 on node n1 did not come"):
        gloo.join(epoch)
    assert list(board.values) == ["here/0"] and gloo.listening() == before


def test_a_meeting_ends_with_the_time_of_its_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "MEET_S", 60.0)
    timeout, came, deadlines = 30.0, {}, []

    def late(index: int, key: str, value: bytes) -> None:
        came.setdefault(index, time.monotonic())
        if index == 1:
            time.sleep(0.1)  # while the other thread waits for its place

    def gathers(peers: Peers, record: bytes, deadline: Deadline, purpose: str) -> list[bytes]:
        deadlines.append(deadline.at)
        return gathered(peers, record, deadline, purpose)

    gathered = Peers.all_gather
    monkeypatch.setattr(Peers, "all_gather", gathers)
    for service in meet(Board(), 2, timeout, late):
        assert isinstance(service, gloo.GlooService)
        service.close()
    assert len(deadlines) == 2 and max(deadlines) <= max(came.values()) + timeout


TAKER = """
import contextlib, socket, struct, sys
held = []
for line in sys.stdin:
    port, *places = map(int, line.split())
    for place in places:
        with contextlib.suppress(ConnectionError):  # its owner has closed it since it was listed
            peer = socket.create_connection(("127.0.0.1", port), timeout=10)
            held.append((peer, peer.getsockname()[1]))
            peer.sendall(struct.pack("<q", place))
    print(*(own for _, own in held), flush=True)
"""


class Thief:
    """Takes every place before the worker connects, as if it had guessed the place's number."""

    def __init__(self, meetings: int) -> None:
        self._meetings = meetings
        self.ports: set[int] = set()  # its ends of connections
        self._one = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-c", TAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, index: int, key: str, value: bytes) -> None:
        number, _, rest = key.partition("/")
        if int(number) >= self._meetings or rest.startswith("word"):
            return
        places = [struct.unpack_from("<q", value, at)[0] for at in range(len(value) - 8 * 3, len(value), 8)]
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with self._one:
            for port in {*gloo.listening().values()}:  # the worker's own one is among them
                process.stdin.write(f"{port} {' '.join(map(str, places))}\n")
                process.stdin.flush()
                self.ports |= {*map(int, process.stdout.readline().split())}
        until = time.monotonic() + 5.0
        while self._has_unread() and time.monotonic() < until:
            time.sleep(0.002)

    def _has_unread(self) -> bool:
        """Whether gloo has not read yet what was sent to it; the worker itself must connect later."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return any(int(row[2].split(":")[1], 16) in self.ports and not row[4].endswith(":00000000") for row in rows)

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process.wait(10)


def test_meeting_that_a_stranger_has_taken_a_place_in_is_held_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "MEET_S", 1.0)
    thief, board = Thief(meetings=2), Board()
    try:
        found = meet(board, 3, 30.0, thief)
    finally:
        thief.close()
    assert all(isinstance(service, gloo.GlooService) for service in found), found
    assert {key.partition("/")[0] for key in board.values} >= {"here", "0", "1", "2"}


@pytest.mark.slow
def test_workers_that_a_stranger_keeps_apart_say_how_often_they_have_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "MEET_S", 2.0)
    monkeypatch.setattr(gloo, "MEETINGS", 3)
    thief = Thief(meetings=100)
    try:
        found = meet(Board(), 3, 30.0, thief)
    finally:
        thief.close()
    for error in found:
        assert isinstance(error, refitd.TransportError)
        assert "in 3 attempts: " in str(error) and "no other program connects" in str(error)


def test_ports_are_shut_and_numbers_are_others_once_all_have_met() -> None:
    before = gloo.listening()
    numbers = set()

    def look(index: int, key: str, value: bytes) -> None:
        if key.endswith(f"/{index}") and "word" not in key:
            numbers.add(struct.unpack_from("<q", value, len(value) - 8)[0])

    for _ in range(8):
        found = meet(Board(), 2, 20.0, look)
        assert all(isinstance(service, gloo.GlooService) for service in found), found
        doors = {fd: port for fd, port in gloo.listening().items() if fd not in before}
        assert len(doors) >= 2
        for port in doors.values():
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", port), timeout=0.2)
        del found
    assert len(numbers) > 12, "places have the same numbers again and again"


def test_workers_whose_keys_differ_move_nothing_and_name_each_other() -> None:
    found = meet(Board(), 2, 30.0, keys={1: bytes(32)})
    for error in found:
        assert isinstance(error, refitd.TransportError), error
        for node in ("n0", "n1"):
            assert f"the process that came as worker 0 on node {node} does not hold the key of epoch e" in str(error)


def run_both(services: Sequence[gloo.GlooService], sent: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
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
        services = meet(
            Board(), 2, 40.0, lambda index, key, value: None if "word" in key else between.instead(index, value)
        )
        assert all(isinstance(service, gloo.GlooService) for service in services), services
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


def test_worker_that_does_not_come_is_still_named() -> None:
    labels = ("worker 0 on node n0", "worker 0 on node n1")
    with pytest.raises(DeadlineExceeded, match=r"worker 0 on node n1 did not come to epoch e within 0\.5 s$"):
        gloo.join(Epoch("e", 0, labels, "127.0.0.1", 1 << 20, OnBoard(Board()), 0.5, KEY))


@pytest.mark.parametrize("others_meet_again", [True, False])
def test_meetings_share_one_deadline_and_the_first_cause_is_told(
    monkeypatch: pytest.MonkeyPatch, others_meet_again: bool
) -> None:
    labels = ("worker 0 on node n0", "worker 0 on node n1")
    deadlines, board = [], Board()
    OnBoard(board).put("here/1", b"1")

    class Disturbed:
        reason = "strangers came"

        def __init__(self, epoch: Epoch, deadline: Deadline, number: int, seconds: float) -> None:
            deadlines.append(deadline)
            self._store = MailboxStore(epoch, deadline, f"{number}/")
            self._number = number

        def hold(self) -> bool:
            if others_meet_again:
                time.sleep(0.4)
            elif self._number:
                self._store.get("0/1")
            return False

    monkeypatch.setattr(gloo, "_Meeting", Disturbed)
    with pytest.raises(refitd.TransportError, match="strangers came") as caught:
        gloo.join(Epoch("e", 0, labels, "127.0.0.1", 1 << 20, OnBoard(board), 1.0, KEY))
    assert len({*deadlines}) == 1 and len(deadlines) < gloo.MEETINGS, "none is held when the time is over"
    assert ("worker 0 on node n1 did not come to epoch e within 1.0 s; before, " in str(caught.value)) is not (
        others_meet_again
    )
