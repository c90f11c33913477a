"""The state machine of a target rank in its daemon: its versions, its right to serve, and its part in a swap.

A rank has two states, like a connection of h11: `step` is the progress of its swap, `live` says whether the live
tensors may be served. An event moves both. The tables below are the code: `step_of` looks the next states up there.
An event without a row in STEPS raises IllegalTransition and leaves the state as it was. docs/design.md is drawn
from the tables.

Rules:
- A rank has one swap at a time. Events of a swap name it; an event that names another swap is illegal.
- Until `Decided`, a swap can be aborted, and the rank keeps its version: its live tensors are unchanged.
  A rank that is written in place is the exception: an abort poisons it.
- After `Decided`, a swap ends only with `Committed` or `Failed`. A failed rank serves no version.
- `holds` is the version that the staging arena (in place, or with flips: the live tensors) holds whole. Staging clears
  it, except with flips: then staging clears `spare`, the version in the staging arena.
- Only a rank that serves, or that has been told of a decision, may have a lease (see `may_serve`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from refitd.errors import IllegalTransition


class Step(enum.Enum):
    """The progress of the swap in this rank."""

    RESTORING = "restoring"  # the process copies a retained staging arena; the coordinator does not know the rank yet
    IDLE = "idle"
    STAGING = "staging"
    STAGED = "staged"
    COMMITTING = "committing"  # decided; the rank has been told to commit

    @property
    def is_staged(self) -> bool:
        """Whether a verified version waits for the decision or the commit."""
        return self in (Step.STAGED, Step.COMMITTING)


class Live(enum.Enum):
    """Whether the live tensors may be served, and why not."""

    EMPTY = "empty"  # no version to serve: before the first one, or after a failed commit
    SERVING = "serving"
    WRITTEN = "written"  # workers write them in place: parts of two versions
    BEHIND = "behind"  # fenced: another version is live
    SUSPENDED = "suspended"  # the process has put its tensors away, and takes part in no swap
    POISONED = "poisoned"  # parts of two versions; only another swap can repair that

    @property
    def is_fenced(self) -> bool:
        """Whether the rank must not serve the version that it holds."""
        return self is Live.BEHIND


# --- events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ContentRestored:
    """The process has copied the retained staging arena and compared it byte for byte."""


@dataclass(frozen=True, slots=True)
class ContentRefused:
    """The retained staging arena differs from its digests: it is not restored."""


@dataclass(frozen=True, slots=True)
class StageBegan:
    """Workers start writing a version into the staging arena; in place, into the live tensors."""

    swap: str
    version: int
    run: str = ""


@dataclass(frozen=True, slots=True)
class SpareStaged:
    """The version that the other arena holds is to go live again, without any write."""

    swap: str
    version: int
    run: str = ""


@dataclass(frozen=True, slots=True)
class StageFinished:
    """The version is complete and verified."""

    swap: str


@dataclass(frozen=True, slots=True)
class Decided:
    """The coordinator has decided to commit the version."""

    swap: str
    version: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The rank has committed the version."""

    swap: str


