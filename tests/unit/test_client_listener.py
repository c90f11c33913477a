"""The daemon's end of descriptor sockets: what was sent is heard before the end of whoever sent it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from refitd.buffers import handoff
from refitd.daemon.client_listener import ClientListener
from refitd.errors import RefusedError
from refitd.protocol import local, sidecar
from refitd.protocol.channel import Received
from refitd.protocol.codec import Decoder, encode


class Door:
    """A gate, one client in front of it, and what the gate says."""

    def __init__(self, directory: Path) -> None:
        self.watched: dict[int, int] = {}
        self.told: list[tuple[int, local.Told]] = []
        self.goodbyes: list[int] = []
        self.given: list[tuple[int, int]] = []
        self.gate = ClientListener(
            directory / "refitd.fds",
            "ipc://nowhere",
            frozenset({os.getuid()}),
            self.watched.__setitem__,
            self.goodbyes.append,
            lambda session, message: self.told.append((session, message)),
            lambda session, fd, nbytes: self.given.append((session, nbytes)) or len(self.given),  # type: ignore[func-returns-value]
        )
        self.client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.client.settimeout(20)
        self.client.connect(str(directory / "refitd.fds"))
        assert self.gate.accept() == ""
        decoder: Decoder[sidecar.DescriptorReply] = Decoder(sidecar.DescriptorReply)
        session = decoder.decode(handoff.receive(self.client)[0])[1]
        assert isinstance(session, sidecar.Greeting)
        self.token = session.token
        self.peer = Received(b"id", b"", "", f"localhost:{os.getuid()}:{os.getgid()}:{os.getpid()}")
        (self.fd,) = [fd for fd in self.watched if self.gate.owns(fd) and fd not in self.gate._processes]

    def say(self, *messages: local.Told | sidecar.Goodbye | sidecar.FetchArena) -> None:
        for message in messages:
            handoff.send(self.client, encode(0, message))

    def serve(self) -> int | None:
        def fetch(session: int, arena: int, write: bool) -> tuple[int, int, str]:
            raise RefusedError("there are no arenas here")

        return self.gate.serve(self.fd, fetch)

    def hear(self) -> bool:
        return self.gate.hear(self.peer, lambda *_: (0, 0, ""))


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    found = Door(tmp_path)
    yield found
    found.client.close()
    found.gate.close()


DONE = local.CommitDone(swap="s", member="m", paused_s=0.0)


def test_what_was_sent_is_heard_before_the_end(door: Door) -> None:
    session, _ = door.gate.admit(door.peer, door.token)
    door.say(DONE, sidecar.Goodbye())
    door.client.close()
    assert door.serve() == session
    assert door.told == [(session, DONE)] and door.goodbyes == [session]


def test_it_is_heard_though_the_client_has_left_an_answer_unread(door: Door) -> None:
    # the kernel then tells of a reset before it gives out what lies in the socket
    session, _ = door.gate.admit(door.peer, door.token)
    door.say(sidecar.FetchArena(arena=1))
    assert door.serve() is None
    door.say(DONE)
    door.client.close()
    assert door.serve() == session
    assert door.told == [(session, DONE)]


def test_it_is_heard_before_what_is_said_elsewhere_and_the_end_after_that(door: Door) -> None:
    session, _ = door.gate.admit(door.peer, door.token)
    door.say(DONE)
    door.client.close()
    assert door.hear()
    assert door.told == [(session, DONE)]
    assert door.gate.session_of(door.peer) == session, "its end comes in its turn"
    assert door.serve() == session


def test_nobody_is_told_anything_by_who_has_not_said_hello_and_what_is_no_message_ends_a_session(door: Door) -> None:
    door.say(DONE)
    assert door.serve() is not None and door.told == []
    door.gate.admit(door.peer, door.token)
    door.client.send(b"\x00")
    assert not door.hear()


def test_a_session_that_is_left_leaves_nothing_to_watch(door: Door) -> None:
    session, _ = door.gate.admit(door.peer, door.token)
    process = next(iter(door.gate._processes))
    door.gate.leave(session)
    assert not door.gate.owns(door.fd) and not door.gate.owns(process)
    assert door.watched[door.fd] == door.watched[process] == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(process)
