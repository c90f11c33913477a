"""The records of journals, their interface, and their tables."""

from __future__ import annotations

import contextlib
import json
import secrets
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from refitd.errors import CommitError
from refitd.protocol.reports import LostNode, SwapReport

# --- records ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SwapRecord:
    """One swap in the journal."""

    swap: str
    model: str
    version: int
    state: str
    plan: str
    reason: str
    at: float
    report: bytes = b""
    run: str = ""

    @property
    def is_decided(self) -> bool:
        """Whether the swap was decided to commit."""
        return self.state != "aborted"

    def written_report(self) -> SwapReport | None:
        """Return the recorded report; None if it is missing, or another version of refitd wrote it."""
        try:
            return msgspec.json.decode(self.report, type=SwapReport) if self.report else None
        except msgspec.DecodeError:  # the record itself has the decision; a coordinator must start without the report
            return None


@dataclass(frozen=True, slots=True)
class LiveVersion:
    """The version of a model that was decided last; number and run identify it.

    `sequence` increases with every decision, also across journals that continue each other.
    """

    version: int
    run: str = ""
    sequence: int = 0
    swap: str = ""

    def is_at(self, version: int | None, run: str) -> bool:
        """Whether this is the given version of the given run."""
        return version == self.version and run == self.run

    def __str__(self) -> str:
        return f"{self.version} (run {self.run})" if self.run else str(self.version)


