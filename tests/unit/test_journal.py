"""The journal in a file: earlier versions, damage, second owners. tests/conformance has what all journals do."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from refitd.coordinator.journals.file import FileJournal
from refitd.coordinator.records import LiveVersion, SwapRecord
from refitd.errors import CommitError
from tests.support import programs

CONNECT = (
    "import sys; from pathlib import Path; from refitd.coordinator.journals.file import FileJournal as J; "
    "J(Path(sys.argv[1]))"
)
DECIDED = SwapRecord("s1", "policy", 4, "decided", "plan", "", 1.0)


def ended(journal: FileJournal) -> None:
    """The process ends without closing anything in order: the kernel does."""
    journal._unlock()


def test_a_decision_is_found_by_the_next_life(tmp_path: Path) -> None:
    path = tmp_path / "dir" / "journal.sqlite"
    journal = FileJournal(path)
    journal.write(DECIDED)
    ended(journal)
    assert FileJournal(path).decided("s1") == DECIDED
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_no_journal_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_text("this is not a database, and it is long enough to look like one" * 20)
    with pytest.raises(CommitError, match=r"journal .*j: file is not a database .*; move it away"):
        FileJournal(path)


def test_a_journal_that_another_program_has_locked_says_so_and_not_that_the_disk_is_full(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path / "j")
    other = sqlite3.connect(tmp_path / "j", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(CommitError, match=r"database is locked .*another program has it open") as refused:
        journal.write(DECIDED)
    assert "free disk space" not in str(refused.value)
    other.close()


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
    journal = FileJournal(path)
    assert journal.decided("s1") == DECIDED
    assert journal.live("policy") == LiveVersion(4, "", 1, "s1") and journal.highest("policy") == 4
    journal.write(replace(DECIDED, state="committed", report=b"{}"))
    ended(journal)
    assert FileJournal(path).recent("", 1)[0].report == b"{}"


# --- whose file it is --------------------------------------------------------------------------------------


def other_process(path: Path) -> subprocess.CompletedProcess[str]:
    return programs.run([sys.executable, "-c", CONNECT, str(path)])


@pytest.mark.parametrize("name", ["same", "hard link", "symbolic link"])
def test_a_second_owner_is_refused_by_name_until_the_first_has_ended(tmp_path: Path, name: str) -> None:
    path, other = tmp_path / "j", tmp_path / "j"
    journal = FileJournal(path)
    if name != "same":
        other = tmp_path / "other"
        (os.link if name == "hard link" else os.symlink)(path, other)
    refused = other_process(other)
    assert f"journal {other} is in use by another coordinator (pid {os.getpid()})" in refused.stderr
    with pytest.raises(CommitError, match="in use by another coordinator"):
        FileJournal(other)
    journal.write(DECIDED)  # nobody has taken the lock away with it
    ended(journal)
    assert other_process(path).returncode == 0


def removed(path: Path) -> None:
    path.unlink()


def all_removed(path: Path) -> None:
    for each in path.parent.glob("j*"):
        each.unlink()


def replaced(path: Path) -> None:
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.rename(path)


def truncated(path: Path) -> None:
    os.truncate(path, 0)


def halved(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def garbled(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def wal_garbled(path: Path) -> None:
    garbled(path.with_name("j-wal"))


def wal_truncated(path: Path) -> None:
    truncated(path.with_name("j-wal"))


def wal_removed(path: Path) -> None:
    path.with_name("j-wal").unlink()


DAMAGES = (removed, all_removed, replaced, truncated, halved, garbled, wal_garbled, wal_truncated, wal_removed)


@pytest.mark.parametrize("damage", DAMAGES)
def test_nothing_is_decided_with_a_file_that_is_not_as_it_was_left(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    journal = FileJournal(tmp_path / "j")
    journal.write(DECIDED)
    damage(tmp_path / "j")
    for _ in range(2):
        with pytest.raises(CommitError, match="recovers what is live"):
            journal.write(replace(DECIDED, swap="s2", version=5))
    with pytest.raises(CommitError):
        journal.note(replace(DECIDED, state="committed"))
    journal.close()


@pytest.mark.parametrize("damage", [truncated, halved, garbled])
def test_what_others_change_before_a_checkpoint_is_not_covered_up_by_it(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    journal = FileJournal(tmp_path / "j")
    journal.write(DECIDED)
    damage(tmp_path / "j")
    journal.flush()
    with pytest.raises(CommitError, match="recovers what is live"):
        journal.write(replace(DECIDED, swap="s2", version=5))
    journal.close()


@pytest.mark.parametrize("damage", [wal_garbled, wal_truncated, wal_removed])
def test_what_is_live_does_not_hang_on_the_wal_for_longer_than_a_second(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    journal = FileJournal(tmp_path / "j")
    journal.write(DECIDED)
    journal.note(replace(DECIDED, state="committed"))
    journal.flush()
    kept = (tmp_path / "j-wal").read_bytes()
    journal._unlock()
    (tmp_path / "j-wal").write_bytes(kept)
    damage(tmp_path / "j")
    assert FileJournal(tmp_path / "j").live("policy") == LiveVersion(4, "", 1, "s1")


def test_a_journal_of_a_newer_refitd_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "j"
    newer = sqlite3.connect(path)
    newer.execute("CREATE TABLE swaps (tomorrow TEXT)")
    newer.execute("PRAGMA user_version=99")
    newer.commit()
    newer.close()
    before = path.read_bytes()
    with pytest.raises(CommitError, match=r"a newer refitd has written it .schema 99"):
        FileJournal(path)
    assert path.read_bytes() == before


def test_a_database_of_another_program_is_refused(tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "j")
    other.execute("CREATE TABLE bookmarks (url TEXT)")
    other.commit()
    other.close()
    with pytest.raises(CommitError, match=r"another program .tables bookmarks"):
        FileJournal(tmp_path / "j")


def test_a_damaged_journal_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = FileJournal(path)
    for number in range(200):
        journal.note(replace(DECIDED, swap=f"s{number}", reason="r" * 100))
    journal.close()
    pages = bytearray(path.read_bytes())
    pages[4096 * 4 :] = bytes(len(pages) - 4096 * 4)
    path.write_bytes(pages)
    with pytest.raises(CommitError, match=r"journal .*j: "):
        FileJournal(path)


def test_a_decision_is_synced_when_it_is_written_and_the_end_of_a_swap_with_the_next_one(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path / "j")
    said: list[str] = []
    journal._db.set_trace_callback(said.append)

    def is_synced() -> bool:
        """Whether the last change was synced; what follows a change that was not sets that for the next one."""
        last = len(said) - 1 - said[::-1].index("COMMIT")
        assert not [statement for statement in said[last + 1 :] if not statement.startswith("PRAGMA synchronous")]
        settings = [statement for statement in said[:last] if statement.startswith("PRAGMA synchronous")]
        return not settings or settings[-1] == "PRAGMA synchronous=FULL"

    journal.note(replace(DECIDED, state="committed"))
    assert not is_synced()
    journal.write(replace(DECIDED, swap="s2", version=5))
    assert is_synced()
    journal.note(replace(DECIDED, swap="s2", version=5, state="committed"))
    assert not is_synced()
    journal.flush()
    assert is_synced()
    said.clear()
    journal.flush()
    assert said == []
    journal.close()
