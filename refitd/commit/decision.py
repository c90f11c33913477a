"""The state machine of one swap: events in, instructions out, no clock and no sockets.

`ROWS` is the code: `step` looks up what an event does in a phase, and which phases may follow. docs/design.md is drawn
from it. Rules:
- Until the decision is submitted to the journal, any failure aborts the swap, and the old version serves everywhere.
- Then only the answer of the journal counts: Journalled commits, NotJournalled aborts. No clock, request or lost
  member does; lost members are noted, and the commit does not wait for them.
- Journalled is final: a member that cannot commit is named, and the swap ends INCOMPLETE.
- A final phase has no rows: the coordinator drops the events of swaps that do not run.
- A version may be staged while source ranks still write it. Staging ends once they have published it in full.
- Controllers with a pause hook pause their replicas before the decision, or before staging if the replica is written
  in place. An in-place member whose staging has begun is poisoned unless the swap is decided.
- An event without a row, or from a node or member outside the swap, raises IllegalTransition and has no effect.
  Messages that can cross others on the wire have rows that ignore them; each such row says why.

`verdict` and `fence_reason` are the rules for ranks that return, or that serve another version than the live one.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

from refitd.commit.swap_events import (
    AbortAsked,
    AbortOn,
    CommitOn,
    CommitReported,
    DecisionHeld,
    DecisionSubmitted,
    Event,
    Finished,
    Instruction,
    JournalDecision,
    Journalled,
    MemberFailed,
    MemberLost,
    NodeFailed,
    NodeLoaded,
    NodeProgress,
    NodeStaged,
    NotJournalled,
    OfMember,
    OfNode,
    PauseOn,
    PlanLost,
    PlanReady,
    QuietReported,
    ReleaseSources,
    SendPlan,
    SourceFinished,
    StageOn,
    TimePassed,
)
from refitd.errors import IllegalTransition
from refitd.states import SwapCause
from refitd.text import brief

# Events of a swap that are kept for reports.
MAX_EVENTS = 32


class Phase(enum.Enum):
    """The phase of a swap."""

    IDLE = "idle"  # the plan is being made
    PLANNED = "plan"
    HALTING = "halt"  # replicas written in place must pause before anything is written
    STAGING = "stage"
    PAUSING = "pause"  # other replicas whose controllers have a pause hook must pause before the decision
    STAGED = "staged"  # the decision waits for permits to end, or for the other swaps of a joint one
    DECIDING = "decide"  # the journal has the decision and has not answered
    COMMITTING = "commit"
    COMMITTED = "committed"
    INCOMPLETE = "incomplete"
    ABORTED = "aborted"


class Limits(Struct, frozen=True):
    """Seconds that each phase may take, and the whole swap up to its decision (None: only phases are limited)."""

    plan_s: float
    stage_s: float
    commit_s: float
    total_s: float | None = None
    pause_s: float = 60.0


# --- state ------------------------------------------------------------------------------------------------


class Swap(Struct, frozen=True):
    """One swap. Made by `begin`, changed only by `step`."""

    swap: str
    model: str
    version: int
    limits: Limits
    started: float
    names: Mapping[str, str]  # source and target members -> their names for people
    deadline: float = 0.0
    phase: Phase = Phase.IDLE
    failed_phase: Phase | None = None
    reason: str = ""
    culprit: str = ""  # the member or node that ended it
    cause: SwapCause = SwapCause.NONE  # the kind of `reason`
    members: Mapping[str, str] = field(default_factory=dict)  # target member -> node
    nodes: frozenset[str] = frozenset()
    asked: frozenset[str] = frozenset()  # controllers that pause their replicas
    halts: frozenset[str] = frozenset()  # the controllers that pause before staging
    in_place: frozenset[str] = frozenset()  # members whose live tensors staging writes
    publishing: frozenset[str] = frozenset()  # source ranks that still write the version
    waiting: frozenset[str] = frozenset()  # nodes or members the phase still waits for
    progress: Mapping[str, int] = field(default_factory=dict)  # node -> bytes written
    bytes_total: int = 0
    copies: int = 0
    paused: Mapping[str, float] = field(default_factory=dict)  # committed members
    failed: Mapping[str, str] = field(default_factory=dict)  # members that could not commit, and why
    entered: Mapping[Phase, float] = field(default_factory=dict)  # when each phase was entered
    history: tuple[str, ...] = ()  # the last events that changed it, the oldest first

    def __hash__(self) -> int:
        # equal swaps have equal hashes; the mappings, which are never changed, count by their keys
        known = frozenset(self.members), frozenset(self.failed), frozenset(self.paused)
        return hash((self.swap, self.phase, self.waiting, self.nodes, self.asked, self.history, known))

    @property
    def poisoned(self) -> frozenset[str]:
        """The members that would hold parts of two versions if the swap ended here."""
        begun = Phase.STAGING in self.entered and Phase.COMMITTING not in self.entered
        return self.in_place if begun else frozenset()


def begin(swap: str, model: str, version: int, limits: Limits, names: Mapping[str, str], now: float) -> Swap:
    """Return a swap in IDLE, waiting for its plan for `limits.plan_s`; `names` are the participants' names."""
    return _enter(Swap(swap, model, version, limits, now, dict(names)), Phase.IDLE, now)[0]


