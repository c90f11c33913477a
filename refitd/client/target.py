"""An engine rank's registration: its tensors become a new version at commit points that the engine chooses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from msgspec import structs

from refitd.buffers.permits import Permit
from refitd.client.aio import awaitable
from refitd.client.arguments import MAX_COUNT, flag, hook, seconds, whole
from refitd.client.checks import LiveChecks
from refitd.client.connection import Connection
from refitd.client.devices import Arena
from refitd.client.flip import ArenaPair
from refitd.client.mxfp8 import TargetTensors
from refitd.client.reconnect import Give, Line, renumbered
from refitd.client.reentrant_lock import check_process
from refitd.client.steps import PollSteps
from refitd.errors import ArenaError, CommitError, DeadlineExceeded, PeerLost, RefitdError, RefusedError, from_code
from refitd.protocol import local
from refitd.protocol.base import Message
from refitd.text import shown

# The application configures this logger. Lines carry the swap's id, like those of the other processes.
_log = logging.getLogger("refitd.client")

NOTHING_PENDING = -1

# How long a rank waits in a poll to learn in which poll its replica commits.
IN_STEP_S = 30.0

# How long `wait` sleeps before it reads the permit again.
PERMIT_WAIT_S = 0.05

# A permit that ended longer ago was never given, or was withdrawn.
MAX_SAID_S = 86_400.0
# How long before a commit by exchange the tensors may have been checked.
LOOKED_S = 1.0

# How long a wait sleeps before it checks again.
WAKE_S = 0.5

# How long closing a target waits for a commit on the callback's thread.
COMMIT_ENDS_S = 5.0

# How long a paused engine waits for the worker's copy (a few GB) before it gives up and serves no version.
APPLY_TIMEOUT_S = 60.0

# How long a paused engine waits for the decision. After that it serves no version until it learns what was decided.
# This is longer than any deadline that a coordinator should have.
PAUSE_TIMEOUT_S = 600.0


class Commit:
    """A decided version, passed to an `on_commit` callback, which must apply it once before it returns."""

    def __init__(self, target: Target, prepare: local.PrepareCommit) -> None:
        self._target = target
        self._prepare = prepare
        self.version = prepare.version

    def apply(self) -> int:
        """Commit the version now and return it; no forward pass may run meanwhile.

        Raises:
            CommitError: the commit failed, and this rank serves no version; or it was applied before or is over, and
                nothing was written.
        """
        applied = self._target._apply(self._prepare)
        assert applied is not None
        return applied


# The targets of all clients, because clients share the process's memory. A connection keeps its targets alive.
_REGISTERED: weakref.WeakSet[Target] = weakref.WeakSet()


# Registrations in progress, (pid, tensors), in the order of their start; the later of two conflicting ones is refused.
# It is only appended to and removed from, so that no lock is needed, which a signal handler could not wait for.
_REGISTERING: list[tuple[int, TargetTensors]] = []


@contextlib.contextmanager
def registering(tensors: TargetTensors) -> Iterator[None]:
    """Refuse tensors that share memory with another target of this process; use around a registration.

    Two targets' swaps would both write that memory. The same weight in the same place may be registered again.

    Raises:
        RefusedError: the tensors share memory with a target, or with one that another thread is registering.
    """
    mine = os.getpid(), tensors
    _REGISTERING.append(mine)
    try:
        for other in list(_REGISTERING):
            if other is mine:
                break
            if other[0] == mine[0]:  # ignore entries of the parent: a fork copies the list, but not the threads
                other[1].written.check_apart(tensors.written, "a target that another thread is registering")
        for target in list(_REGISTERED):
            target.check_apart(tensors)
        yield
    finally:
        _REGISTERING.remove(mine)


class Target:
    """A target: this rank's registered shard of one replica. Made by `Client.register_target`.

    One thread at a time may poll or wait; any thread may read `version`, `pending` and `last_pause_s`.
    """

    def __init__(
        self,
        line: Line,
        connection: Connection,
        message: local.RegisterTarget,
        tensors: TargetTensors,
        registered: local.TargetRegistered,
        staging: Arena | None,
        permit: Permit | None,
        on_commit: Callable[[Commit], object] | None,
        on_pause: Callable[[int], object] | None = None,
        on_resume: Callable[[int | None], object] | None = None,
        agree: Callable[[int], int] | None = None,
        closed: Callable[[Target], object] = lambda target: None,
        pair: ArenaPair | None = None,
    ) -> None:
        """`closed` is called when the target is closed; `pair` holds the arenas of a target that flips."""
        self._pair = pair
        self.flips = pair is not None
        self._agree = agree
        self._steps = PollSteps()
        self._line = line
        self._connection = connection
        self._message = message
        self._away = ""  # why the daemon cannot be reached now; it is waited for
        self._stood_down = False  # on_resume was called with None because the daemon had ended
        self._pid = os.getpid()
        self._told = closed
        self._tensors = tensors
        self._staging = staging
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._prepare: local.PrepareCommit | None = None  # decided and not yet committed
        self._taking: local.PrepareCommit | None = None  # being committed by a thread now
        self._taker = 0  # that thread's id
        self._taken = ""  # the swap that was committed last
        self._looked_at, self._looked_until = "", 0.0  # the swap before whose commit the tensors were checked
        self._exchanged = False  # whether that exchanged the arenas
        self._flipped = ""  # the swap that exchanged the arenas last, committed or not
        self.is_estranged = False  # its live arena shows another file here than in the daemon
        self._asked: local.AskPause | None = None  # the current request to pause
        self._fenced = ""
        self._applied: local.CommitApplied | None = None
        self._failure: local.Failure | None = None
        self._version: int | None = registered.version
        self._run = registered.run  # of the version that the tensors held last
        self._permit: Permit | None = permit
        self._closed = self._is_evicted = self._suspended = False
        self.model = message.model
        self.replica = message.replica
        self.member = registered.member
        self.last_pause_s = 0.0
        self._checks = LiveChecks(connection, self.member, tensors, lambda: self._staging)
        self.error: RefitdError | None = None  # why a callback's commit failed, or the loss of the daemon
        connection.listen(self.member, self._notified)
        _REGISTERED.add(self)
        self._has_callback = on_pause is not None or on_commit is not None
        work: Callable[[], None] | None = None
        if on_pause is not None:
            work = partial(self._attend, on_pause, on_resume)
        elif on_commit is not None:
            work = partial(self._call_back, on_commit)
        if work is not None:
            threading.Thread(target=work, name="refitd-commit", daemon=True).start()

    @property
    def version(self) -> int | None:
        """The version that the tensors hold and the engine may serve; None: serve nothing.

        It is None before the first version, during a commit, after a failed commit, while `fenced`, once closed, and in
        forked children. It costs one read of shared memory: read it whenever it matters.
        """
        version = self._version
        if version is None or self._fenced or self._suspended or os.getpid() != self._pid:
            return None
        permit = self._permit
        return version if permit is None or permit.left_s() > 0 else None

    @property
    def fenced(self) -> str:
        """Why this rank must not serve the version that it holds; "" if it may, or holds none."""
        if os.getpid() != self._pid:
            return "this process was forked from the one that has registered, and hears nothing; connect here"
        if self._suspended and not self._fenced:
            return "it is suspended: its tensors are put away until resume()"
        permit = self._permit
        if self._fenced or permit is None or self._version is None or (left_s := permit.left_s()) > 0:
            return self._fenced
        if self._away:
            return f"its permit has ended, and {self._away}; it serves again when the coordinator has confirmed it"
        if self._failure is not None:
            return f"the daemon is gone ({self._failure.message}); connect and register again"
        since = f"its permit ended {-left_s:.1f} s ago" if left_s > -MAX_SAID_S else "it has no permit"
        return (
            f"{since}: its node has not heard of the coordinator in time, or does not answer, so that another version "
            "may be live; look at `refitctl status`"
        )

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of the tensors that keep this engine's own values and that no version has; see `keeps`."""
        return tuple(one.name for one in self._tensors.kept)

    @property
    def pending(self) -> int | None:
        """The decided version that waits for this rank's commit point; None if there is none."""
        prepare = self._prepare
        return None if prepare is None else prepare.version

    def poll(
        self, agree: Callable[[int], int] | None = None, *, step: int | None = None, begin: bool = True
    ) -> int | None:
        """Offer a commit point: commit a pending version in place and return it; return None if none was committed.

        All ranks of a replica commit before the same step, which they find in one of three ways:

        - `step`: the engine's own step counter, which only goes up and is the same on all ranks. An idle engine may
          poll before its next step any number of times with `begin=False`; that step must not begin before `poll`
          returns.
        - Without `step`, polls are counted from the last version that the ranks committed together: call `poll` equally
          often on all ranks. In a new replica, or after a rank has returned, each rank waits in its poll until all are
          in one, and they count from there.
        - `agree`, for ranks not in lockstep: called at every poll with this rank's pending version (-1: none), it
          returns the value that all ranks agree on, for instance an all_reduce MIN. The rank commits if that is its
          pending version.

        Without `agree`, the first poll with a pending version waits to learn the other ranks' steps, which takes about
        two messages. With `on_pause` or `on_commit`, that thread commits, and polls never do.

        Raises:
            CommitError: the commit failed; this rank then serves no version.
            PeerLost: the daemon has ended (the tensors keep their version), and the client does not reconnect.
            RefusedError: `step` went down; or the caller is a signal handler that interrupted a commit, or a forked
                child.
        """
        if agree is None and begin is True and self._agree is None and (step is None or type(step) is int):
            # nothing pending, which is the case between almost any two tokens: as little as possible
            with self._lock:
                if self._prepare is None and self._failure is None and (step is None or 0 <= step <= MAX_COUNT):
                    check_process(self._pid)
                    self._steps.count(step)
                    return None
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
        if prepare is None or self._has_callback:  # the callback's thread commits, and may be doing so
            self._check_connected()
            return None
        return self._apply(prepare)

    def wait(self, version: int, timeout: float = 60.0) -> int:
        """Block until `version` or a newer one is live here, committing meanwhile; return the live version.

        Raises:
            RefusedError: `version` or `timeout` is not a valid number, or this target is closed.
            DeadlineExceeded: the version did not become live in time.
            CommitError, PeerLost: as in `poll`.
        """
        return self._wait(version, timeout, threading.Event())

    def _wait(self, version: int, timeout: float, given_up: threading.Event) -> int:
        """Do as `wait`; commit nothing any more once `given_up` is set, which needs the lock."""
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
                left = 0.0 if given_up.is_set() else deadline - time.monotonic()
                if left <= 0:
                    if self._steps.stands and self._prepare is not None:
                        self._say_where(self._prepare)  # this rank no longer waits
                    why = self.fenced or self._away
                    raise DeadlineExceeded(
                        f"model {self.model!r} replica {self.replica!r}: version {version} is not live after "
                        f"{timeout:.1f} s (live: {live}{', ' + why if why else ''}); "
                        "look at `refitctl status` for the last swap"
                    )
                if not self._may_take():
                    if (asked := self._prepare) is not None and asked.lockstep and not self._is_told():
                        self._say_where(asked, "wait")
                    # bounded: a signal handler on this thread may have polled just before, and the renewal of a permit
                    # sends no notification
                    is_held = self._version is not None and not self._fenced
                    self._changed.wait(min(left, PERMIT_WAIT_S if is_held else WAKE_S))
                prepare = self._prepare if self._may_take() else None
            if prepare is not None:
                self._apply(prepare, given_up=given_up)

    _waiting = awaitable(_wait)

    async def wait_async(self, version: int, timeout: float = 60.0) -> int:
        """Do as `wait`, and let the event loop run meanwhile. Once it is cancelled, it commits nothing any more."""
        given_up = threading.Event()
        waiting = asyncio.ensure_future(self._waiting(version, timeout, given_up))
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            self._give_up(given_up)
            await asyncio.wait([waiting])  # a commit that has begun ends first
            if not waiting.cancelled():
                waiting.exception()  # nobody asks for it
            raise
        finally:
            self._give_up(given_up)

    def _give_up(self, given_up: threading.Event) -> None:
        with self._changed:
            given_up.set()
            self._changed.notify_all()

    def _next_in_step(self, step: int | None, begin: bool = True) -> local.PrepareCommit | None:
        """Count a poll; return the commit due in it, or None."""
        with self._changed:
            if step is not None and not begin and self._prepare is None:
                self._steps.count(max(0, step - 1))  # never `step`: a report must not say that the step has begun
                return None
            try:
                return self._counted(step)
            finally:
                if step is not None and not begin:
                    self._steps.stay()

    def _counted(self, step: int | None) -> local.PrepareCommit | None:
        """Do as `_next_in_step`, under the lock."""
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
        self._tell(local.CommitFailed(swap=prepare.swap, member=self.member, reason=reason))
        raise CommitError(
            f"model {self.model!r} replica {self.replica!r}: version {prepare.version} is not taken over: {reason}"
        )

    def _say_where(self, prepare: local.PrepareCommit, stands: str = "") -> None:
        self._tell(self._steps.reached(prepare.swap, self.member, stands))

    def _tell(self, message: local.Told | local.StepReached) -> None:
        """Say something about a commit to the daemon, unless it has ended: the next one learns what came of it."""
        connection = self._connection
        try:
            connection.tell(message)
        except PeerLost:
            if not connection.is_awaited:
                raise

    def _is_told(self) -> bool:
        """Return whether this rank knows the poll to commit in, or has already reported that it waits for it."""
        return self._steps.flip_at is not None or bool(self._steps.stands)

    def _is_over(self, prepare: local.PrepareCommit) -> bool:
        return self._prepare is not prepare or self._failure is not None

    def _may_take(self) -> bool:
        """Return whether a rank in `wait`, which computes nothing, may commit the pending version."""
        prepare = self._prepare
        if prepare is None or self._taking is not None or self._has_callback:
            return False  # with on_pause or on_commit, the thread of the callback commits
        return not prepare.lockstep or self._steps.flip_at is not None

    def suspend(self, timeout: float = 10.0) -> None:
        """Put this rank to sleep: its tensors may then be offloaded, discarded or unmapped until `resume`.

        `version` is None meanwhile, and swaps leave the whole replica out; their reports name it. A swap of it that is
        not decided yet aborts. Call it at a commit point, on every rank that sleeps.

        Raises:
            RefusedError: a version is decided and waits for this rank: take it over first (`poll`); or the target is
                closed.
            DeadlineExceeded, PeerLost: the coordinator or the daemon does not answer; nothing has changed.
        """
        check_process(self._pid)
        timeout = seconds("timeout", timeout)
        connection = self._line.steady(timeout)
        self._check_open()
        with self._changed:
            if self._prepare is not None or self._taking is not None:
                raise RefusedError(
                    f"model {self.model!r} replica {self.replica!r}: version {self.pending} is decided and waits for "
                    "this rank; take it over first (poll or wait), then suspend"
                )
        connection.request(local.Suspend(member=self.member), local.Done, timeout)
        with self._checks.committing():  # waits for a check that reads the tensors
            self._checks.suspended = self._suspended = True

    def resume(self, *, kept: bool = True, timeout: float = 10.0) -> int | None:
        """Wake up: the tensors are back at their addresses. Return the version to serve, None if that must come first.

        Without `kept` their contents are lost, and the rank serves nothing until the live version has been brought to
        it. So it is if another version went live meanwhile. Both happen by themselves, at this rank's commit points.

        Raises:
            CommitError: a tensor is not where it was at registration; close this target and register again.
            RefusedError: the target is closed.
            DeadlineExceeded, PeerLost: the coordinator or the daemon does not answer; the rank stays suspended.
        """
        check_process(self._pid)
        timeout = seconds("timeout", timeout)
        connection = self._line.steady(timeout)
        self._check_open()
        self._tensors.check_unmoved(is_described=True)
        wake = local.Wake(member=self.member, is_lost=not flag("kept", kept))
        taken = self._taken
        connection.request(wake, local.Done, timeout)
        with self._changed:
            if not kept and self._taken == taken:  # a callback may have taken the live version over already
                self._version = None
            self._checks.suspended = self._suspended = False
            self._changed.notify_all()
        return self.version

    def _check_open(self) -> None:
        self._check_connected()
        if self._closed:
            raise RefusedError(self._fenced)

    def close(self) -> None:
        """End the registration. The tensors keep their values, but `version` becomes None: no swap reaches them."""
        if self._closed:
            return
        self.release()
        try:
            if not self._is_evicted:
                self.is_estranged |= self.flips and self._taking is not None  # its commit did not end in time
                self._line.deregister(self._connection, self.member)
        except RefitdError:
            self.is_estranged |= bool(self._flipped)  # evicted meanwhile: what the daemon knows is not certain
            raise
        finally:
            self._told(self)

    def check_apart(self, tensors: TargetTensors) -> None:
        """Raise RefusedError if tensors to be registered share memory with this target: two swaps would write it."""
        if not self._closed and self._failure is None and not self._connection.is_foreign:
            self._tensors.written.check_apart(tensors.written, self.member)

    def arenas(self) -> set[int]:
        """Return the arenas from `allocate` that hold its tensors."""
        return {place.arena for place in self._tensors.arena_places}

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Take over the new numbers of arenas that have been given to another daemon."""
        self._message = structs.replace(self._message, live=renumbered(self._message.live, numbers))
        self._tensors.arena_places = renumbered(self._tensors.arena_places, numbers)

    def register_again(self, connection: Connection, give: Give, timeout: float) -> None:
        """Register over a new connection, with the version that the tensors hold and the same staging arena.

        The coordinator confirms the version before the target may serve it. A commit under way ends first.

        Raises:
            RefitdError: it is refused, or the daemon is gone again.
        """
        with self._checks.committing():
            if self._closed or self._is_evicted:
                return
            if self._pair is not None:
                given = give(*self._pair.staging)
                if given is None:
                    raise ArenaError("the memory that its commits exchange could not be given back to the daemon")
            else:
                arena = self._staging
                given = None if arena is None else give(arena.address, arena.nbytes)
            with self._changed:
                message = structs.replace(
                    self._message,
                    version=self._version,
                    run=self._run,
                    given=given,
                    returns=True,
                    suspended=self._suspended,
                    timeout_s=timeout,
                )
            registered = connection.request(message, local.TargetRegistered, timeout)
            if given is None and self._staging is not None:
                self._staging = connection.map_arena(registered.staging, write=False)
            permit = Permit(connection.permit_page(), registered.permit_slot, registered.permit_token)
            self._checks.registered_again(connection, registered.member)
            with self._changed:
                self.member, self._connection, self._permit = registered.member, connection, permit
                self._away = self._fenced = self._flipped = ""
                self._applied = None
                self._changed.notify_all()
        connection.listen(self.member, self._notified)

    def give_up(self, failure: local.Failure) -> None:
        """Take note that it could not be registered again: it serves nothing, and polls raise the reason."""
        with self._changed:
            self._failure, self._version = failure, None
            self.error, self._away = from_code(failure.code, failure.message), ""
            self._changed.notify_all()

    def release(self) -> None:
        """Drop the staging arena; nothing can be committed afterwards."""
        self._checks.let_commit_end(COMMIT_ENDS_S)
        with self._changed:
            self._closed = True
            self._prepare = None
            self._staging = self._pair = None
            self._permit = None  # it is no longer renewed, so this rank cannot know whether another version is live
            self._fenced = self._fenced or f"{self.member} is registered no more: it was closed; register_target again"
            self._changed.notify_all()
        self._checks.release()
        self._connection.unlisten(self.member)

    def _apply(
        self, prepare: local.PrepareCommit, started: float | None = None, given_up: threading.Event | None = None
    ) -> int | None:
        """Commit a version; `started` is the time at which this rank paused, if it did so earlier.

        Return None, and commit nothing, if `given_up` is set.

        Raises:
            CommitError: the commit failed; or it is no longer pending, and nothing was written.
        """
        started = time.perf_counter() if started is None else started
        with self._changed:
            if given_up is not None and given_up.is_set():
                return None
            what = f"model {self.model!r} replica {self.replica!r}: the commit of version {prepare.version}"
            if self._taking is not None:
                raise RefusedError(f"{what} is being applied already, on another thread or below this call")
            if self._prepare is not prepare:
                raise CommitError(
                    f"{what} (swap {prepare.swap}) is over; a commit can be applied once, while it is pending"
                )
            self._taking, self._taker = prepare, threading.get_ident()
            self._version = None  # while they are written, the tensors hold neither version
        try:
            with self._checks.committing():
                return self._take_over(prepare, started)
        finally:
            with self._changed:
                self._taking = None
                self._changed.notify_all()

    def _take_over(self, prepare: local.PrepareCommit, started: float) -> int:
        exchanged = False
        try:
            if not prepare.flips or prepare.swap != self._looked_at or time.monotonic() > self._looked_until:
                self._tensors.check_unmoved(is_described=True)
            self._tensors.settle()  # kernels may still read the old version on a GPU
            if prepare.flips:
                exchanged = self._flip(prepare.swap)
            elif prepare.by_worker:
                self._let_worker_write(prepare)
            elif not prepare.in_place:
                if self._staging is None:
                    raise CommitError("this target has been closed")
                self._tensors.read_from(self._staging)
                self._tensors.settle()
            self._tensors.refresh()
            if not prepare.flips:  # an exchange takes no time in which tensors could move
                self._tensors.check_unmoved("during the commit")
        except Exception as exc:
            self._fail()
            _log.error("swap=%s member=%s version=%s failed: %s", prepare.swap, self.member, prepare.version, exc)
            self._tell(local.CommitFailed(swap=prepare.swap, member=self.member, reason=str(exc), exchanged=exchanged))
            if isinstance(exc, CommitError):
                raise
            raise CommitError(f"version {prepare.version} could not be taken over: {exc}") from exc
        self.last_pause_s = time.perf_counter() - started
        self._exchanged = exchanged  # before `_taken`: a repeated decision is answered with it
        self._taken = prepare.swap
        self._steps.flipped()
        _log.info(
            "swap=%s member=%s version=%s committed paused_s=%.4f",
            prepare.swap,
            self.member,
            prepare.version,
            self.last_pause_s,
        )
        # report before setting the version: a thread that waits for it may end the process as soon as it is live
        self._fenced = ""
        self._settle()
        done = local.CommitDone(prepare.swap, self.member, self.last_pause_s, exchanged)
        try:
            self._tell(done)
        finally:
            with self._changed:
                self._version, self._run = prepare.version, prepare.run
                self._changed.notify_all()
        return prepare.version

    def _flip(self, swap: str) -> bool:
        """Make what is staged live; return whether the arenas were exchanged."""
        pair = self._pair
        if pair is None:
            raise CommitError("this target has been closed")
        # a commit that was interrupted afterwards (KeyboardInterrupt in a hook) is repeated, its exchange must not be
        if self._flipped != swap:
            before = pair.exchanges
            try:
                pair.flip()
            finally:
                if pair.exchanges != before:
                    self._flipped = swap
        with self._changed:
            self.is_estranged |= self._is_evicted and self._flipped == swap
        return self._flipped == swap

    def _let_worker_write(self, prepare: local.PrepareCommit) -> None:
        with self._changed:
            self._applied = None
        self._tell(local.CommitQuiet(swap=prepare.swap, member=self.member))

        def is_told() -> bool:
            applied = self._applied
            mine = applied is not None and applied.swap == prepare.swap
            return mine or self._failure is not None or bool(self._away) or self._closed

        with self._changed:
            done = self._changed.wait_for(is_told, APPLY_TIMEOUT_S)
        if not done:
            raise CommitError(f"the worker did not write the live tensors within {APPLY_TIMEOUT_S:.0f} s")
        if self._closed:
            raise CommitError("this target has been closed")
        if self._applied is None:
            self._check_connected()
            raise CommitError(f"its tensors may hold parts of two versions: {self._away}")
        if self._applied.reason:
            raise CommitError(self._applied.reason)

    def _settle(self) -> None:
        with self._changed:
            self._prepare = None
            self._changed.notify_all()

    def _fail(self) -> None:
        """Give up a decided version: the tensors may hold parts of two, and the old version is no longer live."""
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
        if isinstance(message, local.PrepareCommit) and message.flips:
            self._look_before(message)  # without the lock: the engine may poll meanwhile
        with self._changed:
            match message:
                case local.PrepareCommit(swap) if swap == self._taken:
                    # already committed, but the coordinator died before it knew
                    self._tell(local.CommitDone(swap, self.member, self.last_pause_s, self._exchanged))
                case local.PrepareCommit(swap):
                    is_told = self._prepare is not None and self._prepare.swap == swap
                    if not is_told or (message.controlled and self._taking is None):
                        self._prepare = message
                        self._steps.decided()
                    if message.lockstep or message.controlled:
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
                    if bool(reason) != bool(self._fenced):  # one that is left out hears of each version that it lacks
                        _log.warning("member=%s %s", member, f"fenced: {reason}" if reason else "no longer fenced")
                    self._fenced = reason
                case local.Evicted(member, reason, exchanged):
                    # otherwise it exchanged its arenas while it was evicted, and the daemon does not know
                    self.is_estranged |= self._flipped != exchanged
                    text = f"{member} is registered no more: {reason}; register_target again"
                    _log.warning("member=%s evicted: %s", member, reason)
                    self._fenced, self._prepare, self._asked, self._is_evicted = text, None, None, True
                    self._failure = local.Failure(code=RefusedError.code, message=text)
                case local.Failure(_, text) if self._connection.is_awaited and self._failure is None:
                    self._away = text
                    if self._message.in_place and self._asked is not None:
                        self._version = None  # workers may have written the tensors
                    # what was decided is brought to it when it is back; a commit under way ends first
                    self._prepare = self._asked = None
                case local.Failure(code, text):
                    self._failure, self.error = message, from_code(code, text)
            self._changed.notify_all()

    def _look_before(self, prepare: local.PrepareCommit) -> None:
        """Check the tensors of a target that flips before its commit point: that takes longer than the exchange."""
        with contextlib.suppress(CommitError):  # the commit looks again, and fails
            self._tensors.check_unmoved(is_described=True)
            self._looked_at, self._looked_until = prepare.swap, time.monotonic() + LOOKED_S

    def _attend(self, on_pause: Callable[[int], object], on_resume: Callable[[int | None], object] | None) -> None:
        """Pause when asked, commit what is decided, resume: the body of the `on_pause` thread."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._asked
                        or self._prepare
                        or (self._stood_down and not self._away)
                        or self._failure
                        or self._closed
                    )
                )
                asked, prepare = self._asked, self._prepare
                resumes, self._stood_down = self._stood_down and not self._away, self._stood_down and bool(self._away)
                if self._failure is not None and not self._closed:
                    self.error = from_code(self._failure.code, self._failure.message)
                if self._closed or self._failure is not None:
                    return
            # a version that was decided before a coordinator's restart comes without a request to pause
            cause = asked or prepare
            if cause is None:
                if resumes and on_resume is not None:
                    self._resume(on_resume)
                continue
            try:
                self._stand_still(on_pause, cause.swap, cause.version, is_asked=asked is not None)
            except BaseException as exc:  # SystemExit too: this is the client's thread, and is needed again
                self.error = _kept(exc, "on_pause")
            with self._changed:
                if self._asked is asked:  # another swap may already have asked
                    self._asked = None
            if on_resume is not None:
                self._resume(on_resume)

    def _resume(self, on_resume: Callable[[int | None], object]) -> None:
        try:
            on_resume(self.version)
        except BaseException as exc:
            self.error = CommitError(f"on_resume raised {exc!r}")

    def _stand_still(self, on_pause: Callable[[int], object], swap: str, version: int, *, is_asked: bool) -> None:
        """Pause the engine and commit the version once it is decided; raises CommitError on failure."""
        try:
            on_pause(version)
        except BaseException as exc:
            if self._prepare is None:
                self._settle()
            else:
                self._fail()  # the version is already decided
            reason = f"on_pause raised {exc!r}"
            self._tell(local.CommitFailed(swap=swap, member=self.member, reason=reason))
            raise CommitError(reason) from exc
        since = time.perf_counter()
        if is_asked:
            self._tell(local.Paused(swap=swap, member=self.member))
        with self._changed:
            decided = self._changed.wait_for(
                lambda: (
                    self._prepare
                    or self._asked is None
                    or self._asked.swap != swap  # this swap is over, and the next one has asked
                    or self._failure
                    or self._closed
                ),
                PAUSE_TIMEOUT_S,
            )
            prepare = self._prepare
            if not decided:
                self._fenced = f"nobody said within {PAUSE_TIMEOUT_S:.0f} s whether swap {swap} was decided"
            elif self._failure is not None or self._away:
                self._fenced = f"the daemon ended before it said whether swap {swap} was decided"
                self._stood_down = bool(self._away)  # on_resume is called again when it is back
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
                    with contextlib.suppress(RefitdError):  # the daemon has gone, or the callback closed the target
                        self._connection.tell(failed)

    def _withdraw(self, prepare: local.PrepareCommit) -> bool:
        """Withdraw a commit that its callback did not apply; return whether it was still pending."""
        with self._changed:
            # wait for a thread of the callback that may be applying it right now
            self._changed.wait_for(lambda: self._taking is not prepare, APPLY_TIMEOUT_S)
            if self._prepare is not prepare:
                return False
            self._version, self._prepare = None, None
            self._changed.notify_all()
            return True


def _agreed(value: Any) -> float:
    """Return the result of `agree`, a number of Python, numpy or torch, as a Python number.

    Raises:
        RefusedError: it is not a number, so that no version would ever be committed.
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
    """Return a copy of an error without its traceback, whose frames would keep the target and its tensors alive."""
    if isinstance(exc, RefitdError):
        return from_code(exc.code, str(exc))
    return CommitError(f"{raised_by} raised {exc!r}")
