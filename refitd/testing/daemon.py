"""Real daemons, coordinators and clusters for a test: private directories, logs on failure, leftovers reported."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypedDict, Unpack

from refitd.errors import TransportError
from refitd.protocol import keys
from refitd.testing import processes
from refitd.testing.processes import END_S, START_S, Process, ProcessFailed, eventually, read_word

if TYPE_CHECKING:
    from refitd.client import Client
    from refitd.protocol.reports import NodeStatus, StatusReport

LOG_TAIL = 20_000  # characters of a log that an error shows
_MARK = "TESTED_IN"  # environment variable of all processes started here, which their children inherit


class Options(TypedDict, total=False):
    """Options of a Service.

    Attributes:
        folder: holds its configuration, log and runtime directory; by default a new temporary folder, which `remove`
            deletes.
        directory: its runtime directory, if not inside `folder`.
        environment: added to this process's environment, whose own REFITD_ variables are dropped. REFITD_ variables in
            it (REFITD_NODE__WORKERS) override the configuration.
        prefix: a command prefix, such as ("ip", "netns", "exec", "a").
        prepare: see Process.
        own_session: see Process.
    """

    folder: Path
    directory: Path
    environment: Mapping[str, str]
    prefix: Sequence[str]
    prepare: Callable[[], None]
    own_session: bool


class Service(Process):
    """A refitd process with its configuration, runtime directory and log.

    Attributes:
        directory: its runtime directory, where clients find a daemon.
        folder: holds the runtime directory, the configuration and the log.
    """

    def __init__(self, name: str, command: str, config: str = "", **options: Unpack[Options]) -> None:
        """Write the configuration; `start` starts the process.

        Args:
            name: the name of the process, its log and its directory.
            command: "serve" or "coordinator".
            config: TOML.
            options: see Options.
        """
        self._owns_folder = "folder" not in options
        # a short prefix, because a socket's path holds at most 107 bytes
        self.folder = options["folder"] if "folder" in options else Path(tempfile.mkdtemp(prefix="rfd"))
        self.directory = options.get("directory", self.folder / name)
        path = self.folder / f"{name}.toml"
        path.write_text(config)
        self._mark = f"{_MARK}={self.folder}/{name}/"
        given = {"REFITD_NODE__RUNTIME_DIR": str(self.directory)}
        if "[log]" not in config:
            given["REFITD_LOG__LEVEL"] = "debug"
        given |= options.get("environment", {})
        prefix = options.get("prefix", ())
        super().__init__(
            name,
            [*prefix, sys.executable, "-m", "refitd_cli.daemon", command, "--config", str(path)],
            self.folder / f"{name}.log",
            environment=marked(self.folder, name, given),
            prepare=options.get("prepare"),
            own_session=options.get("own_session", False),
        )

    def children(self) -> dict[int, str]:
        """Return {pid: command line} of its running descendants."""
        mine = self.pid if self.is_running else 0
        return {pid: command for pid, command in processes.processes_of(self._mark).items() if pid != mine}

    def remove(self) -> None:
        """Kill it and its descendants, and delete its temporary folder."""
        self.kill()
        processes.kill_all(self._mark)
        if self._owns_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _not_started(self, why: str = "") -> ProcessFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self.popen is not None and not why:
                self.popen.wait(END_S)  # let it clean up
        self.kill()
        left = processes.files_in(self.directory)
        said = f"{self.name} did not start{why}:\n{self.log()[-LOG_TAIL:]}" + (f"\nit has left {left}" if left else "")
        self.remove()
        return ProcessFailed(said)

    def __enter__(self) -> Self:
        return self if self.is_running else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = self.stop()
        log = f"--- log of {self.name}\n{self.log()[-LOG_TAIL:]}"
        self.remove()
        if error is not None:
            error.add_note(log)
        elif left:
            raise ProcessFailed(f"left behind: {left}\n{log}")


def marked(folder: Path, name: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without REFITD_ variables, plus `environment` and a mark to find it by."""
    kept = {variable: text for variable, text in os.environ.items() if not variable.startswith("REFITD_")}
    return {**kept, **environment, _MARK: f"{folder}/{name}/"}


def joined(client: Client) -> int:
    """Return how many nodes the coordinator knows; 0 while it does not answer."""
    try:
        return len(client.status().nodes)
    except TransportError:
        return 0


class Coordinator(Service):
    """A `refitd coordinator` process, for daemons that are not standalone."""

    def __init__(self, config: str = "", *, name: str = "coordinator", **options: Unpack[Options]) -> None:
        """Write the configuration (TOML); see Options for the options."""
        super().__init__(name, "coordinator", config, **options)

    def start(self) -> Self:
        """Start it and wait until it listens.

        Raises:
            ProcessFailed: it ended instead, or does not listen within START_S.
        """
        before = self.log().count("event=ready")
        super().start()
        try:
            eventually(lambda: not self.is_running or self.log().count("event=ready") > before, "it listens", START_S)
        except AssertionError:
            raise self._not_started(f" within {START_S:.0f} s") from None
        if not self.is_running:
            raise self._not_started()
        return self


