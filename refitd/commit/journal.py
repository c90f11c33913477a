"""The journal: what was decided about each swap, on disk before anyone acts on it."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from refitd.errors import CommitError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS swaps (
    swap TEXT PRIMARY KEY,
    model TEXT NOT NULL,
    version INTEGER NOT NULL,
    state TEXT NOT NULL,      -- decided, committed, incomplete, aborted
    plan TEXT NOT NULL DEFAULT '',
    reason TEXT NOT NULL DEFAULT '',
    at REAL NOT NULL          -- seconds since the epoch
) STRICT
"""


@dataclass(frozen=True, slots=True)
class Record:
    """One swap as the journal has it."""

    swap: str
    model: str
    version: int
    state: str
    plan: str
    reason: str
    at: float


class Journal:
    """A sqlite file, one writer. Every write is on disk (fsync) when the call returns."""

    def __init__(self, path: Path) -> None:
        """Open or create the journal, readable by its owner only.

        Raises:
            CommitError: the file cannot be written or is no journal.
        """
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            self._db = sqlite3.connect(path, isolation_level=None, timeout=5.0)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute(_SCHEMA)
        except (OSError, sqlite3.Error) as exc:
            raise CommitError(f"journal {path}: {exc}; check coordinator.journal and the disk") from exc

    def write(self, record: Record) -> None:
        """Insert or replace a record, durably.

        Raises:
            CommitError: the disk is full or the file is gone; the decision must then not be acted on.
        """
        try:
            self._db.execute(
                "INSERT OR REPLACE INTO swaps (swap, model, version, state, plan, reason, at) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (record.swap, record.model, record.version, record.state, record.plan, record.reason, record.at),
            )
        except sqlite3.Error as exc:
            raise CommitError(f"journal {self._path}: {exc}; free disk space, then swap again") from exc

    def decided(self, swap: str) -> Record | None:
        """Return the record of a swap whose commit was decided, None if it was not."""
        row = self._db.execute(
            "SELECT swap, model, version, state, plan, reason, at FROM swaps WHERE swap = ? AND state != 'aborted'",
            (swap,),
        ).fetchone()
        return Record(*row) if row else None

    def close(self) -> None:
        """Close the file."""
        self._db.close()