def step(state: Swap, event: Event, now: float) -> tuple[Swap, list[Instruction]]:
    """Return the next state and the instructions to carry out.

    Raises:
        IllegalTransition: `event` has no row in this state; the error says why and lists the swap's last events.
    """
    row = ROWS.get((type(event), state.phase))
    if row is None:
        raise _refusal(state, event, "it has no row in this phase")
    if isinstance(event, OfNode) and event.node not in state.nodes:
        raise _refusal(state, event, f"no node of this swap is called {event.node!r}")
    if isinstance(event, OfMember) and event.member not in (
        state.names if isinstance(event, MemberLost | SourceFinished) else state.members
    ):
        raise _refusal(state, event, f"no member of this swap is called {event.member!r}")
    after, instructions = row.do(state, event, now)
    assert after.phase in row.to, f"{event} led from {state.phase} to {after.phase}, which its row does not have"
    if after is not state and not isinstance(event, NodeProgress):
        told = f"{now - state.started:.3f} s: {event} -> {after.phase.value}"
        after = replace(after, history=(*state.history, brief(told))[-MAX_EVENTS:])
    return after, instructions


def _refusal(state: Swap, event: Event, reason: str) -> IllegalTransition:
    return IllegalTransition(
        f"swap {state.swap} of {state.model} version {state.version}: {event} cannot happen in phase "
        f"{state.phase.value}: {reason}; waiting for {sorted(state.waiting)}; its last events: "
        f"{'; '.join(state.history) or 'none'}"
    )


# --- what events do ---------------------------------------------------------------------------------------

_Stepped: TypeAlias = tuple[Swap, list[Instruction]]


def _ignored(state: Swap, event: Event, now: float) -> _Stepped:
    return state, []


def _planned(state: Swap, event: PlanReady, now: float) -> _Stepped:
    planned = replace(
        state,
        members=dict(event.members),
        nodes=event.nodes,
        bytes_total=event.bytes_total,
        asked=event.asked,
        halts=event.halts,
        in_place=event.in_place,
        publishing=event.publishing,
    )
    entered, _ = _enter(planned, Phase.PLANNED, now)
    if waiting := event.nodes - event.loaded:
        return replace(entered, waiting=waiting), [SendPlan(node) for node in sorted(waiting)]
    return _onward(entered, now)


def _loaded(state: Swap, event: NodeLoaded, now: float) -> _Stepped:
    # a repeated answer changes nothing: it may answer an earlier, aborted swap with the same plan
    return _heard(state, event.node, now)


def _progressed(state: Swap, event: NodeProgress, now: float) -> _Stepped:
    return replace(state, progress={**state.progress, event.node: event.bytes_done}), []


def _staged(state: Swap, event: NodeStaged, now: float) -> _Stepped:
    if event.node not in state.waiting:
        raise _refusal(state, event, "it was reported before")
    progress = {**state.progress, event.node: event.bytes}
    return _heard(replace(state, progress=progress, copies=state.copies + event.copies), event.node, now)


def _published(state: Swap, event: SourceFinished, now: float) -> _Stepped:
    if event.member not in state.publishing:
        raise _refusal(state, event, "it writes no version, or this was reported before")
    return _heard(replace(state, publishing=state.publishing - {event.member}), event.member, now)


def _quiet(state: Swap, event: QuietReported, now: float) -> _Stepped:
    if event.member not in state.waiting:
        raise _refusal(state, event, "it was not asked to pause, or this was reported before")
    return _heard(state, event.member, now)


