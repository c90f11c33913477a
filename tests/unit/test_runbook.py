"""The runbook has every alarm and every family of errors."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from refitd import errors, logs

TEXT = (Path(__file__).parents[2] / "docs/runbook.md").read_text()


def test_every_event_that_is_logged_as_a_warning_or_an_error_has_a_row_with_its_level():
    rows = {
        (event, level)
        for events, level in re.findall(r"^\| (`[^|]*) \| (warning|error) \|", TEXT, re.MULTILINE)
        for event in re.findall(r"`([\w-]+)`", events)
    }
    loud = {
        (event, logging.getLevelName(level).lower()) for event, level in logs._LEVELS.items() if level > logging.INFO
    }
    assert loud <= rows
    assert {event for event, _ in rows} <= {*logs._LEVELS, "swap", "session-closed", "failed"}


def test_every_family_of_errors_has_a_row():
    abstract = {errors.RefitdError, errors.IllegalTransition}
    for kind in {*errors._all_errors()} - abstract:
        if kind.__module__ == "refitd.errors":
            assert f"`{kind.code}` |" in TEXT, kind
