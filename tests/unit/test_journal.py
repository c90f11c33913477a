"""The journal keeps decisions across lives."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from refitd.commit.journal import Journal, Record
from refitd.errors import CommitError

DECIDED = Record("s1", "policy", 4, "decided", "plan", "", 1.0)


def test_a_decision_is_found_by_the_next_life(tmp_path: Path) -> None:
    path = tmp_path / "dir" / "journal.sqlite"
    journal = Journal(path)
    journal.write(DECIDED)
    # the first life ends without closing anything
    assert Journal(path).decided("s1") == DECIDED
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_aborted_swap_was_not_decided(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.write(Record("s1", "policy", 4, "aborted", "", "worker died", 1.0))
    assert journal.decided("s1") is None
    assert journal.decided("unknown") is None


def test_a_file_that_is_no_journal_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_text("this is not a database, and it is long enough to look like one" * 20)
    with pytest.raises(CommitError, match=r"journal .*j: file is not a database"):
        Journal(path)


def test_recent_swaps_come_newest_first_of_one_model_or_all(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.write(DECIDED)
    journal.write(Record("s2", "other", 1, "aborted", "", "no", 2.0))
    journal.write(replace(DECIDED, state="committed", report=b"{}"))
    assert [(r.swap, r.state, r.is_decided) for r in journal.recent("", 5)] == [
        ("s1", "committed", True),
        ("s2", "aborted", False),
    ]
    assert [r.swap for r in journal.recent("policy", 5)] == ["s1"]
    assert [r.swap for r in journal.recent("", 1)] == ["s1"]


def test_what_cannot_be_written_is_written_before_anything_later(tmp_path: Path) -> None:
    class Disk(Journal):
        full = False

        def _write(self, record: Record) -> None:
            if self.full:
                raise CommitError("full")
            super()._write(record)

    journal = Disk(tmp_path / "j")
    journal.write(DECIDED)
    journal.full = True
    for ended in (replace(DECIDED, state="committed"), Record("s2", "policy", 5, "aborted", "", "no", 2.0)):
        with pytest.raises(CommitError):
            journal.note(ended)
    with pytest.raises(CommitError):
        journal.write(replace(DECIDED, swap="s3", version=6))
    journal.full = False
    journal.write(replace(DECIDED, swap="s4", version=7))
    found = [(r.swap, r.state) for r in journal.recent("policy", 9)]
    assert found == [("s4", "decided"), ("s2", "aborted"), ("s1", "committed")]
    journal.close()


def test_a_journal_of_an_earlier_version_is_read_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "j"
    old = sqlite3.connect(path, isolation_level=None)
    old.execute(
        "CREATE TABLE swaps (swap TEXT PRIMARY KEY, model TEXT NOT NULL, version INTEGER NOT NULL, state TEXT NOT NULL,"
        " plan TEXT NOT NULL DEFAULT '', reason TEXT NOT NULL DEFAULT '', at REAL NOT NULL) STRICT"
    )
    old.execute("INSERT INTO swaps VALUES ('s1', 'policy', 4, 'decided', 'plan', '', 1.0)")
    old.execute("PRAGMA user_version=1")
    old.close()
    journal = Journal(path)
    assert journal.decided("s1") == DECIDED
    journal.write(replace(DECIDED, state="committed", report=b"{}"))
    assert Journal(path).recent("", 1)[0].report == b"{}"


def test_a_journal_keeps_the_last_swaps_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refitd.commit.journal.KEPT", 3)
    journal = Journal(tmp_path / "j")
    for number in range(20):
        journal.write(Record(f"s{number}", "policy", number, "decided", "", "", 1.0))
        journal.write(Record(f"s{number}", "policy", number, "committed", "", "", 1.0))
    kept = [r.version for r in journal.recent("", 100)]
    assert kept[:3] == [19, 18, 17] and len(kept) <= 6
