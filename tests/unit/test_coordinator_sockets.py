"""A daemon with several coordinators follows the first one that answers and ignores the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from refitd.protocol.base import request_of
from refitd.protocol.channel import CoordinatorSockets, Received, Router
from refitd.protocol.local import Done
from refitd.testing import eventually


@pytest.fixture
def contexts() -> Iterator[list[zmq.Context[zmq.Socket[bytes]]]]:
    made = [zmq.Context() for _ in range(3)]
    yield made
    for context in made:
        context.destroy(linger=0)


def test_the_coordinator_that_answers_is_followed_until_it_is_silent(
    contexts: list[zmq.Context[zmq.Socket[bytes]]], tmp_path: Path
) -> None:
    paths = [f"ipc://{tmp_path}/a", f"ipc://{tmp_path}/b"]
    sockets = CoordinatorSockets(contexts[0], paths, None)
    assert not sockets.queues and not sockets.send(1, Done())  # no coordinator listens, so no message is queued
    a, b = (Router(context, path) for context, path in zip(contexts[1:], paths, strict=True))

    def heard_by(router: Router, request: int = 1) -> bytes:
        found: list[Received] = []

        def take() -> bool:
            sockets.send(request, Done())
            while (one := router.receive()) is not None:
                found.append(one)
            return any(request_of(one.frame)[0] == request for one in found)

        eventually(take, "it is heard")
        return found[-1].identity

    def frame() -> bytes:
        found: list[bytes | None] = []

        def take() -> bool:
            found.append(sockets.receive())
            return found[-1] is not None

        eventually(take, "it hears")
        assert found[-1] is not None
        return found[-1]

    of_a, of_b = heard_by(a), heard_by(b)  # both are greeted
    assert sockets.is_seeking and sockets.follow(is_up=False) == ""
    b.send_frame(of_b, b"welcome")
    assert frame() == b"welcome" and sockets.follow(is_up=True) == paths[1]
    assert sockets.follow(is_up=True) == "" and not sockets.is_seeking
    a.send_frame(of_a, b"from an old leader")
    eventually(lambda: bool(sockets.sockets[0].poll(0)), "it has come")
    b.send_frame(of_b, b"second")
    assert frame() == b"second"
    heard_by(b, request=2)
    while (stale := a.receive()) is not None:
        assert request_of(stale.frame)[0] == 1  # sent while b was not followed yet
    assert sockets.follow(is_up=False) == "" and sockets.is_seeking  # b is silent
    heard_by(a, request=3)
    a.send_frame(of_a, b"welcome")
    assert frame() == b"welcome" and sockets.follow(is_up=True) == paths[0]
    for each in (a, b, sockets):
        each.close()


def test_one_coordinator_is_followed_from_the_beginning_and_messages_wait_for_it(
    contexts: list[zmq.Context[zmq.Socket[bytes]]], tmp_path: Path
) -> None:
    sockets = CoordinatorSockets(contexts[0], [f"ipc://{tmp_path}/a"], None)
    assert sockets.queues and not sockets.is_seeking and sockets.follow(is_up=False) == ""
    assert sockets.send(1, Done()) and not sockets.is_seeking
    router = Router(contexts[1], f"ipc://{tmp_path}/a")
    eventually(lambda: router.receive() is not None, "it is heard")
    router.close()
    sockets.close()
