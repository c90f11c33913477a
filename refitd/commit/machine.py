"""The state machine of one swap: events in, instructions out, no clock and no sockets.

    IDLE --PlanReady--> PLANNED --all NodeLoaded--> STAGING --all NodeStaged--> STAGED --Journalled--> COMMITTING
                              |                       ^       |                      ^                    |
                              +- PAUSING, all quiet --+       +- PAUSING, all quiet -+                    |
                                 (members in place)              (members that are asked)                 |
                                                                                                          |
      (IDLE to STAGED) --NodeFailed | MemberLost | MemberFailed | AbortAsked | Deadline--> ABORTED        |
                                                                                                          v
                         INCOMPLETE <--some member failed, was lost or is late-- (all members heard) --> COMMITTED

Rules:
- Until the decision is journalled, anything that goes wrong aborts and the old version serves everywhere.
- After it, nothing aborts: a member that cannot follow is named and the swap ends INCOMPLETE.
- Members that are asked have said that they stand still before anything is decided; those that are written in
  place, before anything is staged. A member in place whose staging has begun and not been decided is poisoned.
- An event that the state does not allow raises IllegalTransition and changes nothing. Late echoes of a
  finished swap (a node that reports after an abort) are not illegal: they are answered with nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from refitd.errors import IllegalTransition


class Phase(enum.Enum):
    """Where a swap stands."""

    IDLE = "idle"
    PLANNED = "plan"
    PAUSING = "pause"
    STAGING = "stage"
    STAGED = "staged"
    COMMITTING = "commit"
    COMMITTED = "committed"
    INCOMPLETE = "incomplete"
    ABORTED = "aborted"

    @property
    def is_final(self) -> bool:
        """Whether no event changes it any more."""
        return self in (Phase.COMMITTED, Phase.INCOMPLETE, Phase.ABORTED)


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds each phase may take, and the whole swap until its decision (None: no limit beyond the phases')."""

    plan_s: float
    stage_s: float
    commit_s: float
    total_s: float | None = None
    pause_s: float = 60.0


# --- events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanReady:
    """The plan is proven. `members` maps every target member to its node; `nodes` are all that take part.

    `names` says how people are told about a member, source or target. `asked` members say that they stand still
    before the decision, `in_place` ones before they are written to.
    """

    members: Mapping[str, str]
    nodes: frozenset[str]
    bytes_total: int
    names: Mapping[str, str] = field(default_factory=dict)
    asked: frozenset[str] = frozenset()
    in_place: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class NodeLoaded:
    """A node has the plan."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeProgress:
    """A node has written this many bytes."""

    node: str
    bytes_done: int


@dataclass(frozen=True, slots=True)
class NodeStaged:
    """A node has staged and verified everything it receives."""

    node: str
    copies: int
    bytes: int


@dataclass(frozen=True, slots=True)
class NodeFailed:
    """A node could not stage; `where` names process and rank."""

    node: str
    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class MemberQuiet:
    """This member stands still until the swap is over."""

    member: str


@dataclass(frozen=True, slots=True)
class MemberLost:
    """A trainer or engine rank of this swap is gone."""

    member: str
    reason: str


@dataclass(frozen=True, slots=True)
class Journalled:
    """The decision to commit is on disk."""


@dataclass(frozen=True, slots=True)
class MemberCommitted:
    """The version is live in this member."""

    member: str
    paused_s: float


@dataclass(frozen=True, slots=True)
class MemberFailed:
    """This member could not take over the version."""

    member: str
    reason: str


@dataclass(frozen=True, slots=True)
class AbortAsked:
    """Somebody wants it to end."""

    reason: str


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Look at the deadline."""


Event = (
    PlanReady
    | NodeLoaded
    | NodeProgress
    | NodeStaged
    | NodeFailed
    | MemberQuiet
    | MemberLost
    | Journalled
    | MemberCommitted
    | MemberFailed
    | AbortAsked
    | TimePassed
)


# --- instructions -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Send the plan to this node."""

    node: str


@dataclass(frozen=True, slots=True)
class PauseOn:
    """Have these members of this node stand still."""

    node: str
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StageOn:
    """Have this node stage."""

    node: str


@dataclass(frozen=True, slots=True)
class JournalDecision:
    """Write the decision durably, then feed Journalled."""


@dataclass(frozen=True, slots=True)
class CommitOn:
    """Have this node's members take over."""

    node: str


@dataclass(frozen=True, slots=True)
class AbortOn:
    """Have this node forget the swap."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReleaseSources:
    """Everything is staged: what was read may be overwritten."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The swap has reached a final phase."""


