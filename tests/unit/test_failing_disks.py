"""A journal on a full or failing disk: the next coordinator reads each decision as it was answered."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from refitd.coordinator.journals.file import FileJournal
from refitd.coordinator.records import SwapRecord
from refitd.errors import CommitError

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
from refitd.coordinator.journals.base import LeadLost
from refitd.coordinator.journals.file import FileJournal
from refitd.coordinator.records import SwapRecord
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
    """The -wal holds it whole, and the next coordinator may find it. The ranks must not abort."""
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
