"""The commit state of a target under one lock: its polls, its daemon's notifications, and waits for lockstep."""

from __future__ import annotations

import logging
import os
import threading
import time

from refitd.buffers.permits import Permit
from refitd.client.connection import Connection
from refitd.commit import rank_state
from refitd.commit.lockstep import CALLERS_STEP
from refitd.commit.rank_state import Bond, GaveUp, joined
from refitd.errors import CommitError, DeadlineExceeded, Orphaned, PeerLost, RefitdError, RefusedError, from_code
from refitd.protocol import local
from refitd.protocol.base import Message
from refitd.text import called

_log = logging.getLogger("refitd.client")

# How long a poll waits until the rank knows when its replica commits.
IN_STEP_S = 30.0

# How long a rank in `wait` delays an early commit. Other ranks may be in a step that this rank has not begun, and wait
# for it there.
EARLY_S = 3.0

# How long `wait` sleeps before it reads the permit again.
PERMIT_WAIT_S = 0.05

# How long `wait` sleeps before it checks again, if there is no permit to read.
WAKE_S = 0.5


class PollSteps:
    """The poll counter of one target, guarded by the target's lock. See `refitd.commit.lockstep` for its purpose."""

    def __init__(self) -> None:
        self.flip_at: int | None = None  # the poll that commits the pending version; None until known
        self.stands = ""  # the call that waits for `flip_at`, already reported: "poll" or "wait"; "" if none waits
        self._step = 0
        self._origin = ""  # polls are counted from this event; "": this rank's registration
        self._flip_origin = ""
        self._thread = 0

    def count(self, step: int | None, *, begin: bool = True) -> None:
        """Count a poll: use the caller's number `step`, or the next number. 0 means before the first poll.

        A caller's step 0 is counted as poll 1. If `begin` is False, the caller's step does not begin with this poll,
        and the rank may poll again before that step.

        Raises:
            RefusedError: `step` is lower than in an earlier poll.
        """
        if step is None:
            self._origin = "" if self._origin == CALLERS_STEP else self._origin
            self._step += 1
        elif self._origin == CALLERS_STEP and step + begin < self._step:
            raise RefusedError(
                f"step is {step}, after {self._step - 1} in the poll before; give a number that only goes up, and is "
                "the same on all ranks of the replica"
            )
        else:
            self._origin = CALLERS_STEP
            self._step = step + 1
        self._thread = threading.get_ident()

    def stay(self) -> None:
        """Subtract a poll that did not begin the caller's step."""
        if self._origin == CALLERS_STEP:
            self._step -= 1

    def decided(self) -> None:
        """Note that a version is decided; the poll that commits it is not known yet."""
        self.flip_at, self.stands = None, ""

    def reached(self, swap: str, member: str, stands: str = "") -> local.StepReached:
        """Return the report of this rank's step; `stands` names the call where the rank waits, if it does."""
        self.stands = stands
        self._thread = threading.get_ident() if stands else self._thread
        # if flip_at is known, a new coordinator asks again; other ranks may have committed, so repeat the old answer
        step = self._step if self.flip_at is None else max(0, self.flip_at - 1)
        return local.StepReached(swap, member, step, self._origin, stands, self._thread)

    def flip(self, step: int, origin: str) -> None:
        """Commit the version in poll `step`; if `origin` is given, all ranks count from that poll on."""
        self.flip_at, self._flip_origin, self.stands = step, origin, ""

    def passed(self) -> None:
        """Let the rank continue: it no longer waits in its poll."""
        self.stands = ""

    def is_due(self) -> bool:
        """Return whether this poll must commit the version."""
        return self.flip_at is not None and self._step >= self.flip_at

    def is_early(self) -> bool:
        """Return whether the other ranks commit after a step that this rank has not begun."""
        return self.flip_at is not None and self._step + 1 < self.flip_at

    def flipped(self) -> None:
        """Note that the version is committed: ranks that committed together count from here, even after a `wait`.

        The committing poll is number 1. If this rank committed in a `wait`, its next poll is number 1. A rank that
        committed early does not share the other ranks' origin.
        """
        if self.flip_at is not None and self._origin != CALLERS_STEP:
            self._origin = "" if self.is_early() else self._flip_origin
            self._step = int(self.is_due()) if self._origin else self._step
        self.decided()


