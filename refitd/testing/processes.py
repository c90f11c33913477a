"""Processes that a test can start, stop, kill and restart; and their resources, to name leaks after a fault.

`Engine` and `RunningSwap` act in the background of a test.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

from refitd.errors import RefitdError
from refitd.protocol.reports import SwapProgress, SwapReport

if TYPE_CHECKING:
    from refitd.client import Client
    from refitd.client.target import Target

START_S = 60.0  # generous, for a busy machine
END_S = 20.0
POLL_S, MAX_POLL_S = 0.01, 0.1


class ProcessFailed(RuntimeError):
    """A process did not start, or left something behind; the text contains the end of its log."""


class Process:
    """A process that can be restarted; its output goes to `log_path`.

    Attributes:
        name: its name in errors.
        popen: the process that was started last; None before the first start.
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
        """Store the arguments; `start` starts the process.

        Args:
            name: see above.
            command: the program and its arguments.
            log_path: its output is appended to this file.
            environment: its whole environment; None: this process's.
            folder: its working directory; None: this process's.
            prepare: called in the new process before exec. It may only make system calls.
            own_session: run it in a new session: Ctrl-C in this terminal does not end it.
        """
        self.name, self.log_path = name, log_path
        self.popen: subprocess.Popen[bytes] | None = None
        self._command, self._environment, self._folder = list(command), environment, folder
        self._prepare, self._own_session = prepare, own_session

    def start(self) -> Self:
        """Start the process; the previous one must have ended."""
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
        """The pid of the process that was started last."""
        assert self.popen is not None, f"{self.name} was never started"
        return self.popen.pid

    @property
    def is_running(self) -> bool:
        """Whether the process is running."""
        return self.popen is not None and self.popen.poll() is None

    def log(self) -> str:
        """Return its log."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def kill(self) -> None:
        """Kill it (SIGKILL), even if it is stopped."""
        if self.popen is not None:
            self.popen.kill()
            self.popen.wait(END_S)

    def stop(self) -> list[str]:
        """Terminate it (SIGTERM); return problems, [] if its exit status is 0."""
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
    """Stop processes (SIGSTOP) during the block, and continue them afterwards (SIGCONT)."""
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
    """Poll until a claim about another process holds.

    Raises:
        AssertionError: the claim does not hold within `timeout` seconds.
    """
    deadline, pause_s = time.monotonic() + timeout, POLL_S
    while not claim():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, MAX_POLL_S)  # a claim often asks a daemon, which costs milliseconds


def read_word(pipe: int, timeout: float) -> bytes | None:
    """Return what is first written to a pipe; b"" if its other end closes first, None after `timeout` seconds."""
    return os.read(pipe, 16) if select.select([pipe], [], [], timeout)[0] else None


def processes_of(mark: str) -> dict[int, str]:
    """Return {pid: command line} of the processes that have `mark` in their initial environment."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            is_ours = mark.encode() in (entry / "environ").read_bytes()
            command = (entry / "cmdline").read_bytes().strip(b"\0").replace(b"\0", b" ").decode(errors="replace")
            if is_ours and command:  # a zombie has no command line
                found[int(entry.name)] = command
    return found


def kill_all(mark: str) -> None:
    """Kill the processes that have `mark` in their initial environment."""
    for pid in processes_of(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def descriptors(pid: int) -> Counter[str]:
    """Return how many descriptors of each kind a process has open."""
    found: Counter[str] = Counter()
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found[_kind(os.readlink(fd))] += 1
    return found


def _kind(link: str) -> str:
    if link.startswith("/memfd:"):
        return "memfd"
    kind = link.partition(":")[0]
    return kind if kind in ("socket", "pipe", "anon_inode") else "file"


def own_memory_files() -> list[str]:
    """Return the links of refitd's arenas that this process still has open."""
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:refitd" in (link := os.readlink(fd)):
                found.append(link)
    return found


def files_in(folder: Path) -> list[str]:
    """Return the names in a runtime directory, except the journal, which is meant to stay."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("journal"))


def files(folders: Mapping[str, Path]) -> dict[str, int]:
    """Return the number of files and folders below each folder, except journals."""
    found = {}
    for name, folder in folders.items():
        with contextlib.suppress(OSError):
            found[f"files of {name}"] = sum(not p.name.startswith("journal") for p in folder.rglob("*"))
    return found


def more(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """Return a text for each count that has grown."""
    return [
        f"{what}: {now[what]}, was {before.get(what, 0)}" for what in sorted(now) if now[what] > before.get(what, 0)
    ]


TOKEN_S = 0.002


class Engine:
    """Polls targets on a thread during a block, as an engine does between two tokens.

    Attributes:
        errors: the error that a poll raised, after which polling stops.
    """

    def __init__(self, *targets: Target) -> None:
        """Poll `targets` in this order."""
        self.errors: list[RefitdError] = []
        self._targets = targets
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(TOKEN_S):
            for target in self._targets:
                try:
                    target.poll()
                except RefitdError as exc:
                    self.errors.append(exc)
                    return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)


class RunningSwap:
    """A swap that runs on a thread. A test can wait for its phases.

    Attributes:
        report: the swap's report; None until it has succeeded.
        error: the error that it raised, if any.
    """

    def __init__(self, client: Client, model: str, version: int | None = None, timeout: float = 60.0) -> None:
        """Start the swap; `client` must not be used elsewhere, and is closed at the end."""
        self.report: SwapReport | None = None
        self.error: RefitdError | None = None
        self._client = client
        self._phases: set[str] = set()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(model, version, timeout), daemon=True)
        self._thread.start()

    def _run(self, model: str, version: int | None, timeout: float) -> None:
        try:
            self.report = self._client.swap(model, version, timeout=timeout, on_progress=self._progress)
        except RefitdError as exc:
            self.error = exc
        finally:
            self._client.close()

    def _progress(self, progress: SwapProgress) -> None:
        with self._changed:
            self._phases.add(progress.phase)
            self._changed.notify_all()

    def wait_phase(self, phase: str, timeout: float = 40.0) -> None:
        """Wait until the swap has been in a phase: "plan", "stage", "verify" or "commit".

        Raises:
            AssertionError: it has not reached it within `timeout` seconds.
        """
        with self._changed:
            reached = self._changed.wait_for(lambda: phase in self._phases, timeout)
        assert reached, f"phase {phase} not reached; seen {self._phases}, error {self.error}"

    def result(self, timeout: float = 60.0) -> SwapReport:
        """Wait for the swap's end; return its report.

        Raises:
            RefitdError: the swap failed.
            AssertionError: it has not ended within `timeout` seconds.
        """
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the swap has neither succeeded nor failed"
        if self.error is not None:
            raise self.error
        assert self.report is not None
        return self.report
