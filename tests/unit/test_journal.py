"""The journal keeps decisions across lives."""

from __future__ import annotations

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
