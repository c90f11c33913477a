"""Processes that a test starts, stops, kills and starts again under the same name."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Self

START_S = 60.0  # what a busy machine may need, not what is expected
END_S = 20.0
POLL_S = 0.01


class ProcessFailed(RuntimeError):
    """A process did not start, or has left something behind; the text holds the end of its log."""


class Process:
    """One process; what it prints goes to `log_path`.

    Attributes:
        name: what errors and the log's file call it.
        popen: the last one that was started, None before the first.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path,
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        prepare: Callable[[], None] | None = None,
        own_session: bool = False,
    ) -> None:
        """Start nothing yet.

        Args:
            name: see above.
            command: the program and its arguments.
            log_path: what it prints is appended to this file.
            environment: all of its environment; None: this process's own.
            folder: its working directory; None: this process's own.
            prepare: called in the new process before it becomes the program. It may make system calls, no more.
            own_session: keep Ctrl-C at this terminal from it; whoever starts it ends it.
        """
        self.name, self.log_path = name, log_path
        self.popen: subprocess.Popen[bytes] | None = None
        self._command, self._environment, self._folder = list(command), environment, folder
        self._prepare, self._own_session = prepare, own_session

    def start(self) -> Self:
        """Start it; the last one must have ended."""
        self._spawn()
        return self

    def _spawn(
        self,
        arguments: Sequence[str] = (),
        *,
        stdin: int | None = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> subprocess.Popen[bytes]:
        assert not self.is_running, f"{self.name} runs already"
        with self.log_path.open("ab") as log:
            self.popen = subprocess.Popen(
                [*self._command, *arguments],
                env=self._environment,
                cwd=self._folder,
                stdin=stdin,
                stdout=stdout or log,
                stderr=log,
                pass_fds=pass_fds,
                start_new_session=self._own_session,
                preexec_fn=self._prepare,  # noqa: PLW1509  a few system calls
            )
        return self.popen

    @property
    def pid(self) -> int:
        """The process that was started last."""
        assert self.popen is not None, f"{self.name} was never started"
        return self.popen.pid

    @property
    def is_running(self) -> bool:
        """Whether it is there."""
        return self.popen is not None and self.popen.poll() is None

    def log(self) -> str:
        """Return what it has printed."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def kill(self) -> None:
        """End it at once (SIGKILL), also one that is stopped."""
        if self.popen is not None:
            self.popen.kill()
            self.popen.wait(END_S)

    def stop(self) -> list[str]:
        """End it in order (SIGTERM); return what went wrong, nothing if its exit status is 0."""
        if not self.is_running or self.popen is None:
            return [f"{self.name} was not running"]
        self.popen.terminate()
        try:
            status = self.popen.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return [f"{self.name} did not end within {END_S:.0f} s of SIGTERM"]
        return [f"{self.name} ended with status {status}"] if status else []


@contextlib.contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """Have processes stand still (SIGSTOP) in the block; those still there afterwards go on."""
    assert all(pid > 0 for pid in pids), f"{pids}: wait until the workers have said who they are"
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def eventually(claim: Callable[[], bool], what: str, timeout: float = 40.0) -> None:
    """Wait for another process's state; asking again and again is the only way to see it from outside.

    Raises:
        AssertionError: the claim does not hold within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while not claim():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(POLL_S)


def read_word(pipe: int, timeout: float) -> bytes | None:
    """Return what is first written to a pipe; b"" where its other end closes before, None after `timeout` seconds."""
    return os.read(pipe, 16) if select.select([pipe], [], [], timeout)[0] else None
