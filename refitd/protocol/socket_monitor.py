"""Reports a ZeroMQ socket's failed handshakes, from its monitor."""

from __future__ import annotations

import enum
import struct

import zmq

_EVENT = struct.Struct("=Hi")  # (event, value); pyzmq's own parser would load asyncio


class HandshakeFailure(enum.Enum):
    """A failed handshake and its cause."""

    KEY_REFUSED = "the other end does not allow our key"
    OTHER_MECHANISM = "one end uses keys and the other does not"
    PROTOCOL = "the other end's bytes make no sense: it has another server key in mind, or is no ZeroMQ"
    ENDED = "the other end has closed the connection without a word"


_EVENTS: dict[int, HandshakeFailure] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: HandshakeFailure.KEY_REFUSED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: HandshakeFailure.PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: HandshakeFailure.ENDED,
}


class SocketMonitor:
    """Reports one socket's failures to the loop that polls `socket`. Create it before that socket binds or connects."""

    def __init__(self, watched: zmq.Socket[bytes]) -> None:
        self._watched = watched
        self.socket = watched.get_monitor_socket(sum(_EVENTS))

    def receive(self) -> HandshakeFailure | None:
        """Return the next failure, None if there is none."""
        try:
            frame, _endpoint = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        event, value = _EVENT.unpack(frame)
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return HandshakeFailure.OTHER_MECHANISM
        return _EVENTS[event]

    def close(self) -> None:
        """Stop watching. Call it before the watched socket is closed."""
        self._watched.disable_monitor()
        self.socket.close()
