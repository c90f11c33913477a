"""The journal: what was decided about each swap, on disk before anyone acts on it."""

from __future__ import annotations

import contextlib
import os
import resource
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
    at REAL NOT NULL,         -- seconds since the epoch
    report BLOB NOT NULL DEFAULT x''  -- how it ended, or what was decided: a SwapReport as JSON
) STRICT
"""

_VERSION = 2  # of the schema; 1 had no report
_COLUMNS = "swap, model, version, state, plan, reason, at, report"

# Swaps that are kept; every swap is written twice.
KEPT = 10_000


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
    report: bytes = b""

    @property
    def is_decided(self) -> bool:
        """Whether its version was to become live."""
        return self.state != "aborted"


class Journal:
    """A sqlite file, one writer. Every write is on disk (fsync) when the call returns."""

    def __init__(self, path: Path) -> None:
        """Open or create the journal, readable by its owner only.

        Raises:
            CommitError: the file cannot be written (the disk is full, it is read-only, it is in use) or is no journal.
        """
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            self._late: list[Record] = []
            self._db = sqlite3.connect(path, isolation_level=None, timeout=5.0)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute(_SCHEMA)
            if self._db.execute("PRAGMA user_version").fetchone() == (1,):
                self._db.execute("ALTER TABLE swaps ADD COLUMN report BLOB NOT NULL DEFAULT x''")
            # written anew at every start: a coordinator that could not write a decision must not begin a swap
            self._db.execute(f"PRAGMA user_version={_VERSION}")
        except (OSError, sqlite3.Error) as exc:
            raise CommitError(f"journal {path}: {exc}{_room(path)}; check coordinator.journal and the disk") from exc

    def write(self, record: Record) -> None:
        """Insert or replace a record, durably.

        Raises:
            CommitError: the disk is full or the file is gone; the decision must then not be acted on.
        """
        self.flush()
        self._write(record)

    def note(self, record: Record) -> None:
        """Write how a swap has ended, or keep that until it can be written: before anything later is.

        Raises:
            CommitError: as in `write`; the record is kept.
        """
        self._late.append(record)
        del self._late[:-KEPT]
        self.flush()

    def flush(self) -> None:
        """Write what could not be written when it was noted.

        Raises:
            CommitError: it still cannot be.
        """
        while self._late:
            self._write(self._late[0])
            del self._late[0]

    def _write(self, record: Record) -> None:
        r = record
        try:
            self._db.execute(
                f"INSERT OR REPLACE INTO swaps ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (r.swap, r.model, r.version, r.state, r.plan, r.reason, r.at, r.report),
            )
            if r.state != "decided":
                newest = "(SELECT max(rowid) FROM swaps)"
                self._db.execute(f"DELETE FROM swaps WHERE rowid <= {newest} - ?", (2 * KEPT,))
        except sqlite3.Error as exc:
            raise CommitError(
                f"journal {self._path}: {exc}{_room(self._path)}; free disk space, then swap again"
            ) from exc

    def decided(self, swap: str) -> Record | None:
        """Return the record of a swap whose commit was decided, None if it was not."""
        row = self._db.execute(
            f"SELECT {_COLUMNS} FROM swaps WHERE swap = ? AND state != 'aborted'", (swap,)
        ).fetchone()
        return Record(*row) if row else None

    def recent(self, model: str, limit: int) -> list[Record]:
        """Return the last swaps of a model ("": of all), the newest first."""
        rows = self._db.execute(
            f"SELECT {_COLUMNS} FROM swaps WHERE model = ?1 OR ?1 = '' ORDER BY rowid DESC LIMIT ?2", (model, limit)
        )
        return [Record(*row) for row in rows]

    def close(self) -> None:
        """Close the file, with all in it that can be written."""
        with contextlib.suppress(CommitError):
            self.flush()
        self._db.close()


def _room(path: Path) -> str:
    """Return what a failed write should be told with: sqlite says "disk I/O error" for most limits."""
    try:
        disk = os.statvfs(path.parent)
    except OSError:
        return ""
    found = f" ({disk.f_bavail * disk.f_frsize} bytes free on its file system"
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY:
        found += f", files may grow to {limit} bytes (RLIMIT_FSIZE)"
    return found + ")"
