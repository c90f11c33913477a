"""Run refitctl, or Python code, against a test's daemon."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from refitd.testing import Daemon
from tests.support.json_schema import check_printed

ROOT = Path(__file__).parents[2]


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run to the end; return status and output."""
    given = {"capture_output": True, "text": True, "timeout": 120, "cwd": ROOT}
    return subprocess.run(command, check=False, **(given | options))


def refitctl(daemon: Daemon, command: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run refitctl on this daemon; check its output with --json against the schema of the command."""
    ran = run([sys.executable, "-m", "refitd_cli.control", command, "--address", str(daemon.directory), *words])
    if "--json" in words:
        check_printed((command, *words), ran.stdout)
    return ran


def python(daemon: Daemon, code: str, *words: str) -> list[str]:
    """Return the command that runs this code."""
    return [sys.executable, "-c", code, str(daemon.directory), *words]


class Program:
    """A program in another process, which says lines and is told lines. It is killed at the end of a block."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        """Start the program with these options of Popen."""
        given = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1, "cwd": ROOT}
        self.process: subprocess.Popen[str] = subprocess.Popen(command, **(given | options))
        self.pid = self.process.pid

    def line(self) -> str:
        """Return its next line without the newline, "" after its end."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def tell(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """At the end of the block, kill the process if it still runs, and close its pipes."""
    with process:
        try:
            yield process
        finally:
            process.kill()
