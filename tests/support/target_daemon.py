"""A fake daemon connection for a target: records its messages and delivers notifications."""

from __future__ import annotations

import queue
from collections.abc import Callable

from refitd.protocol.base import Message

WAIT_S = 60.0


class Daemon:
    """Records a target's messages, and delivers notifications to it."""

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
