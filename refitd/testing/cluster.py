"""A coordinator and daemons of several nodes on this machine, each of which a test may break and mend."""

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
    """`refitd coordinator` and a `refitd serve` for each node, which know each other by keys, over the loopback.

    Attributes:
        coordinator: its process.
        daemons: the daemons by the names of their nodes.
        journal: the coordinator's file.
        folder: configurations, logs, and a runtime directory for each.
    """

    def __init__(
        self, nodes: Sequence[str] = ("n0", "n1"), config: str = "", *, workers: int = 1, endpoint: str = ""
    ) -> None:
        """Start nothing yet.

        Args:
            nodes: their names.
            config: TOML for the coordinator and for every daemon.
            workers: how many worker processes each daemon has.
            endpoint: where the coordinator listens; "": a free port of the loopback.
        """
        # short: a socket's path holds 107 bytes
        self.folder = Path(tempfile.mkdtemp(prefix="rfc"))
        self.endpoint = endpoint or f"tcp://127.0.0.1:{free_port()}"
        self.journal = self.folder / "coordinator" / "journal.sqlite"
        self._nodes, self._config, self._workers = tuple(nodes), config, workers
        self.daemons: dict[str, Daemon] = {}

    def start(self) -> Self:
        """Start all of them and wait until every node has joined.

        Raises:
            ProcessFailed: one does not start.
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
        """Return what the coordinator or a daemon is to have in its environment beside the usual; for subclasses."""
        return {}

    def prefix(self, name: str) -> Sequence[str]:
        """Return what the command of the coordinator or of a daemon begins with; for subclasses."""
        return ()

    def parts(self) -> list[Process]:
        """Return the coordinator and the daemons, in the order in which they are started."""
        return [self.coordinator, *self.daemons.values()] if self.daemons else []

    def logs(self, tail: int = LOG_TAIL) -> str:
        """Return the ends of all logs, so many characters of each."""
        found = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- log of {path.stem}\n{path.read_text(errors='replace')[-tail:]}" for path in found)

    def marked(self, name: str, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment for another process that is to count as one of this cluster."""
        return marked(self.folder, name, environment)

    def running(self) -> dict[int, str]:
        """Return all that was started here, and what that has started: pid -> command line."""
        return leaks.processes_of(f"={self.folder}/")

    def stop(self) -> list[str]:
        """End the daemons and then the coordinator in order; return what went wrong and what was left behind."""
        left = [f"{part.name}: {problem}" for part in reversed(self.parts()) for problem in part.stop()]
        left += [f"process {pid}: {command}" for pid, command in self.running().items()]
        return left + [f"coordinator: file {name}" for name in leaks.files_in(self.journal.parent)]

    def kill(self) -> None:
        """End what still runs, by force; logs stay."""
        leaks.kill_all(f"={self.folder}/")
        for part in self.parts():
            part.kill()

    def remove(self) -> None:
        """End what still runs, by force, and delete the folder."""
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
    """Return a port of the loopback that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