class Daemon(Service):
    """A `refitd serve` process in its own directory: standalone, unless it joins another coordinator.

    As a context manager it starts the daemon, stops it at the end of the block, and raises ProcessFailed if the daemon
    left processes or files behind. If the block raises, the log is added to that error.
    """

    def __init__(
        self,
        config: str = "",
        *,
        name: str = "n0",
        workers: int = 1,
        standalone: bool = True,
        joins: str = "",
        **options: Unpack[Options],
    ) -> None:
        """Write the configuration; `start` starts the process.

        Args:
            config: TOML, as for `refitd serve --config`; `name` and `workers` override it.
            name: the node's name.
            workers: the number of worker processes.
            standalone: whether it runs its own coordinator.
            joins: the endpoint of a running coordinator, such as another daemon's `endpoint`; then not standalone.
            options: see Options.
        """
        given = {"REFITD_NODE__NAME": name, "REFITD_NODE__WORKERS": str(workers)}
        given |= {"REFITD_COORDINATOR__ENDPOINT": joins} if joins else {}
        options["environment"] = {**given, **options.get("environment", {})}
        super().__init__(name, "serve", config, **options)
        self._command += ["--standalone"] if standalone and not joins else []
        self._coordinators: list[Coordinator] = []

    @property
    def endpoint(self) -> str:
        """Its standalone coordinator's endpoint, which other daemons of this machine can join."""
        return f"ipc://{self.directory / 'coordinator.sock'}"

    def start(self, timeout: float = START_S) -> Self:
        """Start it and wait until clients can connect.

        Raises:
            ProcessFailed: it ended instead, or is not ready within `timeout` seconds.
        """
        ready_r, ready_w = os.pipe()
        try:
            self._spawn(["--ready-fd", str(ready_w)], pass_fds=(ready_w,))
            os.close(ready_w)
            ready_w = -1
            word = read_word(ready_r, timeout)
        finally:
            os.close(ready_r)
            if ready_w >= 0:
                os.close(ready_w)
        if word != b"ready\n":
            raise self._not_started("" if word is not None else f" within {timeout:.0f} s")
        return self

    def connect(self, name: str = "test", timeout: float = 10.0, *, reconnect: bool = False) -> Client:
        """Connect to it from this process; the caller closes the client.

        With `reconnect` the client waits for the daemon when it has ended, as one of `refitd.connect` does.
        """
        from refitd.client import connect

        return connect(self.directory, name=name, timeout=timeout, reconnect=reconnect)

    def status(self) -> StatusReport:
        """Return its coordinator's status."""
        with self.connect("status") as client:
            return client.status()

    def node(self) -> NodeStatus:
        """Return its coordinator's status of the first node."""
        return self.status().nodes[0]

    def node_of(self, name: str) -> NodeStatus:
        """Return the status of a node of its cluster, once all workers of that node are running."""
        found: list[NodeStatus] = []

        def is_there() -> bool:
            found[:] = [node for node in self.status().nodes if node.node == name and all(node.workers)]
            return bool(found)

        eventually(is_there, f"the workers of {name} are there")
        return found[0]

    def workers(self) -> list[int]:
        """Return the pids of its workers, from /proc."""
        return [pid for pid, command in self.children().items() if "refitd.worker" in command]

    def start_coordinator(self) -> Coordinator:
        """Start `refitd coordinator` in the directory of this (not standalone) daemon; wait until it has joined.

        Raises:
            ProcessFailed: the coordinator does not start.
        """
        config = (self.folder / f"{self.name}.toml").read_text()
        found = Coordinator(config, folder=self.folder, directory=self.directory)
        found.log_path = self.log_path
        self._coordinators.append(found.start())
        with self.connect("status") as client:
            eventually(lambda: joined(client) > 0, "the daemon has met its coordinator", START_S)
        return found

    def stop(self) -> list[str]:
        """Stop it (SIGTERM); return failures and leftovers: processes, and files other than journals."""
        left = [problem for part in self._coordinators if part.is_running for problem in part.stop()]
        left += super().stop()
        left += [f"process {pid}: {command}" for pid, command in self.children().items()]
        return left + [f"file {name}" for name in processes.files_in(self.directory)]

    def remove(self) -> None:
        """Kill it, its coordinators and their descendants, and delete its temporary folder."""
        for coordinator in self._coordinators:
            coordinator.remove()
        super().remove()