# node -> (model, replica) of each replica that has, or had, a rank or its controller on this drained node
Drained = dict[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class Drain:
    """A drained node, with its replicas as (model, replica); None: it takes part again."""

    node: str
    replicas: frozenset[tuple[str, str]] | None


@dataclass(frozen=True, slots=True)
class Recovered:
    """A live version that daemons know and this journal does not; `continues` is the journal that it came from."""

    model: str
    live: LiveVersion
    continues: str
    at: float
    highest: int = -1  # of all versions that were ever live


@dataclass(frozen=True, slots=True)
class KnownNode:
    """A node that is connected, or lost: `described.reason` is why, "" while it is connected. None: it is forgotten.

    `heard` is its last heartbeat, in seconds since the epoch; of a connected node, when it connected.
    """

    node: str
    described: LostNode | None
    heard: float = 0.0


# --- tables ----------------------------------------------------------------------------------------------

SCHEMA_VERSION = 3  # of the schema; 1 had no reports, 2 no runs and no tables but `swaps`

SCHEMA = """
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
CREATE TABLE IF NOT EXISTS nodes (  -- which are connected or lost
    node TEXT PRIMARY KEY,
    described TEXT NOT NULL,  -- JSON: LostNode
    heard REAL NOT NULL
) STRICT, WITHOUT ROWID;
"""

_COLUMNS = "swap, model, version, state, plan, reason, at, report, run"

# Limits: rows of the history, each written twice; and versions of a model that a rollback can find.
KEPT = 10_000

# A decision in so many removes versions beyond `kept`: to look for them takes 3 ms where there are 10,000.
FORGET_EVERY = 50

# Peers also report sequences. One above this is a mistake and must not exhaust the numbers.
MAX_SEQUENCE = 1 << 53


class LeadLost(Exception):
    """This coordinator must send no more messages: another may lead, or the outcome of its last write is unknown."""


class Journal(ABC):
    """Decisions and live versions, in sqlite tables that one process writes.

    A write is durable when its call returns, except in `note`. A kind of journal opens `_db` and implements `_writing`;
    reads never leave this process.

    Attributes:
        id: which journal this is.
        name: in errors and logs.
        kept: swaps of the history, each written twice; and versions of a model that a rollback can find.
        is_remote: writes take a network's time. One thread makes them all, and another one reads.
    """

    _db: sqlite3.Connection
    id: str
    name: str
    kept = KEPT
    is_remote = False

    def __init__(self) -> None:
        self._late: list[SwapRecord | Recovered | KnownNode] = []

    def __deepcopy__(self, memo: object) -> Self:
        """Return this journal: copies of a coordinator's state only read it."""
        return self

    @abstractmethod
    def _writing(self, *, durable: bool = True) -> contextlib.AbstractContextManager[None]:
        """Make one change of the tables durable, completely or not at all.

        Without `durable` it may become so with the next durable change, or the next `_tidy`.

        Raises:
            CommitError: it was not written.
            LeadLost: it cannot be known, or another coordinator leads.
        """

    def _tidy(self) -> None:  # noqa: B027 - most kinds need none
        """Make everything durable, and prepare the next write."""

    def guard(self) -> None:  # noqa: B027
        """Renew the right to write; called by the coordinator's loop each second, and after a stop of the process.

        Raises:
            LeadLost: it is gone.
        """

    @abstractmethod
    def close(self) -> None:
        """Write what is pending, and leave the journal to others."""

    def abandon(self) -> None:
        """Let go of the journal without writing; called at the end, also after `close`."""
        self._db.close()

    def _make_tables(self, schema: int) -> None:
        """Create what is missing, inside a transaction; `schema` is the version found, 0 for none."""
        for statement in SCHEMA.split(";\n"):
            if statement.strip():
                self._db.execute(statement)
        self._db.execute("INSERT OR IGNORE INTO journal VALUES (1, ?, 0)", (secrets.token_hex(8),))
        if schema in (1, 2):
            self._take_over_history()

    def _take_over_history(self) -> None:
        """Fill the live table of an older schema from its history: each model's last decided row."""
        rows = self._db.execute(
            "SELECT model, version, swap, at, state != 'aborted' FROM swaps ORDER BY rowid"
        ).fetchall()
        for model, version, swap, at, was_decided in rows:
            if was_decided:
                self._make_live(model, LiveVersion(version, swap=swap), at, is_new=True)
            else:
                self._tried(model, version, "")

    # --- writing ------------------------------------------------------------------------------------------

    def write(self, *records: SwapRecord) -> list[int]:
        """Insert or replace records durably, all or none; a decision also updates what is live.

        Returns:
            The sequence of each decision; 0 for another record.

        Raises:
            CommitError: the disk is full, or the file was removed or changed by others; do not act on the decision
                then.
        """
        if self._late:
            self.note()
        with self._writing():
            return [self._insert(record) for record in records]

    def note(self, *entries: SwapRecord | Recovered | KnownNode) -> None:
        """Write how a swap ended, a recovered live version, or a node. On failure keep it and write it first next time.

        How a swap ended is durable with the next `write` or `flush`: one whose end a power failure has taken was
        decided, and is finished again.

        Raises:
            CommitError: as in `write`; the entry is kept.
        """
        self._late += entries
        del self._late[:-KEPT]
        while self._late:
            entry = self._late[0]
            if isinstance(entry, SwapRecord):
                with self._writing(durable=False):
                    self._insert(entry)
            elif isinstance(entry, KnownNode):
                with self._writing(durable=False):
                    self._know(entry)
            else:
                self._recover(entry)
            del self._late[0]

    def flush(self) -> None:
        """Write the entries that `note` could not write, and make all durable; called each second.

        Raises:
            CommitError: they still cannot be written.
        """
        self.note()
        with contextlib.suppress(sqlite3.Error, CommitError):  # the next write reports the problem
            self._tidy()

    def set_drain(self, drain: Drain, at: float) -> None:
        """Write durably that a node is drained, or no longer, at this time (seconds since the epoch).

        Raises:
            CommitError: as in `write`; the journal is unchanged.
        """
        with self._writing():
            if drain.replicas is None:
                self._db.execute("DELETE FROM drained WHERE node = ?", (drain.node,))
            else:
                found = (drain.node, json.dumps(sorted(drain.replicas)), at)
                self._db.execute("INSERT OR REPLACE INTO drained VALUES (?, ?, ?)", found)

    def _know(self, entry: KnownNode) -> None:
        if entry.described is None:
            self._db.execute("DELETE FROM nodes WHERE node = ?", (entry.node,))
        else:
            found = (entry.node, msgspec.json.encode(entry.described).decode(), entry.heard)
            self._db.execute("INSERT OR REPLACE INTO nodes VALUES (?, ?, ?)", found)

    def _insert(self, r: SwapRecord) -> int:
        """Insert a record; return the sequence of the decision, 0 if it is none."""
        self._db.execute(
            f"INSERT OR REPLACE INTO swaps ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (r.swap, r.model, r.version, r.state, r.plan, r.reason, r.at, r.report, r.run),
        )
        if r.state == "decided":
            return self._make_live(r.model, LiveVersion(r.version, r.run, swap=r.swap), r.at, is_new=True)
        newest = "(SELECT max(rowid) FROM swaps)"
        self._db.execute(f"DELETE FROM swaps WHERE rowid <= {newest} - ?", (2 * self.kept,))
        if r.state == "aborted":
            self._tried(r.model, r.version, r.run)
        return 0

    def _make_live(self, model: str, live: LiveVersion, at: float, *, is_new: bool = False) -> int:
        """Make a version live, with the next sequence if it `is_new`; return its sequence."""
        sequence = live.sequence
        if is_new:
            self._db.execute("UPDATE journal SET sequence = sequence + 1")
            (sequence,) = self._db.execute("SELECT sequence FROM journal").fetchone()
        found = (model, live.version, live.run, sequence)
        self._db.execute("INSERT OR REPLACE INTO live VALUES (?, ?, ?, ?, ?, ?)", (*found, live.swap, at))
        self._db.execute("INSERT OR REPLACE INTO decided VALUES (?, ?, ?, ?)", found)
        self._db.execute(
            "INSERT INTO numbers (model, decided) VALUES (?1, ?2) ON CONFLICT DO UPDATE SET decided = max(decided, ?2)",
            (model, live.version),
        )
        if sequence % FORGET_EVERY == 0:
            for (each,) in self._db.execute("SELECT model FROM live").fetchall():
                self._db.execute(
                    "DELETE FROM decided WHERE model = ?1 AND sequence < "
                    "(SELECT sequence FROM decided WHERE model = ?1 ORDER BY sequence DESC LIMIT 1 OFFSET ?2)",
                    (each, self.kept),
                )
        return int(sequence)

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
            self._make_live(entry.model, entry.live, entry.at)
            self._db.execute(
                "UPDATE numbers SET decided = max(decided, ?) WHERE model = ?", (entry.highest, entry.model)
            )

    # --- reading ------------------------------------------------------------------------------------------

    def decided(self, swap: str) -> SwapRecord | None:
        """Return the record of a swap that was decided to commit, else None.

        Raises:
            CommitError: the file cannot be read.
        """
        found = self._select(f"SELECT {_COLUMNS} FROM swaps WHERE swap = ? AND state != 'aborted'", swap)
        return SwapRecord(*found[0]) if found else None

    def recent(self, model: str, limit: int) -> list[SwapRecord]:
        """Return a model's last swaps ("": all models'), the newest first; raises CommitError like `decided`."""
        rows = self._select(
            f"SELECT {_COLUMNS} FROM swaps WHERE model = ?1 OR ?1 = '' ORDER BY rowid DESC LIMIT ?2", model, limit
        )
        return [SwapRecord(*row) for row in rows]

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

    def nodes(self) -> list[KnownNode]:
        """Return the nodes that were connected or lost, the longest lost first; raises CommitError like `decided`."""
        rows = self._select("SELECT node, described, heard FROM nodes ORDER BY heard")
        found = []
        for node, described, heard in rows:
            with contextlib.suppress(msgspec.DecodeError):  # another version of refitd wrote it
                found.append(KnownNode(node, msgspec.json.decode(described, type=LostNode), heard))
        return found

    def continues(self, journal: str) -> bool:
        """Whether this is the given journal, or continues it."""
        return journal == self.id or bool(self._select("SELECT 1 FROM continued WHERE id = ?", journal))

    @property
    def is_new(self) -> bool:
        """Whether it holds no decision."""
        return not self._select("SELECT 1 FROM live LIMIT 1")

    def _select(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            return self._readable().execute(statement, values).fetchall()
        except sqlite3.Error as exc:
            raise CommitError(f"journal {self.name}: it cannot be read: {exc}") from exc

    def _readable(self) -> sqlite3.Connection:
        """Return the tables to read from."""
        return self._db

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
