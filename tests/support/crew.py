"""A coordinator, daemons, a trainer and replicas as processes of their own, each of which may be broken and mended."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from refitd.protocol import keys
from tests.support import leaks
from tests.support.processes import Daemon, Member, Process, free_port

Settings = dict[str, dict[str, Any]]


class Crew:
    """Everything that runs, once `start` is called; the trainer is beside the first node.

    `events` has what trainer and engines (tests/support/crew_member.py) said: when, who, what.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        replicas: Mapping[str, tuple[str, str]],
        *,
        deadlines: Mapping[str, float],
        ranks: int = 1,
    ) -> None:
        """`replicas` says where each is and its way; `ranks` is how many the trainer and every replica have."""
        self._nodes, self._replicas, self._deadlines, self._ranks = nodes, replicas, dict(deadlines), ranks
        # short: a socket's path holds 107 bytes
        self.folder = Path(tempfile.mkdtemp(prefix="rfc"))
        self._mark = f"CREW_OF={self.folder}"  # in the environment of all of them, and of what they start
        self._temporary = self.folder / "tmp"
        self._temporary.mkdir()
        self.journal = self.folder / "c" / "journal.sqlite"
        self.events: queue.SimpleQueue[tuple[float, str, dict[str, Any]]] = queue.SimpleQueue()
        self.processes: list[Process] = []  # in the order in which they are started
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"

    def start(self) -> None:
        """Start all of them."""
        try:
            self._make_keys()
            command = self._serving("coordinator", "coordinator")
            self.coordinator = Process(
                "coordinator", command, self.environment("coordinator"), self._log("coordinator")
            )
            self.daemons = {name: self._daemon(name) for name in self._nodes}
            self.trainer = self._member("trainer", self._nodes[0], "trainer")
            self.engines = {
                name: self._member(name, node, "engine", "--replica", name, "--way", way)
                for name, (node, way) in self._replicas.items()
            }
            self.processes = [self.coordinator, *self.daemons.values(), self.trainer, *self.engines.values()]
            for process in self.processes:
                process.start()
        except BaseException:
            self.remove()
            raise

    # --- how it is started --------------------------------------------------------------------------------

    def _make_keys(self) -> None:
        lines = []
        for name in ("coordinator", *self._nodes):
            pair = keys.generate(name)
            keys.write(pair, self.folder)
            lines.append(f"{pair.public_line} node={name}\n" if name in self._nodes else "")
        (self.folder / "allowed").write_text("".join(lines))
        (self.folder / "allowed").chmod(0o644)

    def settings(self, name: str) -> Settings:
        """Return the configuration of the coordinator or of a daemon."""
        node: dict[str, Any] = {"runtime_dir": str(self.folder / "c")}
        if name in self._nodes:
            node = {"name": name, "workers": 2, "runtime_dir": str(self.folder / name)}
        security = {"key": str(self.folder / f"{name}.key"), "server_key": str(self.folder / "coordinator.pub")}
        if name == "coordinator":
            security["allowed"] = str(self.folder / "allowed")
        return {
            "node": node,
            "coordinator": {"endpoint": self.endpoint},
            "security": security,
            "deadlines": self._deadlines,
        }

    def environment(self, name: str) -> dict[str, str]:
        """Return what a process has in its environment."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("REFITD_")}
        mark, _, folder = self._mark.partition("=")
        return {**kept, mark: folder, "TMPDIR": str(self._temporary)}

    def prefix(self, name: str) -> list[str]:
        """Return what the command of the coordinator or of a daemon begins with."""
        return []

    def _serving(self, name: str, what: str) -> list[str]:
        config = self.folder / f"{name}.toml"
        config.write_text(_toml(self.settings(name)))
        return [*self.prefix(name), sys.executable, "-m", "refitd_cli.daemon", what, "--config", str(config)]

    def _daemon(self, name: str) -> Daemon:
        command = self._serving(name, "serve")
        return Daemon(name, command, self.environment(name), self._log(name), self.folder / name)

    def _member(self, name: str, node: str, *arguments: str) -> Member:
        directory = str(self.folder / node)
        command = [sys.executable, "-m", "tests.support.crew_member", *arguments]
        command += ["--directory", directory, "--ranks", str(self._ranks)]
        environment = {**self.environment(name), "OMP_NUM_THREADS": "1"}
        return Member(name, command, environment, self._log(name), self.events.put)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    # --- the end ------------------------------------------------------------------------------------------

    def strangers(self) -> dict[int, str]:
        """Return the processes that those of `processes` have started: pid -> command."""
        known = {process.pid for process in self.processes if process.popen is not None}
        return {pid: command for pid, command in leaks.processes_of(self._mark).items() if pid not in known}

    def folders(self) -> dict[str, Path]:
        """Return the folders in which they may leave something, by whose they are."""
        found = {name: daemon.directory for name, daemon in self.daemons.items()}
        return {**found, "the coordinator": self.folder / "c", "$TMPDIR": self._temporary}

    def close(self) -> list[str]:
        """End everything in order; return what was left behind."""
        left: list[str] = []
        for member in (*self.engines.values(), self.trainer):
            member.kill()
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
        while (alive := leaks.processes_of(self._mark)) and time.monotonic() < until:
            time.sleep(0.1)
        left += [f"process {pid}: {command}" for pid, command in alive.items()]
        for whose, folder in self.folders().items():
            left += [f"{whose}: {path.name}" for path in folder.iterdir() if not path.name.startswith("journal")]
        return left

    def kill(self) -> None:
        """End what still runs, and what that has started."""
        for pid in leaks.processes_of(self._mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.kill()

    def remove(self) -> None:
        """End what still runs and delete the folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _toml(settings: Settings) -> str:
    # a text or a number of JSON is one of TOML
    lines = []
    for table, values in settings.items():
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"
