"""The commit state of a target, shared with its daemon's notifications, under one lock."""

from __future__ import annotations

import logging
import os
import threading

from refitd.buffers.permits import Permit
from refitd.client.connection import Connection
from refitd.client.steps import PollSteps
from refitd.errors import CommitError, Orphaned, PeerLost, RefitdError, RefusedError, from_code
from refitd.protocol import local
from refitd.protocol.base import Message

_log = logging.getLogger("refitd.client")


class CommitState:
    """Shared by the polling thread, a callback's thread and the notification thread. `changed` guards it."""

    def __init__(
        self,
        connection: Connection,
        message: local.RegisterTarget,
        registered: local.TargetRegistered,
        permit: Permit | None,
    ) -> None:
        self.who = f"model {message.model!r} replica {message.replica!r}"
        self.in_place = message.in_place
        self.connection = connection
        self.member = registered.member
        self.pid = os.getpid()
        # entered as `lock`: an interrupt while Python code of the condition takes or releases it would leave it locked
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.steps = PollSteps()
        self.waiting = 0  # threads in `wait`, which commit at once; nothing is computed meanwhile
        self.prepare: local.PrepareCommit | None = None  # decided and not yet committed
        self.taking: local.PrepareCommit | None = None  # being committed by a thread now
        self.taker = 0  # that thread's id
        self.taken = ""  # the swap committed last
        self.ended = ""  # the swap whose commit ended last; while it is still pending, only its report is missing
        self.exchanged = False  # whether that exchanged the arenas
        self.last_pause_s = 0.0  # how long that took
        self.flipped = ""  # the swap that exchanged the arenas last, committed or not
        self.is_estranged = False  # the file of its live arena here differs from the daemon's
        self.asked: local.AskPause | None = None  # the current request to pause
        self.applied: local.CommitApplied | None = None
        self.fenced = ""
        self.away = ""  # why the daemon cannot be reached now; it is waited for
        self.stood_down = False  # on_resume was called with None because the daemon had ended
        self.failure: local.Failure | None = None
        self.orphaned = ""  # why this process must serve nothing more: one that it serves for has ended
        self.error: RefitdError | None = None  # why a callback's commit failed, or the loss of the daemon
        self.version: int | None = registered.version  # held by the tensors; None while they hold no whole version
        self.run = registered.run  # of the version that the tensors held last
        self.permit: Permit | None = permit
        self.closed = self.is_evicted = self.suspended = False

    def serves(self) -> int | None:
        """Return the version that the engine may serve; None: it must serve nothing."""
        version = self.version
        if version is None or self.fenced or self.orphaned or self.suspended or os.getpid() != self.pid:
            return None
        permit = self.permit
        return version if permit is None or permit.left_s() > 0 else None

    def obstacle(self) -> str:
        """Return why the engine must not serve the version that it holds; "" if it may, or holds none."""
        if os.getpid() != self.pid:
            return (
                f"this process was forked from pid {self.pid}, which registered it; it gets no news of versions here, "
                "and memory of allocate() and adopt() changes with versions there; connect and register in this "
                "process, or start it with spawn"
            )
        if self.orphaned:
            return self.orphaned
        if self.suspended and not self.fenced:
            return "it is suspended: its tensors are put away until resume()"
        permit = self.permit
        if self.fenced or permit is None or self.version is None or (left_s := permit.left_s()) > 0:
            return self.fenced
        if self.away:
            return f"its permit has ended, and {self.away}; it serves again when the coordinator has confirmed it"
        if self.failure is not None:
            return f"the daemon is gone ({self.failure.message}); connect and register again"
        if not permit.is_given:
            return (
                "it has no permit: the coordinator has not confirmed yet that its version is live, or has refused "
                "this rank; look at `refitctl status`"
            )
        return (
            f"its permit ended {-left_s:.1f} s ago: its node has not heard of the coordinator in time, or does not "
            "answer, so that another version may be live; look at `refitctl status`"
        )

    def check_connected(self) -> None:
        """Raise the error that ended the registration, or the connection to its daemon, if one has."""
        if self.failure is not None:
            raise from_code(self.failure.code, self.failure.message)

    def check_open(self) -> None:
        """Raise as `check_connected`, and RefusedError once the target is closed."""
        self.check_connected()
        if self.closed:
            raise RefusedError(self.fenced)

    def tell(self, message: local.Told | local.StepReached) -> None:
        """Report a commit's progress to the daemon, unless it has ended: its successor learns the outcome."""
        connection = self.connection
        try:
            connection.tell(message)
        except PeerLost:
            if not connection.is_awaited:
                raise

    def say_where(self, prepare: local.PrepareCommit, stands: str = "") -> None:
        """Tell the step that this rank has reached; a nonempty `stands` says in which call it waits."""
        self.tell(self.steps.reached(prepare.swap, self.member, stands))

    def registered_again(self, connection: Connection, registered: local.TargetRegistered, permit: Permit) -> None:
        """Continue with the next daemon."""
        with self.lock:
            self.member, self.connection, self.permit = registered.member, connection, permit
            self.away = self.fenced = self.flipped = ""
            self.applied = None
            self.changed.notify_all()

    def give_up(self, failure: local.Failure) -> None:
        """Serve nothing any more; polls raise the reason."""
        with self.lock:
            self.failure, self.version = failure, None
            self.error, self.away = from_code(failure.code, failure.message), ""
            if failure.code == Orphaned.code:  # a commit under way ends, and no other begins
                self.orphaned, self.prepare, self.asked = failure.message, None, None
            self.changed.notify_all()

    def close(self) -> None:
        """End all commits and serve nothing any more."""
        with self.lock:
            self.closed = True
            self.prepare = None
            self.permit = None  # it is no longer renewed, so this rank cannot know whether another version is live
            self.fenced = self.fenced or f"{self.member} is registered no more: it was closed; register_target again"
            self.changed.notify_all()

    def hear(self, message: Message) -> None:
        """Handle a notification of the daemon."""
        with self.lock:
            match message:
                case local.PrepareCommit() if self.closed or self.orphaned:
                    pass  # it was on its way; the daemon learns from the end of the registration
                case local.PrepareCommit(swap) if swap == self.taken:
                    # already committed, but the coordinator died before it knew
                    self.tell(local.CommitDone(swap, self.member, self.last_pause_s, self.exchanged))
                case local.PrepareCommit(swap):
                    is_told = self.prepare is not None and self.prepare.swap == swap
                    if not is_told or (message.controlled and self.taking is None):
                        self.prepare = message
                        self.steps.decided()
                    if message.lockstep or message.controlled:
                        self.say_where(message, self.steps.stands or ("wait" if self.waiting else ""))
                case local.FlipAt(swap, _, step, origin):
                    if self.prepare is not None and self.prepare.swap == swap:
                        self.steps.flip(step, origin)
                case local.PassPoll(swap):
                    if self.prepare is not None and self.prepare.swap == swap:
                        self.steps.passed()
                case local.CommitApplied():
                    self.applied = message
                case local.AskPause(swap, member, version):
                    _log.info("swap=%s member=%s version=%s is to stand still", swap, member, version)
                    self.asked = message
                case local.Resume(swap, _, reason, is_poisoned):
                    _log.info("swap=%s member=%s aborted: %s", swap, self.member, reason)
                    if is_poisoned:
                        self.version, self.error = None, CommitError(f"nothing can be served: {reason}")
                    if self.asked is not None and self.asked.swap == swap:
                        self.asked = None
                    if self.prepare is not None and self.prepare.swap == swap and self.taking is None:
                        self.prepare = None
                case local.Fence(member, reason):
                    if bool(reason) != bool(self.fenced):  # one that is left out hears of each version that it lacks
                        _log.warning("member=%s %s", member, f"fenced: {reason}" if reason else "no longer fenced")
                    self.fenced = reason
                case local.Evicted(member, reason, exchanged):
                    # otherwise it exchanged its arenas while it was evicted, and the daemon does not know
                    self.is_estranged |= self.flipped != exchanged
                    text = f"{member} is registered no more: {reason}; register_target again"
                    _log.warning("member=%s evicted: %s", member, reason)
                    self.fenced, self.prepare, self.asked, self.is_evicted = text, None, None, True
                    self.failure = local.Failure(code=RefusedError.code, message=text)
                case local.Failure() if self.orphaned:
                    pass  # the end of the session that this process has closed
                case local.Failure(_, text) if self.connection.is_awaited and self.failure is None:
                    self.away = text
                    if self.in_place and self.asked is not None:
                        self.version = None  # workers may have written the tensors
                    # what was decided is brought to it when it is back; a commit under way ends first
                    self.prepare = self.asked = None
                case local.Failure(code, text):
                    self.failure, self.error = message, from_code(code, text)
            self.changed.notify_all()
