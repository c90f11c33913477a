"""A target on a fake daemon connection that records its messages and delivers notifications."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

from refitd.client.target import Target
from refitd.client.target_tensors import TargetTensors
from refitd.protocol import local
from refitd.protocol.base import Message
from refitd.protocol.shards import shard_of

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


def target_on(daemon: Any, tensors: TargetTensors, staging: Any = None, **registered: Any) -> Target:
    """Return member "m" of model "policy" on this daemon; `staging` is its arena, `registered` more of its request."""
    message = local.RegisterTarget("policy", "a", 0, 1, shard_of(tensors.wire), **registered)
    answer = local.Registered(member="m", staging=0, nbytes=16, version=None)
    return Target(daemon, daemon, message, tensors, answer, staging, None)
