"""Structured log lines on stderr: one event per line, as key=value pairs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

from refitd.text import printable, printable_lines

_QUOTED = set(' "=')


class _LineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "t": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "process": record.name,
            "event": record.getMessage(),
        } | getattr(record, "fields", {})
        line = " ".join(f"{key}={_value(value)}" for key, value in fields.items() if value not in ("", None))
        return f"{line}\n{printable_lines(self.formatException(record.exc_info))}" if record.exc_info else line


def setup(level: str) -> None:
    """Send every log line of this process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class Escaped(logging.Filter):
    """Escapes log records that go to an application's own handlers, so that each message is one printable line."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Escape a record's message and traceback; return True."""
        record.msg, record.args = printable(record.getMessage()), ()
        if record.exc_info and not record.exc_text:
            record.exc_text = printable_lines(logging.Formatter().formatException(record.exc_info))
        return True


class EventLog:
    """Writes the log lines of one process."""

    def __init__(self, process: str) -> None:
        self._log = logging.getLogger(process)

    def __call__(self, event: str, **fields: object) -> None:
        """Write one line."""
        self.write(event, fields)

    def failed(self, event: str, **fields: object) -> None:
        """Write one line and the traceback of the exception being handled."""
        self._log.exception(event, extra={"fields": fields})

    def write(self, event: str, fields: Mapping[str, object]) -> None:
        """Write one line."""
        self._log.info(event, extra={"fields": dict(fields)})


class Throttle:
    """Limits log lines that peers cause: one per subject and period, and at most `most` subjects per period."""

    def __init__(self, period_s: float = 30.0, most: int = 100) -> None:
        self._period_s, self._most = period_s, most
        self._since = -period_s
        self._seen: set[str] = set()

    def allows(self, subject: str, now: float) -> bool:
        """Return whether a line about `subject` may be written."""
        if now - self._since >= self._period_s:
            self._since = now
            self._seen.clear()
        if subject in self._seen or len(self._seen) >= self._most:
            return False
        self._seen.add(subject)
        return True


def _value(value: object) -> str:
    text = f"{value:.6f}" if isinstance(value, float) else str(value)
    if not text or _QUOTED & set(text) or not text.isprintable():
        # names come from peers: they must not move a terminal's cursor or begin a new line
        return '"' + printable(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'
    return text
