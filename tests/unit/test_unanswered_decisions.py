"""A coordinator that cannot know whether its decision was written stops leading and reads the journal again."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from refitd.config import Config
from refitd.coordinator import actions as act
from refitd.coordinator.journals import LeadLost, SwapRecord
from refitd.coordinator.journals.file import FileJournal
from refitd.coordinator.shell import CoordinatorShell
from refitd.errors import CommitError
from refitd.logs import EventLog
from refitd.protocol.channel import Router
from refitd.states import Tick

DECIDED = SwapRecord("s1", "m", 7, "decided", "", "", 1.0)


class Broken(FileJournal):
    """A file journal that raises `error` after its write has reached the disk, or before."""

    error: Exception | None = None
    writes_first = True

    def write(self, *records: SwapRecord) -> list[int]:
        sequences = super().write(*records) if self.writes_first else []
        if self.error is not None:
            raise self.error
        return sequences


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[tuple[CoordinatorShell, Broken]]:
    context: zmq.Context[Any] = zmq.Context()
    config = Config()
    router = Router(context, f"ipc://{tmp_path}/c", None)
    journal = Broken(tmp_path / "journal")
    told = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    made = CoordinatorShell(config, router, {}, journal, EventLog("coordinator"), told)
    yield made, journal
    made.close()
    journal.abandon()
    router.close()
    context.destroy(linger=0)
    for end in told:
        os.close(end)


@pytest.mark.parametrize("writes_first", [False, True])
def test_an_unexpected_error_of_the_journal_ends_the_lead(
    shell: tuple[CoordinatorShell, Broken], writes_first: bool, tmp_path: Path
) -> None:
    made, journal = shell
    journal.error, journal.writes_first = ValueError("a bug"), writes_first
    with pytest.raises(LeadLost, match=r"not known whether the last write holds.*a bug"):
        made._perform(act.Decide((DECIDED,)))
    journal.abandon()
    again = FileJournal(tmp_path / "journal")  # in this process: its lock is free
    assert (again.decided("s1") is not None) == writes_first
    again.close()


def test_a_refused_write_is_an_answer(shell: tuple[CoordinatorShell, Broken]) -> None:
    made, journal = shell
    journal.error = CommitError("disk full")
    assert made._perform(act.Decide((DECIDED,))) == act.JournalWritten(("s1",), journal.error)


def test_an_error_before_the_answer_is_handled_ends_the_lead(shell: tuple[CoordinatorShell, Broken]) -> None:
    """Otherwise the swap would wait for the answer for ever."""
    made, _ = shell
    handle = made._state.handle

    def failing(event: act.Event, now: float, wall: float = 0.0) -> list[act.Instruction]:
        if isinstance(event, Tick):
            return [act.Decide((DECIDED,))]
        if isinstance(event, act.JournalWritten):
            raise ValueError("a bug")
        return handle(event, now)

    made._state.handle = failing  # type: ignore[method-assign]
    with pytest.raises(LeadLost, match="a bug"):
        made._feed(Tick())


def test_a_file_that_fails_to_sync_gives_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The change is complete in the -wal, where the next coordinator reads it."""
    journal = FileJournal(tmp_path / "journal")

    def unsynced(self: FileJournal, record: SwapRecord) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
        raise error

    monkeypatch.setattr(FileJournal, "_insert", unsynced)
    with pytest.raises(LeadLost, match="not known"):
        journal.write(DECIDED)
    journal.abandon()


class Slow(Broken):
    """A remote journal; its writes wait for `answers`."""

    is_remote = True

    def write(self, *records: SwapRecord) -> list[int]:
        assert self.answers.wait(20)
        if self.error is not None:
            raise self.error
        return [7]


@pytest.mark.parametrize("error", [None, CommitError("etcd is full"), LeadLost("it is not known")], ids=repr)
def test_a_write_over_a_network_does_not_stop_the_loop(
    shell: tuple[CoordinatorShell, Broken], error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, journal = shell
    journal.__class__ = Slow
    journal.answers, journal.error = threading.Event(), error  # type: ignore[attr-defined]
    fed: list[act.Event] = []
    monkeypatch.setattr(made, "_feed", fed.append)
    assert made._perform(act.Decide((DECIDED,))) is None
    made._collect()
    assert not fed, "the loop goes on before the answer"
    journal.answers.set()  # type: ignore[attr-defined]
    made.end_writes()
    if isinstance(error, LeadLost):
        with pytest.raises(LeadLost):
            made._collect()
    else:
        made._collect()
        assert fed == [act.JournalWritten(("s1",), error, () if error else (7,))]
