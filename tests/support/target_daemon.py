"""The daemon of a target without a connection: what it is told, and how it answers."""

from __future__ import annotations

import queue
from collections.abc import Callable

from refitd.protocol.base import Message

WAIT_S = 20.0


class Daemon:
    """What a target says to its daemon, and how it hears it."""

    is_foreign = is_awaited = False

    def __init__(self) -> None:
        self.said: queue.Queue[Message] = queue.Queue()
        self.hears: Callable[[Message], None] = lambda message: None

    def listen(self, member: str, callback: Callable[[Message], None]) -> None:
        self.hears = callback

    def unlisten(self, member: str) -> None:
        pass

    def tell(self, message: Message) -> None:
        self.said.put(message)

    def next(self) -> Message:
        return self.said.get(timeout=WAIT_S)
