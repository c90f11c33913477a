"""A real daemon, and a coordinator, for a test: private directories, logs on failure, leavings reported."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypedDict, Unpack

from refitd.errors import TransportError
from refitd.testing import leaks
from refitd.testing.processes import END_S, START_S, Process, ProcessFailed, eventually, read_word

if TYPE_CHECKING:
    from refitd.client import Client
    from refitd.protocol.reports import NodeStatus, StatusReport

LOG_TAIL = 20_000  # characters of a log that an error shows
_MARK = "TESTED_IN"  # in the environment of all that is started here, and of what that starts


class Options(TypedDict, total=False):
    """How a Service is started, where it is not as usual.

    Attributes:
        folder: where its configuration, its log and its runtime directory go; the default is a temporary folder of its
            own, which `remove` deletes.
        directory: its runtime directory, if it is not one below `folder`.
        environment: over this process's environment, and over the configuration where it has REFITD_NODE__WORKERS and
            such. This process's own REFITD_ variables do not count.
        prefix: what the command line begins with, as ("ip", "netns", "exec", "a").
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
    """One of refitd's own processes: its configuration, its directory, its log.

    Attributes:
        directory: its runtime directory, where clients find a daemon.
        folder: what holds the directory, the configuration and the log.
    """

    def __init__(self, name: str, command: str, config: str = "", **options: Unpack[Options]) -> None:
        """Write the configuration; start nothing yet.

        Args:
            name: what it, its log and its directory are called.
            command: "serve" or "coordinator".
            config: TOML.
            options: see Options.
        """
        self._owns_folder = "folder" not in options
        # short: a socket's path holds 107 bytes
        self.folder = options["folder"] if "folder" in options else Path(tempfile.mkdtemp(prefix="rfd"))
        self.directory = options.get("directory", self.folder / name)
        path = self.folder / f"{name}.toml"
        path.write_text(config)
        self._mark = f"{_MARK}={self.folder}/{name}/"
        given = {"REFITD_NODE__RUNTIME_DIR": str(self.directory), **options.get("environment", {})}
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
        """Return what it has started and still runs: pid -> command line."""
        mine = self.pid if self.is_running else 0
        return {pid: command for pid, command in leaks.processes_of(self._mark).items() if pid != mine}

    def remove(self) -> None:
        """End it and all that it has started, by force, and delete its temporary folder."""
        self.kill()
        leaks.kill_all(self._mark)
        if self._owns_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _not_started(self, why: str = "") -> ProcessFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self.popen is not None and not why:
                self.popen.wait(END_S)  # what it has to clean up, it does now
        self.kill()
        left = leaks.files_in(self.directory)
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
    """Return this process's environment without settings of refitd, with others, and with a mark to be found by."""
    kept = {variable: text for variable, text in os.environ.items() if not variable.startswith("REFITD_")}
    return {**kept, **environment, _MARK: f"{folder}/{name}/"}


def joined(client: Client) -> int:
    """Return how many nodes the coordinator of a client's daemon knows, 0 while none answers."""
    try:
        return len(client.status().nodes)
    except TransportError:
        return 0


class Coordinator(Service):
    """`refitd coordinator`, for daemons that are not standalone."""

    def __init__(self, config: str = "", *, name: str = "coordinator", **options: Unpack[Options]) -> None:
        """Take TOML and Options."""
        super().__init__(name, "coordinator", config, **options)

    def start(self) -> Self:
        """Start it and wait until it listens.

        Raises:
            ProcessFailed: it has ended instead, or does not listen within START_S.
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
    """`refitd serve` on a directory of its own: standalone, unless it joins another coordinator.

    As a context manager it starts, and at the end of the block is stopped and raises ProcessFailed if it has left
    processes or files. If the block raises, its log is added to that error.
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
        """Write the configuration; start nothing yet.

        Args:
            config: TOML, as for `refitd serve --config`; `name` and `workers` stand above it.
            name: of the node.
            workers: how many worker processes copy.
            standalone: whether it runs a coordinator of its own.
            joins: the endpoint of a coordinator that runs already, as another daemon's `endpoint`: not standalone.
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
        """Where its standalone coordinator listens; other daemons of this machine join it there."""
        return f"ipc://{self.directory / 'coordinator.sock'}"

    def start(self, timeout: float = START_S) -> Self:
        """Start it and wait until clients can connect.

        Raises:
            ProcessFailed: it has ended instead, or is not ready within `timeout` seconds.
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

    def connect(self, name: str = "test", timeout: float = 10.0) -> Client:
        """Connect to it from this process; the caller closes the client."""
        from refitd.client import connect

        return connect(self.directory, name=name, timeout=timeout)

    def status(self) -> StatusReport:
        """Return what its coordinator knows."""
        with self.connect("status") as client:
            return client.status()

    def node(self) -> NodeStatus:
        """Return its coordinator's status of the first node."""
        return self.status().nodes[0]

    def node_of(self, name: str) -> NodeStatus:
        """Return the status of a node of its cluster, once all workers of that are there."""

        def found() -> NodeStatus:
            return next(node for node in self.status().nodes if node.node == name)

        eventually(lambda: all(found().workers), f"the workers of {name} are there")
        return found()

    def workers(self) -> list[int]:
        """Return the pids of its workers, as the kernel knows them."""
        return [pid for pid, command in self.children().items() if "refitd.worker" in command]

    def start_coordinator(self) -> Coordinator:
        """Start `refitd coordinator` in the directory of this daemon, which is not standalone; wait until they meet.

        Raises:
            ProcessFailed: it does not start.
        """
        config = (self.folder / f"{self.name}.toml").read_text()
        found = Coordinator(config, folder=self.folder, directory=self.directory)
        found.log_path = self.log_path
        self._coordinators.append(found.start())
        with self.connect("status") as client:
            eventually(lambda: joined(client) > 0, "the daemon has met its coordinator", START_S)
        return found

    def stop(self) -> list[str]:
        """End it in order; return what went wrong and what was left behind: processes, and files but for journals."""
        left = [problem for part in self._coordinators if part.is_running for problem in part.stop()]
        left += super().stop()
        left += [f"process {pid}: {command}" for pid, command in self.children().items()]
        return left + [f"file {name}" for name in leaks.files_in(self.directory)]

    def remove(self) -> None:
        """End it, its coordinators and all that they have started, by force, and delete its temporary folder."""
        for coordinator in self._coordinators:
            coordinator.remove()
        super().remove()
