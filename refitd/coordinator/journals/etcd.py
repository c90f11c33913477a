"""The journal in etcd: rows of its tables are keys, each change is one transaction that only the leader can make."""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
import sqlite3
import zlib
from collections.abc import Iterator
from typing import Any

from refitd.config import EtcdPlace
from refitd.coordinator.journals.base import SCHEMA_VERSION, Journal, LeadLost
from refitd.coordinator.journals.gateway import Gateway, Json, NotReached, Refused, decoded, encoded, number
from refitd.coordinator.journals.lead import Lead, ranged
from refitd.errors import CommitError
from refitd.text import brief, printable

# How long a write may take, all tries together: an election among etcd's members takes 1 to 2 s. No message is answered
# meanwhile, and daemons consider a coordinator gone after 5 s.
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
}
_COLUMNS = {
    "swaps": ("rowid", "swap", "model", "version", "state", "plan", "reason", "at", "report", "run"),
    "live": ("model", "version", "run", "sequence", "swap", "at"),
    "numbers": ("model", "decided", "tried", "tried_run"),
    "decided": ("model", "version", "run", "sequence"),
    "journal": ("one", "id", "sequence"),
    "continued": ("id",),
    "drained": ("node", "replicas", "at"),
}
_REPORT = _COLUMNS["swaps"].index("report")


class EtcdJournal(Journal):
    """A journal in etcd, of which this process holds a copy in memory while it leads.

    A transaction succeeds only if this process still leads (the leader's key has the revision at which it took the
    lead) and nothing was written since this process's last write. So a request that etcd executes late or twice has no
    effect, and neither has one of a replaced leader.
    """

    # Every new leader reads all of this, and etcd keeps it in memory: it is not an archive.
    kept = 1000

    def __init__(self, lead: Lead, place: EtcdPlace, cluster: str) -> None:
        """Read everything, and write once.

        Args:
            lead: taken by this process.
            place: where it is.
            cluster: the coordinator's public key, which its standbys share; "" without keys.

        Raises:
            CommitError: etcd does not answer, is full, holds something else at this prefix, the journal of another
                cluster, or one that a newer refitd has written.
            LeadLost: another coordinator leads meanwhile.
        """
        super().__init__()
        self.name, self._lead, self._prefix = str(place), lead, place.prefix
        self._puts: list[Json] = []  # written with the next change
        self._last_write = 0  # revision of this process's last write; 0: none yet
        self._lost = ""  # why no more may be written; "": it may
        self._db = sqlite3.connect(":memory:", isolation_level=None)
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
            changes = [self._changed(table, json.loads(key)) for table, key in self._changes()]
            self._db.execute("DELETE FROM changed")
            operations, self._puts = [*self._puts, *changes], []
            self._carry_out(operations)

    def _changes(self) -> list[tuple[Any, ...]]:
        return self._db.execute("SELECT name, key FROM changed ORDER BY name, key").fetchall()

    def _changed(self, table: str, key: list[Any]) -> Json:
        """Return the operation that updates etcd's key of a row."""
        where = " AND ".join(f"{name} = ?" for name in _KEYS[table])
        row = self._db.execute(f"SELECT {', '.join(_COLUMNS[table])} FROM {table} WHERE {where}", key).fetchone()
        if row is None:
            return {"request_delete_range": {"key": encoded(self._key(table, key))}}
        values = list(row)
        if table == "swaps":
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
            answer = self._lead.gateway.ask("kv/txn", body, WRITE_S)
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
        """Renew the lease when that is due; see Journal.guard."""
        self._lead.renew()

    def close(self) -> None:
        """Write what is pending, and let another coordinator lead at once."""
        with contextlib.suppress(CommitError, LeadLost):
            self.flush()
        self._db.close()
        self._lead.release()


def check_place(gateway: Gateway, place: EtcdPlace, cluster: str) -> None:
    """Check that what etcd holds at this place, if anything, may be continued by this coordinator; for standbys.

    Raises:
        CommitError: as `check_format`; or etcd does not answer.
    """
    key = encoded(f"{place.prefix}/format".encode())
    for found in gateway.ask("kv/range", {"key": key}, PAGE_S).get("kvs") or ():
        check_format(str(place), decoded(found.get("value")), cluster)


def check_format(name: str, value: bytes, cluster: str) -> None:
    """Check that a journal, whose key `format` has this value, may be continued by this coordinator.

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
