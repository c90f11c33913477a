"""Sockets with keys, both ends in one process: known peers are heard, others are reported, and no sockets leak."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import zmq

from refitd.errors import ConfigError, RefusedError
from refitd.protocol import keys
from refitd.protocol.channel import Dealer, Router
from refitd.protocol.keys import Allowed

HEAD, ALLOWED, STRANGER = (keys.generate(name) for name in ("head", "allowed", "stranger"))
SERVER = keys.ServerKeys(HEAD, {ALLOWED.public: Allowed("allowed")})
DEADLINE_S = 20.0

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def contexts() -> Iterator[tuple[Context, Context]]:
    before = descriptors()
    both = zmq.Context(), zmq.Context()
    yield both
    for context in both:
        context.destroy(linger=0)
    assert descriptors() == before


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Pair:
    """A Router on a free port and a Dealer that connects to it."""

    def __init__(self, contexts: tuple[Context, Context], server: keys.ServerKeys | None, own: keys.KeyPair) -> None:
        self.router = Router(contexts[0], "tcp://127.0.0.1:*", server)
        self.endpoint = self.router.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.dealer = Dealer(contexts[1], self.endpoint, keys.ClientKeys(own, HEAD.public))
        self.heard: list[bytes] = []
        self.refused: list[dict[str, str]] = []
        self.failures: list[str] = []

    def run_until(self, what: str) -> None:
        """Run both ends until one of the lists has grown by one."""
        watched: list[object] = getattr(self, what)
        wanted, deadline = len(watched) + 1, time.monotonic() + DEADLINE_S
        poller = zmq.Poller()
        for sock in (
            self.router.socket,
            *self.router.control_sockets,
            self.dealer.socket,
            *self.dealer.control_sockets,
        ):
            poller.register(sock, zmq.POLLIN)
        while len(watched) < wanted:
            assert time.monotonic() < deadline, f"nothing {what}: {vars(self)}"
            poller.poll(100)
            self.refused.extend(self.router.turned_away())
            if (received := self.router.receive()) is not None:
                self.heard.append(received.frame)
            if (failure := self.dealer.failure()) is not None:
                self.failures.append(failure)

    def close(self) -> None:
        self.router.close()
        self.dealer.close()


def test_other_key_is_refused_again_whenever_it_asks_and_costs_no_descriptors(contexts):
    pair = Pair(contexts, SERVER, STRANGER)
    pair.run_until("failures")
    before = descriptors()
    for _ in range(50):
        pair.dealer.retry()
        pair.run_until("failures")
    assert descriptors() <= before + 2  # one connection may be about to end
    assert len(pair.refused) > 50 and pair.heard == []
    assert {(fields["key"], fields["address"]) for fields in pair.refused} == {(STRANGER.public, "127.0.0.1")}
    assert STRANGER.public_line in pair.failures[0]
    pair.close()


def test_empty_list_lets_nobody_in(contexts):
    pair = Pair(contexts, keys.ServerKeys(HEAD, {}), ALLOWED)
    pair.run_until("failures")
    assert pair.heard == []
    pair.close()


def test_key_is_not_told_to_an_end_without_keys(contexts):
    pair = Pair(contexts, None, ALLOWED)
    # the other end notices too, unless this one has hung up before it could
    pair.run_until("failures")
    assert pair.heard == [] and ALLOWED.public not in str(pair.refused)
    pair.close()


def test_endpoint_in_use_is_refused_and_leaves_nothing_open(contexts):
    first = Router(contexts[0], "tcp://127.0.0.1:*", SERVER)
    endpoint = first.socket.getsockopt_string(zmq.LAST_ENDPOINT)
    with pytest.raises(RefusedError, match="cannot listen here"):
        Router(contexts[1], endpoint, SERVER)
    first.close()


@pytest.mark.parametrize("endpoint", ["tcp://*:7433", "tcp://head", "tcp://head:port"])
def test_endpoint_that_cannot_be_called_is_named(contexts, endpoint):
    with pytest.raises(ConfigError, match=r"cannot connect to it: .*tcp://HOST:PORT"):
        Dealer(contexts[0], endpoint, keys.ClientKeys(ALLOWED, HEAD.public))
