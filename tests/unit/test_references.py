"""The reference pages are what the code says."""

from __future__ import annotations

import sys

from tests.support.programs import run


def test_references_are_what_the_code_says() -> None:
    # a process of its own: click keeps the help option with which a command was first shown
    found = run([sys.executable, "-m", "tests.support.references", "--check"])
    assert found.returncode == 0, found.stderr
