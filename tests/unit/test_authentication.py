"""MACs from an epoch's key: they cannot be forged without the key, and differ when any input differs."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
import torch

from refitd.copy_services import Epoch
from refitd.copy_services.digests import KEY_BYTES, MAC_BYTES, Authenticator, DeviceDigest, make_secret_keys, session
from refitd.copy_services.peers import prove
from refitd.copy_services.waits import Deadline
from refitd.errors import TransportError
from refitd.protocol import cluster, sidecar
from refitd.protocol.base import Secret

KEY = bytes(range(KEY_BYTES))
DATA = random.Random(1).randbytes(100_003)
WORDS = 1 << 15  # of keys; DATA has fewer


def stream_mac(*parts: bytes, key: bytes = KEY, about: bytes = b"run 1") -> bytes:
    made = Authenticator(key).stream(about)
    for part in parts:
        made.update(torch.frombuffer(bytearray(part), dtype=torch.uint8))
    return made.digest()


def device_mac(*parts: bytes, key: bytes = KEY, about: bytes = b"run 1") -> bytes:
    authenticator = Authenticator(key)
    made = DeviceDigest(make_secret_keys(authenticator, WORDS), authenticator, about)
    for part in parts:
        made.update(torch.frombuffer(bytearray(part), dtype=torch.uint8))
    return made.digest()


@pytest.mark.parametrize("mac", [stream_mac, device_mac])
def test_a_streams_mac_depends_on_all_but_the_cuts(mac: object) -> None:
    assert callable(mac)
    whole = mac(DATA)
    assert len(whole) == MAC_BYTES
    assert mac(DATA[:1], DATA[1:70_001], DATA[70_001:]) == whole == mac(DATA)
    flipped = bytearray(DATA)
    flipped[77_777] ^= 1
    others = {
        mac(bytes(flipped)),
        mac(DATA[50_000:], DATA[:50_000]),
        mac(DATA[:-1]),
        mac(DATA + b"\0"),
        mac(DATA, about=b"run 2"),
        mac(DATA, key=bytes(KEY_BYTES)),
        mac(),
        mac(about=b"run 2"),
    }
    assert len(others) == 8 and whole not in others


def test_a_mac_is_for_its_purpose_and_its_parts() -> None:
    made = Authenticator(KEY)
    mac = made.mac(b"record", b"ab", b"c")
    assert made.is_mac(mac, b"record", b"ab", b"c")
    assert not made.is_mac(mac, b"record", b"a", b"bc") and not made.is_mac(mac, b"proof", b"ab", b"c")
    assert not made.is_mac(mac[:-1], b"record", b"ab", b"c") and not made.is_mac(b"", b"record", b"ab", b"c")
    assert not Authenticator(bytes(KEY_BYTES)).is_mac(mac, b"record", b"ab", b"c")


@pytest.mark.parametrize("key", [b"", KEY[:-1], KEY + b"\0"])
def test_keys_of_another_length_are_refused(key: bytes) -> None:
    with pytest.raises(TransportError, match=f"has {len(key)} bytes, expected 32"):
        Authenticator(key)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"data": key}, Secret)


def test_no_repr_shows_a_key() -> None:
    key = b"secret".ljust(KEY_BYTES, b".")
    plan = cluster.EpochPlan("e", "gloo", ("n0",), ("h",), 1, 1 << 20, 1.0, Secret(key))
    load = cluster.LoadPlan(plan="p", model="m", share="s", ranks="r", epoch=plan)
    joining = sidecar.JoinEpoch("e", "gloo", 0, ("w",), "127.0.0.1", 1 << 20, 1.0, Secret(key))
    shown = [repr(plan), repr(load), repr(joining), str(joining), repr(Epoch("e", 0, ("w",), "", 1, None, 1.0, key))]  # type: ignore[arg-type]
    shown += [repr(Authenticator(key)), repr(list(plan.key.__rich_repr__()))]
    assert not any("secret" in each for each in shown), shown


# --- the proof ----------------------------------------------------------------------------------------------


class Wire:
    """One end of a connection of two. Each message passes `between(its number, message)`, which may alter it."""

    def __init__(self, index: int, ends: list[queue.Queue[bytes]], between: Callable[[int, bytes], bytes]) -> None:
        self.index = index
        self._ends, self._between = ends, between
        self.said: list[bytes] = []

    def __len__(self) -> int:
        return 2

    def _exchange(self, said: bytes, own: bytes) -> list[bytes]:
        self.said.append(said)
        self._ends[1 - self.index].put(self._between(len(self.said) - 1, said))
        other = self._ends[self.index].get(timeout=20)
        return [own, other] if self.index == 0 else [other, own]

    def all_gather(self, record: bytes, deadline: object, purpose: str) -> list[bytes]:
        return self._exchange(record, record)

    def all_to_all(self, records: list[bytes], deadline: object, purpose: str) -> list[bytes]:
        return self._exchange(records[1 - self.index], records[self.index])


EPOCH = Epoch("e", 0, ("worker 0 on a", "worker 0 on b"), "127.0.0.1", 1 << 20, None, 1.0, KEY)  # type: ignore[arg-type]


def proven(
    other: Epoch = EPOCH, between: Callable[[Wire, int, bytes], bytes] = lambda wire, number, said: said
) -> list[Authenticator | str]:
    """Let two ends authenticate each other; return the authenticator or the error of each end.

    `between` returns the message that the first end receives for each message of the second end.
    """
    ends: list[queue.Queue[bytes]] = [queue.Queue(), queue.Queue()]
    first = Wire(0, ends, lambda number, said: said)
    second = Wire(1, ends, lambda number, said: between(first, number, said))
    found: list[Authenticator | str] = ["", ""]

    def run(wire: Wire, epoch: Epoch) -> None:
        try:
            found[wire.index] = prove(wire, epoch, Deadline.after(20))  # type: ignore[arg-type]
        except TransportError as exc:
            found[wire.index] = str(exc)

    threads = [threading.Thread(target=run, args=each) for each in ((first, EPOCH), (second, replace(other, index=1)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_two_who_hold_the_key_of_one_epoch_share_a_session_that_no_other_epoch_has() -> None:
    first, second = proven()
    assert isinstance(first, Authenticator) and isinstance(second, Authenticator)
    others = [session(KEY, "e"), session(KEY, "f"), session(bytes(32), "e"), Authenticator(KEY)]
    assert first.mac(b"x") == second.mac(b"x") == others[0].mac(b"x")
    assert len({each.mac(b"x") for each in others}) == 4


@pytest.mark.parametrize(
    "other",
    [
        replace(EPOCH, key=bytes(KEY_BYTES)),
        replace(EPOCH, id="f"),
        replace(EPOCH, labels=("worker 1 on a", "worker 1 on b")),
    ],
    ids=["key", "epoch", "lane"],
)
def test_who_is_of_another_epoch_or_lane_proves_nothing(other: Epoch) -> None:
    first, second = proven(other)
    assert isinstance(first, str) and "the process that came as worker 0 on b does not hold the key of epoch e" in first
    assert (
        isinstance(second, str)
        and f"the process that came as {other.labels[0]} does not hold the key of epoch {other.id}" in second
    )


def test_a_proof_cannot_be_altered_nor_said_back_to_whoever_made_it() -> None:
    def says_back(first: Wire, number: int, said: bytes) -> bytes:
        while len(first.said) <= number:
            time.sleep(0.001)
        return first.said[number]

    def alters(first: Wire, number: int, said: bytes) -> bytes:
        return said[:-1] + bytes([said[-1] ^ 1])

    for between in (says_back, alters):
        first, _ = proven(between=between)
        assert isinstance(first, str) and "the process that came as worker 0 on b does not hold the key" in first
