"""False claims of a worker about message parts over NIXL are refused, though it holds the epoch's key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from refitd.copy_services.pieces import ArenaPiece
from refitd.errors import PeerLost, TransportError
from tests.support.service_threads import ServiceThreads

pytest.importorskip("nixl")

from refitd.copy_services import nixl as nixl_peers  # its library may be a fake
from refitd.copy_services.nixl import _ADDRESS, _PART, _PARTED, _TAKEN

MESSAGE_BYTES = 64 << 10


def exchange(liar: int, kind: bytes, lie: Callable[[bytes], bytes], *, timeout: float = 2.0) -> list[Any]:
    """Return the results of both ends of a transfer; rank `liar` alters its first notification of this kind."""
    ends = ServiceThreads("nixl", ("sender", "receiver"), MESSAGE_BYTES)
    try:
        peers: Any = ends.services[liar].peers
        say, left = peers._say, [True]

        def lying(key: Any, said: bytes, body: bytes = b"") -> None:
            if said == kind and left:
                left.clear()
                body = lie(body)
            say(key, said, body)

        peers._say = lying
        words = np.arange(MESSAGE_BYTES, dtype=np.uint16)
        place = np.zeros_like(words)
        ends.services[0].send(1, ArenaPiece(words, 0, 2), 1)
        ends.services[1].receive(1, ArenaPiece(place, 0, 2), 0)
        return ends.run(timeout=timeout)
    finally:
        ends.close()


def part(address: int = 0, nbytes: int = 0, start: int = 0, of: int = 0) -> Callable[[bytes], bytes]:
    """Return a lie that adds these numbers to the fields of a message part."""
    more = (address, nbytes, start, of)
    return lambda body: _PART.pack(*(had + by for had, by in zip(_PART.unpack(body), more, strict=True)))


@pytest.mark.parametrize(
    ("lie", "found"),
    [
        (part(nbytes=1 << 20), "at most"),
        (part(start=MESSAGE_BYTES), "at most"),
        (part(start=2**63), "at most"),
        (part(of=16), "sends a message of"),
        (lambda body: body[1:], "of kind b'p' with 31 bytes"),
    ],
)
def test_a_part_that_cannot_be_is_not_read(lie: Callable[[bytes], bytes], found: str) -> None:
    _, taken = exchange(0, _PARTED, lie)
    assert isinstance(taken, TransportError) and found in str(taken), taken
    assert "sender" in str(taken)


def test_a_part_that_lies_nowhere_fails_the_run_and_names_its_sender() -> None:
    _, taken = exchange(0, _PARTED, part(address=1 << 40))
    assert isinstance(taken, PeerLost) and "sender" in str(taken), taken


@pytest.mark.parametrize("lie", [part(start=16, nbytes=-16), part(address=16)])
def test_a_part_that_lies_elsewhere_fails_the_run(lie: Callable[[bytes], bytes]) -> None:
    """In the message, or in the slab."""
    assert all(isinstance(each, TransportError) for each in exchange(0, _PARTED, lie, timeout=1.0))


def test_what_was_not_offered_cannot_be_taken() -> None:
    given, _ = exchange(1, _TAKEN, lambda body: _ADDRESS.pack(_ADDRESS.unpack(body)[0] + 16))
    assert isinstance(given, TransportError) and "receiver has taken a part that was not offered" in str(given)


def test_more_parts_than_there_is_room_for_are_refused() -> None:
    """A sender that does not wait until its places are free."""
    ends = ServiceThreads("nixl", ("sender", "receiver"), MESSAGE_BYTES)
    try:
        peers: Any = ends.services[0].peers
        say = peers._say

        def hasty(key: Any, kind: bytes, body: bytes = b"") -> None:
            for _ in range(1 + nixl_peers.PARTS * (kind == _PARTED)):
                say(key, kind, body)

        peers._say = hasty
        words = np.arange(MESSAGE_BYTES, dtype=np.uint16)
        ends.services[0].send(1, ArenaPiece(words, 0, 2), 1)
        ends.services[1].receive(1, ArenaPiece(np.zeros_like(words), 0, 2), 0)
        _, taken = ends.run(timeout=2.0)
        assert isinstance(taken, TransportError) and "sender" in str(taken), taken
    finally:
        ends.close()
