"""Admits only listed keys: the ZAP handler of a listening CURVE socket.

Without a handler ZeroMQ admits every key. It asks the socket bound to `inproc://zeromq.zap.01` in its context, if any.
With ZAP_ENFORCE_DOMAIN (see channel.py) it refuses every peer while there is no handler. The protocol is ZAP 1.0,
https://rfc.zeromq.org/spec/27.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import zmq
from zmq.utils import z85

DOMAIN = b"refitd"
_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


@dataclass(frozen=True, slots=True)
class RefusedPeer:
    """A peer whose key is not on the list."""

    key: str
    address: str


def _described(frames: list[bytes]) -> RefusedPeer:
    match frames:
        case [_, _, _, address, _, _, key] if len(key) == 32:
            # our sockets are IPv6, so IPv4 peers have mapped addresses
            return RefusedPeer(z85.encode(key).decode(), address.decode("ascii", "replace").removeprefix("::ffff:"))
    return RefusedPeer("", "")


class ZapHandler:
    """Answers ZeroMQ's admission requests, called by the loop that polls `socket`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: Collection[str]) -> None:
        self.admit(allowed)
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ENDPOINT)

    def admit(self, allowed: Collection[str]) -> None:
        """Admit these keys, and no others, from now on."""
        self._allowed = {z85.decode(public): public for public in allowed}

    def answer(self) -> list[RefusedPeer]:
        """Answer all pending requests; return the refused peers."""
        refused: list[RefusedPeer] = []
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return refused
            request = frames[1] if len(frames) > 1 else b""
            key = self._key(frames)
            # sent back as the User-Id of the peer's messages: the key, since several keys may share a name
            verdict = (b"400", b"key not allowed", b"") if key is None else (b"200", b"OK", key.encode())
            self.socket.send_multipart([_VERSION, request, *verdict, b""])
            if key is None:
                refused.append(_described(frames))

    def _key(self, frames: list[bytes]) -> str | None:
        match frames:
            case [version, _, domain, _, _, b"CURVE", key] if version == _VERSION and domain == DOMAIN:
                return self._allowed.get(key)
        return None

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
