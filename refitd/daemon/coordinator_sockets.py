"""Connections to a cluster's coordinators: follows the one that leads, and looks for another when it is silent."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from refitd.protocol.base import Message
from refitd.protocol.channel import Dealer
from refitd.protocol.codec import encode
from refitd.protocol.keys import ClientKeys


class CoordinatorSockets:
    """Sends to the leading coordinator and ignores the others; while none is known, sends to all.

    With one endpoint it is that coordinator, known or not.

    Attributes:
        peer: address of the last message's sender, as in Received.address.
        queues: whether messages wait for a connection; else `send` fails while there is none.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoints: Sequence[str], keys: ClientKeys | None
    ) -> None:
        """Start connecting, in the background.

        Raises:
            ConfigError: an endpoint cannot be connected to.
        """
        several = len(endpoints) > 1
        self.queues = not several
        self._dealers: list[Dealer] = []
        try:
            for endpoint in endpoints:
                self._dealers.append(Dealer(context, endpoint, keys, queues=not several))
        except BaseException:
            self.close()
            raise
        self._leader = None if several else self._dealers[0]
        self._last = self._dealers[0]
        self.peer = ""

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """The sockets from which `receive` takes messages."""
        return [dealer.socket for dealer in self._dealers]

    @property
    def control_sockets(self) -> list[zmq.Socket[bytes]]:
        """The sockets to poll besides `sockets`; then call `failure`."""
        return [sock for dealer in self._dealers for sock in dealer.control_sockets]

    @property
    def is_seeking(self) -> bool:
        """Whether none of several coordinators is followed."""
        return self._leader is None

    def follow(self, is_up: bool) -> str:
        """Follow whoever has sent the last message if a coordinator is `is_up`, else look for one among all.

        Returns:
            The endpoint of a newly followed one of several, else "".
        """
        if len(self._dealers) == 1:
            return ""
        found = (self._leader or self._last) if is_up else None
        is_new, self._leader = found not in (None, self._leader), found
        return self._last.endpoint if is_new else ""

    def receive(self) -> bytes | None:
        """Return the next frame, None if none waits; what others than the followed one say is dropped."""
        for dealer in self._dealers:
            while (frame := dealer.receive()) is not None:
                if self._leader in (None, dealer):
                    self._last, self.peer = dealer, dealer.peer
                    return frame
        return None

    def send(self, request: int, message: Message) -> bool:
        """Queue a message; False if the queue is full, or if there are several coordinators and none is connected."""
        frame = encode(request, message)
        if self._leader is not None:
            return self._leader.send_frame(frame)
        return any([dealer.send_frame(frame) for dealer in self._dealers])

    def failure(self) -> str | None:
        """Return why a handshake failed since the last call, with advice; None if none failed."""
        said = [text for dealer in self._dealers if (text := dealer.failure()) is not None]
        return said[0] if said else None

    def retry(self) -> None:
        """Reconnect to the coordinators that refused the last handshake: the cause may have been fixed."""
        for dealer in self._dealers:
            dealer.retry()

    def close(self, *, sending_s: float = 0.0) -> None:
        """Close the sockets; keep sending queued messages for up to `sending_s`."""
        for dealer in self._dealers:
            dealer.close(sending_s=sending_s)
