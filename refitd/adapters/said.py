"""What an engine that tries again and again says in its log: each thing once, until it is another one."""

from __future__ import annotations

import logging


class Said:
    """Writes a line only where it differs from the one before: an engine may wait for its trainer for days."""

    def __init__(self, log: logging.Logger) -> None:
        self._log, self._last = log, ""

    def say(self, level: int, text: str) -> None:
        """Write a line, unless it was the last one."""
        if text != self._last:
            self._log.log(level, "%s", text, stacklevel=2)
        self._last = text
