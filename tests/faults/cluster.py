"""The processes that are broken: a coordinator, two daemons, a trainer beside one of them and a replica beside each."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import refitd
from benchmarks.soak_cluster import Ended, Process
from tests.faults import clock, leaks
from tests.faults.member import MODEL
from tests.support.cluster import RunningSwap
from tests.support.network import TwoHosts

PORT = 7455
PLAN_S, STAGE_S, PAUSE_S, COMMIT_S = 8.0, 3.0, 3.0, 3.0
DEADLINES = f"[deadlines]\nplan_s = {PLAN_S}\nstage_s = {STAGE_S}\npause_s = {PAUSE_S}\ncommit_s = {COMMIT_S}\n"
ROOT = Path(__file__).parents[2]


class Daemon(Process):
    """`refitd serve` of one node."""

    directory: Path

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

    def connect(self, name: str = "faults") -> refitd.Client:
        """Connect as an operator."""
        return refitd.connect(self.directory, name=name, timeout=5)


class Member(Process):
    """A trainer or a replica, whose events go to a queue with the time they came."""

    events: queue.SimpleQueue[tuple[float, str, dict[str, Any]]]

    def start(self, **options: Any) -> subprocess.Popen[bytes]:
        """Start it."""
        popen = super().start(stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)
        threading.Thread(target=self._listen, args=(popen,), daemon=True).start()
        return popen

    def _listen(self, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stdout is not None
        with popen.stdout as said:
            for line in said:
                with contextlib.suppress(ValueError):  # the last line of one that was killed
                    self.events.put((time.monotonic(), self.name, json.loads(line)))

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


class Cluster:
    """Everything that runs: coordinator, n0 (with trainer and replica `near`, which is asked) and n1 (`far`, polls)."""

    def __init__(self, hosts: TwoHosts | None = None) -> None:
        """`hosts`, where they can be made, hold n0 and the coordinator on the one side and n1 on the other."""
        self.hosts = hosts
        self.folder = Path(tempfile.mkdtemp(prefix="rff"))
        self._temporary = self.folder / "tmp"
        self._temporary.mkdir()
        self.journal = self.folder / "c" / "journal.sqlite"
        self.events: queue.SimpleQueue[tuple[float, str, dict[str, Any]]] = queue.SimpleQueue()
        self.clocks: dict[str, clock.Clock] = {}
        self._library = None if clock.why_not() else clock.build(self.folder)
        address = hosts.coordinator if hosts is not None else "127.0.0.1"
        port = PORT if hosts is not None else _free_port()
        self._endpoint = f"tcp://{address}:{port}"
        if hosts is not None:
            self._make_keys()
        try:
            config = self._config("coordinator", 'runtime_dir = "{}"'.format(self.folder / "c"), key="c")
            self.coordinator = Process(
                "coordinator",
                self._command("coordinator", 0, "--config", str(config)),
                self._environment("coordinator"),
                self.folder / "coordinator.log",
            )
            self.daemons = {name: self._daemon(name, side) for side, name in enumerate(("n0", "n1"))}
            n0, n1 = (str(daemon.directory) for daemon in self.daemons.values())
            self.trainer = self._member("trainer", "trainer", n0)
            self.engines = {
                "near": self._member("near", "engine", n0, "near", "asked"),
                "far": self._member("far", "engine", n1, "far", "polls"),
            }
            for process in self.processes():
                process.start()
        except BaseException:
            self.remove()
            raise

    # --- what is started ----------------------------------------------------------------------------------

    def _make_keys(self) -> None:
        for name in ("c", "n0", "n1"):
            keygen = [sys.executable, "-m", "refitd_cli.control", "keygen", name, "--directory", str(self.folder)]
            subprocess.run(keygen, check=True, timeout=30, capture_output=True)
        (self.folder / "allowed").write_text("".join((self.folder / f"{n}.pub").read_text() for n in ("n0", "n1")))

    def _config(self, name: str, node: str, key: str) -> Path:
        text = f'[node]\n{node}\n[coordinator]\nendpoint = "{self._endpoint}"\n{DEADLINES}'
        if self.hosts is not None:
            text += f'[security]\nkey = "{self.folder}/{key}.key"\nserver_key = "{self.folder}/c.pub"\n'
            text += f'allowed = "{self.folder}/allowed"\n' if name == "coordinator" else ""
        path = self.folder / f"{name}.toml"
        path.write_text(text)
        return path

    def _command(self, what: str, side: int, *arguments: str) -> list[str]:
        command = ["ip", "netns", "exec", self.hosts.names[side]] if self.hosts is not None else []
        return [*command, sys.executable, "-m", "refitd_cli.daemon", what, *arguments]

    def _environment(self, name: str) -> dict[str, str]:
        found = {k: v for k, v in os.environ.items() if not k.startswith("REFITD_")}
        found |= {"FAULTS_OF": str(self.folder), "TMPDIR": str(self._temporary)}
        if self._library is not None and name in ("coordinator", "n0", "n1"):
            self.clocks[name] = clock.Clock(self._library, self.folder / f"{name}.clock")
            found |= self.clocks[name].environment
        return found

    def _daemon(self, name: str, side: int) -> Daemon:
        directory = self.folder / name
        node = f'name = "{name}"\nworkers = 2\nruntime_dir = "{directory}"\n'
        if self.hosts is not None:
            node += f'address = "{self.hosts.addresses[side]}"\n'
        config = self._config(name, node, key=name)
        command = self._command("serve", side, "--config", str(config))
        daemon = Daemon(name, command, self._environment(name), self.folder / f"{name}.log")
        daemon.directory = directory
        return daemon

    def _member(self, name: str, *arguments: str) -> Member:
        command = [sys.executable, "-m", "tests.faults.member", *arguments]
        environment = {**self._environment(name), "OMP_NUM_THREADS": "1"}
        member = Member(name, command, environment, self.folder / f"{name}.log")
        member.events = self.events
        return member

    def processes(self) -> Iterator[Process]:
        """Yield everything that is started here, in the order in which it is."""
        yield self.coordinator
        yield from self.daemons.values()
        yield self.trainer
        yield from self.engines.values()

    def pid(self, name: str) -> int:
        """Return the pid of one of them."""
        popen = next(process for process in self.processes() if process.name == name).popen
        assert popen is not None
        return popen.pid

    def workers(self, node: str) -> list[int]:
        """Return the pids of a daemon's workers."""
        found = []
        with contextlib.suppress(OSError):
            pid = self.pid(node)
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                with contextlib.suppress(OSError):
                    if b"refitd.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                        found.append(int(child))
        return found

    # --- what is asked ------------------------------------------------------------------------------------

    def swap(self, version: int, timeout: float) -> RunningSwap:
        """Ask n0 for a swap, on a thread."""
        return RunningSwap(self.daemons["n0"], MODEL, version, timeout)  # type: ignore[arg-type]

    def status(self) -> refitd.protocol.reports.StatusReport | None:  # type: ignore[name-defined]
        """Return what n0 is told, None where nobody answers."""
        try:
            with self.daemons["n0"].connect("status") as client:
                return client.status()
        except refitd.RefitdError:
            return None

    def journalled(self) -> list[tuple[int, str, float]]:
        """Return version, state and time of the swaps in the journal, the one written last first."""
        with contextlib.closing(sqlite3.connect(f"file:{self.journal}?mode=ro", uri=True, timeout=5)) as journal:
            return journal.execute("SELECT version, state, at FROM swaps ORDER BY rowid DESC").fetchall()

    def live(self) -> int | None:
        """Return the version that the journal says was decided last."""
        return next((version for version, state, _ in self.journalled() if state != "aborted"), None)

    # --- what is held -------------------------------------------------------------------------------------

    def held(self) -> dict[str, int]:
        """Return what all of it holds: descriptors by kind, processes, files."""
        found: Counter[str] = Counter()
        for process in self.processes():
            if process.popen is not None:
                for kind, count in leaks.descriptors(process.popen.pid).items():
                    found[f"{kind} descriptors of {process.name}"] = count
        for node in self.daemons:
            for pid in self.workers(node):
                for kind, count in leaks.descriptors(pid).items():
                    found[f"{kind} descriptors of {node}'s workers"] += count
        for pid, command in leaks.processes_of(f"FAULTS_OF={self.folder}").items():
            if not any(process.popen is not None and process.popen.pid == pid for process in self.processes()):
                kind = "workers" if "refitd.worker" in command else f"of {command}"
                found[f"processes, {kind}"] += 1
        folders = {name: daemon.directory for name, daemon in self.daemons.items()}
        found.update(leaks.files({**folders, "the coordinator": self.folder / "c", "$TMPDIR": self._temporary}))
        return dict(found)

    # --- the end ------------------------------------------------------------------------------------------

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
        while (alive := leaks.processes_of(f"FAULTS_OF={self.folder}")) and time.monotonic() < until:
            time.sleep(0.1)
        left += [f"process {pid}: {command}" for pid, command in alive.items()]
        for folder in (*(daemon.directory for daemon in self.daemons.values()), self._temporary):
            left += [f"{folder.name}: {p.name}" for p in folder.iterdir() if not p.name.startswith("journal")]
        return left

    def remove(self) -> None:
        """Kill what still runs and delete the folder."""
        for pid in leaks.processes_of(f"FAULTS_OF={self.folder}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes() if hasattr(self, "engines") else ():
            process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def logs(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(f"--- {path.stem}\n{path.read_text()[-6000:]}" for path in sorted(self.folder.glob("*.log")))


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
