"""A coordinator and the daemons of several nodes on this machine, which a test can stop and restart."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from refitd.protocol import keys
from refitd.testing import leaks
from refitd.testing.daemon import LOG_TAIL, Coordinator, Daemon, Options, joined, marked
from refitd.testing.processes import Process, ProcessFailed, eventually


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
        """Return an environment for another process, marked so that it counts as one of this cluster."""
        return marked(self.folder, name, environment)

    def running(self) -> dict[int, str]:
        """Return {pid: command line} of all processes started here, and of their descendants."""
        return leaks.processes_of(f"={self.folder}/")

    def stop(self) -> list[str]:
        """Stop the daemons and then the coordinator (SIGTERM); return failures and leftovers."""
        left = [f"{part.name}: {problem}" for part in reversed(self.parts()) for problem in part.stop()]
        left += [f"process {pid}: {command}" for pid, command in self.running().items()]
        return left + [f"coordinator: file {name}" for name in leaks.files_in(self.journal.parent)]

    def kill(self) -> None:
        """Kill what still runs; logs stay."""
        leaks.kill_all(f"={self.folder}/")
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
