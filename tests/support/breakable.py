"""A cluster whose trainer and replicas are separate processes, each of which can be broken and repaired."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from refitd.testing import Cluster, Process
from refitd.testing.processes import files_in

ROOT = Path(__file__).parents[2]
Event = tuple[float, str, dict[str, Any]]


class Member(Process):
    """A process driven by lines of JSON; each line that it prints is passed to `said` with the time and its name."""

    def __init__(self, *arguments: Any, said: Callable[[Event], None], **options: Any) -> None:
        super().__init__(*arguments, folder=ROOT, **options)
        self._said = said

    def start(self) -> Self:
        popen = self._spawn(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        threading.Thread(target=self._listen, args=(popen,), daemon=True).start()
        return self

    def _listen(self, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stdout is not None
        with popen.stdout as said:
            for line in said:
                with contextlib.suppress(ValueError):  # the last line of a killed process may be incomplete
                    self._said((time.monotonic(), self.name, json.loads(line)))

    def kill(self) -> None:
        """Kill it, and close the pipes to it."""
        super().kill()
        if self.popen is not None and self.popen.stdin is not None:
            with contextlib.suppress(OSError):
                self.popen.stdin.close()

    def tell(self, **command: Any) -> None:
        """Send it a command, unless it has ended."""
        assert self.popen is not None and self.popen.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.popen.stdin.write(json.dumps(command).encode() + b"\n")
            self.popen.stdin.flush()


class BreakableCluster(Cluster):
    """All processes of the cluster, once `start` is called; the trainer is beside the first node.

    `events` has the reports of trainer and engines (tests/support/breakable_member.py): time, process, report.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        replicas: Mapping[str, tuple[str, str]],
        *,
        deadlines: Mapping[str, float],
        ranks: int = 1,
        endpoint: str = "",
        families: Mapping[str, str] | None = None,
    ) -> None:
        """`replicas` gives node and way of each replica; the trainer and every replica have `ranks` ranks.

        `families` are members that publish, swap and serve on their own (tests/support/family_member.py), with the
        node of each.
        """
        lines = "".join(f"{name} = {seconds}\n" for name, seconds in deadlines.items())
        super().__init__(nodes, f"[deadlines]\n{lines}", workers=2, endpoint=endpoint)
        self._replicas, self._ranks, self._families = replicas, ranks, families or {}
        self._temporary = self.folder / "tmp"
        self._temporary.mkdir()
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.processes: list[Process] = []  # in starting order

    def start(self) -> Self:
        super().start()
        try:
            self.trainer = self._member("trainer", next(iter(self.daemons)), "trainer")
            self.engines = {
                name: self._member(name, node, "engine", "--replica", name, "--way", way)
                for name, (node, way) in self._replicas.items()
            }
            self.families = {
                name: self._spawned(name, node, "tests.support.family_member", name)
                for name, node in self._families.items()
            }
            members = (self.trainer, *self.engines.values(), *self.families.values())
            for member in members:
                member.start()
            self.processes = [*self.parts(), *members]
        except BaseException:
            self.remove()
            raise
        return self

    def environment(self, name: str) -> dict[str, str]:
        return {"TMPDIR": str(self._temporary)}

    def _member(self, name: str, node: str, *arguments: str) -> Member:
        return self._spawned(name, node, "tests.support.breakable_member", *arguments, "--ranks", str(self._ranks))

    def _spawned(self, name: str, node: str, module: str, *arguments: str) -> Member:
        command = [sys.executable, "-m", module, *arguments, "--directory", str(self.daemons[node].directory)]
        environment = self.marked(name, self.environment(name))
        return Member(name, command, self.folder / f"{name}.log", environment=environment, said=self.events.put)

    # --- the end ------------------------------------------------------------------------------------------

    def strangers(self) -> dict[int, str]:
        """Return the descendants of `processes`: pid -> command."""
        known = {process.pid for process in self.processes}
        return {pid: command for pid, command in self.running().items() if pid not in known}

    def folders(self) -> dict[str, Path]:
        """Return the folders where processes may leave files, by process."""
        found = {name: daemon.directory for name, daemon in self.daemons.items()}
        return {**found, "the coordinator": self.journal.parent, "$TMPDIR": self._temporary}

    def stop(self) -> list[str]:
        """End all processes in order; return their leftovers."""
        for member in (*self.families.values(), *self.engines.values(), self.trainer):
            member.kill()
        return super().stop() + [f"$TMPDIR: {name}" for name in files_in(self._temporary)]
