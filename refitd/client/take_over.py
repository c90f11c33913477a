"""Take a decided version over into the live tensors, and say what came of it, whatever interrupts that."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from refitd.client.checks import LiveChecks
from refitd.client.commit_state import CommitState
from refitd.client.devices import Arena
from refitd.client.flip import ArenaPair
from refitd.client.mxfp8 import TargetTensors
from refitd.client.reconnect import Give
from refitd.client.reentrant_lock import check_process
from refitd.errors import ArenaError, CommitError, RefitdError, RefusedError
from refitd.protocol import local

# The application configures this logger. Lines carry the swap's id, like those of the other processes.
_log = logging.getLogger("refitd.client")

# How long before a commit by exchange the tensors may have been checked.
LOOKED_S = 1.0

# How long a paused engine waits for the worker's copy (a few GB) before it gives up and serves no version.
APPLY_TIMEOUT_S = 60.0


class TakeOver:
    """Commits versions of one target, on whatever thread has reached a commit point.

    Attributes:
        checks: reads of the live tensors between commits.
        staging: the mapped staging arena of a target that copies from it; None without one, and once released.
        pair: the live and the staging arena of a target that flips; None once released.
    """

    def __init__(
        self, state: CommitState, tensors: TargetTensors, staging: Arena | None, pair: ArenaPair | None
    ) -> None:
        self.staging = staging
        self.pair = pair
        self.checks = LiveChecks(state.connection, state.member, tensors, lambda: self.staging)
        self._state = state
        self._tensors = tensors
        self._looked_at, self._looked_until = "", 0.0  # the swap before whose commit the tensors were checked
        self._failed = "", ""  # the swap whose commit failed last, and why

    def look_before(self, prepare: local.PrepareCommit) -> None:
        """Check the tensors of a target that flips before its commit point: that takes longer than the exchange."""
        with contextlib.suppress(CommitError):  # the commit looks again, and fails
            self._tensors.check_unmoved(is_described=True)
            self._looked_at, self._looked_until = prepare.swap, time.monotonic() + LOOKED_S

    def give_staging(self, give: Give) -> int | None:
        """Give the staging arena to the next daemon; return its number there, or None if that must make a new one.

        Raises:
            ArenaError: the daemon does not take the memory that commits exchange.
        """
        if self.pair is None:
            return None if self.staging is None else give(self.staging.address, self.staging.nbytes)
        given = give(*self.pair.staging)
        if given is None:
            raise ArenaError("the memory that its commits exchange could not be given back to the daemon")
        return given

    def release(self) -> None:
        """Drop the arenas; nothing can be committed afterwards."""
        self.staging = self.pair = None
        self.checks.release()

    def apply(
        self, prepare: local.PrepareCommit, started: float | None = None, given_up: threading.Event | None = None
    ) -> int | None:
        """Commit a version; `started` is the time at which this rank paused, if it did so earlier.

        Return None, and commit nothing, if `given_up` is set. An exception that is no failure of the commit
        (KeyboardInterrupt, SystemExit) is raised once the version is live or its failure has been reported; one that
        comes before anything is written leaves the version pending.

        Raises:
            CommitError: the commit failed; or it is no longer pending, and nothing was written.
            RefusedError: another thread applies it; or this is a forked child, and nothing was written.
        """
        check_process(self._state.pid)
        started = time.perf_counter() if started is None else started
        state, is_taker = self._state, False
        what = f"{state.who}: the commit of version {prepare.version}"
        try:
            with state.lock:
                if given_up is not None and given_up.is_set():
                    return None
                # another swap's that this thread began has ended, but an interrupt has kept it from saying so
                is_stale = state.taking is not prepare and state.taker == threading.get_ident()
                if state.taking is not None and not is_stale:
                    raise RefusedError(f"{what} is being applied already, on another thread or below this call")
                if state.prepare is not prepare:
                    raise CommitError(
                        f"{what} (swap {prepare.swap}) is over; a commit can be applied once, while it is pending"
                    )
                is_taker = True
                state.taking, state.taker = prepare, threading.get_ident()
            with self.checks.committing():
                self._to_its_end(prepare, started)
        finally:
            if is_taker:
                with state.lock:
                    state.taking = None
                    state.changed.notify_all()
        return prepare.version

    def ends_elsewhere(self, prepare: local.PrepareCommit) -> bool:
        """Wait for a commit of this version on another thread; return whether that made the version live.

        Raises:
            CommitError: that commit failed, or has not ended in time.
        """
        state = self._state
        with state.lock:
            is_elsewhere = state.taking is prepare and state.taker != threading.get_ident()
            if is_elsewhere and not state.changed.wait_for(lambda: state.taking is not prepare, APPLY_TIMEOUT_S):
                raise CommitError(
                    f"{state.who}: another thread has been committing version {prepare.version} for "
                    f"{APPLY_TIMEOUT_S:.0f} s; look at that thread's stack"
                )
            if state.prepare is prepare:
                return False  # still pending, or an interrupted report is missing
            if self._failed[0] == prepare.swap:
                raise CommitError(self._failed[1])
            return state.taken == prepare.swap

    def _to_its_end(self, prepare: local.PrepareCommit, started: float) -> None:
        try:
            self._take_over(prepare, started)
        except Exception:
            raise
        except BaseException:
            # once more, so that no swap waits for an engine that may never poll again: what is done is not repeated,
            # and bytes may be copied again
            with contextlib.suppress(RefitdError):
                self._take_over(prepare, started, is_last=True)
            raise

    def _take_over(self, prepare: local.PrepareCommit, started: float, *, is_last: bool = False) -> None:
        """Commit and report; report a failure. An interrupted call may be repeated; the last must report."""
        state = self._state
        try:
            if self._failed[0] == prepare.swap:
                raise CommitError(self._failed[1])
            if state.taken != prepare.swap:
                state.version = None  # while they are written, the tensors hold neither version
                exchanged = self._write(prepare)
                state.last_pause_s = time.perf_counter() - started
                state.exchanged = exchanged  # before `taken`: a repeated decision is answered with it
                state.steps.flipped()
                state.taken = prepare.swap
        except BaseException as exc:
            if not (is_last or isinstance(exc, Exception)):
                raise
            reason = str(exc) if isinstance(exc, Exception) else f"it was interrupted twice: {exc!r}"
            self._failed = prepare.swap, reason  # the tensors may hold parts of two versions: no version is set
            _log.error("swap=%s member=%s version=%s failed: %s", prepare.swap, state.member, prepare.version, reason)
            exchanged = state.flipped == prepare.swap
            self._say(prepare, local.CommitFailed(prepare.swap, state.member, reason, exchanged=exchanged))
            if isinstance(exc, CommitError):
                raise
            raise CommitError(f"version {prepare.version} could not be taken over: {reason}") from exc
        _log.info(
            "swap=%s member=%s version=%s committed paused_s=%.4f",
            prepare.swap,
            state.member,
            prepare.version,
            state.last_pause_s,
        )
        # report before setting the version: a thread that waits for it may end the process as soon as it is live
        state.fenced = ""
        try:
            self._say(prepare, local.CommitDone(prepare.swap, state.member, state.last_pause_s, state.exchanged))
        finally:
            with state.lock:
                state.version, state.run = prepare.version, prepare.run
                state.changed.notify_all()

    def _write(self, prepare: local.PrepareCommit) -> bool:
        """Make what is staged live; return whether that exchanged the arenas."""
        exchanged = False
        if not prepare.flips or prepare.swap != self._looked_at or time.monotonic() > self._looked_until:
            self._tensors.check_unmoved(is_described=True)
        self._tensors.settle()  # kernels may still read the old version on a GPU
        if prepare.flips:
            exchanged = self._flip(prepare.swap)
        elif prepare.by_worker:
            self._let_worker_write(prepare)
        elif not prepare.in_place:
            if self.staging is None:
                raise CommitError("this target has been closed")
            self._tensors.read_from(self.staging)
            self._tensors.settle()
        self._tensors.refresh()
        if not prepare.flips:  # an exchange takes no time in which tensors could move
            self._tensors.check_unmoved("during the commit")
        return exchanged

    def _flip(self, swap: str) -> bool:
        """Make what is staged live; return whether the arenas were exchanged."""
        pair, state = self.pair, self._state
        if pair is None:
            raise CommitError("this target has been closed")
        if state.flipped != swap:  # a commit that was interrupted afterwards is repeated, its exchange must not be
            before = pair.exchanges
            try:
                pair.flip()
            finally:
                if pair.exchanges != before:
                    state.flipped = swap
        with state.lock:
            state.is_estranged |= state.is_evicted and state.flipped == swap
        return state.flipped == swap

    def _let_worker_write(self, prepare: local.PrepareCommit) -> None:
        state = self._state
        state.tell(local.CommitQuiet(swap=prepare.swap, member=state.member))

        def is_told() -> bool:
            mine = state.applied is not None and state.applied.swap == prepare.swap
            return mine or state.failure is not None or bool(state.away) or state.closed

        with state.lock:
            done = state.changed.wait_for(is_told, APPLY_TIMEOUT_S)
        if not done:
            raise CommitError(f"the worker did not write the live tensors within {APPLY_TIMEOUT_S:.0f} s")
        if state.closed:
            raise CommitError("this target has been closed")
        if state.applied is None or state.applied.swap != prepare.swap:
            state.check_connected()
            raise CommitError(f"its tensors may hold parts of two versions: {state.away}")
        if state.applied.reason:
            raise CommitError(state.applied.reason)

    def _say(self, prepare: local.PrepareCommit, outcome: local.CommitDone | local.CommitFailed) -> None:
        """Report how a commit has ended. If that is interrupted, it stays pending, and the next poll only reports."""
        self._state.ended = prepare.swap
        try:
            self._state.tell(outcome)
        except Exception:
            self._settle(prepare)
            raise
        self._settle(prepare)

    def _settle(self, prepare: local.PrepareCommit) -> None:
        state = self._state
        with state.lock:
            if state.prepare is prepare:  # the next may be there already
                state.prepare = None
            state.changed.notify_all()