Instruction = LoadPlan | PauseOn | StageOn | JournalDecision | CommitOn | AbortOn | ReleaseSources | Finished


# --- state ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Swap:
    """One swap. Made by `begin`, changed only by `step`."""

    swap: str
    model: str
    version: int
    limits: Limits
    started: float
    deadline: float
    phase: Phase = Phase.IDLE
    failed_phase: str = ""
    reason: str = ""
    culprit: str = ""  # the member or node that ended it
    members: Mapping[str, str] = field(default_factory=dict)  # target member -> node
    names: Mapping[str, str] = field(default_factory=dict)
    nodes: frozenset[str] = frozenset()
    asked: frozenset[str] = frozenset()  # members that are to stand still before the decision
    in_place: frozenset[str] = frozenset()  # members that are written to while staging
    waiting: frozenset[str] = frozenset()  # nodes or members the phase still waits for
    progress: Mapping[str, int] = field(default_factory=dict)
    bytes_total: int = 0
    bytes_done: int = 0
    copies: int = 0
    paused: Mapping[str, float] = field(default_factory=dict)  # committed members
    failed: Mapping[str, str] = field(default_factory=dict)  # members that could not follow, and why
    entered: Mapping[str, float] = field(default_factory=dict)  # phase -> when, the last time

    @property
    def is_staged(self) -> bool:
        """Whether everything is staged, or the swap over: nobody reads the sources any more."""
        begun = Phase.STAGING.value in self.entered
        return (begun and self.phase is not Phase.STAGING) or self.phase.is_final

    @property
    def poisoned(self) -> frozenset[str]:
        """The members that hold parts of two versions, should this be where it ends."""
        begun = Phase.STAGING.value in self.entered and Phase.COMMITTING.value not in self.entered
        return self.in_place if begun else frozenset()


def begin(swap: str, model: str, version: int, limits: Limits, now: float) -> Swap:
    """Return a swap in IDLE, waiting for its plan until `limits.plan_s` from now."""
    fresh = Swap(swap, model, version, limits, started=now, deadline=0.0)
    return _enter(fresh, Phase.IDLE, now, limits.plan_s, frozenset())


def step(state: Swap, event: Event, now: float) -> tuple[Swap, list[Instruction]]:
    """Return the next state and what is to be done about it.

    Raises:
        IllegalTransition: `event` cannot happen in this state.
    """
    phase = state.phase
    match event:
        case TimePassed():
            return _out_of_time(state, now) if not phase.is_final and now >= state.deadline else (state, [])
        case _ if phase.is_final:
            return state, []  # an echo of something that is over
        case PlanReady() if phase is Phase.IDLE:
            planned = replace(
                state,
                members=dict(event.members),
                names=dict(event.names),
                nodes=event.nodes,
                bytes_total=event.bytes_total,
                asked=event.asked,
                in_place=event.in_place,
            )
            planned = _enter(planned, Phase.PLANNED, now, planned.limits.plan_s, event.nodes)
            return planned, [LoadPlan(node) for node in sorted(event.nodes)]
        case NodeLoaded(node) if phase is Phase.PLANNED and node in state.waiting:
            left = state.waiting - {node}
            if left:
                return replace(state, waiting=left), []
            return _pause(state, state.in_place, now) if state.in_place else _stage(state, now)
        case MemberQuiet(member) if phase is Phase.PAUSING and member in state.waiting:
            heard = replace(state, waiting=state.waiting - {member})
            if heard.waiting:
                return heard, []
            return _decide(heard, now) if Phase.STAGING.value in heard.entered else _stage(heard, now)
        case MemberQuiet():
            return state, []  # said twice
        case NodeProgress(node, bytes_done) if phase is Phase.STAGING:
            progress = {**state.progress, node: bytes_done}
            return replace(state, progress=progress, bytes_done=sum(progress.values())), []
        case NodeStaged(node) if phase is Phase.STAGING and node in state.waiting:
            return _node_staged(state, event, now)
        case Journalled() if phase is Phase.STAGED:
            committing = _enter(state, Phase.COMMITTING, now, state.limits.commit_s, frozenset(state.members))
            return committing, [CommitOn(n) for n in sorted(set(state.members.values()))]
        case MemberCommitted(member, paused_s) if phase is Phase.COMMITTING:
            if member not in state.waiting:
                return state, []
            heard = replace(state, waiting=state.waiting - {member}, paused={**state.paused, member: paused_s})
            return _maybe_finish(heard, now)
        case MemberFailed(member, reason) | MemberLost(member, reason) if phase is Phase.COMMITTING:
            if member not in state.waiting:
                return state, []
            heard = replace(state, waiting=state.waiting - {member}, failed={**state.failed, member: reason})
            return _maybe_finish(heard, now)
        case NodeFailed(node, where, reason) if phase in (Phase.PLANNED, Phase.PAUSING, Phase.STAGING):
            return _abort(state, f"{where}: {reason}", where or node, now)
        case NodeFailed() if phase is Phase.COMMITTING:
            return state, []  # its members are reported one by one
        case MemberLost(member, reason) | MemberFailed(member, reason) if phase is not Phase.COMMITTING:
            return _abort(state, f"{state.names.get(member, member)}: {reason}", member, now)
        case AbortAsked(reason) if phase is not Phase.COMMITTING:
            return _abort(state, reason, "", now)
    raise IllegalTransition(
        f"swap {state.swap} of {state.model} version {state.version}: {event} cannot happen in phase {phase.value}; "
        f"waiting for {sorted(state.waiting)}"
    )


