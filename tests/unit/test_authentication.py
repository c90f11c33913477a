"""What an epoch's key makes: MACs that others cannot make, and that tell apart whatever differs."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch

from refitd.copy_services.authentication import KEY_BYTES, MAC_BYTES, Authenticator
from refitd.copy_services.device_digest import DeviceDigest, make_secret_keys
from refitd.copy_services.epoch import Epoch
from refitd.errors import TransportError
from refitd.protocol import cluster, sidecar
from refitd.protocol.base import Secret

KEY = bytes(range(KEY_BYTES))
DATA = random.Random(1).randbytes(100_003)
WORDS = 1 << 10


def stream_mac(*parts: bytes, key: bytes = KEY, about: bytes = b"run 1") -> bytes:
    made = Authenticator(key).stream(about)
    for part in parts:
        made.update(torch.frombuffer(bytearray(part), dtype=torch.uint8))
    return made.digest()


def device_mac(*parts: bytes, key: bytes = KEY, about: bytes = b"run 1") -> bytes:
    authenticator = Authenticator(key)
    made = DeviceDigest(make_secret_keys(authenticator), authenticator, about)
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
    }
    assert len(others) == 7 and whole not in others


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
    load = cluster.LoadPlan(plan="p", model="m", ranks=(), members=(), table={}, epoch=plan)
    joining = sidecar.JoinEpoch("e", "gloo", 0, ("w",), "127.0.0.1", 1 << 20, 1.0, Secret(key))
    shown = [repr(plan), repr(load), repr(joining), str(joining), repr(Epoch("e", 0, ("w",), "", 1, None, 1.0, key))]  # type: ignore[arg-type]
    shown += [repr(Authenticator(key)), repr(list(plan.key.__rich_repr__()))]
    assert not any("secret" in each for each in shown), shown
