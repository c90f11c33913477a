"""The daemon's end of descriptor sockets: a client's messages are handled before its disconnect."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from refitd.buffers import handoff
from refitd.daemon.clients import ClientListener
from refitd.errors import RefusedError
from refitd.protocol import local, sidecar
from refitd.protocol.base import Decoder, encode
from refitd.protocol.channel import Received


class Front:
    """A listener with one client, and the reports of the listener."""

    def __init__(self, directory: Path) -> None:
        self.watched: dict[int, int] = {}
        self.told: list[tuple[int, local.Told]] = []
        self.goodbyes: list[int] = []
        self.given: list[tuple[int, int]] = []
        self.listener = ClientListener(
            directory / "refitd.fds",
            "ipc://nowhere",
            frozenset({os.getuid()}),
            self.watched.__setitem__,
            self,  # type: ignore[arg-type]
            self.goodbyes.append,
            lambda session, message: self.told.append((session, message)),
        )
        self.client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.client.settimeout(20)
        self.client.connect(str(directory / "refitd.fds"))
        assert self.listener.accept() == ""
        decoder: Decoder[sidecar.DescriptorReply] = Decoder(sidecar.DescriptorReply)
        session = decoder.decode(handoff.receive(self.client)[0])[1]
        assert isinstance(session, sidecar.Greeting)
        self.token = session.token
        self.peer = Received(b"id", b"", "", f"localhost:{os.getuid()}:{os.getgid()}:{os.getpid()}")
        (self.fd,) = [fd for fd, one in self.listener.fds.items() if fd != one.process]

    def say(self, *messages: local.Told | local.Goodbye | sidecar.FetchArena) -> None:
        for message in messages:
            handoff.send(self.client, encode(0, message))

    def fetch(self, session: int, arena: int, write: bool) -> tuple[int, int, str]:
        """The listener's `files`."""
        raise RefusedError("there are no arenas here")

    def given_back(self, session: int, fd: int, nbytes: int) -> int:
        """The listener's `files`."""
        self.given.append((session, nbytes))
        return len(self.given)

    def serve(self) -> int | None:
        return self.listener.hear(self.fd)

    def hear(self) -> bool:
        return self.listener.hear(self.peer.identity) is None


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    found = Front(tmp_path)
    yield found
    found.client.close()
    found.listener.close()


DONE = local.CommitDone(swap="s", member="m", paused_s=0.0)


def test_what_was_sent_is_heard_before_the_end(front: Front) -> None:
    session, _ = front.listener.admit(front.peer, front.token)
    front.say(DONE, local.Goodbye())
    front.client.close()
    assert front.serve() == session
    assert front.told == [(session, DONE)] and front.goodbyes == [session]


def test_it_is_heard_though_the_client_has_left_an_answer_unread(front: Front) -> None:
    # the kernel then reports a reset before it delivers the data in the socket
    session, _ = front.listener.admit(front.peer, front.token)
    front.say(sidecar.FetchArena(arena=1))
    assert front.serve() is None
    front.say(DONE)
    front.client.close()
    assert front.serve() == session
    assert front.told == [(session, DONE)]


def test_it_is_heard_before_what_is_said_elsewhere_and_the_end_after_that(front: Front) -> None:
    session, _ = front.listener.admit(front.peer, front.token)
    front.say(DONE)
    front.client.close()
    assert front.hear()
    assert front.told == [(session, DONE)]
    assert front.listener.session_of(front.peer) == session, "its end comes in its turn"
    assert front.serve() == session


def test_nobody_is_told_anything_by_who_has_not_said_hello_and_what_is_no_message_ends_a_session(front: Front) -> None:
    front.say(DONE)
    assert front.serve() is not None and front.told == []
    front.listener.admit(front.peer, front.token)
    front.client.send(b"\x00")
    assert not front.hear()


def test_a_session_that_is_left_leaves_nothing_to_watch(front: Front) -> None:
    session, _ = front.listener.admit(front.peer, front.token)
    (process,) = [one.process for fd, one in front.listener.fds.items() if fd == one.process]
    assert process is not None
    front.listener.leave(session)
    assert not front.listener.fds
    assert front.watched[front.fd] == front.watched[process] == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(process)
