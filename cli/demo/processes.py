"""The launcher's processes: their commands, events, logs and deadlines, and how all of them are ended."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refitd.testing import Daemon, ProcessFailed

Message = dict[str, Any]

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here: the child may not load anything between fork and exec

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
TICK_S = 1.0
END_S = 30.0
TAIL_BYTES = 3000


class DemoFailed(Exception):
    """The demo cannot continue, or found a difference."""


@dataclass(frozen=True)
class Child:
    """A trainer's or an engine's process."""

    name: str
    process: subprocess.Popen[str]
    log: Path

    def tail(self) -> str:
        """Return the end of its log."""
        text = self.log.read_bytes()[-TAIL_BYTES:].decode("utf-8", "replace")
        return _tail(self.name, self.process, text)


class DemoProcesses:
    """Every process the demo has started.

    Args:
        directory: where logs go.
        on_event: called with a child's name and each event it sends, on the launcher's thread.
        on_wait: called about every second of an idle wait, with the awaited event.
    """

    def __init__(
        self, directory: Path, on_event: Callable[[str, Message], None], on_wait: Callable[[str], None]
    ) -> None:
        self._directory, self._on_event, self._on_wait = directory, on_event, on_wait
        self._events: queue.SimpleQueue[tuple[str, Message]] = queue.SimpleQueue()
        self._arrived: dict[tuple[str, str], Message] = {}
        self.members: dict[str, Child] = {}
        self.daemon: Daemon | None = None

    def start_daemon(self, config: str, directory: Path, timeout_s: float) -> Daemon:
        """Run `refitd serve --standalone` with two workers and return once clients can connect."""
        self.daemon = Daemon(
            config,
            name="demo",
            workers=2,
            folder=self._directory,
            directory=directory,
            environment=_ONE_THREAD,
            prepare=_end_with_parent,
            own_session=True,
        )
        try:
            return self.daemon.start(timeout_s)
        except ProcessFailed as exc:
            how = str(exc).partition(":\n")[0].removeprefix(f"{self.daemon.name} ")
            raise DemoFailed(f"refitd {how}; its log is above") from None

    def start(self, name: str, module: str, *arguments: object, niceness: int = 0) -> None:
        """Start a trainer or engine process, which talks newline-separated JSON on its pipes."""
        child = self._spawn(name, [module, *map(str, arguments)])
        os.setpriority(os.PRIO_PROCESS, child.process.pid, niceness)
        self.members[name] = child
        threading.Thread(target=self._read, args=(child,), name=f"events of {name}", daemon=True).start()

    def send(self, names: Iterable[str], command: str, **fields: Any) -> None:
        """Send a command to children."""
        for name in names:
            pipe = self.members[name].process.stdin
            try:
                if pipe is not None:
                    pipe.write(json.dumps({"command": command, **fields}) + "\n")
                    pipe.flush()
            except BrokenPipeError:
                raise DemoFailed(f"{name} has ended and cannot be told to {command}") from None

    def wait(self, event: str, names: Iterable[str], timeout_s: float) -> dict[str, Message]:
        """Return each named child's next event of this kind, waiting if it has not arrived.

        Raises:
            DemoFailed: one of them, or any other process, failed or ended, or the deadline passed.
        """
        wanted = set(names)
        found: dict[str, Message] = {}

        def complete() -> bool:
            for name in wanted - found.keys():
                if (message := self._arrived.pop((name, event), None)) is not None:
                    found[name] = message
            return found.keys() == wanted

        self.wait_until(complete, lambda: f"{event!r} of {', '.join(sorted(wanted - found.keys()))}", timeout_s)
        return found

    def wait_until(self, claim: Callable[[], bool], what: Callable[[], str], timeout_s: float) -> None:
        """Handle events until the condition holds.

        Raises:
            DemoFailed: a process failed or ended, or the deadline passed.
        """
        deadline = time.monotonic() + timeout_s
        while not claim():
            left = deadline - time.monotonic()
            if left <= 0:
                raise DemoFailed(f"no {what()} within {timeout_s:.0f} s")
            try:
                self._take(*self._events.get(timeout=min(left, TICK_S)))
            except queue.Empty:
                if self._daemon_has_ended():
                    raise DemoFailed("refitd has ended") from None
                self._on_wait(what())

    def run(self, name: str, command: list[str], timeout_s: float) -> str:
        """Run a command and return its stdout.

        Raises:
            DemoFailed: its exit status is not 0, or the deadline passed.
        """
        log = self._directory / f"{name}.log"
        with log.open("ab") as stderr:
            try:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    env=_environment(),
                    timeout=timeout_s,
                    text=True,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise DemoFailed(f"{name} took more than {timeout_s:.0f} s") from None
        if done.returncode:
            raise DemoFailed(f"{name}: exit status {done.returncode}\n{done.stdout}{log.read_text()}")
        return done.stdout

    def tails(self) -> str:
        """Return the end of every process's log."""
        tails = [child.tail() for child in self.members.values()]
        if self.daemon is not None and self.daemon.popen is not None:
            tails.insert(0, _tail("refitd", self.daemon.popen, self.daemon.log()[-TAIL_BYTES:]))
        return "\n".join(tails)

    def dismiss(self) -> None:
        """Ask every trainer and engine to exit.

        Raises:
            DemoFailed: one did not, or not with exit status 0.
        """
        self.send(self.members, "exit")
        deadline = time.monotonic() + END_S
        for name, child in self.members.items():
            try:
                status = child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise DemoFailed(f"{name} did not end within {END_S:.0f} s of being told to") from None
            if status:
                raise DemoFailed(f"{name} left with exit status {status}")

    def stop(self) -> None:
        """End trainers and engines by closing their pipes, then the daemon; kill what does not end."""
        for child in self.members.values():
            if child.process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    child.process.stdin.close()
        deadline = time.monotonic() + END_S
        for child in self.members.values():
            _end(child.process, deadline)
        if self.daemon is not None:
            self.daemon.stop()
            self.daemon.remove()

    def _spawn(self, name: str, command: list[str]) -> Child:
        log = self._directory / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for the launcher, which ends the others in order
            )
        return Child(name, process, log)

    def _read(self, child: Child) -> None:
        for line in child.process.stdout or ():
            try:
                self._events.put((child.name, json.loads(line)))
            except ValueError:
                self._events.put((child.name, {"event": "failed", "reason": f"printed {line!r}"}))
        self._events.put((child.name, {"event": "ended"}))

    def _take(self, name: str, message: Message) -> None:
        match message["event"]:
            case "failed" | "ended" if self._daemon_has_ended():
                raise DemoFailed(f"refitd has ended, and {name} with it")
            case "failed":
                raise DemoFailed(f"{name}: {message['reason']}")
            case "ended":
                # its pipes are closed a moment before it can be waited for
                raise DemoFailed(f"{name} ended unexpectedly, {_status(self.members[name].process, END_S)}")
            case event:
                self._arrived[(name, event)] = message
                self._on_event(name, message)

    def _daemon_has_ended(self) -> bool:
        return self.daemon is not None and not self.daemon.is_running


def _end_with_parent() -> None:
    """Have the kernel send SIGTERM when the launcher dies, even by SIGKILL: no pipe tells the daemon."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _tail(name: str, process: subprocess.Popen[Any], text: str) -> str:
    return f"--- {name} (pid {process.pid}, {_status(process)})\n{text.strip() or '(no output)'}"


def _status(process: subprocess.Popen[Any], within_s: float = 0.0) -> str:
    try:
        return f"exit status {process.wait(within_s)}"
    except subprocess.TimeoutExpired:
        return "running"


def _end(process: subprocess.Popen[str], deadline: float) -> None:
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    """Return the environment without settings of another refitd, and with one thread per process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("REFITD_")}
    return kept | _ONE_THREAD
