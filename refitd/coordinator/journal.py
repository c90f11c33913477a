"""The journal: each swap's decision and the live versions, on disk before anyone acts on them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import secrets
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from refitd.coordinator.records import Drain, Drained, LiveVersion, Record, Recovered
from refitd.errors import CommitError

_VERSION = 3  # of the schema; 1 had no reports, 2 no runs and no tables but `swaps`

_SCHEMA = """
CREATE TABLE IF NOT EXISTS swaps (
    swap TEXT PRIMARY KEY,
    model TEXT NOT NULL,
    version INTEGER NOT NULL,
    state TEXT NOT NULL,      -- decided, committed, incomplete, aborted
    plan TEXT NOT NULL DEFAULT '',
    reason TEXT NOT NULL DEFAULT '',
    at REAL NOT NULL,         -- seconds since the epoch
    report BLOB NOT NULL DEFAULT x'',  -- how it ended, or what was decided: a SwapReport as JSON
    run TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE TABLE IF NOT EXISTS live (  -- what was decided last; history pushes nothing out of it
    model TEXT PRIMARY KEY,
    version INTEGER NOT NULL,
    run TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    swap TEXT NOT NULL,
    at REAL NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS numbers (  -- the highest that was decided, and the highest that a swap was begun to
    model TEXT PRIMARY KEY,
    decided INTEGER NOT NULL DEFAULT -1,
    tried INTEGER NOT NULL DEFAULT -1,
    tried_run TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE TABLE IF NOT EXISTS decided (  -- each version that was live, and when it was decided last
    model TEXT NOT NULL,
    version INTEGER NOT NULL,
    run TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    PRIMARY KEY (model, version)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS journal (  -- one row: which journal this is, and the number of its last decision
    one INTEGER PRIMARY KEY CHECK (one = 1),
    id TEXT NOT NULL,
    sequence INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS continued (  -- the journals that were lost, and whose decisions this one has taken over
    id TEXT PRIMARY KEY
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS drained (  -- refitd before it had drains does not look here
    node TEXT PRIMARY KEY,
    replicas TEXT NOT NULL,  -- JSON: [model, replica], ...
    at REAL NOT NULL
) STRICT, WITHOUT ROWID;
"""

_COLUMNS = "swap, model, version, state, plan, reason, at, report, run"

# Limits: rows of the history, each written twice; and versions of a model that a rollback can find.
KEPT = 10_000

# Peers also report sequences. One above this is a mistake and must not exhaust the numbers.
MAX_SEQUENCE = 1 << 53

# How long a write waits if another program has locked the file. No message is answered meanwhile, and daemons consider
# a coordinator gone after 5 s.
_LOCKED_S = 2.0


class Journal:
    """A sqlite file with one writer. Every write is on disk (fsync) when the call returns.

    No other process can open it meanwhile. If it is removed, replaced or changed by others, every later write fails.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the journal, readable by its owner only.

        Raises:
            CommitError: the file cannot be written (full disk, read-only), is in use by another coordinator, was
                written by a newer refitd, is damaged, or is not a journal.
        """
        self._path = path
        self._wal = path.with_name(path.name + "-wal")
        self._late: list[Record | Recovered] = []
        self._lock = -1
        self._place = self._wal_place = _GONE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._own()
            self._db = sqlite3.connect(path, isolation_level=None, timeout=_LOCKED_S)
            self._open()
        except (OSError, sqlite3.Error) as exc:
            self._unlock()
            advice = _advice(exc) or "check coordinator.journal and the disk"
            raise CommitError(f"journal {path}: {exc}{_room(path)}; {advice}") from exc
        except CommitError:
            self._unlock()
            raise

    def _own(self) -> None:
        """Lock the file's inode, whatever its name, for the life of this process."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise CommitError(
                f"journal {self._path} is in use by another coordinator{_holder(self._lock)}; end that one, or give "
                "this one a journal of its own (coordinator.journal)"
            ) from exc

    def _open(self) -> None:
        db = self._db
        (schema,) = db.execute("PRAGMA user_version").fetchone()
        if schema > _VERSION:
            raise CommitError(
                f"journal {self._path}: a newer refitd has written it (schema {schema}, this one knows {_VERSION}); "
                "start that version again, or name another file (coordinator.journal)"
            )
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables and (schema == 0 or "swaps" not in tables):
            raise CommitError(
                f"journal {self._path}: a database of another program (tables {', '.join(sorted(tables)[:5])}); "
                "name another file (coordinator.journal)"
            )
        (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise CommitError(
                f"journal {self._path}: it is damaged ({found}); move it away: the next one is recovered from what "
                "the daemons hold"
            )
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        # a write at every start: a coordinator that cannot write decisions must not begin a swap
        with self._transaction():
            if schema == 1:
                db.execute("ALTER TABLE swaps ADD COLUMN report BLOB NOT NULL DEFAULT x''")
            if schema in (1, 2):
                db.execute("ALTER TABLE swaps ADD COLUMN run TEXT NOT NULL DEFAULT ''")
            for statement in _SCHEMA.split(";\n"):
                if statement.strip():
                    db.execute(statement)
            db.execute("INSERT OR IGNORE INTO journal VALUES (1, ?, 0)", (secrets.token_hex(8),))
            if schema in (1, 2):
                self._take_over_history()
            db.execute(f"PRAGMA user_version={_VERSION}")
        (self.id,) = db.execute("SELECT id FROM journal").fetchone()
        self._place = self._stat(self._path)
        if self._place[:2] != _place(os.fstat(self._lock))[:2]:
            raise CommitError(f"journal {self._path}: it was replaced while it was opened; start again")
        self._remember_place()
        self._checkpoint()

    def _take_over_history(self) -> None:
        """Fill the live table of an older schema from its history: each model's last decided row."""
        rows = self._db.execute(
            "SELECT model, version, swap, at, state != 'aborted' FROM swaps ORDER BY rowid"
        ).fetchall()
        for model, version, swap, at, was_decided in rows:
            if was_decided:
                self._decide(model, version, "", swap, at)
            else:
                self._tried(model, version, "")

    # --- writing ------------------------------------------------------------------------------------------

    def write(self, *records: Record) -> None:
        """Insert or replace records durably, all or none; a decision also updates what is live.

        Raises:
            CommitError: the disk is full, or the file was removed or changed by others; do not act on the decision
                then.
        """
        self.flush()
        with self._writing():
            for record in records:
                self._insert(record)

    def note(self, entry: Record | Recovered) -> None:
        """Write how a swap ended, or a recovered live version. On failure keep the entry and write it first next time.

        Raises:
            CommitError: as in `write`; the entry is kept.
        """
        # Before the entry, not after it: the first write after a checkpoint syncs twice, and should be no decision. An
        # entry that is lost with the -wal leaves its swap decided, which is finished again.
        with contextlib.suppress(sqlite3.Error, CommitError):  # the next write reports the problem
            self._checkpoint()
        self._late.append(entry)
        del self._late[:-KEPT]
        self.flush()

    def flush(self) -> None:
        """Write the entries that `note` could not write.

        Raises:
            CommitError: they still cannot be written.
        """
        while self._late:
            entry = self._late[0]
            if isinstance(entry, Record):
                with self._writing():
                    self._insert(entry)
            else:
                self._recover(entry)
            del self._late[0]

    def set_drain(self, drain: Drain, at: float) -> None:
        """Write durably that a node is drained, or no longer, at this time (seconds since the epoch).

        Raises:
            CommitError: as in `write`; nothing has changed.
        """
        with self._writing():
            if drain.replicas is None:
                self._db.execute("DELETE FROM drained WHERE node = ?", (drain.node,))
            else:
                found = (drain.node, json.dumps(sorted(drain.replicas)), at)
                self._db.execute("INSERT OR REPLACE INTO drained VALUES (?, ?, ?)", found)

    def _insert(self, r: Record) -> None:
        self._db.execute(
            f"INSERT OR REPLACE INTO swaps ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (r.swap, r.model, r.version, r.state, r.plan, r.reason, r.at, r.report, r.run),
        )
        if r.state == "decided":
            self._decide(r.model, r.version, r.run, r.swap, r.at)
        else:
            newest = "(SELECT max(rowid) FROM swaps)"
            self._db.execute(f"DELETE FROM swaps WHERE rowid <= {newest} - ?", (2 * KEPT,))
        if r.state == "aborted":
            self._tried(r.model, r.version, r.run)

    def _decide(self, model: str, version: int, run: str, swap: str, at: float) -> None:
        self._db.execute("UPDATE journal SET sequence = sequence + 1")
        (sequence,) = self._db.execute("SELECT sequence FROM journal").fetchone()
        self._set_live(model, LiveVersion(version, run, sequence, swap), at)
        self._db.execute(
            "DELETE FROM decided WHERE model = ?1 AND sequence < "
            "(SELECT sequence FROM decided WHERE model = ?1 ORDER BY sequence DESC LIMIT 1 OFFSET ?2)",
            (model, KEPT),
        )

    def _set_live(self, model: str, live: LiveVersion, at: float) -> None:
        found = (model, live.version, live.run, live.sequence)
        self._db.execute("INSERT OR REPLACE INTO live VALUES (?, ?, ?, ?, ?, ?)", (*found, live.swap, at))
        self._db.execute("INSERT OR REPLACE INTO decided VALUES (?, ?, ?, ?)", found)
        self._db.execute(
            "INSERT INTO numbers (model, decided) VALUES (?1, ?2) ON CONFLICT DO UPDATE SET decided = max(decided, ?2)",
            (model, live.version),
        )

    def _tried(self, model: str, version: int, run: str) -> None:
        self._db.execute(
            "INSERT INTO numbers (model, tried, tried_run) VALUES (?1, ?2, ?3) ON CONFLICT DO UPDATE SET "
            "tried = CASE WHEN tried_run = ?3 THEN max(tried, ?2) ELSE ?2 END, tried_run = ?3",
            (model, version, run),
        )

    def _recover(self, entry: Recovered) -> None:
        with self._writing():
            self._db.execute("UPDATE journal SET sequence = max(sequence, ?)", (entry.live.sequence,))
            if entry.continues not in ("", self.id):
                self._db.execute("INSERT OR IGNORE INTO continued VALUES (?)", (entry.continues,))
            self._set_live(entry.model, entry.live, entry.at)
            self._db.execute(
                "UPDATE numbers SET decided = max(decided, ?) WHERE model = ?", (entry.highest, entry.model)
            )

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Make one durable change, after checking that the file is the opened one and unchanged by others."""
        self._check_place()
        try:
            with self._transaction():
                yield
        except (OSError, sqlite3.Error) as exc:
            advice = _advice(exc) or "free disk space, then swap again"
            raise CommitError(f"journal {self._path}: {exc}{_room(self._path)}; {advice}") from exc
        finally:
            self._remember_place()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise

    def _checkpoint(self) -> None:
        """Move the -wal's content into the file, so that losing the -wal loses nothing.

        Raises:
            CommitError: others have changed the files; a checkpoint would hide that.
        """
        self._check_place()
        try:
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        finally:
            self._remember_place()

    # --- whether it is still the file that was opened -----------------------------------------------------

    def _check_place(self) -> None:
        """Raise CommitError if the files were moved, resized or changed by others."""
        self._check_head()
        for path, left in ((self._path, self._place), (self._wal, self._wal_place)):
            found = self._stat(path)
            if found == left:
                continue
            if found == _GONE:
                what = "it has been removed"
            elif found[:2] != left[:2]:
                what = "another file is in its place"
            elif found[2] != left[2]:
                what = f"somebody else has changed it: {left[2]} bytes were left, {found[2]} are found"
            else:
                what = "somebody else has written to it"
            raise CommitError(
                f"journal {path}: {what}; nothing can be decided with it. Put it back as it was, or start the "
                "coordinator again: it recovers what is live from what the daemons hold"
            )

    def _check_head(self) -> None:
        """Raise CommitError if the file has no database header: an emptied file may have grown again."""
        try:
            with self._path.open("rb") as file:
                head = file.read(len(_HEAD))
        except OSError:
            return  # removed or unreadable: the caller or the write itself reports that
        if head != _HEAD:
            raise CommitError(
                f"journal {self._path}: somebody else has changed it: it begins with {head!r}, expected {_HEAD!r}; "
                "nothing can be decided with it. Start the coordinator again: it recovers what is live from what the "
                "daemons hold"
            )

    def _remember_place(self) -> None:
        # neither file shrinks by itself: keep the earlier place if it was replaced or cut, so that the next write fails
        self._place = _grown(self._place, self._stat(self._path))
        self._wal_place = _grown(self._wal_place, self._stat(self._wal))

    @staticmethod
    def _stat(path: Path) -> tuple[int, int, int, int]:
        try:
            return _place(path.stat())
        except FileNotFoundError:
            return _GONE

    # --- reading ------------------------------------------------------------------------------------------

    def decided(self, swap: str) -> Record | None:
        """Return the record of a swap that was decided to commit, else None.

        Raises:
            CommitError: the file cannot be read.
        """
        found = self._select(f"SELECT {_COLUMNS} FROM swaps WHERE swap = ? AND state != 'aborted'", swap)
        return Record(*found[0]) if found else None

    def recent(self, model: str, limit: int) -> list[Record]:
        """Return a model's last swaps ("": all models'), the newest first; raises CommitError like `decided`."""
        rows = self._select(
            f"SELECT {_COLUMNS} FROM swaps WHERE model = ?1 OR ?1 = '' ORDER BY rowid DESC LIMIT ?2", model, limit
        )
        return [Record(*row) for row in rows]

    def live(self, model: str) -> LiveVersion | None:
        """Return the version decided last, None before the first decision; raises CommitError like `decided`."""
        found = self._select("SELECT version, run, sequence, swap FROM live WHERE model = ?", model)
        return LiveVersion(*found[0]) if found else None

    def highest(self, model: str) -> int:
        """Return the highest version that was ever decided, -1 for none; raises CommitError like `decided`."""
        found = self._select("SELECT decided FROM numbers WHERE model = ?", model)
        return int(found[0][0]) if found else -1

    def tried(self, model: str) -> tuple[int, str]:
        """Return the highest version whose swap was aborted, and its run; (-1, "") for none."""
        found = self._select("SELECT tried, tried_run FROM numbers WHERE model = ?", model)
        return (int(found[0][0]), str(found[0][1])) if found else (-1, "")

    def before(self, model: str, version: int) -> LiveVersion | None:
        """Return the last decided version below this one; raises CommitError like `decided`."""
        found = self._select(
            "SELECT version, run, sequence FROM decided WHERE model = ? AND version < ? ORDER BY sequence DESC LIMIT 1",
            model,
            version,
        )
        return LiveVersion(*found[0]) if found else None

    def drained(self) -> Drained:
        """Return the drained nodes with their replicas; raises CommitError like `decided`."""
        rows = self._select("SELECT node, replicas FROM drained")
        return {node: frozenset((model, replica) for model, replica in json.loads(found)) for node, found in rows}

    def continues(self, journal: str) -> bool:
        """Whether this is the given journal, or continues it."""
        return journal == self.id or bool(self._select("SELECT 1 FROM continued WHERE id = ?", journal))

    @property
    def is_new(self) -> bool:
        """Whether it holds no decision."""
        return not self._select("SELECT 1 FROM live LIMIT 1")

    def _select(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            return self._db.execute(statement, values).fetchall()
        except sqlite3.Error as exc:
            raise CommitError(f"journal {self._path}: it cannot be read: {exc}") from exc

    def close(self) -> None:
        """Write what is pending, close the file and unlock it."""
        with contextlib.suppress(CommitError):
            self.flush()
        self._db.close()
        self._unlock()

    def _unlock(self) -> None:
        # close the database first: closing any descriptor of a file drops all of the process's locks on it
        if self._lock >= 0:
            with contextlib.suppress(AttributeError):
                self._db.close()
            os.close(self._lock)
            self._lock = -1


_GONE = (0, 0, 0, 0)
_HEAD = b"SQLite format 3\0"


def _grown(before: tuple[int, int, int, int], now: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Return the file's new (place, size, time) if the owner's writes explain it, else the earlier one."""
    is_ours = before == _GONE or (now[:2] == before[:2] and now[2] >= before[2])
    return now if is_ours else before


def _place(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _holder(descriptor: int) -> str:
    """Return which process has locked a file, if the kernel says."""
    found = os.fstat(descriptor)
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if "FLOCK" in words and place in words:
                return f" (pid {words[words.index('WRITE') + 1]})"
    except (OSError, ValueError):
        pass
    return ""


def _advice(error: Exception) -> str:
    """Return advice for an error that is not about space, "" for any other."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return "another program has it open (`fuser` says which) and may not write to it; end that one, then swap again"
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return "move it away: the next one is recovered from what the daemons hold"
    return ""


def _room(path: Path) -> str:
    """Return free space and file size limits for a write error: sqlite reports most as "disk I/O error"."""
    try:
        disk = os.statvfs(path.parent)
    except OSError:
        return ""
    found = f" ({disk.f_bavail * disk.f_frsize} bytes free on its file system"
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY:
        found += f", files may grow to {limit} bytes (RLIMIT_FSIZE)"
    return found + ")"