def _enter(state: Swap, phase: Phase, now: float, limit_s: float, waiting: frozenset[str]) -> Swap:
    deadline = now + limit_s
    if state.limits.total_s is not None and phase in (Phase.IDLE, Phase.PLANNED, Phase.PAUSING, Phase.STAGING):
        deadline = min(deadline, state.started + state.limits.total_s)
    return replace(state, phase=phase, deadline=deadline, waiting=waiting, entered={**state.entered, phase.value: now})


def _node_staged(state: Swap, event: NodeStaged, now: float) -> tuple[Swap, list[Instruction]]:
    progress = {**state.progress, event.node: event.bytes}
    heard = replace(
        state,
        waiting=state.waiting - {event.node},
        copies=state.copies + event.copies,
        progress=progress,
        bytes_done=sum(progress.values()),
    )
    if heard.waiting:
        return heard, []
    asked = state.asked - state.in_place
    after, instructions = _pause(heard, asked, now) if asked else _decide(heard, now)
    return after, [ReleaseSources(), *instructions]


def _stage(state: Swap, now: float) -> tuple[Swap, list[Instruction]]:
    staging = _enter(state, Phase.STAGING, now, state.limits.stage_s, state.nodes)
    return staging, [StageOn(node) for node in sorted(state.nodes)]


def _pause(state: Swap, members: frozenset[str], now: float) -> tuple[Swap, list[Instruction]]:
    pausing = _enter(state, Phase.PAUSING, now, state.limits.pause_s, members)
    nodes: dict[str, list[str]] = {}
    for member in sorted(members):
        nodes.setdefault(state.members[member], []).append(member)
    return pausing, [PauseOn(node, tuple(these)) for node, these in sorted(nodes.items())]


def _decide(state: Swap, now: float) -> tuple[Swap, list[Instruction]]:
    return _enter(state, Phase.STAGED, now, state.limits.commit_s, frozenset()), [JournalDecision()]


def _maybe_finish(state: Swap, now: float) -> tuple[Swap, list[Instruction]]:
    if state.waiting:
        return state, []
    if not state.failed:
        return _enter(state, Phase.COMMITTED, now, 0.0, frozenset()), [Finished()]
    who = ", ".join(sorted(state.failed))
    why = "; ".join(f"{state.names.get(m, m)}: {reason}" for m, reason in sorted(state.failed.items()))
    ended = replace(state, failed_phase=Phase.COMMITTING.value, culprit=who, reason=why)
    return _enter(ended, Phase.INCOMPLETE, now, 0.0, frozenset()), [Finished()]


def _out_of_time(state: Swap, now: float) -> tuple[Swap, list[Instruction]]:
    spent = now - state.entered[state.phase.value]
    late = ", ".join(state.names.get(who, who) for who in sorted(state.waiting)) or "the coordinator"
    if state.phase is Phase.COMMITTING:
        failed = {m: f"did not take over the version within {spent:.1f} s" for m in state.waiting}
        return _maybe_finish(replace(state, waiting=frozenset(), failed={**state.failed, **failed}), now)
    reason = f"phase {state.phase.value} ended at its deadline after {spent:.1f} s, still waiting for {late}"
    return _abort(state, reason, ", ".join(sorted(state.waiting)), now)


def _abort(state: Swap, reason: str, culprit: str, now: float) -> tuple[Swap, list[Instruction]]:
    ended = replace(state, failed_phase=state.phase.value, reason=reason, culprit=culprit)
    aborts: list[Instruction] = [AbortOn(node, reason) for node in sorted(state.nodes)]
    return _enter(ended, Phase.ABORTED, now, 0.0, frozenset()), [*aborts, Finished()]
