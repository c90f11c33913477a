"""The journal in etcd, and the election of the coordinator that leads.

Rows of the journal's tables are keys. Each change is one transaction, which only the leader can make: the lead is a key
that is bound to its owner's lease, and every transaction compares that key's revision.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import secrets
import socket
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from refitd.config import EtcdPlace
from refitd.coordinator.journals import SCHEMA_VERSION, Journal, LeadLost
from refitd.coordinator.journals.gateway import Gateway, Json, NotReached, Refused, decoded, encoded, number
from refitd.errors import CommitError
from refitd.text import brief, printable

# How long a leader that etcd does not hear remains leader; etcd grants at least 2 s. A leader that cannot renew its
# lease stops before etcd lets another one lead.
LEASE_S = 5

# Seconds between renewals of the lease, and the longest wait of the coordinator's loop for one.
RENEW_S, RENEWING_S = 1.0, 0.9

# How often a standby tries to take the lead, and how long it waits for the answers.
LOOK_S, LOOKING_S = 0.5, 2.0

# How long a write may take, all tries together: an election among etcd's members takes 1 to 2 s.
WRITE_S = 3.5

# How long reading each page may take, in seconds, and limits on the journal's size.
PAGE_S, PAGE = 5.0, 500
MAX_BYTES = 256 << 20
MAX_REPORT_BYTES = 64 << 20

# Primary keys and columns of the tables in etcd; a swap's row number orders the history.
_KEYS = {
    "swaps": ("swap",),
    "live": ("model",),
    "numbers": ("model",),
    "decided": ("model", "version"),
    "journal": ("one",),
    "continued": ("id",),
    "drained": ("node",),
    "nodes": ("node",),
}
_COLUMNS = {
    "swaps": ("rowid", "swap", "model", "version", "state", "plan", "reason", "at", "report", "run"),
    "live": ("model", "version", "run", "sequence", "swap", "at"),
    "numbers": ("model", "decided", "tried", "tried_run"),
    "decided": ("model", "version", "run", "sequence"),
    "journal": ("one", "id", "sequence"),
    "continued": ("id",),
    "drained": ("node", "replicas", "at"),
    "nodes": ("node", "described", "heard"),
}
_REPORT = _COLUMNS["swaps"].index("report")

# A table, the primary key of a row, and its columns; None: it was deleted.
_Row = tuple[str, list[Any], list[Any] | None]


class EtcdJournal(Journal):
    """A journal in etcd. This process has a copy in memory while it leads.

    A transaction succeeds only if this process still leads (the leader's key has the revision at which it took the
    lead) and no other write has followed this process's last write. So a request that etcd executes late or twice has
    no effect, and neither has one of a replaced leader.

    After `__init__` one thread writes, and another one reads and renews the lead. The reading thread has its own copy
    of the tables, which gets the rows of each write once etcd has them.
    """

    # Every new leader reads all of this, and etcd keeps it in memory: it is not an archive.
    kept = 1000
    is_remote = True

    def __init__(self, lead: Lead, place: EtcdPlace, cluster: str) -> None:
        """Read everything, and write once.

        Args:
            lead: taken by this process.
            place: where it is.
            cluster: the coordinator's public key, which its standbys share; "" without keys.

        Raises:
            CommitError: etcd does not answer, is full, has other keys at this prefix, the journal of another cluster,
            or the journal of a newer refitd.
            LeadLost: another coordinator leads.
        """
        super().__init__()
        self.name, self._lead, self._prefix = str(place), lead, place.prefix
        self._gateway = lead.gateway.another()
        self._fresh: queue.SimpleQueue[list[_Row]] = queue.SimpleQueue()  # rows that `_copy` lacks
        self._puts: list[Json] = []  # written with the next change
        self._last_write = 0  # revision of this process's last write; 0: none yet
        self._lost = ""  # why writes are refused; "": they are not
        self._db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._copy = sqlite3.connect(":memory:", isolation_level=None)
        try:
            with self._transaction():
                self._make_tables(SCHEMA_VERSION)
                self._db.execute("DELETE FROM journal")
            self._note_changes()
            has_format = self._load(cluster)
            with self._writing():
                self._make_tables(SCHEMA_VERSION)
                if not has_format:
                    self._puts = [self._put("format", json.dumps({"schema": SCHEMA_VERSION, "cluster": cluster}))]
        except sqlite3.Error as exc:
            raise CommitError(f"journal {self.name}: its rows do not fit: {exc}; {self._other()}") from exc
        (self.id,) = self._db.execute("SELECT id FROM journal").fetchone()
        self._db.backup(self._copy)
        self._readable()

    # --- loading ------------------------------------------------------------------------------------------

    def _load(self, cluster: str) -> bool:
        """Fill the tables; return whether the journal existed."""
        size, start, has_format = 0, f"{self._prefix}/".encode(), False
        end = encoded(f"{self._prefix}0".encode())  # the character after the slash
        with self._transaction():
            while True:
                self._lead.renew()
                body = {"key": encoded(start), "range_end": end, "limit": str(PAGE)}
                answer = self._lead.gateway.ask("kv/range", body, PAGE_S)
                for found in answer.get("kvs") or ():
                    key, value = decoded(found.get("key")), decoded(found.get("value"))
                    size += len(key) + len(value)
                    if size > MAX_BYTES:
                        raise CommitError(f"journal {self.name}: more than {MAX_BYTES} bytes; {self._other()}")
                    has_format |= self._take_in(key, value, number(found.get("mod_revision")), cluster)
                    start = key + b"\0"
                if not answer.get("more"):
                    break
            self._db.execute("DELETE FROM changed")
        return has_format

    def _take_in(self, key: bytes, value: bytes, revision: int, cluster: str) -> bool:
        """Load one key; return whether it is the format key, which describes the others."""
        name = key.decode(errors="replace").removeprefix(f"{self._prefix}/")
        table, _, _ = name.partition("/")
        if name == "format":
            check_format(self.name, value, cluster)
            return True
        if name == "write":
            self._last_write = revision
        elif table in _COLUMNS:
            row = self._row(table, key, value)
            marks = ", ".join("?" * len(row))
            self._db.execute(f"INSERT INTO {table} ({', '.join(_COLUMNS[table])}) VALUES ({marks})", row)
        elif name != "leader":
            raise CommitError(f"journal {self.name}: it holds the key {printable(brief(name))}; {self._other()}")
        return False

    def _row(self, table: str, key: bytes, value: bytes) -> list[Any]:
        columns = _COLUMNS[table]
        try:
            row = json.loads(value)
            if not isinstance(row, list) or len(row) != len(columns):
                raise ValueError(f"{len(columns)} columns are expected")
            if table == "swaps":
                unpacker = zlib.decompressobj()
                row[_REPORT] = unpacker.decompress(base64.b64decode(row[_REPORT]), MAX_REPORT_BYTES)
                if unpacker.unconsumed_tail:
                    raise ValueError(f"a report of more than {MAX_REPORT_BYTES} bytes")
            if self._key(table, [row[columns.index(name)] for name in _KEYS[table]]) != key:
                raise ValueError("its key belongs to another row")
        except (ValueError, TypeError, zlib.error) as exc:
            raise CommitError(
                f"journal {self.name}: the value of {printable(key.decode(errors='replace'))} is damaged: {exc}; "
                "restore etcd from a snapshot, or name an empty prefix: what is live is then recovered from the daemons"
            ) from exc
        return row

    def _other(self) -> str:
        return "another program's, it seems: name a prefix of this cluster's own in coordinator.journal"

    # --- writing ------------------------------------------------------------------------------------------

    def _note_changes(self) -> None:
        """Make sqlite record every changed row in the table `changed`."""
        self._db.execute("CREATE TEMP TABLE changed (name TEXT, key TEXT, PRIMARY KEY (name, key))")
        for table, key in _KEYS.items():
            for action, row in (("INSERT", "NEW"), ("UPDATE", "NEW"), ("DELETE", "OLD")):
                columns = ", ".join(f"{row}.{name}" for name in key)
                self._db.execute(
                    f"CREATE TEMP TRIGGER {action}_{table} AFTER {action} ON main.{table} BEGIN "
                    f"INSERT OR IGNORE INTO changed VALUES ('{table}', json_array({columns})); END"
                )

    @contextlib.contextmanager
    def _writing(self, *, durable: bool = True) -> Iterator[None]:
        with self._transaction():
            yield
            rows = [self._row_of(table, json.loads(key)) for table, key in self._changes()]
            self._db.execute("DELETE FROM changed")
            operations, self._puts = [*self._puts, *map(self._operation, rows)], []
            self._carry_out(operations)
        self._fresh.put(rows)

    def _readable(self) -> sqlite3.Connection:
        while not self._fresh.empty():
            for table, key, values in self._fresh.get():
                where = " AND ".join(f"{name} = ?" for name in _KEYS[table])
                self._copy.execute(f"DELETE FROM {table} WHERE {where}", key)
                if values is not None:
                    marks = ", ".join("?" * len(values))
                    columns = ", ".join(_COLUMNS[table])
                    self._copy.execute(f"INSERT OR REPLACE INTO {table} ({columns}) VALUES ({marks})", values)
        return self._copy

    def _changes(self) -> list[tuple[Any, ...]]:
        return self._db.execute("SELECT name, key FROM changed ORDER BY name, key").fetchall()

    def _row_of(self, table: str, key: list[Any]) -> _Row:
        """Return a row that has changed."""
        where = " AND ".join(f"{name} = ?" for name in _KEYS[table])
        row = self._db.execute(f"SELECT {', '.join(_COLUMNS[table])} FROM {table} WHERE {where}", key).fetchone()
        return table, key, None if row is None else list(row)

    def _operation(self, row: _Row) -> Json:
        """Return the operation that updates etcd's key of a row."""
        table, key, values = row
        if values is None:
            return {"request_delete_range": {"key": encoded(self._key(table, key))}}
        if table == "swaps":
            values = list(values)
            values[_REPORT] = base64.b64encode(zlib.compress(values[_REPORT], 1)).decode()
        value = json.dumps(values, ensure_ascii=False).encode()
        return {"request_put": {"key": encoded(self._key(table, key)), "value": encoded(value)}}

    def _key(self, table: str, key: list[Any]) -> bytes:
        return f"{self._prefix}/{table}/{json.dumps(key, ensure_ascii=False, separators=(',', ':'))}".encode()

    def _put(self, name: str, value: str) -> Json:
        return {"request_put": {"key": encoded(f"{self._prefix}/{name}".encode()), "value": encoded(value.encode())}}

    def _carry_out(self, operations: list[Json]) -> None:
        """Execute operations in etcd, all or none.

        Raises:
            CommitError: it did not and never will.
            LeadLost: another one leads, or it is not known whether etcd has carried them out.
        """
        if self._lost:
            raise LeadLost(self._lost)
        self._lead.check()
        mark = secrets.token_hex(8)
        leader, last = encoded(self._lead.key), encoded(f"{self._prefix}/write".encode())
        body = {
            "compare": [
                {"key": leader, "target": "CREATE", "result": "EQUAL", "create_revision": str(self._lead.revision)},
                {"key": last, "target": "MOD", "result": "EQUAL", "mod_revision": str(self._last_write)},
            ],
            "success": [*operations, self._put("write", mark)],
            "failure": [{"request_range": {"key": leader}}, {"request_range": {"key": last}}],
        }
        try:
            answer = self._gateway.ask("kv/txn", body, WRITE_S)
        except (NotReached, Refused) as exc:
            if exc.may_hold:
                # the outcome is unknown: etcd may still execute it. The next leader reads what happened
                raise self._lose(f"it is not known whether the last write holds: {exc}") from exc
            raise
        if answer.get("succeeded"):
            self._last_write = number(answer["header"]["revision"])
            return
        leads, written = ranged(answer, 0), ranged(answer, 1)
        if leads is None or number(leads.get("create_revision")) != self._lead.revision:
            raise self._lose("another coordinator leads, or may: this one's lease in etcd has run out")
        if written is None or decoded(written.get("value")) != mark.encode():
            raise self._lose("somebody else has written to this journal, whose leader this coordinator is")
        self._last_write = number(written.get("mod_revision"))  # an earlier try of this very request was carried out

    def _lose(self, reason: str) -> LeadLost:
        self._lost = f"journal {self.name}: {reason}"
        return LeadLost(self._lost)

    def guard(self) -> None:
        """Renew the lease when that is due, and take in what was written; see Journal.guard."""
        self._lead.renew()
        self._readable()

    def close(self) -> None:
        """Write the pending entries, and let another coordinator lead now."""
        with contextlib.suppress(CommitError, LeadLost):
            self.flush()
        self._db.close()
        self._lead.release()

    def abandon(self) -> None:
        """Leave the journal without writing; called at the end, also after `close`."""
        # the writing thread may still use the tables, and closing them under it can end the process
        self._gateway.close()


