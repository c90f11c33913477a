"""The journal in a file: earlier versions, damage, second owners, full and failing disks."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from refitd.coordinator.journals import LiveVersion, SwapRecord
from refitd.coordinator.journals.file import FileJournal
from refitd.errors import CommitError
from tests.support import programs

CONNECT = (
    "import sys; from pathlib import Path; from refitd.coordinator.journals.file import FileJournal as J; "
    "J(Path(sys.argv[1]))"
)
DECIDED = SwapRecord("s1", "policy", 4, "decided", "plan", "", 1.0)


def ended(journal: FileJournal) -> None:
    """End the process without closing the journal; the kernel closes its files."""
    journal._unlock()


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
    FileJournal(tmp_path / "dir" / "new")
    assert (tmp_path / "dir" / "new").stat().st_mode & 0o777 == 0o600


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
    journal.write(DECIDED)  # the refused attempt did not release the lock
    ended(journal)
    assert other_process(path).returncode == 0


def damage(path: Path, how: str) -> None:
    """Damage a journal's file, or its -wal."""
    if how.endswith("wal"):
        path = path.with_name("j-wal")
    match how.partition(" ")[0]:
        case "removed":
            path.unlink()
        case "all":
            for each in path.parent.glob("j*"):
                each.unlink()
        case "replaced":
            shutil.copyfile(path, path.with_name("copy"))
            path.with_name("copy").rename(path)
        case "truncated":
            os.truncate(path, 0)
        case "halved":
            os.truncate(path, path.stat().st_size // 2)
        case "garbled":
            path.write_bytes(bytes(path.stat().st_size))


WAL = ["garbled wal", "truncated wal", "removed wal"]


@pytest.mark.parametrize("how", ["removed", "all removed", "replaced", "truncated", "halved", "garbled", *WAL])
def test_nothing_is_decided_with_a_file_that_is_not_as_it_was_left(tmp_path: Path, how: str) -> None:
    journal = FileJournal(tmp_path / "j")
    journal.write(DECIDED)
    damage(tmp_path / "j", how)
    for _ in range(2):
        with pytest.raises(CommitError, match="recovers what is live"):
            journal.write(replace(DECIDED, swap="s2", version=5))
    with pytest.raises(CommitError):
        journal.note(replace(DECIDED, state="committed"))
    journal.close()


@pytest.mark.parametrize("how", ["truncated", "halved", "garbled"])
def test_what_others_change_before_a_checkpoint_is_not_covered_up_by_it(tmp_path: Path, how: str) -> None:
    journal = FileJournal(tmp_path / "j")
    journal.write(DECIDED)
    damage(tmp_path / "j", how)
    journal.flush()
    with pytest.raises(CommitError, match="recovers what is live"):
        journal.write(replace(DECIDED, swap="s2", version=5))
    journal.close()


@pytest.mark.parametrize("how", WAL)
def test_what_is_live_does_not_hang_on_the_wal_for_longer_than_a_second(tmp_path: Path, how: str) -> None:
    journal = FileJournal(tmp_path / "j")
    journal.write(DECIDED)
    journal.note(replace(DECIDED, state="committed"))
    journal.flush()
    kept = (tmp_path / "j-wal").read_bytes()
    journal._unlock()
    (tmp_path / "j-wal").write_bytes(kept)
    damage(tmp_path / "j", how)
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
        """Whether the last change was synced; after an unsynced change the journal restores the setting."""
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


# --- A journal on a full or failing disk: the next coordinator reads exactly the decisions that were confirmed.


SYNC = Path(__file__).parents[1] / "faults" / "sync.c"
PAGE = 4096


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_decision_on_a_disk_that_fills_up_is_written_whole_or_refused(small: Path) -> None:
    chance, ballast = random.Random(1), small / "ballast"
    refused = written = 0
    for life in range(12):
        answers: dict[SwapRecord, bool] = {}
        journal = FileJournal(small / "journal")
        for number in range(8):
            ballast.write_bytes(b"")
            free = os.statvfs(small).f_bavail * PAGE - chance.choice([0, 1, 2, 3, 5, 15]) * PAGE
            ballast.write_bytes(bytes(max(0, free)))
            records = [
                SwapRecord(f"{life}.{number}.{model}", model, number, "decided", "", "", 1.0, bytes(size))
                for model, size in (("m", 10), ("d", chance.choice([10, 3000, 9000])))
            ]
            try:
                journal.write(*records)
            except CommitError as exc:
                assert "bytes free" in str(exc)
                answers |= dict.fromkeys(records, False)
            else:
                answers |= dict.fromkeys(records, True)
        ballast.unlink()
        journal.abandon()  # as when it is killed
        again = FileJournal(small / "journal")
        assert {record: again.decided(record.swap) is not None for record in answers} == answers
        again.close()
        refused += list(answers.values()).count(False)
        written += list(answers.values()).count(True)
        if life % 3 == 2:
            for path in small.iterdir():
                path.unlink()
    assert refused and written


WRITER = """
import sys
from pathlib import Path
from refitd.coordinator.journals import LeadLost
from refitd.coordinator.journals.file import FileJournal
from refitd.coordinator.journals import SwapRecord
from refitd.errors import CommitError
journal = FileJournal(Path(sys.argv[1]))
journal.write(SwapRecord("s1", "m", 1, "decided", "", "", 1.0))
Path(sys.argv[2]).write_text("1")
try:
    journal.write(SwapRecord("s2", "m", 2, "decided", "", "", 1.0))
    print("written")
except CommitError as exc:
    print("refused")
except LeadLost as exc:
    print("unknown")
sys.stdout.flush()
import os
os._exit(0)
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_a_decision_whose_sync_failed_is_not_called_refused(tmp_path: Path) -> None:
    """The -wal contains the whole decision, which the next coordinator may read. The ranks must not abort."""
    library, flag = tmp_path / "sync.so", tmp_path / "fails"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SYNC)], check=True)
    flag.write_text("0")
    environment = {**os.environ, "LD_PRELOAD": str(library), "FAULTS_SYNC": str(flag)}
    command = [sys.executable, "-c", WRITER, str(tmp_path / "journal"), str(flag)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    journal = FileJournal(tmp_path / "journal")
    assert (ran.stdout.strip(), journal.decided("s2") is not None) == ("unknown", True)
    assert journal.decided("s1") is not None
    journal.close()