class CommitState:
    """The state machine of a rank (`refitd.commit.rank_state`) and the data that its threads share, under one lock."""

    def __init__(
        self,
        connection: Connection,
        message: local.RegisterTarget,
        registered: local.Registered,
        permit: Permit | None,
    ) -> None:
        self.who = f"model {message.model!r} replica {message.replica!r}"
        self.connection = connection
        self.pid = os.getpid()
        # enter `lock`, not `changed`: the condition's enter and exit are Python code, and an interrupt there would
        # leave the lock locked
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.rank = joined(registered.member, registered.version, registered.run, in_place=message.in_place)
        self.steps = PollSteps()
        self.waiting = 0  # threads in `wait`; they commit immediately, because their engine is idle
        self.taker = 0  # the id of the thread that commits now; 0: none
        self.last_pause_s = 0.0  # duration of the last commit
        self.error: RefitdError | None = None  # the daemon was lost, or an abort left a mix of two versions
        self.permit: Permit | None = permit

    def step(self, event: rank_state.Event) -> None:
        """Apply an event, send the report that follows from it, and wake threads that wait for a change."""
        with self.lock:
            self.rank, report = rank_state.step(self.rank, event)
            if report is not None:
                self.tell(report)
            self.changed.notify_all()

    def serves(self) -> int | None:
        """Return the version that the engine may serve; None if it must not serve."""
        rank = self.rank
        if not rank.may_serve or os.getpid() != self.pid:
            return None
        permit = self.permit
        return rank.version if permit is None or permit.left_s() > 0 else None

    def obstacle(self) -> str:
        """Return why the engine must not serve its version; "" if it may, or has no version."""
        if os.getpid() != self.pid:
            return (
                f"this process was forked from pid {self.pid}, which registered it; it gets no news of versions here, "
                "and memory of allocate() and adopt() changes with versions there; connect and register in this "
                "process, or start it with spawn"
            )
        rank, permit = self.rank, self.permit
        why = "" if rank.failure is None else rank.failure.message
        if rank.bond is Bond.ORPHANED:
            return why
        if rank.suspended and not rank.fenced:
            return "it is suspended: its tensors are put away until resume()"
        if rank.fenced or permit is None or rank.version is None or (left_s := permit.left_s()) > 0:
            return rank.fenced
        if rank.bond is Bond.AWAY:
            return f"its permit has ended, and {why}; it serves again when the coordinator has confirmed it"
        if rank.ended is not None:
            return f"the daemon is gone ({why}); connect and register again"
        if not permit.is_given:
            return (
                "it has no permit: the coordinator has not confirmed yet that its version is live, or has refused "
                "this rank; look at `refitctl status`"
            )
        return (
            f"its permit ended {-left_s:.1f} s ago: its node has not heard of the coordinator in time, or does not "
            "answer, so that another version may be live; look at `refitctl status`"
        )

    def check_open(self) -> None:
        """Raise the error that ended the registration or the connection to its daemon; RefusedError once closed."""
        if (failure := self.rank.ended) is not None:
            raise from_code(failure.code, failure.message)

    def tell(self, message: local.Told | local.StepReached) -> None:
        """Report a commit's progress to the daemon. If the daemon has ended, its successor will learn the outcome."""
        connection = self.connection
        try:
            connection.tell(message)
        except PeerLost:
            if not connection.is_awaited:
                raise

    def say_where(self, prepare: local.PrepareCommit, stands: str = "") -> None:
        """Report the step that this rank has reached; a nonempty `stands` names the call that it waits in."""
        self.tell(self.steps.reached(prepare.swap, self.rank.member, stands))

    def registered_again(self, connection: Connection, registered: local.Registered, permit: Permit) -> None:
        """Continue over a connection to the next daemon."""
        with self.lock:
            self.connection, self.permit = connection, permit
            self.step(rank_state.Rejoined(registered.member))

    def give_up(self, failure: local.Failure) -> None:
        """Stop serving; later polls raise `failure`."""
        with self.lock:
            self._ended_by(failure)
            is_orphaned = failure.code == Orphaned.code  # a running commit finishes, and no new one begins
            self.step(rank_state.Orphaned(failure) if is_orphaned else rank_state.DaemonLost(failure, must_stop=True))

    def _ended_by(self, failure: local.Failure) -> None:
        if not isinstance(self.error, Orphaned):  # an orphan's daemon may end too
            self.error = from_code(failure.code, failure.message)

    def close(self) -> None:
        """Stop committing and serving."""
        with self.lock:
            self.permit = None  # the permit is no longer renewed: another version may go live without this rank
            text = f"{called(self.rank.member)} was closed; register_target again"
            self.step(rank_state.Closed(text))

    def _may_be_written(self) -> bool:
        """Return whether workers may have written the live tensors since the last commit.

        Before its workers write a rank in place, the daemon revokes that rank's permit. It restores the permit with the
        decision, and then notifies this rank.
        """
        rank, is_given = self.rank, self.permit is not None and self.permit.is_given
        return rank.in_place and not rank.suspended and (rank.pending is not None or not is_given)

    def hear(self, message: Message) -> None:
        """Handle a notification of the daemon."""
        with self.lock:
            rank = self.rank
            match message:
                case local.PrepareCommit():
                    self.step(message)
                    is_asked = message.lockstep or message.controlled
                    if self.rank.pending is message and (is_asked or self.steps.flip_at is not None):
                        self.steps.decided()
                    is_pending = self.rank.pending is not None and self.rank.pending.swap == message.swap
                    if is_asked and is_pending and not self.rank.owes_report:
                        self.say_where(message, self.steps.stands or ("wait" if self.waiting else ""))
                case local.FlipAt(swap, _, step, origin):
                    if rank.pending is not None and rank.pending.swap == swap:
                        if step is None:
                            self.steps.passed()
                        else:
                            self.steps.flip(step, origin)
                case local.Poisoned(swap, _, reason):
                    _log.info("swap=%s member=%s aborted: %s", swap, called(rank.member), reason)
                    self.error = CommitError(f"nothing can be served: {reason}")
                    self.step(message)
                case local.Fence(member, reason):
                    if bool(reason) != bool(rank.fenced):  # a fenced rank gets a Fence for each version it misses
                        _log.warning(
                            "member=%s %s", called(member), f"fenced: {reason}" if reason else "no longer fenced"
                        )
                    self.step(message)
                case local.Evicted(member, reason):
                    _log.warning("member=%s evicted: %s", called(member), reason)
                    self.step(message)
                case local.Failure() if rank.bond is Bond.ORPHANED:
                    pass  # this process has closed the session itself
                case local.Failure() if self.connection.is_awaited and rank.ended is None:
                    self.step(rank_state.DaemonEnded(message, self._may_be_written()))
                case local.Failure():
                    self._ended_by(message)
                    self.step(rank_state.DaemonLost(message))
            self.changed.notify_all()


