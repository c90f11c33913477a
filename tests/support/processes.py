"""Processes that tests and benchmarks kill, stop and start again under the same name."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import refitd

ROOT = Path(__file__).parents[2]


class Ended(RuntimeError):
    """A process that should run does not."""


class Process:
    """One process; what it says goes to `log`."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.name = name
        self._command, self._environment, self._log = command, environment, log
        self.popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it."""
        self._start(self._command)

    def _start(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            given = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, **options}
            self.popen = subprocess.Popen(command, env=self._environment, cwd=ROOT, **given)
        return self.popen

    @property
    def pid(self) -> int:
        """Its process, the last one that was started."""
        assert self.popen is not None
        return self.popen.pid

    @property
    def is_running(self) -> bool:
        """Whether it is there."""
        return self.popen is not None and self.popen.poll() is None

    def kill(self) -> None:
        """End it at once, the hard way."""
        if self.popen is not None:
            self.popen.kill()
            self.popen.wait(10)


class Daemon(Process):
    """`refitd serve` of one node, or what else says on a descriptor that it is ready."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], log: Path, directory: Path) -> None:
        super().__init__(name, command, environment, log)
        self.directory = directory

    def start(self) -> None:
        """Start it and wait until it is ready.

        Raises:
            Ended: it has ended instead.
        """
        ready_r, ready_w = os.pipe()
        try:
            self._start([*self._command, "--ready-fd", str(ready_w)], pass_fds=(ready_w,))
        finally:
            os.close(ready_w)
        said = os.read(ready_r, 16)  # ends with the daemon
        os.close(ready_r)
        if said != b"ready\n":
            raise Ended(f"daemon {self.name} did not start:\n{self._log.read_text(errors='replace')[-3000:]}")

    def connect(self, name: str = "operator") -> refitd.Client:
        """Connect as an operator."""
        return refitd.connect(self.directory, name=name, timeout=5)

    def workers(self) -> list[int]:
        """Return the pids of its workers."""
        found = []
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
                with contextlib.suppress(OSError):
                    if b"refitd.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                        found.append(int(child))
        return found


class Member(Process):
    """A process that is told things, and tells: lines of JSON, each given to `said` with the time and its name."""

    def __init__(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        log: Path,
        said: Callable[[tuple[float, str, dict[str, Any]]], None],
    ) -> None:
        super().__init__(name, command, environment, log)
        self._said = said

    def start(self) -> None:
        """Start it."""
        popen = self._start(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        threading.Thread(target=self._listen, args=(popen,), daemon=True).start()

    def _listen(self, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stdout is not None
        with popen.stdout as said:
            for line in said:
                with contextlib.suppress(ValueError):  # the last line of one that was killed
                    self._said((time.monotonic(), self.name, json.loads(line)))

    def kill(self) -> None:
        """End it at once; let go of its pipes."""
        super().kill()
        if self.popen is not None and self.popen.stdin is not None:
            with contextlib.suppress(OSError):
                self.popen.stdin.close()

    def tell(self, **command: Any) -> None:
        """Send it a command; one that is dead does not hear it."""
        assert self.popen is not None and self.popen.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.popen.stdin.write(json.dumps(command).encode() + b"\n")
            self.popen.stdin.flush()


def free_port() -> int:
    """Return a port of the loopback that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
