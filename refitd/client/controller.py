"""The controller of one replica: its hooks pause an engine, let all of its ranks commit, and resume it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping

from refitd.client.connection import Connection
from refitd.client.reconnect import Give, Line
from refitd.errors import CommitError, RefitdError, from_code
from refitd.protocol import control, local
from refitd.protocol.base import Message

_log = logging.getLogger("refitd.client")


class ReplicaController:
    """Pauses, commits and resumes one replica, on a thread of its own. Made by `Client.control_replica`."""

    def __init__(
        self,
        line: Line,
        connection: Connection,
        message: control.RegisterController,
        member: str,
        pause: Callable[[int], object] | None,
        commit: Callable[[int], object],
        resume: Callable[[int | None], object] | None,
        closed: Callable[[ReplicaController], object],
    ) -> None:
        """`closed` is called when the controller is closed."""
        self.model = message.model
        self.replica = message.replica
        self.member = member
        self._line, self._message = line, message
        self.error: RefitdError | None = None  # the last hook's error, or the loss of the daemon
        self.is_paused = False
        self._connection = connection
        self._pause, self._commit, self._resume = pause, commit, resume
        self._told = closed
        self._since = 0.0  # when its engine stood still
        self._asked: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="refitd-control", daemon=True)
        connection.listen(member, self._asked.put)
        self._thread.start()

    def close(self) -> None:
        """End the registration. A swap that is not decided yet aborts; a paused engine is resumed with None."""
        if self._closed:
            return
        self._told(self)
        self.release()
        self._line.deregister(self._connection, self.member)

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Do nothing: a controller has no tensors in arenas."""

    def register_again(self, connection: Connection, give: Give, timeout: float) -> None:
        """Register over a new connection; raises RefitdError if that is refused, or the daemon is gone again."""
        self.member = connection.request(self._message, control.ControllerRegistered, timeout).member
        self._connection = connection
        connection.listen(self.member, self._asked.put)

    def give_up(self, failure: local.Failure) -> None:
        """Record that it could not be registered again; its thread ends."""
        self._connection.is_awaited = False
        self._asked.put(failure)

    def arenas(self) -> set[int]:
        """Return the arenas from `allocate` that hold its tensors: none."""
        return set()

    def release(self) -> None:
        """Stop hearing of swaps; a hook that runs is not interrupted."""
        self._closed = True
        self._connection.unlisten(self.member)
        self._asked.put(None)

    def _work(self) -> None:
        while True:
            match self._asked.get():
                case control.Control(_, swap, "pause", int(version)):
                    self._answer(swap, "pause", self._pause, version)
                case control.Control(_, swap, "commit", int(version)):
                    self._answer(swap, "commit", self._commit, version)
                case control.Control(_, swap, "resume", version):
                    _log.info("swap=%s member=%s resumes version=%s", swap, self.member, version)
                    self._go_on(version)
                case local.Failure() if self._connection.is_awaited:
                    if self.is_paused:
                        self._go_on(None)  # until the next swap nobody says what it may serve
                case local.Failure(code, text):
                    self.error = from_code(code, text)
                    break
                case None:
                    break
        if self.is_paused:
            self._go_on(None)  # nobody says any more what it may serve

    def _answer(self, swap: str, what: str, hook: Callable[[int], object] | None, version: int) -> None:
        """Call a hook and report the result."""
        assert what in ("pause", "commit")
        _log.info("swap=%s member=%s version=%s %s", swap, self.member, version, what)
        if not self.is_paused:
            self.is_paused, self._since = True, time.perf_counter()
        reason = ""
        try:
            if hook is not None:
                hook(version)
        except BaseException as exc:  # SystemExit too: this is the client's thread, and is needed again
            reason = f"the {what} hook of replica {self.replica!r} raised {type(exc).__name__}: {exc}"
            self.error = CommitError(reason)
            _log.error("swap=%s member=%s %s", swap, self.member, reason)
        paused_s = time.perf_counter() - self._since
        told = control.Controlled(
            member=self.member,
            swap=swap,
            what="pause" if what == "pause" else "commit",
            paused_s=paused_s,
            reason=reason,
        )
        try:
            self._connection.tell(told)
        except RefitdError as exc:
            self.error = exc  # the daemon is gone: a Failure follows

    def _go_on(self, version: int | None) -> None:
        self.is_paused = False
        if self._resume is None:
            return
        try:
            self._resume(version)
        except BaseException as exc:
            self.error = CommitError(f"the resume hook of replica {self.replica!r} raised {type(exc).__name__}: {exc}")
            _log.error("member=%s %s", self.member, self.error)
