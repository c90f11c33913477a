"""Run refitctl, or Python code, against a test's daemon."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from refitd.testing import Daemon
from tests.support.json_schema import check_printed

ROOT = Path(__file__).parents[2]


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run to the end; return its status and what it printed."""
    given = {"capture_output": True, "text": True, "timeout": 120, "cwd": ROOT}
    return subprocess.run(command, check=False, **(given | options))


def refitctl(daemon: Daemon, command: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run refitctl on this daemon; what it prints with --json fits the schema of the command."""
    ran = run([sys.executable, "-m", "refitd_cli.control", command, "--address", str(daemon.directory), *words])
    if "--json" in words:
        check_printed((command, *words), ran.stdout)
    return ran


def python(daemon: Daemon, code: str, *words: str) -> list[str]:
    """The command that runs this code."""
    return [sys.executable, "-c", code, str(daemon.directory), *words]


@contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """Kill it when the block ends, if it has not ended, and close its pipes."""
    with process:
        try:
            yield process
        finally:
            process.kill()