def _held(state: Swap, event: DecisionHeld, now: float) -> _Stepped:
    return replace(state, deadline=max(state.deadline, event.until + state.limits.commit_s)), []


def _submitted(state: Swap, event: DecisionSubmitted, now: float) -> _Stepped:
    return _enter(state, Phase.DECIDING, now)


def _journalled(state: Swap, event: Journalled, now: float) -> _Stepped:
    after, instructions = _enter(state, Phase.COMMITTING, now)
    if after.waiting:
        return after, instructions
    ended, last = _onward(after, now)
    return ended, [*instructions, *last]


def _not_journalled(state: Swap, event: NotJournalled, now: float) -> _Stepped:
    reason = f"the decision could not be journalled: {event.reason}"
    return _abort(replace(state, failed={}), reason, "", SwapCause.JOURNAL, now)


def _committed(state: Swap, event: CommitReported, now: float) -> _Stepped:
    if event.member not in state.waiting:
        return state, []  # evicted or lost with its node while this message was on its way
    return _heard(replace(state, paused={**state.paused, event.member: event.paused_s}), event.member, now)


def _missed_early(state: Swap, event: MemberLost, now: float) -> _Stepped:
    if event.member not in state.members:
        return state, []  # a source
    return replace(state, failed={**state.failed, event.member: event.reason}), []


def _missed(state: Swap, event: MemberFailed | MemberLost, now: float) -> _Stepped:
    if event.member not in state.waiting:
        return state, []  # a source, or a target whose outcome is known
    return _heard(replace(state, failed={**state.failed, event.member: event.reason}), event.member, now)


def _node_aborts(state: Swap, event: NodeFailed | PlanLost, now: float) -> _Stepped:
    where = state.names.get(event.where, event.where)
    return _abort(state, f"{where}: {event.reason}", event.where or event.node, SwapCause.NODE, now)


def _member_aborts(state: Swap, event: MemberFailed | MemberLost, now: float) -> _Stepped:
    reason = f"{state.names.get(event.member, event.member)}: {event.reason}"
    return _abort(state, reason, event.member, SwapCause.MEMBER, now)


def _target_aborts(state: Swap, event: MemberLost, now: float) -> _Stepped:
    # everything is staged: sources are no longer needed
    return _member_aborts(state, event, now) if event.member in state.members else (state, [])


def _asked_to_abort(state: Swap, event: AbortAsked, now: float) -> _Stepped:
    return _abort(state, event.reason, "", event.cause, now)


# The setting that limits each phase before the decision, and how a rank gets more time to commit.
_SETTINGS = {
    Phase.PLANNED: "deadlines.plan_s",
    Phase.HALTING: "deadlines.pause_s",
    Phase.STAGING: "deadlines.stage_s",
    Phase.PAUSING: "deadlines.pause_s",
}
_LONGER = "by poll(), wait() or its controller's commit; call poll() more often, or raise "


def _late(state: Swap, event: TimePassed, now: float) -> _Stepped:
    if now < state.deadline:
        return state, []
    spent = now - state.entered[state.phase]
    if state.phase is Phase.COMMITTING:
        why = f"did not take over the version within {spent:.1f} s, {_LONGER}deadlines.commit_s"
        failed = dict.fromkeys(state.waiting, why)
        return _onward(replace(state, failed={**state.failed, **failed}, cause=SwapCause.DEADLINE), now)
    late = ", ".join(state.names.get(who, who) for who in sorted(state.waiting)) or "the coordinator"
    setting = _SETTINGS.get(state.phase)
    advice = f"; if that was too short, raise {setting}" if setting else ""
    reason = f"phase {state.phase.value} ended at its deadline after {spent:.1f} s, still waiting for {late}{advice}"
    return _abort(state, reason, ", ".join(sorted(state.waiting)), SwapCause.DEADLINE, now)


def _heard(state: Swap, who: str, now: float) -> _Stepped:
    """Stop waiting for `who`; enter the next phase when `waiting` is empty."""
    heard = replace(state, waiting=state.waiting - {who})
    return (heard, []) if heard.waiting else _onward(heard, now)


