"""Misbehaving peers, and the resources that they cost the attacked processes."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import zmq

import refitd
from refitd.buffers import handoff
from refitd.errors import ProtocolError
from refitd.protocol import local, sidecar
from refitd.protocol.base import PROTOCOL_VERSION, Decoder, Message, encode
from refitd.testing import Daemon, Engine
from tests.support.names import policy

ANSWER_S = 60.0


@dataclass(frozen=True)
class Figures:
    """Resources of a process: private bytes (without arenas, which are shared) and descriptors."""

    private_bytes: int
    descriptors: int


def figures(pid: int) -> Figures:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return Figures(int(fields["RssAnon"].split()[0]) << 10, len(os.listdir(f"/proc/{pid}/fd")))


class RawPeer:
    """A client's two sockets without the client library, to send anything."""

    def __init__(self, directory: Path, *, hello: bool = True) -> None:
        self.descriptors = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.descriptors.settimeout(ANSWER_S)
        self.descriptors.connect(str(directory / "refitd.fds"))
        self._small: Decoder[sidecar.DescriptorReply] = Decoder(sidecar.DescriptorReply, handoff.MAX_DATAGRAM)
        session = self._small.decode(handoff.receive(self.descriptors)[0])[1]
        assert isinstance(session, sidecar.Greeting)
        self.token = session.token
        self._decoder: Decoder[local.ClientReply] = Decoder(local.ClientReply)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._directory = directory
        self.socket = self.dealer()
        if hello:
            assert isinstance(self.hello(self.token), local.Welcome)

    def dealer(self, name: str = "refitd.sock") -> zmq.Socket[bytes]:
        """Another connection of this process, to a socket of the daemon's directory."""
        found = self._context.socket(zmq.DEALER)
        found.setsockopt(zmq.LINGER, 0)
        found.connect(f"ipc://{self._directory / name}")
        return found

    def receive(self) -> tuple[int, Message]:
        """Return the number and the message of the next answer."""
        assert self.socket.poll(int(ANSWER_S * 1000)), "no answer"
        return self._decoder.decode(self.socket.recv())

    def hello(self, token: bytes, on: zmq.Socket[bytes] | None = None) -> Message:
        return self.ask(local.Hello(protocol=PROTOCOL_VERSION, token=token, name="hostile"), on)

    def ask(self, message: Message, on: zmq.Socket[bytes] | None = None, number: int = 7) -> Message:
        """Send a request and return its answer; skip other messages."""
        socket_ = on or self.socket
        socket_.send(encode(number, message))
        while True:
            assert socket_.poll(int(ANSWER_S * 1000)), f"no answer to {type(message).__name__}"
            with contextlib.suppress(ProtocolError):
                found, answer = self._decoder.decode(socket_.recv())
                if found == number:
                    return answer

    def fetch(self, arena: int, *, write: bool) -> tuple[Message, tuple[int, ...]]:
        handoff.send(self.descriptors, encode(1, sidecar.FetchArena(arena=arena, write=write)))
        data, fds = handoff.receive(self.descriptors)
        return self._small.decode(data)[1], fds

    def give(self, fd: int, nbytes: int) -> Message:
        """Hand over an arena as a client does after its daemon's restart."""
        handoff.send(self.descriptors, encode(1, sidecar.GiveArena(nbytes=nbytes)), (fd,))
        return self._small.decode(handoff.receive(self.descriptors)[0])[1]

    def close(self) -> None:
        self._context.destroy(linger=0)
        self.descriptors.close()

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Fleet:
    """A trainer and an engine that only swap now and then."""

    def __init__(self, daemon: Daemon) -> None:
        self._trainer, self._engine = daemon.connect("trainer"), daemon.connect("engine")
        self._weights, self._live = {"w": torch.zeros(64, 64)}, {"w": torch.zeros(64, 64)}
        self.source = self._trainer.register_source(policy(), self._weights)
        self.target = self._engine.register_target(policy(), self._live, replica="a")
        self._version = 0

    def swap(self) -> None:
        """Swap to the next version, and check it."""
        self._version += 1
        self._weights["w"].fill_(self._version)
        self.source.publish(self._version)
        with Engine(self.target) as running:
            assert self._trainer.swap(policy(), self._version, timeout=ANSWER_S).outcome == "committed"
        assert not running.errors
        assert torch.all(self._live["w"] == self._version)

    def close(self) -> None:
        self._trainer.close()
        self._engine.close()


@contextlib.contextmanager
def fleet(daemon: Daemon) -> Iterator[Fleet]:
    """A fleet that has swapped once when the block begins, and does so again when it ends."""
    found = Fleet(daemon)
    try:
        found.swap()
        yield found
        found.swap()
    finally:
        found.close()


def refused(answer: object) -> str:
    """The message of a refusal; fails on anything else."""
    assert isinstance(answer, local.Failure), answer
    assert answer.code in (refitd.RefusedError.code, ProtocolError.code), answer
    return answer.message
