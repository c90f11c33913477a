"""The state machine of a target rank in its own process: from a decided version to the report that it is live.

A rank has two states. `step` says how far the commit of a version is. `bond` says whether the rank still
belongs to its daemon. An event moves both, and the tables STEPS and BONDS are the code. An event without a row in STEPS
raises IllegalTransition and leaves the state as it was.

The daemon's messages are events as they are. The other events come from the thread that commits and from the client.
The polls of ranks in lockstep are counted in `refitd.commit.lockstep`.

Rules:
- A version is committed only after PrepareCommit, and once. A repeated PrepareCommit repeats the report.
- `version` is None while the tensors are written. It is set before the report is sent: when a swap has ended, all of
  its ranks have the new version.
- The end of a registration (closed, evicted, lost) forgets a pending commit. A commit that has begun ends first.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from refitd.errors import IllegalTransition
from refitd.protocol.local import CommitDone, CommitFailed, Evicted, Failure, Fence, Poisoned, PrepareCommit
from refitd.text import called


class RankStep(enum.Enum):
    """How far the commit of a version is in this process."""

    IDLE = "idle"  # no thread commits; `pending` may hold a decided version
    BEGUN = "begun"  # a thread has taken the pending version; the tensors are unchanged
    WRITING = "writing"  # the tensors hold parts of two versions
    LIVE = "live"  # the version is live, and its report is not sent
    FAILED = "failed"  # the commit failed, and its report is not sent


class Bond(enum.Enum):
    """Whether the rank belongs to its daemon."""

    JOINED = "joined"
    AWAY = "away"  # the daemon has ended; the client waits for the next one
    EVICTED = "evicted"
    LOST = "lost"  # the daemon has ended, and the client does not wait or was refused
    ORPHANED = "orphaned"  # a process for which this one serves has ended
    CLOSED = "closed"


# --- events -----------------------------------------------------------------------------------------------


class Begun(Struct, frozen=True):
    """A thread starts to commit the pending version."""


class WriteBegan(Struct, frozen=True):
    """The thread starts to write the tensors."""


class Exchanged(Struct, frozen=True):
    """The live and the staging arena were exchanged."""


class Written(Struct, frozen=True):
    """The tensors hold the version; the engine paused for `paused_s` seconds."""

    paused_s: float
    exchanged: bool = False


class WriteFailed(Struct, frozen=True):
    """The commit failed, and the tensors may hold parts of two versions."""

    reason: str


class Interrupted(Struct, frozen=True):
    """The thread was interrupted before it wrote anything; the version stays pending."""


class Reported(Struct, frozen=True):
    """The outcome was reported."""


class GaveUp(Struct, frozen=True):
    """The rank withdraws a pending commit, for instance because the other ranks of its replica are silent."""

    reason: str


class DaemonEnded(Struct, frozen=True):
    """The connection to the daemon has ended, and the client waits for the next daemon.

    `is_written`: workers may have written the live tensors (in place).
    """

    failure: Failure
    is_written: bool = False


class DaemonLost(Struct, frozen=True):
    """The connection has ended for good. `must_stop`: the rank must not serve its version."""

    failure: Failure
    must_stop: bool = False


class Orphaned(Struct, frozen=True):
    """A process for which this rank serves has ended."""

    failure: Failure


class Rejoined(Struct, frozen=True):
    """The next daemon has registered the rank under this id."""

    member: str


class Closed(Struct, frozen=True):
    """The engine has closed the target."""

    reason: str


class Suspended(Struct, frozen=True):
    """The engine has put its tensors away."""


class Woken(Struct, frozen=True):
    """The tensors are back. `is_lost`: without their contents."""

    is_lost: bool = False


OfDaemon: TypeAlias = PrepareCommit | Fence | Evicted | Poisoned
OfThread: TypeAlias = Begun | WriteBegan | Exchanged | Written | WriteFailed | Interrupted | Reported | GaveUp
OfBond: TypeAlias = DaemonEnded | DaemonLost | Orphaned | Rejoined | Closed
Event: TypeAlias = OfDaemon | OfThread | OfBond | Suspended | Woken

# The report that the shell sends to the daemon.
Report: TypeAlias = CommitDone | CommitFailed


# --- state ------------------------------------------------------------------------------------------------


class RankState(Struct, frozen=True):
    """The state of one rank. Made by `joined`, changed only by `step`."""

    member: str
    version: int | None  # held whole by the tensors
    run: str = ""  # of the version that the tensors held last
    in_place: bool = False
    step: RankStep = RankStep.IDLE
    bond: Bond = Bond.JOINED
    pending: PrepareCommit | None = None  # decided and not yet committed
    taking: PrepareCommit | None = None  # None exactly in IDLE
    last: Report | None = None  # how the last commit ended
    flipped: str = ""  # the swap that exchanged the arenas last, committed or not
    fenced: str = ""  # why the version must not be served
    suspended: bool = False
    failure: Failure | None = None  # why it is not JOINED
    is_estranged: bool = False  # the file of its live arena differs from the daemon's

    @property
    def ended(self) -> Failure | None:
        """Why the registration is over for good; None while it is not."""
        return None if self.bond in (Bond.JOINED, Bond.AWAY) else self.failure

    @property
    def owes_report(self) -> bool:
        """Whether a commit has ended and its report is not sent."""
        return self.step in (RankStep.LIVE, RankStep.FAILED)

    @property
    def taken(self) -> str:
        """The swap that was committed last, "" for none."""
        return self.last.swap if isinstance(self.last, CommitDone) else ""

    @property
    def may_serve(self) -> bool:
        """Whether the engine may serve `version`, as far as this process knows; its permit may have ended."""
        is_kept = self.version is not None and not self.fenced and not self.suspended
        return is_kept and self.bond is not Bond.ORPHANED

    def __str__(self) -> str:
        waits = f", version {self.pending.version} is pending" if self.pending is not None else ""
        return f"{self.bond.value}, {self.step.value}, version {self.version}{waits}"


def joined(member: str, version: int | None, run: str = "", *, in_place: bool = False) -> RankState:
    """Return the state of a rank that has registered; its tensors hold `version`."""
    return RankState(member, version, run, in_place)


# --- tables -----------------------------------------------------------------------------------------------

STEPS: Mapping[tuple[type[Event], RankStep], RankStep] = {
    # PrepareCommit for the next swap may arrive before the thread has noted its report of this one
    **{(PrepareCommit, step): step for step in RankStep},
    (Begun, RankStep.IDLE): RankStep.BEGUN,
    (Interrupted, RankStep.BEGUN): RankStep.IDLE,
    (WriteBegan, RankStep.BEGUN): RankStep.WRITING,
    (WriteBegan, RankStep.WRITING): RankStep.WRITING,  # an interrupted write is repeated
    (Exchanged, RankStep.WRITING): RankStep.WRITING,
    (Written, RankStep.WRITING): RankStep.LIVE,
    (WriteFailed, RankStep.BEGUN): RankStep.FAILED,
    (WriteFailed, RankStep.WRITING): RankStep.FAILED,
    (Reported, RankStep.LIVE): RankStep.IDLE,
    (Reported, RankStep.FAILED): RankStep.IDLE,
    (GaveUp, RankStep.IDLE): RankStep.IDLE,
    **{(Poisoned, step): step for step in RankStep},
    **{(Fence, step): step for step in RankStep},
    **{(Evicted, step): step for step in RankStep},
    **{(DaemonEnded, step): step for step in RankStep},
    **{(DaemonLost, step): step for step in RankStep},
    **{(Orphaned, step): step for step in RankStep},
    **{(Closed, step): step for step in RankStep},
    # a commit under way ends first, but an interrupt may have kept its report back
    **{(Rejoined, step): step for step in (RankStep.IDLE, RankStep.LIVE, RankStep.FAILED)},
    (Suspended, RankStep.IDLE): RankStep.IDLE,
    **{(Woken, step): step for step in RankStep},  # another thread may commit the live version already
}

# An event without a row leaves `bond` unchanged.
BONDS: Mapping[tuple[type[Event], Bond], Bond] = {
    (DaemonEnded, Bond.JOINED): Bond.AWAY,
    (Rejoined, Bond.AWAY): Bond.JOINED,
    (Evicted, Bond.JOINED): Bond.EVICTED,
    (DaemonLost, Bond.JOINED): Bond.LOST,
    (DaemonLost, Bond.AWAY): Bond.LOST,
    **{(Orphaned, bond): Bond.ORPHANED for bond in (Bond.JOINED, Bond.AWAY, Bond.EVICTED, Bond.LOST)},
    **{(Closed, bond): Bond.CLOSED for bond in Bond if bond is not Bond.CLOSED},
}


def step(state: RankState, event: Event) -> tuple[RankState, Report | None]:
    """Return the next state, and a report to send to the daemon or None.

    Raises:
        IllegalTransition: `event` cannot happen in this state; the text names both.
    """
    to = STEPS.get((type(event), state.step))
    begins_nothing = isinstance(event, Begun | GaveUp) and state.pending is None
    if to is None or begins_nothing:
        raise IllegalTransition(f"{event} cannot happen while {called(state.member)} is {state}")
    bond = BONDS.get((type(event), state.bond), state.bond)
    return _filled(state, event, replace(state, step=to, bond=bond))


def _filled(before: RankState, event: Event, moved: RankState) -> tuple[RankState, Report | None]:
    """Return the moved state with the other fields filled in, and a report to send."""
    report: Report | None = None
    match event:
        case PrepareCommit() if before.bond is not Bond.JOINED:
            pass  # sent before the registration ended; the daemon learns of that
        case PrepareCommit(swap) if before.last is not None and swap == before.last.swap:
            # the coordinator or the daemon ended before it knew of the outcome; a missing report follows anyway
            report = replace(before.last, member=before.member) if before.step is RankStep.IDLE else None
        case PrepareCommit():
            # a repeated decision is ignored, unless a controller now calls for the commit
            is_told = before.pending is not None and before.pending.swap == event.swap
            is_taken = before.taking is not None and before.taking.swap == event.swap
            if not is_taken and (not is_told or event.controlled):
                moved = replace(moved, pending=event)
        case Begun():
            moved = replace(moved, taking=before.pending)
        case Interrupted():
            moved = replace(moved, taking=None)
        case WriteBegan():
            moved = replace(moved, version=None)
        case Exchanged():
            assert before.taking is not None
            moved = replace(moved, flipped=before.taking.swap)
            moved = replace(moved, is_estranged=before.is_estranged or before.bond is Bond.EVICTED)
        case Written(paused_s, exchanged):
            assert before.taking is not None
            taking = before.taking
            done = CommitDone(taking.swap, before.member, paused_s, exchanged)
            fenced = "" if before.bond is Bond.JOINED else before.fenced
            moved = replace(moved, version=taking.version, run=taking.run, last=done, fenced=fenced)
        case WriteFailed(reason):
            assert before.taking is not None
            swap = before.taking.swap
            failed = CommitFailed(swap, before.member, reason, exchanged=before.flipped == swap)
            moved = replace(moved, last=failed, version=None)
        case Reported():
            assert before.taking is not None
            # the next decision may be pending already
            is_same = before.pending is not None and before.pending.swap == before.taking.swap
            moved = replace(moved, taking=None, pending=None if is_same else before.pending)
        case GaveUp(reason):
            assert before.pending is not None
            report = CommitFailed(before.pending.swap, before.member, reason)
            moved = replace(moved, version=None, pending=None, last=report)
        case Fence(_, reason):
            moved = replace(moved, fenced=reason) if before.bond is Bond.JOINED else moved
        case Poisoned():
            moved = replace(moved, version=None)
        case Suspended() | Woken():
            version = None if isinstance(event, Woken) and event.is_lost else before.version
            moved = replace(moved, suspended=isinstance(event, Suspended), version=version)
        case Evicted(member, reason, exchanged):
            if before.bond is Bond.JOINED:
                text = f"{called(member)} was removed: {reason}; register_target again"
                moved = replace(moved, fenced=text, failure=Failure("refused", text), pending=None)
                moved = replace(moved, is_estranged=before.is_estranged or before.flipped != exchanged)
        case _:
            moved = _parted(before, event, moved)
    return moved, report


def _parted(before: RankState, event: Event, moved: RankState) -> RankState:
    """Follow the end of the registration, or of its daemon."""
    if moved.bond is before.bond:
        return moved  # it had ended before
    match event:
        case DaemonEnded(failure, is_written):
            version = None if is_written else before.version
            # the next daemon repeats a decided version
            return replace(moved, failure=failure, version=version, pending=None)
        case DaemonLost(failure, must_stop):
            return replace(moved, failure=failure, version=None if must_stop else before.version)
        case Orphaned(failure):
            return replace(moved, failure=failure, version=None, pending=None)
        case Rejoined(member):
            return replace(moved, member=member, failure=None, fenced="", flipped="")
        case Closed(reason):
            why = before.failure if before.failure is not None and before.bond is not Bond.AWAY else None
            why = why or Failure("refused", reason)
            return replace(moved, pending=None, fenced=before.fenced or reason, failure=why)
        case _:
            return moved