def _onward(state: Swap, now: float) -> _Stepped:
    if state.phase is Phase.PLANNED and state.halts:
        return _enter(state, Phase.HALTING, now)
    if state.phase in (Phase.PLANNED, Phase.HALTING):
        return _enter(state, Phase.STAGING, now)
    if state.phase is Phase.STAGING:
        after, instructions = _enter(state, Phase.PAUSING if state.asked - state.halts else Phase.STAGED, now)
        return after, [ReleaseSources(), *instructions]
    if state.phase is Phase.PAUSING:
        return _enter(state, Phase.STAGED, now)
    if not state.failed:
        return _enter(state, Phase.COMMITTED, now)
    who = ", ".join(sorted(state.failed))
    why = "; ".join(f"{state.names.get(m, m)}: {reason}" for m, reason in sorted(state.failed.items()))
    cause = state.cause or SwapCause.MEMBER
    ended = replace(state, failed_phase=state.phase, culprit=who, reason=why, cause=cause)
    return _enter(ended, Phase.INCOMPLETE, now)


def _abort(state: Swap, reason: str, culprit: str, cause: SwapCause, now: float) -> _Stepped:
    ended = replace(state, failed_phase=state.phase, reason=reason, culprit=culprit, cause=cause)
    return _enter(ended, Phase.ABORTED, now)


def _enter(state: Swap, phase: Phase, now: float) -> _Stepped:
    """Enter a phase: set its deadline and whom it waits for, and instruct the nodes."""
    limits, nodes, no_one = state.limits, sorted(state.nodes), frozenset[str]()
    limit_s, waiting, told = 0.0, no_one, list[Instruction]()
    match phase:
        case Phase.IDLE | Phase.PLANNED:
            limit_s = limits.plan_s
        case Phase.HALTING | Phase.PAUSING:
            waiting = state.halts if phase is Phase.HALTING else state.asked - state.halts
            limit_s, told = limits.pause_s, _pauses(state, waiting)
        case Phase.STAGING:
            limit_s, waiting = limits.stage_s, state.nodes | state.publishing
            told = [StageOn(node) for node in nodes]
        case Phase.STAGED:
            limit_s, told = limits.commit_s, [JournalDecision()]
        case Phase.DECIDING:
            limit_s = math.inf  # the journal limits its writes
        case Phase.COMMITTING:
            limit_s, waiting = limits.commit_s, frozenset(state.members) - frozenset(state.failed)
            told = [CommitOn(node) for node in sorted(set(state.members.values()))]
        case Phase.ABORTED:
            told = [*(AbortOn(node, state.reason) for node in nodes), Finished()]
        case Phase.COMMITTED | Phase.INCOMPLETE:
            told = [Finished()]
    deadline = now + limit_s
    if limits.total_s is not None and phase in _BEFORE_STAGED:
        deadline = min(deadline, state.started + limits.total_s)
    entered = {**state.entered, phase: now}
    return replace(state, phase=phase, deadline=deadline, waiting=waiting, entered=entered), told


def _pauses(state: Swap, members: Iterable[str]) -> list[Instruction]:
    nodes: dict[str, list[str]] = {}
    for member in sorted(members):
        nodes.setdefault(state.members[member], []).append(member)
    return [PauseOn(node, tuple(these)) for node, these in sorted(nodes.items())]


# --- table ------------------------------------------------------------------------------------------------


_Key: TypeAlias = tuple[type[Event], Phase]


class Row(Struct, frozen=True):
    """The effect of an event in a phase, and the phases that may follow."""

    do: Callable[[Swap, Any, float], _Stepped]  # takes the event of this row
    to: tuple[Phase, ...]


def _aborts(do: Callable[[Swap, Any, float], _Stepped], event: type[Event], phases: Iterable[Phase]) -> dict[_Key, Row]:
    return {(event, phase): Row(do, (Phase.ABORTED,)) for phase in phases}


def _ignores(event: type[Event], *phases: Phase) -> dict[_Key, Row]:
    return {(event, phase): Row(_ignored, (phase,)) for phase in phases}


_IDLE, _PLANNED, _HALTING, _STAGING, _PAUSING, _STAGED, _DECIDING, _COMMITTING, *FINAL = Phase
_COMMITTED, _INCOMPLETE, _ABORTED = FINAL
_BEFORE_STAGED = (_IDLE, _PLANNED, _HALTING, _STAGING, _PAUSING)
_UNDECIDED = (*_BEFORE_STAGED, _STAGED)

