"""Real daemons for tests: started on private directories, their logs printed on failure, their leavings checked."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import refitd
from refitd.client import Client
from refitd.protocol.reports import NodeStatus, SwapProgress, SwapReport

START_S = 30.0


class RunningDaemon:
    """`refitd serve --standalone` (or without, beside a coordinator of its own) in a directory of its own."""

    def __init__(
        self,
        config: str = "",
        *,
        standalone: bool = True,
        limits: Mapping[int, tuple[int, int]] | None = None,
        preexec: Callable[[], None] = lambda: None,
        netns: str = "",
    ) -> None:
        """`limits` are resource limits (RLIMIT_*: soft, hard) that the daemon and what it starts live under.

        `preexec` is called in the daemon's process before it is one; `netns` is the network namespace it runs in.
        """

        def prepare() -> None:
            for what, to in (limits or {}).items():
                resource.setrlimit(what, to)
            preexec()

        # short: a socket's path holds 107 bytes
        self.directory = Path(tempfile.mkdtemp(prefix="rfd"))
        self._coordinators: list[subprocess.Popen[bytes]] = []
        self.log_path = self.directory.with_suffix(".log")
        config_path = self.directory.with_suffix(".toml")
        node = "" if "[node]" in config else '[node]\nname = "n0"\n'
        config_path.write_text(node + config)
        self._env = {k: v for k, v in os.environ.items() if not k.startswith("REFITD_")}
        self._env["REFITD_NODE__RUNTIME_DIR"] = str(self.directory)
        ready_r, ready_w = os.pipe()
        command = ["ip", "netns", "exec", netns] if netns else []
        command += [sys.executable, "-m", "refitd_cli.daemon", "serve", "--config", str(config_path)]
        command += ["--ready-fd", str(ready_w), *(["--standalone"] if standalone else [])]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env=self._env,
                pass_fds=(ready_w,),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=prepare,  # noqa: PLW1509  a few system calls, before the new program
            )
        os.close(ready_w)
        # the pipe ends when the daemon does, so this wait is bounded by its life
        word = os.read(ready_r, 16)
        os.close(ready_r)
        if word != b"ready\n":
            self.process.wait(START_S)
            left = [path.name for path in self.directory.iterdir() if not path.name.startswith("journal")]
            said = self.log() + (f"\nit has left {left}" if left else "")
            self.clean()
            raise AssertionError(f"the daemon did not start:\n{said}")

    def connect(self, name: str = "test") -> Client:
        return refitd.connect(self.directory, name=name)

    def node(self) -> NodeStatus:
        with self.connect("status") as client:
            return client.status().nodes[0]

    def node_of(self, name: str) -> NodeStatus:
        """A node of this daemon's cluster, once all of its workers are there."""

        def found() -> NodeStatus:
            with self.connect("status") as client:
                return next(node for node in client.status().nodes if node.node == name)

        eventually(lambda: all(found().workers), f"the workers of {name} are there")
        return found()

    def children(self) -> list[int]:
        """The processes that the daemon has started: workers, and the coordinator of a standalone one."""
        return _children(self.process.pid)

    def log(self) -> str:
        return self.log_path.read_text()

    def start_coordinator(self) -> subprocess.Popen[bytes]:
        """`refitd coordinator` beside a daemon that is not standalone."""
        with self.log_path.open("ab") as log:
            command = [sys.executable, "-m", "refitd_cli.daemon", "coordinator"]
            process = subprocess.Popen(command, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._coordinators.append(process)
        return process

    def stop(self) -> list[str]:
        """End the daemon; return what it left behind."""
        for coordinator in self._coordinators:
            coordinator.terminate()
            coordinator.wait(10)
        children = _children(self.process.pid)
        self.process.terminate()
        try:
            status = self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            status = "no end within 15 s of SIGTERM"
        left = [f"process {pid}" for pid in children if _is_alive(pid)]
        left += [f"file {path.name}" for path in self.directory.iterdir() if not path.name.startswith("journal")]
        if status != 0:
            left.append(f"exit status {status}")
        return left

    def clean(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)
        self.log_path.unlink(missing_ok=True)
        self.directory.with_suffix(".toml").unlink(missing_ok=True)


class Engine:
    """Polls a target on a thread, the way an engine does between two tokens."""

    def __init__(self, *targets: refitd.client.target.Target) -> None:  # type: ignore[name-defined]
        self._targets = targets
        self._stop = threading.Event()
        self.errors: list[Exception] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(0.0005):
            for target in self._targets:
                try:
                    target.poll()
                except refitd.RefitdError as exc:
                    self.errors.append(exc)
                    return

    def __enter__(self) -> Engine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)


class RunningSwap:
    """A swap asked for on a thread, whose phases a test can wait for."""

    def __init__(self, daemon: RunningDaemon, model: str, version: int | None = None, timeout: float = 20.0) -> None:
        self._client = daemon.connect("swap")
        self._phases: set[str] = set()
        self._changed = threading.Condition()
        self.report: SwapReport | None = None
        self.error: refitd.RefitdError | None = None
        self._thread = threading.Thread(target=self._run, args=(model, version, timeout), daemon=True)
        self._thread.start()

    def _run(self, model: str, version: int | None, timeout: float) -> None:
        try:
            self.report = self._client.swap(model, version, timeout=timeout, on_progress=self._progress)
        except refitd.RefitdError as exc:
            self.error = exc
        finally:
            self._client.close()

    def _progress(self, progress: SwapProgress) -> None:
        with self._changed:
            self._phases.add(progress.phase)
            self._changed.notify_all()

    def wait_phase(self, phase: str, timeout: float = 10.0) -> None:
        with self._changed:
            reached = self._changed.wait_for(lambda: phase in self._phases, timeout)
        assert reached, f"phase {phase} not reached; seen {self._phases}, error {self.error}"

    def result(self, timeout: float = 30.0) -> SwapReport:
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the swap has neither succeeded nor failed"
        if self.error is not None:
            raise self.error
        assert self.report is not None
        return self.report


@contextlib.contextmanager
def stopped(pids: tuple[int, ...]) -> Iterator[None]:
    """Processes that stand still (SIGSTOP) inside; those still alive afterwards go on."""
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
    """Wait for another process's state; polling is the only way to see it from outside.

    The timeout is what a busy machine may need, not what is expected.
    """
    deadline = time.monotonic() + timeout
    while not claim():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.01)


def own_memory_files() -> list[str]:
    """The refitd arenas this process still holds open."""
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:refitd" in (link := os.readlink(fd)):
                found.append(link)
    return found


def _children(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []  # it has ended between being listed and being asked
    return [int(child) for child in children] + [g for child in children for g in _children(int(child))]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
