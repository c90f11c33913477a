"""The controller of one replica: its hooks pause the engine, make all ranks commit, and resume the engine."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping

from msgspec import structs

from refitd.client.connection import Connection
from refitd.client.reconnect import Give, Line
from refitd.errors import CommitError, RefitdError, from_code
from refitd.protocol import local
from refitd.protocol.base import Message
from refitd.text import called

_log = logging.getLogger("refitd.client")


class ReplicaController:
    """Pauses, commits and resumes one replica from a separate thread. `Client.control_replica` makes it."""

    def __init__(
        self,
        line: Line,
        connection: Connection,
        message: local.RegisterController,
        member: str,
        pause: Callable[[int], object] | None,
        commit: Callable[[int], object],
        resume: Callable[[int | None], object] | None,
        closed: Callable[[ReplicaController], object],
    ) -> None:
        """Start the thread; `close` calls `closed`."""
        self.model = message.model
        self.replica = message.replica
        self.member = member
        self._line, self._message = line, message
        self.error: RefitdError | None = None  # the last hook's error, or the loss of the daemon
        self.is_paused = False
        self._refuses = False  # the engine was last resumed without a version
        self._connection = connection
        self._pause, self._commit, self._resume = pause, commit, resume
        self._told = closed
        self._since = 0.0  # when the engine paused
        self._asked: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="refitd-control", daemon=True)
        connection.listen(member, self._asked.put)
        self._thread.start()

    def close(self) -> None:
        """End the registration. An undecided swap aborts; if the engine is paused, `resume(None)` is called."""
        if self._closed:
            return
        self._told(self)
        self.release()
        self._line.deregister(self._connection, self.member)

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Ignore new arena numbers: a controller has no tensors in arenas."""

    def register_again(self, connection: Connection, give: Give, timeout: float) -> None:
        """Register over a new connection.

        Raises:
            RefitdError: the registration was refused, or the daemon has ended again.
        """
        # a paused engine is resumed without a version, too: its thread handles the loss of the daemon first
        message = structs.replace(self._message, refuses=self._refuses or self.is_paused)
        self.member = connection.request(message, local.Registered, timeout).member
        self._connection = connection
        connection.listen(self.member, self._asked.put)

    def give_up(self, failure: local.Failure) -> None:
        """Record that it could not be registered again, and end its thread."""
        self._connection.is_awaited = False
        self._asked.put(failure)

    def arenas(self) -> set[int]:
        """Return an empty set: a controller has no tensors in arenas."""
        return set()

    def release(self) -> None:
        """Stop receiving swaps; a running hook is not interrupted."""
        self._closed = True
        self._connection.unlisten(self.member)
        self._asked.put(None)

    def _work(self) -> None:
        while True:
            match self._asked.get():
                case local.Control(_, swap, "pause", int(version)):
                    self._answer(swap, "pause", self._pause, version)
                case local.Control(_, swap, "commit", int(version)):
                    self._answer(swap, "commit", self._commit, version)
                case local.Control(_, swap, "resume", version):
                    _log.info("swap=%s member=%s resumes version=%s", swap, called(self.member), version)
                    self._go_on(version)
                case local.Failure() if self._connection.is_awaited:
                    if self.is_paused:
                        self._go_on(None)  # the replica has no permit until the next swap
                case local.Failure(code, text):
                    self.error = from_code(code, text)
                    break
                case None:
                    break
        if self.is_paused:
            self._go_on(None)  # this controller will not learn which version the replica may serve

    def _answer(self, swap: str, what: str, hook: Callable[[int], object] | None, version: int) -> None:
        """Call a hook and report the result to the daemon."""
        assert what in ("pause", "commit")
        _log.info("swap=%s member=%s version=%s %s", swap, called(self.member), version, what)
        if not self.is_paused:
            self.is_paused, self._since = True, time.perf_counter()
        reason = ""
        try:
            if hook is not None:
                hook(version)
        except BaseException as exc:  # also SystemExit: this thread must survive for the next hook
            reason = f"the {what} hook of replica {self.replica!r} raised {type(exc).__name__}: {exc}"
            self.error = CommitError(reason)
            _log.error("swap=%s member=%s %s", swap, called(self.member), reason)
        paused_s = time.perf_counter() - self._since
        told = local.Controlled(
            member=self.member,
            swap=swap,
            what="pause" if what == "pause" else "commit",
            paused_s=paused_s,
            reason=reason,
        )
        try:
            self._connection.tell(told)
        except RefitdError as exc:
            self.error = exc  # the daemon has ended: a Failure follows

    def _go_on(self, version: int | None) -> None:
        self.is_paused, self._refuses = False, version is None
        if self._resume is None:
            return
        try:
            self._resume(version)
        except BaseException as exc:
            self.error = CommitError(f"the resume hook of replica {self.replica!r} raised {type(exc).__name__}: {exc}")
            _log.error("member=%s %s", called(self.member), self.error)
