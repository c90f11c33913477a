"""What an engine holds: tensors that become a new version at commit points of its own choosing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from refitd.client.checks import LiveChecks
from refitd.client.connection import Connection
from refitd.client.devices import Arena
from refitd.client.mxfp8 import TargetTensors
from refitd.errors import CommitError, DeadlineExceeded, RefitdError, from_code
from refitd.protocol import local
from refitd.protocol.base import Message

# The application's own logging says where it goes; every line has the swap's id, as the other processes' lines have.
_log = logging.getLogger("refitd.client")

NOTHING_PENDING = -1

# How long a paused engine waits for the worker's copy of a few GB before it gives up and serves no version.
APPLY_TIMEOUT_S = 60.0

# How long an engine that was asked to stand still waits for the decision. Nobody knows then what was decided, so
# that it serves no version until it is told: this is beyond all deadlines that a coordinator should have.
PAUSE_TIMEOUT_S = 600.0


class Commit:
    """A decided version, handed to an `on_commit` callback."""

    def __init__(self, target: Target, prepare: local.PrepareCommit) -> None:
        self._target = target
        self._prepare = prepare
        self.version = prepare.version

    def apply(self) -> int:
        """Take the version over now; no forward pass may run meanwhile. Return the version."""
        return self._target._apply(self._prepare)


class Target:
    """This rank's shard of one replica, registered. Made by `Client.register_target`.

    One thread polls or waits at a time; `version`, `pending` and `last_pause_s` may be read from any.
    """

    def __init__(
        self,
        connection: Connection,
        model: str,
        replica: str,
        tensors: TargetTensors,
        registered: local.TargetRegistered,
        staging: Arena | None,
        on_commit: Callable[[Commit], object] | None,
        on_pause: Callable[[int], object] | None = None,
        on_resume: Callable[[int | None], object] | None = None,
    ) -> None:
        self._connection = connection
        self._tensors = tensors
        self._staging = staging
        self._changed = threading.Condition()
        self._prepare: local.PrepareCommit | None = None
        self._asked: local.AskPause | None = None  # to stand still, until that is over
        self._fenced = ""
        self._applied: local.CommitApplied | None = None
        self._failure: local.Failure | None = None
        self._version: int | None = registered.version
        self._closed = False
        self.model = model
        self.replica = replica
        self.member = registered.member
        self.last_pause_s = 0.0
        self._checks = LiveChecks(connection, self.member, tensors, lambda: self._staging)
        self.error: RefitdError | None = None  # what a callback's commit failed with, or that the daemon has gone
        connection.listen(self.member, self._notified)
        work: Callable[[], None] | None = None
        if on_pause is not None:
            work = partial(self._attend, on_pause, on_resume)
        elif on_commit is not None:
            work = partial(self._call_back, on_commit)
        if work is not None:
            threading.Thread(target=work, name="refitd-commit", daemon=True).start()

    @property
    def version(self) -> int | None:
        """The version to serve: what these tensors hold.

        None before the first, after a commit that failed, and while `fenced`: serve nothing then.
        """
        return None if self._fenced else self._version

    @property
    def fenced(self) -> str:
        """Why it cannot be known at present whether another version was decided; "" where it is known."""
        return self._fenced

    @property
    def pending(self) -> int | None:
        """The version that is decided and waits for this rank's commit point."""
        prepare = self._prepare
        return None if prepare is None else prepare.version

    def poll(self, agree: Callable[[int], int] | None = None) -> int | None:
        """A commit point: take a pending version over, in place, and return it; None when there is none.

        `agree` is for replicas of several ranks that must flip between the same two tokens: it is called at every
        poll with this rank's pending version (-1: none) and returns what all ranks agree on, for instance an
        all_reduce MIN of it; the commit happens if that is the pending version.

        Raises:
            CommitError: the version could not be taken over; this rank then serves none.
            PeerLost: the daemon has ended (the tensors keep their version).
        """
        prepare = self._prepare
        if agree is not None:
            agreed = agree(NOTHING_PENDING if prepare is None else prepare.version)
            if prepare is None or agreed != prepare.version:
                self._check_connected()
                return None
        if prepare is None:
            self._check_connected()
            return None
        return self._apply(prepare)

    def wait(self, version: int, timeout: float = 60.0) -> int:
        """Block until `version` or a newer one is live here, committing meanwhile; return what is live.

        Raises:
            DeadlineExceeded: it did not become live in time.
            CommitError, PeerLost: as in `poll`.
        """
        deadline = time.monotonic() + timeout
        while True:
            with self._changed:
                live = self.version
                if live is not None and live >= version:
                    return live
                self._check_connected()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded(
                        f"model {self.model!r} replica {self.replica!r}: version {version} is not live after "
                        f"{timeout:.1f} s (live: {live}{', ' + self._fenced if self._fenced else ''}); "
                        "look at `refitctl status` for the last swap"
                    )
                if self._prepare is None:
                    self._changed.wait(left)
                prepare = self._prepare
            if prepare is not None:
                self._apply(prepare)

    def close(self) -> None:
        """Take the registration back; the tensors keep what they hold."""
        self.release()
        self._connection.request(local.Deregister(member=self.member), local.Done, 10.0)

    def release(self) -> None:
        """Let go of the staging arena; nothing can be committed afterwards."""
        with self._changed:
            self._closed = True
            self._prepare = None
            self._staging = None
            self._changed.notify_all()
        self._checks.release()
        self._connection.unlisten(self.member)

    def _apply(self, prepare: local.PrepareCommit, started: float | None = None) -> int:
        """Take a version over; `started` is when this rank came to a standstill, if it did so earlier."""
        started = time.perf_counter() if started is None else started
        with self._checks.committing():
            return self._take_over(prepare, started)

    def _take_over(self, prepare: local.PrepareCommit, started: float) -> int:
        try:
            self._tensors.check_unmoved()
            self._tensors.settle()  # what reads the old version on a GPU
            if prepare.by_worker:
                self._let_worker_write(prepare)
            elif not prepare.in_place:
                if self._staging is None:
                    raise CommitError("this target has been closed")
                self._tensors.read_from(self._staging)
                self._tensors.settle()
            self._tensors.refresh()
            self._tensors.check_unmoved("during the commit")
        except Exception as exc:
            self._version = None
            self._settle()
            _log.error("swap=%s member=%s version=%s failed: %s", prepare.swap, self.member, prepare.version, exc)
            failed = local.CommitFailed(swap=prepare.swap, member=self.member, reason=str(exc))
            self._connection.tell(failed)
            if isinstance(exc, CommitError):
                raise
            raise CommitError(f"version {prepare.version} could not be taken over: {exc}") from exc
        self.last_pause_s = time.perf_counter() - started
        self._version, self._fenced = prepare.version, ""
        _log.info(
            "swap=%s member=%s version=%s committed paused_s=%.4f",
            prepare.swap,
            self.member,
            prepare.version,
            self.last_pause_s,
        )
        self._settle()
        done = local.CommitDone(swap=prepare.swap, member=self.member, paused_s=self.last_pause_s)
        self._connection.tell(done)
        return prepare.version

    def _let_worker_write(self, prepare: local.PrepareCommit) -> None:
        self._applied = None
        self._connection.tell(local.CommitQuiet(swap=prepare.swap, member=self.member))
        with self._changed:
            done = self._changed.wait_for(lambda: self._applied or self._failure, APPLY_TIMEOUT_S)
        if not done:
            raise CommitError(f"the worker did not write the live tensors within {APPLY_TIMEOUT_S:.0f} s")
        if self._applied is None:
            self._check_connected()
        elif self._applied.reason:
            raise CommitError(self._applied.reason)

    def _settle(self) -> None:
        with self._changed:
            self._prepare = None
            self._changed.notify_all()

    def _check_connected(self) -> None:
        if self._failure is not None:
            raise from_code(self._failure.code, self._failure.message)

    def _notified(self, message: Message) -> None:
        if isinstance(message, local.DigestLive | local.CompareLive):
            self._checks.start(message)
            return
        with self._changed:
            match message:
                case local.PrepareCommit():
                    self._prepare = message
                case local.CommitApplied():
                    self._applied = message
                case local.AskPause(swap, member, version):
                    _log.info("swap=%s member=%s version=%s is to stand still", swap, member, version)
                    self._asked = message
                case local.Resume(swap, _, reason, is_poisoned):
                    _log.info("swap=%s member=%s aborted: %s", swap, self.member, reason)
                    if is_poisoned:
                        self._version, self.error = None, CommitError(f"nothing can be served: {reason}")
                    if self._asked is not None and self._asked.swap == swap:
                        self._asked = None
                case local.Fence(member, reason):
                    _log.warning("member=%s %s", member, f"fenced: {reason}" if reason else "no longer fenced")
                    self._fenced = reason
                case local.Failure():
                    self._failure = message
            self._changed.notify_all()

    def _attend(self, on_pause: Callable[[int], object], on_resume: Callable[[int | None], object] | None) -> None:
        """Stand still when asked, take over what is decided, go on: the body of a thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._prepare or self._failure or self._closed)
                asked, prepare = self._asked, self._prepare
                if self._failure is not None and not self._closed:
                    self.error = from_code(self._failure.code, self._failure.message)
                if self._closed or self._failure is not None:
                    return
            # one that was decided while the coordinator was gone comes without being asked for
            cause = asked or prepare
            if cause is None:
                continue
            try:
                self._stand_still(on_pause, cause.swap, cause.version, is_asked=asked is not None)
            except Exception as exc:
                self.error = _kept(exc, "on_pause")
            with self._changed:
                if self._asked is asked:  # another swap may be asking already
                    self._asked = None
            if on_resume is not None:
                try:
                    on_resume(self.version)
                except Exception as exc:
                    self.error = CommitError(f"on_resume raised {exc!r}")

    def _stand_still(self, on_pause: Callable[[int], object], swap: str, version: int, *, is_asked: bool) -> None:
        """Have the engine stand still, and commit when that is decided; raise CommitError where it cannot."""
        try:
            on_pause(version)
        except Exception as exc:
            self._settle()
            reason = f"on_pause raised {exc!r}"
            self._connection.tell(local.CommitFailed(swap=swap, member=self.member, reason=reason))
            raise CommitError(reason) from exc
        since = time.perf_counter()
        if is_asked:
            self._connection.tell(local.Paused(swap=swap, member=self.member))
        with self._changed:
            decided = self._changed.wait_for(
                lambda: (
                    self._prepare
                    or self._asked is None
                    or self._asked.swap != swap  # this one is over, and the next one asks
                    or self._failure
                    or self._closed
                ),
                PAUSE_TIMEOUT_S,
            )
            prepare = self._prepare
            if not decided:
                self._fenced = f"nobody said within {PAUSE_TIMEOUT_S:.0f} s whether swap {swap} was decided"
            elif self._failure is not None:
                self._fenced = f"the daemon ended before it said whether swap {swap} was decided"
        if prepare is not None:
            self._apply(prepare, since)

    def _call_back(self, on_commit: Callable[[Commit], object]) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._prepare or self._failure or self._closed)
                prepare = self._prepare
                if self._failure is not None and not self._closed:
                    self.error = from_code(self._failure.code, self._failure.message)
                if self._closed or prepare is None:
                    return
            try:
                on_commit(Commit(self, prepare))
                if self._prepare is prepare:
                    raise CommitError("the on_commit callback returned without calling commit.apply()")
            except Exception as exc:
                self.error = _kept(exc, "on_commit")
                if self._prepare is prepare:
                    self._settle()
                    failed = local.CommitFailed(swap=prepare.swap, member=self.member, reason=str(self.error))
                    self._connection.tell(failed)


def _kept(exc: Exception, raised_by: str) -> RefitdError:
    """Return an error to keep: without the frames it was raised in, which hold the target and its tensors."""
    if isinstance(exc, RefitdError):
        return from_code(exc.code, str(exc))
    return CommitError(f"{raised_by} raised {exc!r}")