def check_place(gateway: Gateway, place: EtcdPlace, cluster: str) -> None:
    """Check that this coordinator may continue the journal at this place, if one exists; for standbys.

    Raises:
        CommitError: as `check_format`; or etcd does not answer.
    """
    key = encoded(f"{place.prefix}/format".encode())
    for found in gateway.ask("kv/range", {"key": key}, PAGE_S).get("kvs") or ():
        check_format(str(place), decoded(found.get("value")), cluster)


def check_format(name: str, value: bytes, cluster: str) -> None:
    """Check that this coordinator may continue a journal whose key `format` has this value.

    Raises:
        CommitError: it is another cluster's, or a newer refitd has written it.
    """
    try:
        found = json.loads(value)
        schema, whose = int(found["schema"]), str(found["cluster"])
    except (ValueError, KeyError, TypeError) as exc:
        raise CommitError(
            f"journal {name}: its key format holds {printable(value[:60].decode(errors='replace'))!r}; another "
            "program's, it seems: name a prefix of this cluster's own in coordinator.journal"
        ) from exc
    if schema > SCHEMA_VERSION:
        raise CommitError(
            f"journal {name}: a newer refitd has written it (schema {schema}, this one knows {SCHEMA_VERSION}); start "
            "that version again, or name another prefix (coordinator.journal)"
        )
    if whose != cluster:
        raise CommitError(
            f"journal {name}: it belongs to a cluster whose coordinators have the key {printable(whose) or 'none'}, "
            f"and this one's is {cluster or 'none'}. A standby needs the coordinator's own key (security.key); another "
            "cluster needs a prefix of its own (coordinator.journal). If the coordinators' key was changed, remove the "
            "key `format` under the prefix with etcdctl while none runs, and start one"
        )