class Cluster:
    """`refitd coordinator` and a `refitd serve` for each node, connected over loopback and authenticated by keys.

    Attributes:
        coordinator: the coordinator's process.
        daemons: the daemons by node name.
        journal: the coordinator's journal file.
        folder: holds configurations, logs, and each process's runtime directory.
    """

    def __init__(
        self, nodes: Sequence[str] = ("n0", "n1"), config: str = "", *, workers: int = 1, endpoint: str = ""
    ) -> None:
        """Prepare the cluster; `start` starts it.

        Args:
            nodes: the nodes' names.
            config: TOML for the coordinator and for every daemon.
            workers: the number of worker processes of each daemon.
            endpoint: where the coordinator listens; "": a free loopback port.
        """
        # a short prefix, because a socket's path holds at most 107 bytes
        self.folder = Path(tempfile.mkdtemp(prefix="rfc"))
        self.endpoint = endpoint or f"tcp://127.0.0.1:{free_port()}"
        self.journal = self.folder / "coordinator" / "journal.sqlite"
        self._nodes, self._config, self._workers = tuple(nodes), config, workers
        self.daemons: dict[str, Daemon] = {}

    def start(self) -> Self:
        """Start all processes and wait until every node has joined.

        Raises:
            ProcessFailed: a process does not start.
        """
        try:
            self._make_keys()
            self.coordinator = Coordinator(self._config, **self._options("coordinator"))
            for name in self._nodes:
                self.daemons[name] = Daemon(
                    self._config, name=name, workers=self._workers, joins=self.endpoint, **self._options(name)
                )
            for part in self.parts():
                part.start()
            with self.daemons[self._nodes[0]].connect("status") as client:
                eventually(lambda: joined(client) == len(self._nodes), "every node has joined")
        except BaseException:
            self.remove()
            raise
        return self

    def _make_keys(self) -> None:
        lines = []
        for name in ("coordinator", *self._nodes):
            pair = keys.generate(name)
            keys.write(pair, self.folder)
            lines.append(f"{pair.public_line} node={name}\n" if name in self._nodes else "")
        (self.folder / "allowed").write_text("".join(lines))
        (self.folder / "allowed").chmod(0o644)

    def _options(self, name: str) -> Options:
        given = {
            "REFITD_COORDINATOR__ENDPOINT": self.endpoint,
            "REFITD_SECURITY__KEY": str(self.folder / f"{name}.key"),
            "REFITD_SECURITY__SERVER_KEY": str(self.folder / "coordinator.pub"),
        }
        if name == "coordinator":
            given["REFITD_SECURITY__ALLOWED"] = str(self.folder / "allowed")
        environment = {**given, **self.environment(name)}
        return {"folder": self.folder, "environment": environment, "prefix": self.prefix(name)}

    def environment(self, name: str) -> Mapping[str, str]:
        """Return additional environment variables for the coordinator or a daemon; for subclasses to override."""
        return {}

    def prefix(self, name: str) -> Sequence[str]:
        """Return a command prefix for the coordinator or a daemon; for subclasses to override."""
        return ()

    def parts(self) -> list[Process]:
        """Return the coordinator and the daemons, in the order of their start."""
        return [self.coordinator, *self.daemons.values()] if self.daemons else []

    def logs(self, tail: int = LOG_TAIL) -> str:
        """Return the last `tail` characters of each log."""
        found = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- log of {path.stem}\n{path.read_text(errors='replace')[-tail:]}" for path in found)

    def marked(self, name: str, environment: Mapping[str, str]) -> dict[str, str]:
        """Return an environment for another process, marked as one of this cluster."""
        return marked(self.folder, name, environment)

    def running(self) -> dict[int, str]:
        """Return {pid: command line} of all processes started here, and of their descendants."""
        return processes.processes_of(f"={self.folder}/")

    def stop(self) -> list[str]:
        """Stop the daemons and then the coordinator (SIGTERM); return failures and leftovers."""
        left = [f"{part.name}: {problem}" for part in reversed(self.parts()) for problem in part.stop()]
        left += [f"process {pid}: {command}" for pid, command in self.running().items()]
        return left + [f"coordinator: file {name}" for name in processes.files_in(self.journal.parent)]

    def kill(self) -> None:
        """Kill what still runs; logs stay."""
        processes.kill_all(f"={self.folder}/")
        for part in self.parts():
            part.kill()

    def remove(self) -> None:
        """Kill what still runs, and delete the folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left, logs = self.stop(), self.logs()
        self.remove()
        if error is not None:
            error.add_note(logs)
        elif left:
            raise ProcessFailed(f"left behind: {left}\n{logs}")


def free_port() -> int:
    """Return a free loopback port."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
