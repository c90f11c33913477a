"""The journal in a sqlite file: each swap's decision and the live versions, on disk before anyone acts on them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from refitd.coordinator.journals import SCHEMA_VERSION, Journal, LeadLost
from refitd.errors import CommitError
from refitd.files import check_regular

# How long a write waits if another program has locked the file. The coordinator answers no message during the wait, and
# daemons consider it gone after 5 s.
_LOCKED_S = 2.0


class FileJournal(Journal):
    """A sqlite file with one writer. A durable write is on disk (fsync) when the call returns, and all before it.

    No other process can open it during that time. If it is removed, replaced or changed by others, every later write
    fails.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the journal, readable by its owner only.

        Raises:
            CommitError: the file cannot be written (full disk, read-only), is in use by another coordinator, was
                written by a newer refitd, is damaged, or is not a journal.
        """
        super().__init__()
        self.name = str(path)
        self._path = path
        self._wal = path.with_name(path.name + "-wal")
        self._lock = -1
        self._places = {path: _GONE, self._wal: _GONE}  # (device, inode, bytes, time), as the last write left them
        self._is_tidy = self._syncs = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                check_regular(path)
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
        """Lock the file's inode for the life of this process, also if the file is renamed."""
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
        if schema > SCHEMA_VERSION:
            raise CommitError(
                f"journal {self._path}: a newer refitd has written it (schema {schema}, this one knows "
                f"{SCHEMA_VERSION}); start that version again, or name another file (coordinator.journal)"
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
        db.execute("PRAGMA wal_autocheckpoint=0")  # `_tidy` does it, not a decision
        self._sync(True)
        # a write at every start: a coordinator that cannot write decisions must not begin a swap
        with self._transaction():
            if schema == 1:
                db.execute("ALTER TABLE swaps ADD COLUMN report BLOB NOT NULL DEFAULT x''")
            if schema in (1, 2):
                db.execute("ALTER TABLE swaps ADD COLUMN run TEXT NOT NULL DEFAULT ''")
            self._make_tables(schema)
            db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        (self.id,) = db.execute("SELECT id FROM journal").fetchone()
        locked, self._places[self._path] = os.fstat(self._lock), self._stat(self._path)
        if self._places[self._path][:2] != (locked.st_dev, locked.st_ino):
            raise CommitError(f"journal {self._path}: it was replaced while it was opened; start again")
        self._remember_place()
        self._tidy()

    def _sync(self, syncs: bool) -> None:
        """Sync each change to disk, or only write it: the next synced change makes earlier ones durable, too."""
        if syncs != self._syncs:
            self._db.execute(f"PRAGMA synchronous={'FULL' if syncs else 'NORMAL'}")
            self._syncs = syncs

    @contextlib.contextmanager
    def _writing(self, *, durable: bool = True) -> Iterator[None]:
        """Make one change, after checking that the file is the opened one and unchanged by others."""
        try:
            self._check_place()
        except OSError as exc:
            raise CommitError(f"journal {self._path}: {exc}; make it readable, then swap again") from exc
        self._is_tidy = False
        try:
            self._sync(durable)
            with self._transaction():
                yield
            self._sync(True)  # now, because it would take as long as a message before the next decision
        except (OSError, sqlite3.Error) as exc:
            if getattr(exc, "sqlite_errorcode", sqlite3.SQLITE_OK) in _UNSURE:
                # the change is complete in the -wal: the next coordinator may find it there
                raise LeadLost(f"journal {self._path}: it is not known whether the last write holds: {exc}") from exc
            advice = _advice(exc) or "free disk space, then swap again"
            raise CommitError(f"journal {self._path}: {exc}{_room(self._path)}; {advice}") from exc
        finally:
            self._remember_place()

    def _tidy(self) -> None:
        """Move the content of the -wal into the file: then the loss of the -wal loses no entry.

        Raises:
            CommitError: others have changed the files; a checkpoint would hide that.
        """
        if self._is_tidy:
            return
        self._check_place()
        try:
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")
            # the first write after a checkpoint syncs twice, and should be no decision; a write that changes nothing is
            # none for sqlite
            self._sync(True)
            with self._transaction():
                self._db.execute("UPDATE journal SET sequence = sequence + 1")
                self._db.execute("UPDATE journal SET sequence = sequence - 1")
            self._is_tidy = True
        finally:
            self._remember_place()

    # --- whether it is still the file that was opened -----------------------------------------------------

    def _check_place(self) -> None:
        """Raise CommitError if the files were moved, resized or changed by others."""
        for path, left in self._places.items():
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
        # an emptied file may have grown again. By the descriptor: closing another would drop sqlite's locks
        if (head := os.pread(self._lock, len(_HEAD), 0)) != _HEAD:
            raise CommitError(
                f"journal {self._path}: somebody else has changed it: it begins with {head!r}, expected {_HEAD!r}; "
                "nothing can be decided with it. Start the coordinator again: it recovers what is live from what the "
                "daemons hold"
            )

    def _remember_place(self) -> None:
        # refitd shrinks neither file: keep the earlier place if one was replaced or cut, and the next write fails
        for path, before in self._places.items():
            now = self._stat(path)
            if before == _GONE or (now[:2] == before[:2] and now[2] >= before[2]):
                self._places[path] = now

    @staticmethod
    def _stat(path: Path) -> tuple[int, int, int, int]:
        try:
            found = path.stat()
        except FileNotFoundError:
            return _GONE
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def close(self) -> None:
        """Write what is pending, close the file and unlock it."""
        with contextlib.suppress(CommitError):
            self.flush()
        self._db.close()
        self._unlock()

    def abandon(self) -> None:
        """See Journal.abandon; another coordinator, also of this process, can open the file then."""
        self._unlock()

    def _unlock(self) -> None:
        # close the database first: closing any descriptor of a file drops all of the process's locks on it
        if self._lock >= 0:
            with contextlib.suppress(AttributeError):
                self._db.close()
            os.close(self._lock)
            self._lock = -1


# Errors after which a change may be found in the file.
_UNSURE = (sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC)

_GONE = (0, 0, 0, 0)
_HEAD = b"SQLite format 3\0"


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
