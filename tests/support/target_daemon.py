"""A fake daemon connection for a target: records its messages and delivers notifications."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path

from refitd.protocol.base import Message

WAIT_S = 60.0


class Daemon:
    """Records a target's messages, and delivers notifications to it.

    A later test in this process may register a target while the garbage collector has not yet freed an earlier one: the
    registration asks every living target for its memory, and with it this connection.
    """

    is_foreign = is_awaited = is_lost = False
    directory = Path("fake")

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
