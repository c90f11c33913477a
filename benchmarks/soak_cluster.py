"""The processes of the soak: a coordinator, three daemons, a trainer, three replicas; each of them may be killed."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import refitd

NODES = ("n0", "n1", "n2")
REPLICAS = (("a", "n0", "private"), ("b", "n1", "asked"), ("c", "n2", "arena"))
START_S = 30.0
CONFIG = """
[deadlines]
plan_s = 20.0
stage_s = 8.0
commit_s = 5.0
pause_s = 5.0
"""


class Ended(RuntimeError):
    """A process that should run does not."""


class Process:
    """One process that can be ended, stopped and started again under the same name."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.name = name
        self._command, self._environment, self._log = command, environment, log
        self.popen: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def start(self, **options: Any) -> subprocess.Popen[bytes]:
        """Start it."""
        with self._log.open("ab") as log:
            self.popen = subprocess.Popen(
                self._command,
                env=self._environment,
                stderr=log,
                cwd=Path(__file__).parent.parent,
                **{"stdout": log, "stdin": subprocess.DEVNULL, **options},
            )
        self.starts += 1
        return self.popen

    @property
    def is_running(self) -> bool:
        """Whether it is there."""
        return self.popen is not None and self.popen.poll() is None

    def kill(self) -> None:
        """End it at once, the hard way."""
        if self.popen is not None:
            self.popen.kill()
            self.popen.wait(10)

    def tail(self) -> str:
        """Return the end of its log."""
        return self._log.read_text(errors="replace")[-3000:] if self._log.exists() else ""


class Daemon(Process):
    """`refitd serve` of one node."""

    def __init__(self, name: str, folder: Path, endpoint: str) -> None:
        self.directory = folder / name
        config = folder / f"{name}.toml"
        config.write_text(f'[node]\nname = "{name}"\nworkers = 2\n[coordinator]\nendpoint = "{endpoint}"\n{CONFIG}')
        environment = {**_clean(), "REFITD_NODE__RUNTIME_DIR": str(self.directory)}
        command = [sys.executable, "-m", "refitd_cli.daemon", "serve", "--config", str(config)]
        super().__init__(name, command, environment, folder / f"{name}.log")

    def start(self, **options: Any) -> subprocess.Popen[bytes]:
        """Start it and wait until it is ready."""
        ready_r, ready_w = os.pipe()
        plain, self._command = self._command, [*self._command, "--ready-fd", str(ready_w)]
        try:
            popen = super().start(pass_fds=(ready_w,))
        finally:
            self._command = plain
            os.close(ready_w)
        said = os.read(ready_r, 16)  # ends with the daemon
        os.close(ready_r)
        if said != b"ready\n":
            raise Ended(f"daemon {self.name} did not start:\n{self.tail()}")
        return popen


class Member(Process):
    """A trainer or a replica, whose events come back through `said`."""

    def __init__(self, name: str, arguments: list[str], log: Path, said: Callable[[str, dict[str, Any]], None]) -> None:
        command = [sys.executable, "-m", "benchmarks.soak_member", *arguments]
        super().__init__(name, command, {**_clean(), "OMP_NUM_THREADS": "1"}, log)
        self._said = said

    def start(self, **options: Any) -> subprocess.Popen[bytes]:
        """Start it."""
        popen = super().start(stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)
        threading.Thread(target=self._listen, args=(popen,), daemon=True).start()
        return popen

    def _listen(self, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stdout is not None
        for line in popen.stdout:
            with contextlib.suppress(ValueError):
                self._said(self.name, json.loads(line))

    def tell(self, **command: Any) -> None:
        """Send it a command; one that is dead does not hear it."""
        assert self.popen is not None and self.popen.stdin is not None
        with contextlib.suppress(OSError):
            self.popen.stdin.write(json.dumps(command).encode() + b"\n")
            self.popen.stdin.flush()


class Cluster:
    """Everything that runs. `events` has what members said: (member, event)."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rfs"))
        endpoint = f"tcp://127.0.0.1:{_free_port()}"
        config = self.folder / "coordinator.toml"
        config.write_text(f'[coordinator]\nendpoint = "{endpoint}"\n{CONFIG}')
        environment = {**_clean(), "REFITD_NODE__RUNTIME_DIR": str(self.folder / "c")}
        self.journal = self.folder / "c" / "journal.sqlite"
        self.events: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()

        def said(name: str, event: dict[str, Any]) -> None:
            self.events.put((name, event))

        command = [sys.executable, "-m", "refitd_cli.daemon", "coordinator", "--config", str(config)]
        self.coordinator = Process("coordinator", command, environment, self.folder / "coordinator.log")
        self.daemons = {name: Daemon(name, self.folder, endpoint) for name in NODES}
        where = {name: str(daemon.directory) for name, daemon in self.daemons.items()}
        self.trainer = Member("trainer", ["trainer", where["n0"]], self.folder / "trainer.log", said)
        self.engines = {
            replica: Member(replica, ["engine", where[node], replica, way], self.folder / f"{replica}.log", said)
            for replica, node, way in REPLICAS
        }
        self.coordinator.start()
        for daemon in self.daemons.values():
            daemon.start()
        self.trainer.start()
        for engine in self.engines.values():
            engine.start()

    def processes(self) -> Iterator[Process]:
        """Yield everything that was started here."""
        yield self.coordinator
        yield from self.daemons.values()
        yield self.trainer
        yield from self.engines.values()

    def workers(self, node: str) -> list[int]:
        """Return the pids of a daemon's workers."""
        daemon = self.daemons[node].popen
        if daemon is None:
            return []
        found = []
        for pid in _children(daemon.pid):
            with contextlib.suppress(OSError):
                if b"refitd.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def connect(self, node: str = "n1") -> refitd.Client:
        """Connect to a daemon as an operator."""
        return refitd.connect(self.daemons[node].directory, name="soak", timeout=5)

    def close(self) -> list[str]:
        """End everything in order; return what was left behind."""
        left: list[str] = []
        children = [pid for daemon in self.daemons.values() if daemon.popen for pid in _children(daemon.popen.pid)]
        for process in (*self.engines.values(), self.trainer):
            process.kill()
        for process in (*self.daemons.values(), self.coordinator):
            if not process.is_running or process.popen is None:
                left.append(f"{process.name} was not running")
                continue
            process.popen.send_signal(signal.SIGTERM)
            try:
                if status := process.popen.wait(20):
                    left.append(f"{process.name} ended with {status}")
            except subprocess.TimeoutExpired:
                process.kill()
                left.append(f"{process.name} did not end within 20 s of SIGTERM")
        until = time.monotonic() + 10
        while (alive := [pid for pid in children if Path(f"/proc/{pid}").exists()]) and time.monotonic() < until:
            time.sleep(0.1)
        left += [f"process {pid}" for pid in alive]
        for daemon in self.daemons.values():
            left += [f"{daemon.name}: {p.name}" for p in daemon.directory.iterdir() if not p.name.startswith("journal")]
        return left

    def remove(self) -> None:
        """Kill what still runs and delete the folder."""
        for process in self.processes():
            if process.is_running:
                process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def descriptors(pid: int) -> int:
    """Return how many descriptors a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _clean() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("REFITD_")}


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