class CommitPoints:
    """The commit points of one target."""

    def __init__(self, state: CommitState) -> None:
        self._state = state
        self._early = ("", 0.0)  # the swap that a `wait` delays, and since when

    def polled(self, step: int | None, *, begin: bool) -> local.PrepareCommit | None:
        """Count a poll; wait until it is known whether a commit is due in it; return the commit, or None."""
        state = self._state
        with state.lock:
            state.steps.count(step, begin=begin)
            try:
                prepare = state.rank.pending
                if prepare is None or not prepare.lockstep or state.rank.owes_report:
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
                reason = f"the other ranks of the replica have not said within {IN_STEP_S:.0f} s how far they are"
                state.step(GaveUp(reason))
                raise CommitError(f"{state.who}: version {prepare.version} is not taken over: {reason}")
            finally:
                if step is not None and not begin:
                    state.steps.stay()

    def waited(
        self, version: int, timeout: float, deadline: float, given_up: threading.Event
    ) -> local.PrepareCommit | int:
        """Wait; return the next commit to perform, or the live version once it is `version` or newer.

        Raises:
            RefusedError: the target is closed, or this thread is committing already.
            DeadlineExceeded: there was neither by `deadline`, or before `given_up` was set.
            PeerLost: the daemon has ended.
        """
        state = self._state
        with state.lock:
            while True:
                live = state.serves()
                # a thread that waited may end the process immediately, so the report must have been sent
                if live is not None and live >= version and not state.rank.owes_report:
                    self._leave()
                    return live
                state.check_open()
                if state.taker == threading.get_ident():
                    raise RefusedError(
                        f"{state.who}: a handler or callback waits here for the very commit that it has interrupted; "
                        "note what is to be done, and do it afterwards"
                    )
                left = 0.0 if given_up.is_set() else deadline - time.monotonic()
                if left <= 0:
                    self._leave()
                    why = state.obstacle() or ("" if state.rank.failure is None else state.rank.failure.message)
                    raise DeadlineExceeded(
                        f"{state.who}: version {version} is not live after {timeout:.1f} s "
                        f"(live: {live}{', ' + why if why else ''}); look at `refitctl status` for the last swap"
                    )
                if self._takes() is None:
                    if (asked := state.rank.pending) is not None and asked.lockstep and not self._is_told():
                        state.say_where(asked, "wait")
                    # bounded: a signal handler on this thread may have polled just before, and the renewal of a permit
                    # sends no notification
                    is_held = state.rank.version is not None and not state.rank.fenced
                    self._stand(min(left, PERMIT_WAIT_S if is_held else WAKE_S))
                if (found := self._takes()) is not None:
                    return found

    def _stand(self, seconds: float) -> None:
        """Wait for a change. If a version is decided during it, the notification thread reports this wait."""
        state = self._state
        state.waiting += 1
        try:
            state.changed.wait(seconds)
        except BaseException:
            self._leave()
            raise
        finally:
            state.waiting -= 1

    def _leave(self) -> None:
        """Report that this rank no longer waits, if it has reported that it waits."""
        state = self._state
        if state.steps.stands and state.rank.pending is not None:
            state.say_where(state.rank.pending)

    def _takes(self) -> local.PrepareCommit | None:
        """Return the commit that this rank may perform now, while it is in `wait`; None if there is no such commit."""
        state, prepare = self._state, self._state.rank.pending
        if prepare is None or state.taker:
            return None
        is_known = state.steps.flip_at is not None or state.rank.owes_report
        return prepare if not prepare.lockstep or (is_known and not self._is_early(prepare)) else None

    def _is_early(self, prepare: local.PrepareCommit) -> bool:
        """Return whether to delay the commit: this rank's next poll is before its replica's commit."""
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
        return self._state.rank.pending is not prepare or self._state.rank.ended is not None
