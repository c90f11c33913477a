"""What is read beside a loop: in order, and what follows it waits."""

from __future__ import annotations

import threading

from refitd.protocol.background import OrderedDecoder


def test_messages_wait_behind_one_that_is_read_aside_and_come_in_order() -> None:
    told, go_on = threading.Semaphore(0), threading.Event()
    messages = OrderedDecoder[str]("test", told.release)
    assert not messages.holds("before")  # whoever asks takes it at once

    def slow() -> str:
        assert go_on.wait(10)
        return "plan"

    def broken() -> str:
        raise ValueError("no message")

    messages.read(slow)
    assert messages.holds("stage")
    messages.read(broken)
    assert messages.holds("drop")
    assert list(messages.collect()) == []

    go_on.set()
    for _ in range(2):
        assert told.acquire(timeout=10)
    plan, stage, error, drop = messages.collect()
    assert (plan, stage, drop) == ("plan", "stage", "drop") and isinstance(error, ValueError)
    assert not messages.holds("after")