# --- the lead ---------------------------------------------------------------------------------------------


def boot_clock() -> float:
    """Return seconds that no clock adjustment changes and that go on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lead:
    """The right to write one journal. It is tried for until `attempt` returns "", and kept by `renew`.

    Attributes:
        gateway: the way to etcd.
        key: the leader's key in etcd.
        revision: the revision at which this process took the lead, which every write is compared with; 0 before.
    """

    def __init__(
        self, gateway: Gateway, place: EtcdPlace, endpoint: str, clock: Callable[[], float] = boot_clock
    ) -> None:
        """`endpoint` is where this coordinator will listen, for people."""
        self.gateway, self.key, self.revision = gateway, f"{place.prefix}/leader".encode(), 0
        self._clock = clock
        me = {"endpoint": endpoint, "host": socket.gethostname(), "pid": os.getpid()}
        self._value = json.dumps(me).encode()
        self._lease = 0
        self._until = self._renewed = 0.0

    def attempt(self) -> str:
        """Take the lead if it is free; return the name of the leader, "" if it is this process.

        Raises:
            NotReached: etcd does not answer; try again.
            Refused: etcd refuses, for a reason that does not pass by itself.
        """
        found = self.gateway.ask("kv/range", {"key": encoded(self.key)}, LOOKING_S).get("kvs")
        if found and not self._is_mine(found[0]):
            return _named(found[0])
        if found:  # an attempt whose answer was lost
            self.revision = number(found[0].get("create_revision"))
        else:
            asked = self._clock()
            granted = self.gateway.ask("lease/grant", {"TTL": str(LEASE_S)}, LOOKING_S)
            self._lease, self._until = number(granted.get("ID")), asked + LEASE_S
            if other := self._take():
                return other
        self._renewed = -RENEW_S
        self.renew()
        return ""

    def _take(self) -> str:
        key, value = encoded(self.key), encoded(self._value)
        body = {
            "compare": [{"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}],
            "success": [{"request_put": {"key": key, "value": value, "lease": str(self._lease)}}],
            "failure": [{"request_range": {"key": key}}],
        }
        answer = self.gateway.ask("kv/txn", body, LOOKING_S)
        if answer.get("succeeded"):
            self.revision = number(answer["header"]["revision"])
            return ""
        found = ranged(answer, 0)
        if found is None:
            return "nobody yet"  # the key was removed between comparing and reading
        if not self._is_mine(found):
            return _named(found)
        self.revision = number(found.get("create_revision"))
        return ""

    def _is_mine(self, found: Json) -> bool:
        return bool(self._lease) and number(found.get("lease")) == self._lease

    def renew(self) -> None:
        """Renew the lease if that is due; call it each second.

        Raises:
            LeadLost: the lease has run out, or will before it can be renewed.
        """
        self.check()
        now = self._clock()
        if now - self._renewed < RENEW_S:
            return
        self._renewed = now
        try:
            answer = self.gateway.ask("lease/keepalive", {"ID": str(self._lease)}, RENEWING_S)
        except (NotReached, Refused):
            self.check()
            return
        if not number(answer.get("TTL")):
            raise LeadLost("etcd has let this coordinator's lease run out; another one may lead")
        self._until = now + LEASE_S  # etcd's count starts later
        self.check()

    def check(self) -> None:
        """Raise LeadLost if the lease may have run out."""
        if (late_s := self._clock() - self._until) >= 0:
            raise LeadLost(
                f"this coordinator's lease in etcd ran out {late_s:.1f} s ago: it was stopped, or cut off from etcd; "
                "another one may lead"
            )

    def release(self) -> None:
        """Let another coordinator lead now, if etcd answers."""
        if self._lease:
            with contextlib.suppress(CommitError):  # the lease expires by itself
                self.gateway.ask("lease/revoke", {"ID": str(self._lease)}, RENEWING_S)
            self._lease = 0


def ranged(answer: Json, index: int) -> Json | None:
    """Return the key that the `index`-th read of a transaction has found, if any."""
    responses = answer.get("responses") or []
    found = responses[index].get("response_range", {}).get("kvs") if index < len(responses) else None
    return found[0] if found else None


def _named(found: Json) -> str:
    try:
        who = json.loads(decoded(found.get("value")))
        return brief(printable(f"{who['endpoint']} (host {who['host']}, pid {who['pid']})"))
    except (ValueError, KeyError, TypeError):
        return "a process that does not say who it is"
