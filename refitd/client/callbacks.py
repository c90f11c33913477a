"""The thread on which an engine's callbacks are called: it pauses, commits and resumes, or lets a callback commit."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from refitd.client.commit_state import CommitState
from refitd.client.take_over import APPLY_TIMEOUT_S, TakeOver
from refitd.errors import CommitError, RefitdError, from_code
from refitd.protocol import local

# How long a paused engine waits for the decision. After that it serves no version until it learns what was decided.
# This is longer than any deadline that a coordinator should have.
PAUSE_TIMEOUT_S = 600.0


class Commit:
    """A decided version, passed to an `on_commit` callback, which must apply it once before it returns."""

    def __init__(self, take_over: TakeOver, prepare: local.PrepareCommit) -> None:
        self._take_over = take_over
        self._prepare = prepare
        self.version = prepare.version

    def apply(self) -> int:
        """Commit the version now and return it; no forward pass may run meanwhile.

        Raises:
            CommitError: the commit failed, and this rank serves no version; or it was applied before or is over, and
                nothing was written.
        """
        applied = self._take_over.apply(self._prepare)
        assert applied is not None
        return applied


class Callbacks:
    """Starts the thread of a target with callbacks. It ends when the target is closed, or has lost its daemon.

    What a callback raises, SystemExit too, becomes the target's `error`: the thread is the client's, and needed again.
    """

    def __init__(
        self,
        state: CommitState,
        take_over: TakeOver,
        on_commit: Callable[[Commit], object] | None,
        on_pause: Callable[[int], object] | None,
        on_resume: Callable[[int | None], object] | None,
    ) -> None:
        self._state, self._take_over = state, take_over
        self._on_commit, self._on_pause, self._on_resume = on_commit, on_pause, on_resume
        work = self._attend if on_pause is not None else self._call_back
        threading.Thread(target=work, name="refitd-commit", daemon=True).start()

    # --- on_pause -----------------------------------------------------------------------------------------

    def _attend(self) -> None:
        """Pause when asked, commit what is decided, resume."""
        state = self._state
        while True:
            with state.lock:
                state.changed.wait_for(
                    lambda: (
                        state.asked
                        or state.prepare
                        or (state.stood_down and not state.away)
                        or state.failure
                        or state.closed
                    )
                )
                asked, prepare = state.asked, state.prepare
                resumes, state.stood_down = state.stood_down and not state.away, state.stood_down and bool(state.away)
                if self._notes_end():
                    return
            # a version that was decided before a coordinator's restart comes without a request to pause
            cause = asked or prepare
            if cause is None:
                if resumes:
                    self._resume()
                continue
            try:
                self._stand_still(cause.swap, cause.version, is_asked=asked is not None)
            except BaseException as exc:
                state.error = _kept(exc, "on_pause")
            with state.lock:
                if state.asked is asked:  # another swap may already have asked
                    state.asked = None
            self._resume()

    def _notes_end(self) -> bool:
        state = self._state
        if state.failure is not None and not state.closed:
            state.error = from_code(state.failure.code, state.failure.message)
        return state.closed or state.failure is not None

    def _resume(self) -> None:
        try:
            if self._on_resume is not None:
                self._on_resume(self._state.serves())
        except BaseException as exc:
            self._state.error = CommitError(f"on_resume raised {exc!r}")

    def _stand_still(self, swap: str, version: int, *, is_asked: bool) -> None:
        """Pause the engine and commit the version once it is decided; raises CommitError on failure."""
        assert self._on_pause is not None
        state = self._state
        try:
            self._on_pause(version)
        except BaseException as exc:
            with state.lock:
                if state.prepare is not None:  # the version is already decided
                    state.version = state.prepare = None
                state.changed.notify_all()
            reason = f"on_pause raised {exc!r}"
            state.tell(local.CommitFailed(swap=swap, member=state.member, reason=reason))
            raise CommitError(reason) from exc
        since = time.perf_counter()
        if is_asked:
            state.tell(local.Paused(swap=swap, member=state.member))
        with state.lock:
            decided = state.changed.wait_for(
                lambda: (
                    state.prepare
                    or state.asked is None
                    or state.asked.swap != swap  # this swap is over, and the next one has asked
                    or state.failure
                    or state.closed
                ),
                PAUSE_TIMEOUT_S,
            )
            prepare = state.prepare
            if not decided:
                state.fenced = f"nobody said within {PAUSE_TIMEOUT_S:.0f} s whether swap {swap} was decided"
            elif state.failure is not None or state.away:
                state.fenced = f"the daemon ended before it said whether swap {swap} was decided"
                state.stood_down = bool(state.away)  # on_resume is called again when it is back
        if prepare is not None:
            self._take_over.apply(prepare, since)

    # --- on_commit ----------------------------------------------------------------------------------------

    def _call_back(self) -> None:
        assert self._on_commit is not None
        state = self._state
        while True:
            with state.lock:
                state.changed.wait_for(lambda: state.prepare or state.failure or state.closed)
                prepare = state.prepare
                if self._notes_end() and (state.closed or prepare is None):
                    return
            assert prepare is not None
            try:
                self._on_commit(Commit(self._take_over, prepare))
                if state.prepare is prepare:
                    raise CommitError("the on_commit callback returned without calling commit.apply()")
            except BaseException as exc:
                state.error = _kept(exc, "on_commit")
                if self._withdraw(prepare):
                    failed = local.CommitFailed(
                        prepare.swap, state.member, str(state.error), exchanged=state.flipped == prepare.swap
                    )
                    with contextlib.suppress(RefitdError):  # the daemon has gone, or the callback closed the target
                        state.connection.tell(failed)

    def _withdraw(self, prepare: local.PrepareCommit) -> bool:
        """Withdraw a commit that its callback did not apply; return whether it was still pending."""
        state = self._state
        with state.lock:
            # wait for a thread of the callback that may be applying it right now
            state.changed.wait_for(lambda: state.taking is not prepare, APPLY_TIMEOUT_S)
            if state.prepare is not prepare:
                return False
            state.version = state.prepare = None
            state.changed.notify_all()
            return True


def _kept(exc: BaseException, raised_by: str) -> RefitdError:
    """Return a copy of an error without its traceback, whose frames would keep the target and its tensors alive."""
    if isinstance(exc, RefitdError):
        return from_code(exc.code, str(exc))
    return CommitError(f"{raised_by} raised {exc!r}")
