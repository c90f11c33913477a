"""What an engine holds: tensors that become a new version at commit points of its own choosing."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from refitd.buffers.permits import Permit
from refitd.client.arguments import flag, hook, seconds, whole
from refitd.client.checks import LiveChecks
from refitd.client.connection import Connection
from refitd.client.devices import Arena
from refitd.client.mxfp8 import TargetTensors
from refitd.client.reentrant_lock import check_process
from refitd.client.steps import PollSteps
from refitd.errors import CommitError, DeadlineExceeded, RefitdError, RefusedError, from_code
from refitd.protocol import local
from refitd.protocol.base import Message
from refitd.text import shown

# The application's own logging says where it goes; every line has the swap's id, as the other processes' lines have.
_log = logging.getLogger("refitd.client")

NOTHING_PENDING = -1

# How long a rank waits in a poll to be told in which one its replica flips.
IN_STEP_S = 30.0

# How long `wait` sleeps before it looks at the permit again.
PERMIT_WAIT_S = 0.05

# A permit that ended longer ago was never given, or withdrawn.
MAX_SAID_S = 86_400.0
# A wait looks up this often.
WAKE_S = 0.5

# How long a target that is closed waits for a commit that its callback's thread is in.
COMMIT_ENDS_S = 5.0

# How long a paused engine waits for the worker's copy of a few GB before it gives up and serves no version.
APPLY_TIMEOUT_S = 60.0

# How long an engine that was asked to stand still waits for the decision. Nobody knows then what was decided, so
# that it serves no version until it is told: this is beyond all deadlines that a coordinator should have.
PAUSE_TIMEOUT_S = 600.0


class Commit:
    """A decided version, handed to an `on_commit` callback. It can be applied once, before the callback returns."""

    def __init__(self, target: Target, prepare: local.PrepareCommit) -> None:
        self._target = target
        self._prepare = prepare
        self.version = prepare.version

    def apply(self) -> int:
        """Take the version over now; no forward pass may run meanwhile. Return the version.

        Raises:
            CommitError: it could not be taken over, and this rank serves none; or this commit has been applied
                before or is over, and nothing was written.
        """
        return self._target._apply(self._prepare)


# Of all clients: memory is the process's. A target that nobody refers to any more stays while its connection does.
_REGISTERED: weakref.WeakSet[Target] = weakref.WeakSet()


# What threads (of which process) are registering right now, in the order in which they began: whoever began later gives
# way. It is only appended to and removed from, so that nobody waits for a lock, a signal handler least of all.
_REGISTERING: list[tuple[int, TargetTensors]] = []


@contextlib.contextmanager
def registering(tensors: TargetTensors) -> Iterator[None]:
    """Keep tensors apart from those of every other target of this process while they are registered.

    The two would be written by swaps of their own. The same weight in the same place may be registered again.

    Raises:
        RefusedError: they share memory with those of a target, or with what another thread is registering.
    """
    mine = os.getpid(), tensors
    _REGISTERING.append(mine)
    try:
        for other in list(_REGISTERING):
            if other is mine:
                break
            if other[0] == mine[0]:  # a fork has copied the list, and not the thread
                other[1].written.check_apart(tensors.written, "a target that another thread is registering")
        for target in list(_REGISTERED):
            target.check_apart(tensors)
        yield
    finally:
        _REGISTERING.remove(mine)


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
        permit: Permit | None,
        on_commit: Callable[[Commit], object] | None,
        on_pause: Callable[[int], object] | None = None,
        on_resume: Callable[[int | None], object] | None = None,
        agree: Callable[[int], int] | None = None,
        closed: Callable[[Target], object] = lambda target: None,
    ) -> None:
        """`closed` is told when the registration has been taken back."""
        self._agree = agree
        self._steps = PollSteps()
        self._connection = connection
        self._pid = os.getpid()
        self._told = closed
        self._tensors = tensors
        self._staging = staging
        self._changed = threading.Condition()
        self._prepare: local.PrepareCommit | None = None  # what is decided and not yet taken over
        self._taking: local.PrepareCommit | None = None  # what a thread is taking over now
        self._taker = 0  # that thread
        self._taken = ""  # the swap that was taken over last
        self._asked: local.AskPause | None = None  # to stand still, until that is over
        self._fenced = ""
        self._applied: local.CommitApplied | None = None
        self._failure: local.Failure | None = None
        self._version: int | None = registered.version
        self._permit: Permit | None = permit
        self._closed = self._is_evicted = False
        self.model = model
        self.replica = replica
        self.member = registered.member
        self.last_pause_s = 0.0
        self._checks = LiveChecks(connection, self.member, tensors, lambda: self._staging)
        self.error: RefitdError | None = None  # what a callback's commit failed with, or that the daemon has gone
        connection.listen(self.member, self._notified)
        _REGISTERED.add(self)
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

        None before the first, while one is taken over, after a commit that failed, while `fenced`, once closed, and in
        forked children: serve nothing then. It takes a read of shared memory, no call: ask whenever it matters.
        """
        version = self._version
        if version is None or self._fenced or os.getpid() != self._pid:
            return None
        permit = self._permit
        return version if permit is None or permit.left_s() > 0 else None

    @property
    def fenced(self) -> str:
        """Why this rank must not serve the version that it holds; "" where it may, or holds none."""
        if os.getpid() != self._pid:
            return "this process was forked from the one that has registered, and hears nothing; connect here"
        permit = self._permit
        if self._fenced or permit is None or self._version is None or (left_s := permit.left_s()) > 0:
            return self._fenced
        if self._failure is not None:
            return f"the daemon is gone ({self._failure.message}); connect and register again"
        since = f"its permit ended {-left_s:.1f} s ago" if left_s > -MAX_SAID_S else "it has no permit"
        return (
            f"{since}: its node has not heard of the coordinator in time, or does not answer, so that another version "
            "may be live; look at `refitctl status`"
        )

    @property
    def pending(self) -> int | None:
        """The version that is decided and waits for this rank's commit point."""
        prepare = self._prepare
        return None if prepare is None else prepare.version

    def poll(
        self, agree: Callable[[int], int] | None = None, *, step: int | None = None, begin: bool = True
    ) -> int | None:
        """A commit point: take a pending version over, in place, and return it; None when there is none.

        The ranks of a replica flip before the same step. An engine that counts its steps gives `step`, which only goes
        up and is the same on all ranks; an idle one may poll before its next step as often as it likes, with
        `begin=False`: that step has not begun, and nothing of it may until this returns. Otherwise polls are counted,
        from the last version that the ranks took over together: call it equally often on all of them, as ranks in lock
        step do. In a new replica, or one with a rank that has returned, each rank waits in its poll until all stand in
        one, and they count from there. The first poll with a version pending waits for the others to say how far they
        are, about as long as two messages take.
        Ranks that do not run in lock step give `agree`: it is called at every poll with this rank's pending version
        (-1: none) and returns what all ranks agree on, for instance an all_reduce MIN of it; the commit happens if that
        is the pending version.

        Raises:
            CommitError: the version could not be taken over; this rank then serves none.
            PeerLost: the daemon has ended (the tensors keep their version).
            RefusedError: `step` is less than before; in a signal handler that has interrupted a commit; or in a forked
                child.
        """
        check_process(self._pid)
        hook("agree", agree)
        step = None if step is None else whole("step", step)
        if not flag("begin", begin) and step is None:
            raise RefusedError("begin is False, and no step is given that does not begin; pass step=")
        agree = self._agree if agree is None else agree
        prepare = self._prepare if agree is not None else self._next_in_step(step, begin)
        if agree is not None:
            agreed = _agreed(agree(NOTHING_PENDING if prepare is None else prepare.version))
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
            RefusedError: version or timeout is no number, or the timeout is none; or this target is closed.
            DeadlineExceeded: it did not become live in time.
            CommitError, PeerLost: as in `poll`.
        """
        check_process(self._pid)
        version, timeout = whole("version", version), seconds("timeout", timeout)
        deadline = time.monotonic() + timeout
        while True:
            with self._changed:
                live = self.version
                if live is not None and live >= version:
                    return live
                self._check_connected()
                if self._closed:
                    raise RefusedError(self._fenced)
                if self._taking is not None and self._taker == threading.get_ident():
                    raise RefusedError(
                        f"model {self.model!r} replica {self.replica!r}: a handler or callback waits here for the "
                        "very commit that it has interrupted; note what is to be done, and do it afterwards"
                    )
                left = deadline - time.monotonic()
                if left <= 0:
                    if self._steps.stands and self._prepare is not None:
                        self._say_where(self._prepare)  # it goes on from here
                    raise DeadlineExceeded(
                        f"model {self.model!r} replica {self.replica!r}: version {version} is not live after "
                        f"{timeout:.1f} s (live: {live}{', ' + self._fenced if self._fenced else ''}); "
                        "look at `refitctl status` for the last swap"
                    )
                if not self._may_take():
                    if (asked := self._prepare) is not None and asked.lockstep and not self._is_told():
                        self._say_where(asked, "wait")
                    # not longer: a signal handler on this thread may have polled just before, and a permit is renewed
                    # without a word
                    is_held = self._version is not None and not self._fenced
                    self._changed.wait(min(left, PERMIT_WAIT_S if is_held else WAKE_S))
                prepare = self._prepare if self._may_take() else None
            if prepare is not None:
                self._apply(prepare)

    def _next_in_step(self, step: int | None, begin: bool = True) -> local.PrepareCommit | None:
        """Count a poll; return the commit to take over in it, None if there is none, or not in this poll yet."""
        with self._changed:
            if step is not None and not begin and self._prepare is None:
                self._steps.count(max(0, step - 1))  # nobody may hear in between that the step has begun
                return None
            try:
                return self._counted(step)
            finally:
                if step is not None and not begin:
                    self._steps.stay()

    def _counted(self, step: int | None) -> local.PrepareCommit | None:
        """As `_next_in_step`, under the lock."""
        with self._changed:
            self._steps.count(step)
            prepare = self._prepare
            if prepare is None or not prepare.lockstep:
                return prepare
            if self._steps.flip_at is None:
                self._say_where(prepare, "poll")
                self._changed.wait_for(lambda: not self._steps.stands or self._is_over(prepare), IN_STEP_S)
            if self._is_over(prepare):
                return None
            if not self._steps.stands:
                return prepare if self._steps.is_due() else None
            self._version = self._prepare = None
        reason = f"the other ranks of the replica have not said within {IN_STEP_S:.0f} s how far they are"
        self._connection.tell(local.CommitFailed(swap=prepare.swap, member=self.member, reason=reason))
        raise CommitError(
            f"model {self.model!r} replica {self.replica!r}: version {prepare.version} is not taken over: {reason}"
        )

    def _say_where(self, prepare: local.PrepareCommit, stands: str = "") -> None:
        self._connection.tell(self._steps.reached(prepare.swap, self.member, stands))

    def _is_told(self) -> bool:
        """Whether this rank knows in which poll it flips, or has said that it stands and waits to be told."""
        return self._steps.flip_at is not None or bool(self._steps.stands)

    def _is_over(self, prepare: local.PrepareCommit) -> bool:
        return self._prepare is not prepare or self._failure is not None

    def _may_take(self) -> bool:
        """Whether a version is pending that a rank which waits for it, and computes nothing, may take over."""
        prepare = self._prepare
        if prepare is None or self._taking is not None:
            return False
        return not prepare.lockstep or self._steps.flip_at is not None

    def close(self) -> None:
        """Take the registration back; the tensors keep what they hold, and `version` is None: no swap reaches them."""
        if self._closed:
            return
        self.release()
        self._told(self)
        if self._is_evicted:
            return
        self._connection.request(local.Deregister(member=self.member), local.Done, 10.0)

    def check_apart(self, tensors: TargetTensors) -> None:
        """Raise RefusedError where tensors to be registered share memory with these: two swaps would write it."""
        if not self._closed and self._failure is None and not self._connection.is_foreign:
            self._tensors.written.check_apart(tensors.written, self.member)

    def arenas(self) -> set[int]:
        """Return the arenas of `allocate` that its tensors lie in."""
        return {place.arena for place in self._tensors.arena_places}

    def release(self) -> None:
        """Let go of the staging arena; nothing can be committed afterwards."""
        self._checks.let_commit_end(COMMIT_ENDS_S)
        with self._changed:
            self._closed = True
            self._prepare = None
            self._staging = None
            self._permit = None  # nobody renews it any more: whether another version is live cannot be known here
            self._fenced = self._fenced or f"{self.member} is registered no more: it was closed; register_target again"
            self._changed.notify_all()
        self._checks.release()
        self._connection.unlisten(self.member)

    def _apply(self, prepare: local.PrepareCommit, started: float | None = None) -> int:
        """Take a version over; `started` is when this rank came to a standstill, if it did so earlier.

        Raises:
            CommitError: it could not be; or it is not pending any more, and nothing was written.
        """
        started = time.perf_counter() if started is None else started
        with self._changed:
            what = f"model {self.model!r} replica {self.replica!r}: the commit of version {prepare.version}"
            if self._taking is not None:
                raise RefusedError(f"{what} is being applied already, on another thread or below this call")
            if self._prepare is not prepare:
                raise CommitError(
                    f"{what} (swap {prepare.swap}) is over; a commit can be applied once, while it is pending"
                )
            self._taking, self._taker = prepare, threading.get_ident()
            self._version = None  # while it is written, it is neither the one nor the other
        try:
            with self._checks.committing():
                return self._take_over(prepare, started)
        finally:
            with self._changed:
                self._taking = None
                self._changed.notify_all()

    def _take_over(self, prepare: local.PrepareCommit, started: float) -> int:
        try:
            self._tensors.check_unmoved(is_described=True)
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
            self._fail()
            _log.error("swap=%s member=%s version=%s failed: %s", prepare.swap, self.member, prepare.version, exc)
            failed = local.CommitFailed(swap=prepare.swap, member=self.member, reason=str(exc))
            self._connection.tell(failed)
            if isinstance(exc, CommitError):
                raise
            raise CommitError(f"version {prepare.version} could not be taken over: {exc}") from exc
        self.last_pause_s = time.perf_counter() - started
        self._taken = prepare.swap
        self._steps.flipped()
        _log.info(
            "swap=%s member=%s version=%s committed paused_s=%.4f",
            prepare.swap,
            self.member,
            prepare.version,
            self.last_pause_s,
        )
        # no version before it has been said: whoever waits for it may end the process as soon as it is live
        self._fenced = ""
        self._settle()
        done = local.CommitDone(swap=prepare.swap, member=self.member, paused_s=self.last_pause_s)
        try:
            self._connection.tell(done)
        finally:
            with self._changed:
                self._version = prepare.version
                self._changed.notify_all()
        return prepare.version

    def _let_worker_write(self, prepare: local.PrepareCommit) -> None:
        with self._changed:
            self._applied = None
        self._connection.tell(local.CommitQuiet(swap=prepare.swap, member=self.member))

        def is_told() -> bool:
            applied = self._applied
            mine = applied is not None and applied.swap == prepare.swap
            return mine or self._failure is not None or self._closed

        with self._changed:
            done = self._changed.wait_for(is_told, APPLY_TIMEOUT_S)
        if not done:
            raise CommitError(f"the worker did not write the live tensors within {APPLY_TIMEOUT_S:.0f} s")
        if self._closed:
            raise CommitError("this target has been closed")
        if self._applied is None:
            self._check_connected()
        elif self._applied.reason:
            raise CommitError(self._applied.reason)

    def _settle(self) -> None:
        with self._changed:
            self._prepare = None
            self._changed.notify_all()

    def _fail(self) -> None:
        """A decided version was not taken over: these tensors may hold parts of two, and the old one is not live."""
        with self._changed:
            self._version = None
        self._settle()

    def _check_connected(self) -> None:
        if self._failure is not None:
            raise from_code(self._failure.code, self._failure.message)

    def _notified(self, message: Message) -> None:
        if isinstance(message, local.DigestLive | local.CompareLive):
            self._checks.start(message)
            return
        with self._changed:
            match message:
                case local.PrepareCommit(swap) if swap == self._taken:
                    # its coordinator died before it knew
                    done = local.CommitDone(swap=swap, member=self.member, paused_s=self.last_pause_s)
                    self._connection.tell(done)
                case local.PrepareCommit(swap):
                    if self._prepare is None or self._prepare.swap != swap:
                        self._prepare = message
                        self._steps.decided()
                    if message.lockstep:
                        self._say_where(message, self._steps.stands)
                case local.FlipAt(swap, _, step, origin):
                    if self._prepare is not None and self._prepare.swap == swap:
                        self._steps.flip(step, origin)
                case local.PassPoll(swap):
                    if self._prepare is not None and self._prepare.swap == swap:
                        self._steps.passed()
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
                    if self._prepare is not None and self._prepare.swap == swap and self._taking is None:
                        self._prepare = None
                case local.Fence(member, reason):
                    _log.warning("member=%s %s", member, f"fenced: {reason}" if reason else "no longer fenced")
                    self._fenced = reason
                case local.Evicted(member, reason):
                    text = f"{member} is registered no more: {reason}; register_target again"
                    _log.warning("member=%s evicted: %s", member, reason)
                    self._fenced, self._prepare, self._asked, self._is_evicted = text, None, None, True
                    self._failure = local.Failure(code=RefusedError.code, message=text)
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
            except BaseException as exc:  # SystemExit too: this thread is not the engine's, and is needed again
                self.error = _kept(exc, "on_pause")
            with self._changed:
                if self._asked is asked:  # another swap may be asking already
                    self._asked = None
            if on_resume is not None:
                try:
                    on_resume(self.version)
                except BaseException as exc:
                    self.error = CommitError(f"on_resume raised {exc!r}")

    def _stand_still(self, on_pause: Callable[[int], object], swap: str, version: int, *, is_asked: bool) -> None:
        """Have the engine stand still, and commit when that is decided; raise CommitError where it cannot."""
        try:
            on_pause(version)
        except BaseException as exc:
            if self._prepare is None:
                self._settle()
            else:
                self._fail()  # it is decided already
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
            except BaseException as exc:
                self.error = _kept(exc, "on_commit")
                if self._withdraw(prepare):
                    failed = local.CommitFailed(swap=prepare.swap, member=self.member, reason=str(self.error))
                    with contextlib.suppress(RefitdError):  # the daemon has gone, or the callback has closed this
                        self._connection.tell(failed)

    def _withdraw(self, prepare: local.PrepareCommit) -> bool:
        """Let nobody apply a commit that its callback has not; return whether it was pending until now."""
        with self._changed:
            # a thread of the callback's own that applies it at this moment is waited for
            self._changed.wait_for(lambda: self._taking is not prepare, APPLY_TIMEOUT_S)
            if self._prepare is not prepare:
                return False
            self._version, self._prepare = None, None
            self._changed.notify_all()
            return True


def _agreed(value: Any) -> float:
    """Return what `agree` gave as a number: of Python, numpy or torch.

    Raises:
        RefusedError: it is none, so that no version would ever be taken over.
    """
    try:
        found = value.item() if hasattr(value, "item") else value
        if isinstance(found, str | bytes) or found is None:
            raise TypeError
        return found if type(found) is int else float(found)
    except Exception:
        raise RefusedError(
            f"agree returned {shown(value)}, expected the version that all ranks have pending ({NOTHING_PENDING}: none)"
        ) from None


def _kept(exc: BaseException, raised_by: str) -> RefitdError:
    """Return an error to keep: without the frames it was raised in, which hold the target and its tensors."""
    if isinstance(exc, RefitdError):
        return from_code(exc.code, str(exc))
    return CommitError(f"{raised_by} raised {exc!r}")
