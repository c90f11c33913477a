"""A child's pipes to the launcher: commands arrive on stdin, events leave on stdout."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]
LAUNCHER_GONE = 3  # exit status


class Channel:
    """Newline-separated JSON in both directions. Other output of this process goes to stderr, its log.

    When stdin ends the launcher is gone, whatever the reason: the process ends at once, so that nothing is
    ever left running.
    """

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._commands: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def emit(self, event: str, **fields: Any) -> None:
        """Send an event to the launcher."""
        self._out.write(json.dumps({"event": event, **fields}) + "\n")
        self._out.flush()

    def next(self, timeout_s: float) -> Message:
        """Return the next command.

        Raises:
            TimeoutError: the launcher said nothing for `timeout_s`.
        """
        try:
            return self._commands.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no command from the launcher for {timeout_s:.0f} s") from None

    def poll(self) -> Message | None:
        """Return the next command if there is one."""
        try:
            return self._commands.get_nowait()
        except queue.Empty:
            return None

    def _read(self) -> None:
        for line in sys.stdin:
            self._commands.put(json.loads(line))
        os._exit(LAUNCHER_GONE)


@contextlib.contextmanager
def reporting(channel: Channel) -> Iterator[None]:
    """Report an error that ends this process to the launcher."""
    try:
        yield
    except Exception as exc:
        channel.emit("failed", reason=f"{type(exc).__name__}: {exc}")
        raise
