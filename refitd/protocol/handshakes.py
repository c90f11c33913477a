"""Why connections end before they begin: the failed handshakes of a ZeroMQ socket, from its monitor."""

from __future__ import annotations

import enum

import zmq
from zmq.utils.monitor import recv_monitor_message


class Failed(enum.Enum):
    """How a handshake ended."""

    KEY_REFUSED = "the other end does not allow our key"
    OTHER_MECHANISM = "one end uses keys and the other does not"
    PROTOCOL = "the other end's bytes make no sense: it has another server key in mind, or is no ZeroMQ"
    ENDED = "the other end has closed the connection without a word"


_EVENTS: dict[int, Failed] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: Failed.KEY_REFUSED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: Failed.PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: Failed.ENDED,
}


class Handshakes:
    """Tells the failures of one socket to the loop that polls `socket`; made before it binds or connects."""

    def __init__(self, watched: zmq.Socket[bytes]) -> None:
        self._watched = watched
        self.socket = watched.get_monitor_socket(sum(_EVENTS))

    def receive(self) -> Failed | None:
        """Return the next failure, None when nothing waits."""
        try:
            event = recv_monitor_message(self.socket, zmq.NOBLOCK)
        except zmq.Again:
            return None
        if event["value"] == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return Failed.OTHER_MECHANISM
        return _EVENTS[event["event"]]

    def close(self) -> None:
        """Stop watching; call before the watched socket is closed."""
        self._watched.disable_monitor()
        self.socket.close()
