"""An engine rank's registration: its tensors become a new version at commit points that the engine chooses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from msgspec import structs

from refitd.buffers.permits import Permit
from refitd.client.arenas import Arena
from refitd.client.calls import MAX_COUNT, awaitable, check_process, flag, seconds, whole
from refitd.client.commit_state import CommitPoints, CommitState
from refitd.client.connection import Connection
from refitd.client.ownership import Owned, SharedOwners, own
from refitd.client.reconnect import Give, Line, renumbered
from refitd.client.take_over import ArenaPair, TakeOver
from refitd.client.target_tensors import TargetTensors
from refitd.commit.rank_state import Bond, RankStep, Suspended, Woken
from refitd.errors import RefitdError, RefusedError
from refitd.protocol import local
from refitd.protocol.base import Message
from refitd.text import called

_log = logging.getLogger("refitd.client")

# How long `close` waits for a commit on another thread.
COMMIT_ENDS_S = 5.0


class Target:
    """A target: this rank's registered shard of one replica. Created by `Client.register_target`.

    One thread at a time may poll or wait; any thread may read `version`, `pending` and `last_pause_s`.
    """

    def __init__(
        self,
        line: Line,
        connection: Connection,
        message: local.RegisterTarget,
        tensors: TargetTensors,
        registered: local.Registered,
        staging: Arena | None,
        permit: Permit | None,
        closed: Callable[[Target], object] = lambda target: None,
        pair: ArenaPair | None = None,
        shared: Mapping[str, Owned] = MappingProxyType({}),
    ) -> None:
        """`closed` is called when the target is closed; `pair` holds the arenas of a target that flips.

        This target only uses some tensors; `shared` maps their names to the registrations that write them.
        """
        self.model = message.model
        self.replica = message.replica
        self.flips = pair is not None
        self._line = line
        self._message = message
        self._told = closed
        self._tensors = tensors
        self._shared = shared
        self._state = state = CommitState(connection, message, registered, permit)
        self._is_estranged = False  # it was closed while the daemon may not have known of an exchange
        self._owners = SharedOwners(shared)
        self._take_over = TakeOver(state, tensors, staging, pair, self._owners)
        self._points = CommitPoints(state)
        connection.listen(self.member, self._notified)
        own(self)

    @property
    def member(self) -> str:
        """The id that the daemon assigned to this target; it changes when the daemon restarts."""
        return self._state.rank.member

    @property
    def version(self) -> int | None:
        """The version in the tensors that the engine may serve; None: the engine must not serve.

        It is None before the first version, during a commit, after a failed commit, while `fenced`, after `close`, and
        in forked children. With `shared` tensors it is also None until their owner has committed the version that was
        decided together with this one. It costs one read of shared memory, so read it whenever you need it.
        """
        version = self._state.serves()
        return None if version is None or self._owners.obstacle() else version

    @property
    def is_in_place(self) -> bool:
        """Whether staging writes the live tensors directly."""
        return self._message.in_place

    def serving(self) -> tuple[int | None, str]:
        """Return the served version and the source's incarnation; (None, "") if no version is served."""
        run, version = self._state.rank.run, self._state.serves()
        return (None, "") if version is None else (version, run)

    @property
    def fenced(self) -> str:
        """Why this rank must not serve the version in its tensors; "" if it may, or if there is no version."""
        own = self._state.obstacle()
        return own or ("" if self._state.rank.version is None else self._owners.obstacle())

    @property
    def error(self) -> RefitdError | None:
        """The daemon's loss, or the abort that left parts of two versions in the tensors; None if neither occurred."""
        return self._state.error

    @property
    def last_pause_s(self) -> float:
        """How long the engine paused for its last commit, in seconds."""
        return self._state.last_pause_s

    @property
    def is_estranged(self) -> bool:
        """Whether this process and the daemon may disagree about which file is the live arena."""
        return self._is_estranged or self._state.rank.is_estranged

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of the tensors that keep this engine's own values and are in no version; see `keeps`."""
        return tuple(one.name for one in self._tensors.kept_here())

    @property
    def pending(self) -> int | None:
        """The decided version that waits for this rank's commit point; None without one, and in forked children."""
        prepare = self._state.rank.pending
        return None if prepare is None or os.getpid() != self._state.pid else prepare.version

    def poll(self, *, step: int | None = None, begin: bool = True) -> int | None:
        """Offer a commit point: commit a pending version in place and return it; return None if none was committed.

        All ranks of a replica without a controller commit before the same step:

        - With `step`, the engine numbers its steps. The number only goes up, and is the same on all ranks. An idle
          engine may poll any number of times before its next step with `begin=False`. It must not begin that step
          before `poll` returns.
        - Without `step`, polls are counted from the last version that the ranks committed together. Call `poll` equally
          often on all ranks. In a new replica, or after a rank has returned, each rank waits in its poll until all
          ranks are polling. They count from there.

        The first poll with a pending version waits to learn the other ranks' steps, which takes about two messages. In
        a replica with a controller, the controller's `commit` hook calls `poll` on every rank.

        An interrupt (Ctrl-C) during a commit is raised when the commit has ended: either the version is live, or the
        swap knows that this rank has failed. If another thread is committing the pending version (for example a
        cancelled `wait_async`), `poll` waits for it, and returns or raises its result.

        Raises:
            CommitError: the commit failed; this rank then serves no version.
            PeerLost: the daemon has ended, and the client does not reconnect. The tensors keep their version.
            RefusedError: `step` went down; or the caller is a signal handler that interrupted a commit, or a forked
                child.
        """
        state = self._state
        if begin is True and (step is None or type(step) is int):
            # an idle poll, the most frequent one, only increments a counter
            with state.lock:
                if (
                    state.rank.pending is None
                    and state.rank.failure is None
                    and (step is None or 0 <= step <= MAX_COUNT)
                ):
                    check_process(state.pid)
                    state.steps.count(step)
                    return None
        check_process(state.pid)
        step = None if step is None else whole("step", step)
        if not flag("begin", begin) and step is None:
            raise RefusedError("begin is False, and no step is given that does not begin; pass step=")
        prepare = self._points.polled(step, begin=begin)
        if prepare is None:
            state.check_open()
            return None
        is_elsewhere = state.taker or state.rank.pending is not prepare  # another thread commits it, or has
        if is_elsewhere and self._take_over.ends_elsewhere(prepare):
            return prepare.version
        return self._take_over.apply(prepare)

    def wait(self, version: int, timeout: float = 60.0) -> int:
        """Block until `version` or a newer one is live here; commit pending versions; return the live version.

        Raises:
            RefusedError: `version` or `timeout` is not a valid number, or this target is closed.
            DeadlineExceeded: the version did not become live in time.
            CommitError, PeerLost: as in `poll`.
        """
        return self._wait(version, timeout, threading.Event())

    def _wait(self, version: int, timeout: float, given_up: threading.Event) -> int:
        """Do as `wait`, but stop committing when `given_up` is set. Set it under the lock."""
        check_process(self._state.pid)
        version, timeout = whole("version", version), seconds("timeout", timeout)
        deadline = time.monotonic() + timeout
        while not isinstance(found := self._points.waited(version, timeout, deadline, given_up), int):
            self._take_over.apply(found, given_up)
        return found

    _waiting = awaitable(_wait)

    async def wait_async(self, version: int, timeout: float = 60.0) -> int:
        """Do as `wait` without blocking the event loop. After it is cancelled, it commits no version."""
        given_up = threading.Event()
        waiting = asyncio.ensure_future(self._waiting(version, timeout, given_up))
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            self._give_up(given_up)
            while not waiting.done():  # let a commit that has begun end first, even if this is cancelled again
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([waiting])
            if not waiting.cancelled():
                waiting.exception()  # mark it as retrieved
            raise
        finally:
            self._give_up(given_up)

    def _give_up(self, given_up: threading.Event) -> None:
        with self._state.lock:
            given_up.set()
            self._state.changed.notify_all()

    def suspend(self, timeout: float = 10.0) -> None:
        """Suspend this rank: its tensors may be offloaded, discarded or unmapped until `resume`.

        While a rank is suspended, its `version` is None. Swaps skip the whole replica, and their reports name it. If a
        swap of the replica is not decided yet, it aborts. Call this at a commit point, on every rank to suspend.

        Raises:
            RefusedError: a decided version waits for this rank: commit it first (`poll`); or the target is closed.
            DeadlineExceeded, PeerLost: the coordinator or the daemon does not answer; the rank is not suspended.
        """
        state = self._state
        check_process(state.pid)
        timeout = seconds("timeout", timeout)
        connection = self._line.steady(timeout)
        state.check_open()
        with state.lock:
            if state.rank.pending is not None or state.taker or state.rank.step is not RankStep.IDLE:
                raise RefusedError(
                    f"{state.who}: version {self.pending} is decided and waits for "
                    "this rank; take it over first (poll or wait), then suspend"
                )
        connection.request(local.Suspend(member=self.member), local.Done, timeout)
        with self._take_over.checks.committing():  # waits for a check that reads the tensors
            state.step(Suspended())
            self._take_over.checks.suspended = True

    def resume(self, *, kept: bool = True, timeout: float = 10.0) -> int | None:
        """End a suspension when the tensors are back at their addresses; return the version to serve, or None: not yet.

        If `kept` is False, the tensors' contents are lost. The rank then serves no version until it receives the live
        version. This also applies if another version went live during the suspension. In both cases the rank receives
        the version automatically, at its commit points.

        Raises:
            CommitError: a tensor's address differs from registration; close this target and register again.
            RefusedError: the target is closed.
            DeadlineExceeded, PeerLost: the coordinator or the daemon does not answer; the rank stays suspended.
        """
        state = self._state
        check_process(state.pid)
        timeout = seconds("timeout", timeout)
        connection = self._line.steady(timeout)
        state.check_open()
        self._tensors.check_unmoved(is_described=True)
        wake = local.Suspend(member=self.member, suspended=False, is_lost=not flag("kept", kept))
        taken = state.rank.taken
        connection.request(wake, local.Done, timeout)
        with state.lock:
            # another thread may have committed the live version already
            state.step(Woken(is_lost=not kept and state.rank.taken == taken))
            self._take_over.checks.suspended = False
        return self.version

    def close(self) -> None:
        """End the registration. The tensors keep their values, but `version` becomes None: swaps skip this rank."""
        state = self._state
        if state.rank.bond is Bond.CLOSED:
            return
        is_evicted = state.rank.bond is Bond.EVICTED
        self.release()
        try:
            if not is_evicted:
                self._is_estranged |= self.flips and state.taker != 0  # the commit did not end in time
                self._line.deregister(state.connection, self.member)
        except RefitdError:
            self._is_estranged |= bool(state.rank.flipped)  # evicted: the daemon may not know of the exchange
            raise
        finally:
            self._told(self)

    def owned(self) -> Owned | None:
        """Return the memory that its commits write and the tensors that it keeps; None if it is not registered."""
        return None if self._is_over() else self._owned()

    def claimed(self) -> Owned | None:
        """Do as `owned`, but also return the memory of a lost registration that still serves a version."""
        return None if self._is_over() and self._state.serves() is None else self._owned()

    def _is_over(self) -> bool:
        state = self._state
        is_ended = state.rank.bond not in (Bond.JOINED, Bond.AWAY)
        return is_ended or state.connection.is_foreign or (state.connection.is_lost and not state.connection.is_awaited)

    def _owned(self) -> Owned:
        state, m = self._state, self._message
        where = str(state.connection.directory)
        return Owned(state.pid, where, m.model, m.replica, m.rank, self._tensors, self._shared, self)

    def forked(self) -> None:
        """In a forked child: warn if the weights are shared with the parent. The parent's commits change them here."""
        if self._state.rank.bond is not Bond.CLOSED and self.arenas():
            _log.warning("member=%s %s", called(self.member), self._state.obstacle())

    def arenas(self) -> set[int]:
        """Return the arenas from `allocate` that hold its tensors."""
        return {place.arena for place in self._tensors.arena_places}

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Store the new numbers of arenas that were handed over to another daemon."""
        self._message = structs.replace(self._message, live=renumbered(self._message.live, numbers))
        self._tensors.arena_places = renumbered(self._tensors.arena_places, numbers)

    def register_again(self, connection: Connection, give: Give, timeout: float) -> None:
        """Register over a new connection, with the version in the tensors and the same staging arena.

        Wait first for a commit that has begun. The coordinator confirms the version before the target may serve it.

        Raises:
            RefitdError: the daemon refuses, or is lost again.
        """
        state, take_over = self._state, self._take_over
        with take_over.checks.committing():
            if state.rank.bond in (Bond.CLOSED, Bond.EVICTED):
                return
            given = take_over.give_staging(give)
            with state.lock:
                message = structs.replace(
                    self._message,
                    version=state.rank.version,
                    run=state.rank.run,
                    given=given,
                    returns=True,
                    suspended=state.rank.suspended,
                    timeout_s=timeout,
                )
            registered = connection.request(message, local.Registered, timeout)
            if given is None and take_over.staging is not None:
                take_over.staging = connection.map_arena(registered.staging, write=False)
            permit = Permit(connection.permit_page(), registered.permit_slot, registered.permit_token)
            take_over.checks.registered_again(connection, registered.member)
            state.registered_again(connection, registered, permit)
        connection.listen(self.member, self._notified)

    def give_up(self, failure: local.Failure) -> None:
        """Note that registering again failed: the target serves no version, and polls raise the reason."""
        self._state.give_up(failure)

    def release(self) -> None:
        """Drop the staging arena; later commits fail."""
        self._take_over.checks.let_commit_end(COMMIT_ENDS_S)
        self._state.close()
        self._take_over.release()
        self._state.connection.unlisten(self.member)

    def _notified(self, message: Message) -> None:
        if isinstance(message, local.CheckLive):
            self._take_over.checks.start(message)
            return
        if isinstance(message, local.PrepareCommit) and message.flips:
            self._take_over.look_before(message)  # not under the lock: the engine may poll during the check
        self._state.hear(message)
