"""Connections of workers: shared by epochs; a lost pair connects again alone; what an ended epoch left is skipped."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from refitd.copy_services.channels import INLINE_BYTES, Channel, Pending
from refitd.copy_services.wires import Wires, listen_at
from refitd.errors import PeerLost, TransportError

LABELS = tuple(f"worker 0 on node n{number}" for number in range(3))
KEY = bytes(range(32))


class Fleet:
    """Workers of three nodes, each with a thread while it joins."""

    def __init__(self) -> None:
        self.doors = [listen_at("127.0.0.1") for _ in LABELS]
        self.wires = [Wires(door) for door in self.doors]

    def join(self, epoch: str, *pairs: tuple[int, int]) -> list[Channel]:
        """Have each worker join an epoch with its partners; return the channels."""
        met = [sorted({n, *(end for pair in pairs if n in pair for end in pair)}) for n in range(3)]
        channels = [
            Channel(self.wires[n], epoch, known.index(n), [LABELS[p] for p in known], KEY)
            for n, known in enumerate(met)
        ]
        addresses = [[f"127.0.0.1:{self.doors[p].getsockname()[1]}" for p in known] for known in met]
        threads = [
            threading.Thread(target=self.wires[n].join, args=(channels[n], addresses[n], 20.0), daemon=True)
            for n in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert all(channel.is_formed for channel in channels)
        return channels

    def opened(self) -> list[int]:
        return [wires.opened for wires in self.wires]


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    found = Fleet()
    yield found
    for end in (*found.wires, *found.doors):
        end.close()


def moved(sender: Channel, receiver: Channel, data: bytes, *, to: int, of: int) -> bytes:
    """Send data; the receiver posts its receive last."""
    sent = sender.send(Pending(memoryview(data)), to, 7)
    found = Pending(memoryview(bytearray(len(data))))
    receiver.receive(found, of, 7)
    while not (sent.is_done and found.is_done):
        sender.wires.step(0.01)
        receiver.wires.step(0.01)
    return bytes(found.data)


@pytest.mark.parametrize("nbytes", [0, 5, INLINE_BYTES, INLINE_BYTES + 1, 3 << 20])
def test_messages_of_any_size_arrive(fleet: Fleet, nbytes: int) -> None:
    one, other, _ = fleet.join("e1", (0, 1))
    data = bytes(range(251)) * (nbytes // 251 + 1)
    assert moved(one, other, data[:nbytes], to=1, of=0) == data[:nbytes]


def test_epochs_share_connections_and_only_a_lost_pair_connects_again(fleet: Fleet) -> None:
    channels = fleet.join("e1", (0, 1), (1, 2))
    assert fleet.opened() == [0, 1, 1], "of two workers the one with the greater label connects"
    fleet.join("e2", (0, 1), (1, 2))
    assert fleet.opened() == [0, 1, 1], "both epochs use them"
    # the process of the third worker ends, and its successor listens at the same port
    fleet.wires[2].close()
    fleet.wires[2] = Wires(fleet.doors[2])
    _, middle, last = fleet.join("e3", (0, 1), (1, 2))
    assert fleet.opened() == [0, 1, 1]
    assert moved(middle, last, b"again", to=2, of=0) == b"again"
    with pytest.raises(PeerLost, match=LABELS[2]):
        channels[1].check()
    assert not channels[0].lost, "the other pair is untouched"


def test_a_message_that_an_ended_epoch_left_is_skipped(fleet: Fleet) -> None:
    one, other, _ = fleet.join("e1", (0, 1))
    data = bytes(1 << 20)
    one.send(Pending(memoryview(data)), 1, 7)
    abandoned = Pending(memoryview(bytearray(b"x" * len(data))))
    other.receive(abandoned, 0, 7)
    other.stop()
    before = bytes(abandoned.data)
    for wires in fleet.wires[:2] * 20:
        wires.step(0.01)
    assert bytes(abandoned.data) == before and not abandoned.is_done
    for number in (0, 1):
        fleet.wires[number].leave((one, other)[number])
    one, other, _ = fleet.join("e2", (0, 1))
    assert moved(one, other, b"next", to=1, of=0) == b"next"


def test_a_message_that_is_cut_off_ends_the_connection_for_all_epochs(fleet: Fleet) -> None:
    one, other, _ = fleet.join("e1", (0, 1))
    kept, there, _ = fleet.join("e2", (0, 1))
    data = bytes(64 << 20)  # more than the kernel takes
    other.receive(Pending(memoryview(bytearray(len(data)))), 0, 7)
    one.send(Pending(memoryview(data)), 1, 7)
    for _ in range(20):
        one.wires.step(0.01)
    one.stop()
    with pytest.raises(PeerLost, match=f"sending to {LABELS[1]}: a message was left unfinished"):
        kept.send(Pending(memoryview(b"x")), 1, 7)
    one.wires.leave(one)
    for _ in range(200):
        there.wires.step(0.01)
    with pytest.raises(PeerLost, match=r"it closed the connection|reset by peer"):
        there.check()
    fleet.join("e3", (0, 1))
    assert fleet.opened()[1] == 2


def test_a_message_of_another_size_than_expected_ends_the_connection(fleet: Fleet) -> None:
    one, other, _ = fleet.join("e1", (0, 1))
    one.send(Pending(memoryview(bytes(20 << 10))), 1, 7)
    other.receive(Pending(memoryview(bytearray(30 << 10))), 0, 7)
    for wires in fleet.wires[:2] * 20:
        wires.step(0.01)
    with pytest.raises(PeerLost, match="20480 bytes that was not asked for"):
        other.check()


def test_values_of_a_mailbox_come_under_the_receivers_own_numbers(fleet: Fleet) -> None:
    _, middle, last = fleet.join("e1", (0, 1), (1, 2))
    last.put("agent/1", b"from n2")  # position 1 in its own epoch, 2 in the epoch of n1
    assert middle.get("agent/2", 5.0) == b"from n2"


def test_more_workers_than_files_are_refused_with_the_limit(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda what: (66, 66))
    channel = Channel(fleet.wires[0], "e1", 0, LABELS, KEY)
    with pytest.raises(TransportError, match=r"exchanges with 2 workers, but may open only 66 files \(RLIMIT_NOFILE\)"):
        fleet.wires[0].join(channel, ["", "", ""], 1.0)