ROWS: Mapping[_Key, Row] = {
    (PlanReady, _IDLE): Row(_planned, (_PLANNED, _HALTING, _STAGING)),
    (NodeLoaded, _PLANNED): Row(_loaded, (_PLANNED, _HALTING, _STAGING)),
    (QuietReported, _HALTING): Row(_quiet, (_HALTING, _STAGING)),
    (NodeProgress, _STAGING): Row(_progressed, (_STAGING,)),
    (NodeStaged, _STAGING): Row(_staged, (_STAGING, _PAUSING, _STAGED)),
    (SourceFinished, _PLANNED): Row(_published, (_PLANNED,)),
    (SourceFinished, _HALTING): Row(_published, (_HALTING,)),
    (SourceFinished, _STAGING): Row(_published, (_STAGING, _PAUSING, _STAGED)),
    (QuietReported, _PAUSING): Row(_quiet, (_PAUSING, _STAGED)),
    (DecisionHeld, _STAGED): Row(_held, (_STAGED,)),
    (DecisionSubmitted, _STAGED): Row(_submitted, (_DECIDING,)),
    (Journalled, _DECIDING): Row(_journalled, (_COMMITTING, _INCOMPLETE)),
    (NotJournalled, _DECIDING): Row(_not_journalled, (_ABORTED,)),
    # the decision may be on disk: the commit names these members, an abort forgets them
    (MemberLost, _DECIDING): Row(_missed_early, (_DECIDING,)),
    (CommitReported, _COMMITTING): Row(_committed, (_COMMITTING, _COMMITTED, _INCOMPLETE)),
    (MemberFailed, _COMMITTING): Row(_missed, (_COMMITTING, _INCOMPLETE)),
    (MemberLost, _COMMITTING): Row(_missed, (_COMMITTING, _INCOMPLETE)),
    # aborts before the decision is submitted
    **_aborts(_asked_to_abort, AbortAsked, _UNDECIDED),
    **_aborts(_node_aborts, PlanLost, (_PLANNED, _HALTING, _STAGING)),
    **_aborts(_node_aborts, NodeFailed, (_STAGING, _PAUSING, _STAGED)),  # a source may take it back
    **_aborts(_member_aborts, MemberFailed, (_HALTING, _PAUSING)),  # its pause hook failed
    **_aborts(_member_aborts, MemberLost, (_IDLE, _PLANNED, _HALTING, _STAGING)),
    (MemberLost, _PAUSING): Row(_target_aborts, (_PAUSING, _ABORTED)),
    (MemberLost, _STAGED): Row(_target_aborts, (_STAGED, _ABORTED)),
    # time
    **{(TimePassed, phase): Row(_late, (phase, _ABORTED)) for phase in _UNDECIDED},
    (TimePassed, _COMMITTING): Row(_late, (_COMMITTING, _INCOMPLETE)),
    **_ignores(TimePassed, _DECIDING),
    # too late: the decision may be on disk
    **_ignores(AbortAsked, _DECIDING),
    # answers to an earlier swap with the same plan; this one has already used the first answer
    **_ignores(NodeLoaded, _HALTING, _STAGING, _PAUSING, _STAGED, _DECIDING, _COMMITTING),
    # everything has arrived: the next swap forms a new epoch
    **_ignores(PlanLost, _PAUSING, _STAGED, _DECIDING, _COMMITTING),
    # a source took the version back after the decision; members report their outcome themselves
    **_ignores(NodeFailed, _DECIDING, _COMMITTING),
}


# --- ranks that return ------------------------------------------------------------------------------------


class Verdict(enum.Enum):
    """The outcome for the staged version of a rank that returns."""

    COMMIT = "commit"
    ABORT = "abort"
    WAIT = "wait"  # it is not known yet whether the swap is decided


def verdict(*, is_decided: bool, may_be_decided: bool) -> Verdict:
    """Return what a returning rank does with its staged version.

    Args:
        is_decided: the journal or a daemon knows the swap as decided.
        may_be_decided: the journal has not answered about the decision, or daemons that know more may still return.
    """
    if may_be_decided:
        return Verdict.WAIT
    return Verdict.COMMIT if is_decided else Verdict.ABORT


def fence_reason(version: int | None, run: str, live: int | None, live_run: str) -> str:
    """Return why a rank must not serve `version` of `run`; "" if it may, or if it holds none.

    `live` of `live_run` is the version decided last, None before the first decision.
    """
    if version is None or live is None or (version, run) == (live, live_run):
        return ""
    if version == live:
        return f"it holds version {live} of run {run or '?'}, and that of run {live_run} is live"
    return f"it holds version {version}, and {live} is live"