@dataclass(frozen=True, slots=True)
class CommittedByCopy:
    """The rank has committed the version by a copy, because it could not exchange its arenas: both hold it."""

    swap: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The rank could not commit: its live tensors may hold parts of two versions."""

    swap: str


@dataclass(frozen=True, slots=True)
class Aborted:
    """The swap was aborted: workers have stopped writing for it."""

    swap: str
    reason: str


@dataclass(frozen=True, slots=True)
class FellBehind:
    """The coordinator says that another version is live."""

    reason: str


@dataclass(frozen=True, slots=True)
class Suspended:
    """The process puts its tensors away (a sleeping engine)."""


@dataclass(frozen=True, slots=True)
class Woken:
    """The tensors are back, with their contents."""


@dataclass(frozen=True, slots=True)
class WokenEmpty:
    """The tensors are back, and their contents are lost."""


OfSwap: TypeAlias = StageBegan | SpareStaged | StageFinished | Decided | Committed | CommittedByCopy | Failed | Aborted
Event: TypeAlias = ContentRestored | ContentRefused | OfSwap | FellBehind | Suspended | Woken | WokenEmpty


# --- state ------------------------------------------------------------------------------------------------


class TargetState(Struct, frozen=True):
    """The state of one target rank. Made by `fresh` or `restoring`, changed only by `step_of`."""

    in_place: bool = False
    flips: bool = False  # commits exchange the live and the staging arena
    step: Step = Step.IDLE
    live: Live = Live.EMPTY
    swap: str | None = None  # None exactly in RESTORING and IDLE
    next: int | None = None  # the version that `swap` stages or commits, once staging has begun
    next_run: str = ""  # a version's identity is number and run
    version: int | None = None  # of the live tensors; None unless SERVING or fenced
    holds: int | None = None
    run: str = ""  # of `version` and `holds`, if set
    spare: int | None = None  # flips: the version that the staging arena holds whole, beside the live one
    spare_run: str = ""
    reason: str = ""  # why it is fenced or poisoned
    suspended: bool = False  # the process has unmapped or freed the tensors

    @property
    def staged(self) -> str | None:
        """The swap whose version is staged and verified, decided or not."""
        return self.swap if self.step in (Step.STAGED, Step.COMMITTING) else None

    @property
    def may_serve(self) -> bool:
        """Whether the rank may have a lease: it serves the live version, or may commit a decided one at any moment."""
        return self.step is not Step.RESTORING and (self.live is Live.SERVING or self.step is Step.COMMITTING)

    def __str__(self) -> str:
        of = f" swap {self.swap}" if self.swap is not None else ""
        holds = f" version {self.version}" if self.version is not None else ""
        return f"{self.step.value}{of}, {self.live.value}{holds}"


def fresh(*, in_place: bool, version: int | None = None, run: str = "", flips: bool = False) -> TargetState:
    """Return the state of a newly registered rank that serves `version` of `run`, or no version yet.

    `holds` stays None: the digests of that version are unknown, and the rank cannot seed others.
    """
    live = Live.EMPTY if version is None else Live.SERVING
    run = "" if version is None else run
    return TargetState(in_place=in_place, flips=flips, live=live, version=version, run=run)


def restoring(version: int, run: str = "", *, flips: bool = False, suspended: bool = False) -> TargetState:
    """Return the state of a rank that registers and gets a retained staging arena, which holds `version`."""
    return TargetState(
        flips=flips, step=Step.RESTORING, next=version, next_run=run, holds=version, run=run, suspended=suspended
    )


# --- tables -----------------------------------------------------------------------------------------------

_UNDECIDED = (Step.STAGING, Step.STAGED)

STEPS: Mapping[tuple[type[Event], Step], Step] = {
    (ContentRestored, Step.RESTORING): Step.IDLE,
    (ContentRefused, Step.RESTORING): Step.IDLE,
    (StageBegan, Step.IDLE): Step.STAGING,
    (StageFinished, Step.STAGING): Step.STAGED,
    (SpareStaged, Step.IDLE): Step.STAGED,
    (Decided, Step.STAGED): Step.COMMITTING,
    (Decided, Step.COMMITTING): Step.COMMITTING,  # repeated by a coordinator that has restarted
    (Committed, Step.COMMITTING): Step.IDLE,
    (CommittedByCopy, Step.COMMITTING): Step.IDLE,
    (Failed, Step.COMMITTING): Step.IDLE,
    **{(Aborted, step): Step.IDLE for step in _UNDECIDED},
    **{(FellBehind, step): step for step in Step if step is not Step.RESTORING},
    (Suspended, Step.IDLE): Step.IDLE,
    (Woken, Step.IDLE): Step.IDLE,
    (WokenEmpty, Step.IDLE): Step.IDLE,
}

# An event without a row leaves `live` unchanged.
LIVES: Mapping[tuple[type[Event], Live], Live] = {
    (ContentRestored, Live.EMPTY): Live.SERVING,
    # a suspended rank takes part in no swap
    **{(Committed, live): Live.SERVING for live in (Live.EMPTY, Live.WRITTEN, Live.BEHIND)},
    **{(CommittedByCopy, live): Live.SERVING for live in (Live.EMPTY, Live.BEHIND)},
    **{(Failed, live): Live.EMPTY for live in (Live.SERVING, Live.WRITTEN, Live.BEHIND)},
    (Aborted, Live.WRITTEN): Live.POISONED,
    (FellBehind, Live.SERVING): Live.BEHIND,
    (FellBehind, Live.SUSPENDED): Live.BEHIND,
    (Suspended, Live.SERVING): Live.SUSPENDED,
    (Woken, Live.SUSPENDED): Live.SERVING,
    **{(WokenEmpty, live): Live.EMPTY for live in (Live.SERVING, Live.SUSPENDED, Live.BEHIND)},
}

# For ranks written in place; looked up before LIVES.
LIVES_IN_PLACE: Mapping[tuple[type[Event], Live], Live] = {
    (StageBegan, live): Live.WRITTEN for live in (Live.EMPTY, Live.SERVING, Live.BEHIND, Live.POISONED)
}


def step_of(state: TargetState, event: Event) -> TargetState:
    """Return the next state.

    Raises:
        IllegalTransition: `event` cannot happen in this state; the text names both.
    """
    to = STEPS.get((type(event), state.step))
    names = getattr(event, "swap", None)
    begins = isinstance(event, StageBegan | SpareStaged) and state.step is Step.IDLE
    if to is None or (names is not None and names != state.swap and not begins):
        raise IllegalTransition(f"{event} cannot happen while {state}")
    if isinstance(event, Decided) and event.version != state.next:
        raise IllegalTransition(f"{event} cannot happen: version {state.next} is staged ({state})")
    if isinstance(event, SpareStaged) and (event.version, event.run) != (state.spare, state.spare_run):
        raise IllegalTransition(f"{event} cannot happen: the other arena holds version {state.spare} ({state})")
    lives = {**LIVES, **LIVES_IN_PLACE} if state.in_place else LIVES
    live = lives.get((type(event), state.live), state.live)
    return _filled(state, event, replace(state, step=to, live=live, swap=state.swap or names))


def _filled(before: TargetState, event: Event, moved: TargetState) -> TargetState:
    """Return the moved state with versions and reason filled in."""
    match event:
        case StageBegan(_, version, run):
            holds = before.holds if before.flips else None
            moved = replace(moved, next=version, next_run=run, holds=holds, spare=None, spare_run="")
        case SpareStaged(_, version, run):
            moved = replace(moved, next=version, next_run=run)
        case Committed():
            # `holds` is None here without flips
            moved = replace(moved, spare=before.holds, spare_run=before.run if before.holds is not None else "")
            moved = replace(moved, version=before.next, holds=before.next, run=before.next_run)
        case ContentRestored() | CommittedByCopy():
            moved = replace(moved, version=before.next, holds=before.next, run=before.next_run)
        case Failed():
            moved = replace(moved, holds=None, spare=None, spare_run="")  # which arena holds what is not certain
        case ContentRefused():
            moved = replace(moved, holds=None)
        case WokenEmpty() if before.flips or before.in_place:
            moved = replace(moved, holds=None, suspended=False)
        case Suspended() | Woken() | WokenEmpty():
            moved = replace(moved, suspended=isinstance(event, Suspended))
        case _:
            pass
    if moved.live in (Live.EMPTY, Live.WRITTEN, Live.POISONED):
        moved = replace(moved, version=None)
    if moved.version is None and moved.holds is None:
        moved = replace(moved, run="")
    if moved.live is not before.live:
        moved = replace(moved, reason=_reason(event, moved.live))
    return replace(moved, swap=None, next=None, next_run="") if moved.step is Step.IDLE else moved


def _reason(event: Event, live: Live) -> str:
    """Return why a rank is fenced or poisoned; "" for any other state."""
    if isinstance(event, Aborted) and live is Live.POISONED:
        return f"swap {event.swap} ended while it was written in place: {event.reason}"
    return event.reason if isinstance(event, FellBehind) else ""
