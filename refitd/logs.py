"""Structured log lines on stderr: one event per line, as key=value pairs or as JSON, each with its severity."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TextIO

from refitd.text import printable, printable_lines

_QUOTED = set(' "=')


# Events with another level than `info`. warning: a part failed or is missing, the service continues, and an operator
# may have to act. error: weights, decisions or this process break a promise. debug: for developers only.
_LEVELS = {
    "apart": logging.WARNING,
    "silent": logging.WARNING,
    "bad-message": logging.WARNING,
    "bad-plan": logging.WARNING,
    "base-wrong": logging.WARNING,
    "catch-up-refused": logging.WARNING,
    "coordinator-ended": logging.WARNING,
    "coordinator-killed": logging.WARNING,
    "coordinator-refused": logging.WARNING,
    "coordinator-silent": logging.WARNING,
    "delta-wrong": logging.WARNING,
    "differs": logging.ERROR,
    "digests": logging.DEBUG,
    "digests-failed": logging.WARNING,
    "epoch-failed": logging.WARNING,
    "etcd-unreachable": logging.WARNING,
    "evicted": logging.WARNING,
    "fenced": logging.WARNING,
    "handshake-failed": logging.WARNING,
    "illegal": logging.WARNING,
    "internal-error": logging.ERROR,
    "journal-failed": logging.ERROR,
    "keys-not-read": logging.WARNING,
    "cables-not-read": logging.WARNING,
    "lead-lost": logging.WARNING,
    "live-outranked": logging.WARNING,
    "live-recovered": logging.WARNING,
    "no-coordinator": logging.WARNING,
    "node-lost": logging.WARNING,
    "not-readmitted": logging.WARNING,
    "not-restored": logging.WARNING,
    "not-sent": logging.WARNING,
    "plan-lost": logging.WARNING,
    "published": logging.DEBUG,
    "session": logging.DEBUG,
    "slow-turn": logging.WARNING,
    "stage-failed": logging.WARNING,
    "stranger": logging.WARNING,
    "turned-away": logging.WARNING,
    "worker-died": logging.WARNING,
}
# Of a swap that ends well, info has only the coordinator's last line, which has its parts.
_SWAP_LEVELS = {"aborted": logging.WARNING, "failed": logging.WARNING, "incomplete": logging.ERROR}

# syslog's numbers; journald reads them at the start of a line (man 3 sd-daemon)
_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


def severity(event: str, fields: Mapping[str, object]) -> int:
    """Return the level of an event, as `logging` numbers it."""
    if event == "swap":
        return _SWAP_LEVELS.get(str(fields.get("phase")), logging.INFO if "total_s" in fields else logging.DEBUG)
    if event == "session-closed":
        return logging.WARNING if fields.get("lost") else logging.DEBUG
    return _LEVELS.get(event, logging.INFO)


class _LineFormatter(logging.Formatter):
    def __init__(self, *, as_json: bool, for_journald: bool) -> None:
        super().__init__()
        self._as_json, self._for_journald = as_json, for_journald

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = {
            "t": at,
            "level": record.levelname.lower(),
            "process": record.name,
            "event": record.getMessage(),
        } | getattr(record, "fields", {})
        fields = {key: value for key, value in fields.items() if value not in ("", None)}
        trace = printable_lines(self.formatException(record.exc_info)) if record.exc_info else ""
        if self._as_json:
            line = json.dumps(fields | ({"traceback": trace} if trace else {}), default=str)
        else:
            texts = {key: f"{v:.6f}" if isinstance(v, float) else str(v) for key, v in fields.items()}
            line = " ".join(
                f"{key}={text}"
                if text and text.isprintable() and not _QUOTED & set(text)
                else '{}="{}"'.format(key, text.replace("\\", "\\\\").replace('"', '\\"'))
                for key, text in texts.items()
            )
            # names come from peers: they must not move a terminal's cursor or begin a new line
            line = line if line.isprintable() else printable(line)
            line = f"{line}\n{trace}" if trace else line
        mark = f"<{_PRIORITIES.get(record.levelno, 6)}>" if self._for_journald else ""
        return mark + line.replace("\n", f"\n{mark}")


def setup(level: str, style: str = "text") -> None:
    """Send every log line of this process to stderr, as "text" or "json"; with priorities where journald reads it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter(as_json=style == "json", for_journald=_is_journal(sys.stderr)))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def as_error(line: str) -> str:
    """Format text that is not an event (such as why a process does not start) as an error line for journald."""
    return f"<{_PRIORITIES[logging.ERROR]}>{line}" if _is_journal(sys.stderr) else line


def _is_journal(stream: TextIO) -> bool:
    """Return whether systemd has connected this stream to its journal (JOURNAL_STREAM, man 5 systemd.exec)."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


class Escaped(logging.Filter):
    """Escapes log records that go to an application's own handlers: each message becomes one printable line."""

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
        self._log.log(severity(event, fields), event, extra={"fields": dict(fields)})


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
