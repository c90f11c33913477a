"""Log lines: severities and forms; lines that peers can cause are limited in number."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from refitd.logs import Throttle, severity


def test_subject_is_written_once_a_period():
    throttle = Throttle(period_s=30)
    assert [throttle.allows("a", now) for now in (5.0, 6.0, 34.9, 35.0)] == [True, False, False, True]
    assert throttle.allows("b", 35.0)


def test_more_subjects_than_a_reader_wants_are_left_out():
    throttle = Throttle(period_s=30, most=3)
    assert sum(throttle.allows(str(i), 1.0) for i in range(1000)) == 3
    assert throttle.allows("another", 31.0)


@pytest.mark.parametrize(
    ("event", "fields", "level"),
    [
        ("worker-died", {}, "WARNING"),
        ("differs", {}, "ERROR"),
        ("session", {}, "DEBUG"),
        ("session-closed", {"lost": "yes"}, "WARNING"),
        ("session-closed", {"lost": ""}, "DEBUG"),
        ("swap", {"phase": "committed", "total_s": 0.1}, "INFO"),
        ("swap", {"phase": "committed", "member": "m"}, "DEBUG"),
        ("swap", {"phase": "aborted"}, "WARNING"),
        ("swap", {"phase": "incomplete"}, "ERROR"),
        ("node", {}, "INFO"),
    ],
)
def test_severities(event: str, fields: dict[str, object], level: str) -> None:
    import logging

    assert logging.getLevelName(severity(event, fields)) == level


def logged(style: str, *, journal: bool = False, level: str = "info") -> str:
    code = (
        "import os, sys; from refitd import logs\n"
        f"if {journal}: s = os.fstat(2); os.environ['JOURNAL_STREAM'] = f'{{s.st_dev}}:{{s.st_ino}}'\n"
        f"logs.setup({level!r}, {style!r}); log = logs.EventLog('daemon')\n"
        "log('session', session=1); log('ready', node='n 0'); log('worker-died', worker=1, how='a \\n b', pid=None)"
    )
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=True).stderr


def test_lines_have_a_time_with_its_offset_and_only_the_wanted_severities() -> None:
    ready, died = logged("text").splitlines()
    at = datetime.fromisoformat(ready.partition(" ")[0].removeprefix("t="))
    assert at.utcoffset() == timedelta(0) and abs(datetime.now(UTC) - at) < timedelta(minutes=5)
    assert ready.endswith('level=info process=daemon event=ready node="n 0"')
    assert "level=warning" in died and "pid" not in died
    assert [line.split()[1] for line in logged("text", level="debug").splitlines()] == [
        "level=debug",
        "level=info",
        "level=warning",
    ]
    assert len(logged("text", level="warning").splitlines()) == 1


def test_json_lines_and_journald_priorities() -> None:
    found = [json.loads(line) for line in logged("json").splitlines()]
    assert [(line["level"], line["event"]) for line in found] == [("info", "ready"), ("warning", "worker-died")]
    assert found[1]["how"] == "a \n b" and found[1]["worker"] == 1
    assert [line[:3] for line in logged("text", journal=True).splitlines()] == ["<6>", "<4>"]


def test_what_is_said_without_an_event_is_an_error_for_journald_too() -> None:
    code = (
        "import os; s = os.fstat(2); os.environ['JOURNAL_STREAM'] = f'{s.st_dev}:{s.st_ino}'\n"
        "from refitd_cli.daemon import main; main(['serve', '--config', '/nowhere.toml'], prog_name='refitd')"
    )
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert all(line.startswith("<3>") for line in done.stderr.splitlines()) and "/nowhere.toml" in done.stderr


def test_every_line_of_a_traceback_has_its_priority() -> None:
    code = (
        "import os; s = os.fstat(2); os.environ['JOURNAL_STREAM'] = f'{s.st_dev}:{s.st_ino}'\n"
        "from refitd import logs; logs.setup('info'); log = logs.EventLog('daemon')\n"
        "try: 1 / 0\n"
        "except ArithmeticError: log.failed('internal-error')"
    )
    lines = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=True).stderr
    assert len(lines.splitlines()) > 3 and all(line.startswith("<3>") for line in lines.splitlines())
