"""Wait in a poll, or between polls, until this rank may commit a pending version: in lockstep with its replica."""

from __future__ import annotations

import threading
import time

from refitd.client.commit_state import CommitState
from refitd.errors import CommitError, DeadlineExceeded, RefusedError
from refitd.protocol import local

# How long a rank waits in a poll to learn in which poll its replica commits.
IN_STEP_S = 30.0

# How long a rank in `wait` holds back its commit because others may be in a step that it has not begun and wait for it.
EARLY_S = 3.0

# How long `wait` sleeps before it reads the permit again.
PERMIT_WAIT_S = 0.05

# How long a wait sleeps before it checks again.
WAKE_S = 0.5


class CommitPoints:
    """The commit points of one target. `is_called_back`: the thread of a callback commits, and no wait does."""

    def __init__(self, state: CommitState, *, is_called_back: bool) -> None:
        self._state = state
        self._is_called_back = is_called_back
        self._early = ("", 0.0)  # the swap that a `wait` holds back, and since when

    def polled(self, step: int | None, *, begin: bool) -> local.PrepareCommit | None:
        """Count a poll; return the commit due in it, or None."""
        state = self._state
        with state.lock:
            state.steps.count(step, begin=begin)
            try:
                return self._due()
            finally:
                if step is not None and not begin:
                    state.steps.stay()

    def _due(self) -> local.PrepareCommit | None:
        """Return the commit due in the poll that was counted, once it is known whether it is."""
        state = self._state
        with state.lock:
            prepare = state.prepare
            if prepare is None or not prepare.lockstep or prepare.swap == state.ended:
                return prepare
            if state.steps.flip_at is None:
                state.say_where(prepare, "poll")
                try:
                    state.changed.wait_for(lambda: not state.steps.stands or self._is_over(prepare), IN_STEP_S)
                except BaseException:
                    if state.steps.stands and not self._is_over(prepare):
                        state.say_where(prepare)  # this rank no longer waits
                    raise
            if self._is_over(prepare):
                return None
            if not state.steps.stands:
                return prepare if state.steps.is_due() else None
            state.version = state.prepare = None
        reason = f"the other ranks of the replica have not said within {IN_STEP_S:.0f} s how far they are"
        state.tell(local.CommitFailed(swap=prepare.swap, member=state.member, reason=reason))
        raise CommitError(f"{state.who}: version {prepare.version} is not taken over: {reason}")

    def waited(
        self, version: int, timeout: float, deadline: float, given_up: threading.Event
    ) -> local.PrepareCommit | int:
        """Return the next commit to take over, or the live version once that is `version` or a newer one.

        Raises:
            RefusedError: the target is closed, or this thread is committing already.
            DeadlineExceeded: neither has come by `deadline`, or before `given_up` was set.
            PeerLost: the daemon has ended.
        """
        state = self._state
        with state.lock:
            while True:
                live = state.serves()
                if live is not None and live >= version:
                    self._leave()
                    return live
                state.check_open()
                if state.taking is not None and state.taker == threading.get_ident():
                    raise RefusedError(
                        f"{state.who}: a handler or callback waits here for the very commit that it has interrupted; "
                        "note what is to be done, and do it afterwards"
                    )
                left = 0.0 if given_up.is_set() else deadline - time.monotonic()
                if left <= 0:
                    self._leave()
                    why = state.obstacle() or state.away
                    raise DeadlineExceeded(
                        f"{state.who}: version {version} is not live after {timeout:.1f} s "
                        f"(live: {live}{', ' + why if why else ''}); look at `refitctl status` for the last swap"
                    )
                if self._takes() is None:
                    if (asked := state.prepare) is not None and asked.lockstep and not self._is_told():
                        state.say_where(asked, "wait")
                    # bounded: a signal handler on this thread may have polled just before, and the renewal of a permit
                    # sends no notification
                    is_held = state.version is not None and not state.fenced
                    self._stand(min(left, PERMIT_WAIT_S if is_held else WAKE_S))
                if (found := self._takes()) is not None:
                    return found

    def _stand(self, seconds: float) -> None:
        """Wait for a change. If a version is decided meanwhile, the notification thread reports this wait."""
        state = self._state
        state.waiting += not self._is_called_back
        try:
            state.changed.wait(seconds)
        except BaseException:
            self._leave()
            raise
        finally:
            state.waiting -= not self._is_called_back

    def _leave(self) -> None:
        """Report that this rank no longer waits, if it has reported that it waits."""
        state = self._state
        if state.steps.stands and state.prepare is not None:
            state.say_where(state.prepare)

    def _takes(self) -> local.PrepareCommit | None:
        """Return the commit that a rank in `wait` may perform now; it computes nothing meanwhile."""
        state, prepare = self._state, self._state.prepare
        if prepare is None or state.taking is not None or self._is_called_back:
            return None  # with on_pause or on_commit, the thread of the callback commits
        is_known = state.steps.flip_at is not None or prepare.swap == state.ended
        return prepare if not prepare.lockstep or (is_known and not self._is_early(prepare)) else None

    def _is_early(self, prepare: local.PrepareCommit) -> bool:
        """Return whether this rank must wait: its next poll comes before the one in which it must commit."""
        if not self._state.steps.is_early():
            return False
        now = time.monotonic()
        if self._early[0] != prepare.swap:
            self._early = (prepare.swap, now)
        return now < self._early[1] + EARLY_S

    def _is_told(self) -> bool:
        """Return whether this rank knows the poll to commit in, or has already reported that it waits for it."""
        return self._state.steps.flip_at is not None or bool(self._state.steps.stands)

    def _is_over(self, prepare: local.PrepareCommit) -> bool:
        return self._state.prepare is not prepare or self._state.failure is not None
