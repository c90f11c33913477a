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
from typing import Any

from msgspec import structs

from refitd.buffers.permits import Permit
from refitd.client.aio import awaitable
from refitd.client.arguments import MAX_COUNT, flag, hook, seconds, whole
from refitd.client.callbacks import Callbacks, Commit
from refitd.client.commit_points import CommitPoints
from refitd.client.commit_state import CommitState
from refitd.client.connection import Connection
from refitd.client.devices import Arena
from refitd.client.flip import ArenaPair
from refitd.client.mxfp8 import TargetTensors
from refitd.client.ownership import Owned, own
from refitd.client.reconnect import Give, Line, renumbered
from refitd.client.reentrant_lock import check_process
from refitd.client.take_over import TakeOver
from refitd.errors import RefitdError, RefusedError
from refitd.protocol import local
from refitd.protocol.base import Message
from refitd.text import shown

NOTHING_PENDING = -1

_log = logging.getLogger("refitd.client")

# How long closing a target waits for a commit on the callback's thread.
COMMIT_ENDS_S = 5.0


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
        shared: Mapping[str, Owned] = MappingProxyType({}),
    ) -> None:
        """`closed` is called when the target is closed; `pair` holds the arenas of a target that flips.

        `shared` has, by name, the registrations that write tensors which this target only uses.
        """
        self.model = message.model
        self.replica = message.replica
        self.flips = pair is not None
        self._agree = agree
        self._line = line
        self._message = message
        self._told = closed
        self._tensors = tensors
        self._shared = shared
        self._state = state = CommitState(connection, message, registered, permit)
        self._take_over = TakeOver(state, tensors, staging, pair)
        self._is_called_back = on_pause is not None or on_commit is not None
        self._points = CommitPoints(state, is_called_back=self._is_called_back)
        connection.listen(self.member, self._notified)
        own(self)
        if self._is_called_back:
            Callbacks(state, self._take_over, on_commit, on_pause, on_resume)

    @property
    def member(self) -> str:
        """The id that the daemon gave it; another one after a daemon's restart."""
        return self._state.member

    @property
    def version(self) -> int | None:
        """The version that the tensors hold and the engine may serve; None: serve nothing.

        It is None before the first version, during a commit, after a failed commit, while `fenced`, once closed, and in
        forked children. It costs one read of shared memory: read it whenever it matters.
        """
        return self._state.serves()

    @property
    def fenced(self) -> str:
        """Why this rank must not serve the version that it holds; "" if it may, or holds none."""
        return self._state.obstacle()

    @property
    def error(self) -> RefitdError | None:
        """Why a callback's commit failed last, or the loss of the daemon; None if nothing has failed."""
        return self._state.error

    @property
    def last_pause_s(self) -> float:
        """How long the engine stood still for its last commit, in seconds."""
        return self._state.last_pause_s

    @property
    def is_estranged(self) -> bool:
        """Whether its live arena may show another file in this process than in the daemon."""
        return self._state.is_estranged

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of the tensors that keep this engine's own values and that no version has; see `keeps`."""
        return tuple(one.name for one in self._tensors.kept_here())

    @property
    def pending(self) -> int | None:
        """The decided version that waits for this rank's commit point; None if none does, and in forked children."""
        prepare = self._state.prepare
        return None if prepare is None or os.getpid() != self._state.pid else prepare.version

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

        An interrupt (Ctrl-C) while a version is taken over is raised once that has ended: the version is live, or the
        swap knows that this rank has failed.

        If another thread is committing the pending version (a cancelled `wait_async`, say), it ends first, and its
        result is returned or raised.

        Raises:
            CommitError: the commit failed; this rank then serves no version.
            PeerLost: the daemon has ended (the tensors keep their version), and the client does not reconnect.
            RefusedError: `step` went down; or the caller is a signal handler that interrupted a commit, or a forked
                child.
        """
        state = self._state
        if agree is None and begin is True and self._agree is None and (step is None or type(step) is int):
            # nothing pending, which is the case between almost any two tokens: as little as possible
            with state.lock:
                if state.prepare is None and state.failure is None and (step is None or 0 <= step <= MAX_COUNT):
                    check_process(state.pid)
                    state.steps.count(step)
                    return None
        check_process(state.pid)
        hook("agree", agree)
        step = None if step is None else whole("step", step)
        if not flag("begin", begin) and step is None:
            raise RefusedError("begin is False, and no step is given that does not begin; pass step=")
        agree = self._agree if agree is None else agree
        if agree is None:
            prepare = self._points.polled(step, begin=begin)
        else:
            prepare = state.prepare
            agreed = _agreed(agree(NOTHING_PENDING if prepare is None else prepare.version))
            if prepare is not None and agreed != prepare.version and prepare.swap != state.ended:
                prepare = None
        if prepare is None or self._is_called_back:  # the callback's thread commits, and may be doing so
            state.check_connected()
            return None
        if self._take_over.ends_elsewhere(prepare):
            return prepare.version
        return self._take_over.apply(prepare)

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
        check_process(self._state.pid)
        version, timeout = whole("version", version), seconds("timeout", timeout)
        deadline = time.monotonic() + timeout
        while not isinstance(found := self._points.waited(version, timeout, deadline, given_up), int):
            self._take_over.apply(found, given_up=given_up)
        return found

    _waiting = awaitable(_wait)

    async def wait_async(self, version: int, timeout: float = 60.0) -> int:
        """Do as `wait`, and let the event loop run meanwhile. Once it is cancelled, it commits nothing any more."""
        given_up = threading.Event()
        waiting = asyncio.ensure_future(self._waiting(version, timeout, given_up))
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            self._give_up(given_up)
            while not waiting.done():  # a commit that has begun ends first, also if this is cancelled once more
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
        """Put this rank to sleep: its tensors may then be offloaded, discarded or unmapped until `resume`.

        `version` is None meanwhile, and swaps leave the whole replica out; their reports name it. A swap of it that is
        not decided yet aborts. Call it at a commit point, on every rank that sleeps.

        Raises:
            RefusedError: a version is decided and waits for this rank: take it over first (`poll`); or the target is
                closed.
            DeadlineExceeded, PeerLost: the coordinator or the daemon does not answer; nothing has changed.
        """
        state = self._state
        check_process(state.pid)
        timeout = seconds("timeout", timeout)
        connection = self._line.steady(timeout)
        state.check_open()
        with state.lock:
            if state.prepare is not None or state.taking is not None:
                raise RefusedError(
                    f"{state.who}: version {self.pending} is decided and waits for "
                    "this rank; take it over first (poll or wait), then suspend"
                )
        connection.request(local.Suspend(member=self.member), local.Done, timeout)
        with self._take_over.checks.committing():  # waits for a check that reads the tensors
            self._take_over.checks.suspended = state.suspended = True

    def resume(self, *, kept: bool = True, timeout: float = 10.0) -> int | None:
        """Wake up: the tensors are back at their addresses. Return the version to serve, None if that must come first.

        Without `kept` their contents are lost, and the rank serves nothing until the live version has been brought to
        it. So it is if another version went live meanwhile. Both happen by themselves, at this rank's commit points.

        Raises:
            CommitError: a tensor is not where it was at registration; close this target and register again.
            RefusedError: the target is closed.
            DeadlineExceeded, PeerLost: the coordinator or the daemon does not answer; the rank stays suspended.
        """
        state = self._state
        check_process(state.pid)
        timeout = seconds("timeout", timeout)
        connection = self._line.steady(timeout)
        state.check_open()
        self._tensors.check_unmoved(is_described=True)
        wake = local.Wake(member=self.member, is_lost=not flag("kept", kept))
        taken = state.taken
        connection.request(wake, local.Done, timeout)
        with state.lock:
            if not kept and state.taken == taken:  # a callback may have taken the live version over already
                state.version = None
            self._take_over.checks.suspended = state.suspended = False
            state.changed.notify_all()
        return self.version

    def close(self) -> None:
        """End the registration. The tensors keep their values, but `version` becomes None: no swap reaches them."""
        state = self._state
        if state.closed:
            return
        self.release()
        try:
            if not state.is_evicted:
                state.is_estranged |= self.flips and state.taking is not None  # its commit did not end in time
                self._line.deregister(state.connection, self.member)
        except RefitdError:
            state.is_estranged |= bool(state.flipped)  # evicted meanwhile: what the daemon knows is not certain
            raise
        finally:
            self._told(self)

    def owned(self) -> Owned | None:
        """Return the memory that its commits write and what it keeps; None if it is registered no more."""
        return None if self._is_over() else self._owned()

    def claimed(self) -> Owned | None:
        """Return the same as `owned`, also while a registration that is lost still says which version it serves."""
        return None if self._is_over() and self._state.serves() is None else self._owned()

    def _is_over(self) -> bool:
        state = self._state
        is_ended = state.closed or state.failure is not None
        return is_ended or state.connection.is_foreign or (state.connection.is_lost and not state.connection.is_awaited)

    def _owned(self) -> Owned:
        state, m = self._state, self._message
        where = str(state.connection.directory)
        return Owned(state.pid, where, m.model, m.replica, m.rank, self._tensors, self._shared)

    def forked(self) -> None:
        """In a forked child: warn if its weights are shared with the parent, whose commits change them here."""
        if not self._state.closed and self.arenas():
            _log.warning("member=%s %s", self.member, self._state.obstacle())

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
        state, take_over = self._state, self._take_over
        with take_over.checks.committing():
            if state.closed or state.is_evicted:
                return
            given = take_over.give_staging(give)
            with state.lock:
                message = structs.replace(
                    self._message,
                    version=state.version,
                    run=state.run,
                    given=given,
                    returns=True,
                    suspended=state.suspended,
                    timeout_s=timeout,
                )
            registered = connection.request(message, local.TargetRegistered, timeout)
            if given is None and take_over.staging is not None:
                take_over.staging = connection.map_arena(registered.staging, write=False)
            permit = Permit(connection.permit_page(), registered.permit_slot, registered.permit_token)
            take_over.checks.registered_again(connection, registered.member)
            state.registered_again(connection, registered, permit)
        connection.listen(self.member, self._notified)

    def give_up(self, failure: local.Failure) -> None:
        """Take note that it could not be registered again: it serves nothing, and polls raise the reason."""
        self._state.give_up(failure)

    def release(self) -> None:
        """Drop the staging arena; nothing can be committed afterwards."""
        self._take_over.checks.let_commit_end(COMMIT_ENDS_S)
        self._state.close()
        self._take_over.release()
        self._state.connection.unlisten(self.member)

    def _notified(self, message: Message) -> None:
        if isinstance(message, local.DigestLive | local.CompareLive):
            self._take_over.checks.start(message)
            return
        if isinstance(message, local.PrepareCommit) and message.flips:
            self._take_over.look_before(message)  # without the lock: the engine may poll meanwhile
        self._state.hear(message)


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
