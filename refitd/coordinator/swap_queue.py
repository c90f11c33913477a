"""Begin requested and due swaps, one per model at a time, once it is certain which versions are live.

Further requested swaps are queued. Joint swaps begin together. Swaps that earlier coordinators left are settled first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from refitd.commit import decision, swap_events
from refitd.commit.decision import Limits, Phase, Verdict, verdict
from refitd.coordinator import controllers, preparation, swaps
from refitd.coordinator.actions import Waiter
from refitd.coordinator.fleet import Models, ModelState, Queued, Running, Together, Turn
from refitd.coordinator.members import Member, poison
from refitd.coordinator.reports import source_reports
from refitd.coordinator.schedule import (
    DueSwap,
    asked_for,
    gathers_until,
    gave_way,
    gives_way,
    is_forming,
    lagging,
    newer,
    no_turn,
    try_again,
)
from refitd.errors import DeadlineExceeded, RefitdError, RefusedError
from refitd.protocol import cluster, local
from refitd.protocol.base import clipped
from refitd.states import SwapCause

# Joint swaps that wait for a coordinator that has just started.
MAX_WAITING = 64

# Limit on queued swaps of one model.
MAX_QUEUED = 64

# Limit on models of one joint swap.
MAX_TOGETHER = 16

# --- requests ---------------------------------------------------------------------------------------------


def start(turn: Turn, asked: local.StartSwap, waiter: Waiter) -> None:
    """Begin a requested swap, or queue it behind the running one.

    Raises:
        RefusedError: it cannot begin, or must wait and did not ask to be queued, or the queue is full.
    """
    fleet = turn.fleet
    state = fleet.models.named(asked.model)
    if len(fleet.models) > 1:
        _check_shared(fleet.models, {asked.model})
    running = state.running
    if len(state.queue) >= MAX_QUEUED:
        raise RefusedError(f"model {asked.model!r}: {MAX_QUEUED} swaps are waiting already; wait for some of them")
    # a catch-up was not requested: it never causes a refusal
    if running is not None and not asked.queue and running.kind != "catch-up":
        r = running.swap
        raise RefusedError(
            f"model {r.model!r}: swap {r.swap} to version {r.version} is running (phase {r.phase.value}); "
            "wait for it, queue behind it (--queue), or abort it with `refitctl abort`"
        )
    if running is None and fleet.lives.is_settled:
        _begin(turn, state, asked_for(state, asked, waiter, fleet.past))
        return
    ends = running is not None and gives_way(running)
    if ends:
        asked_for(state, asked, waiter, fleet.past)  # a refused request must not end the catch-up
    until = turn.now + (asked.timeout_s or fleet.config.deadlines.queue_s)
    state.queue.append(Queued(asked, waiter, turn.now, until))
    behind = "" if running is None else running.swap.swap
    turn.log("queued", model=asked.model, version=asked.version, behind=behind, waiting=len(state.queue))
    if running is not None and ends:
        running.gives_way = True
        if not is_forming(running):
            turn.post(running.swap.swap, gave_way())


def start_together(turn: Turn, asked: local.StartSwaps, waiter: Waiter) -> None:
    """Begin swaps of several models that are decided together; they wait while daemons may report what is live.

    Raises:
        RefusedError: one of them cannot begin now; none has begun.
    """
    fleet = turn.fleet
    if not fleet.lives.is_settled:
        if len(fleet.joint_requests) >= MAX_WAITING:
            raise RefusedError(
                f"the coordinator has just started, and {MAX_WAITING} requests for several models wait for it "
                "already; try again in some seconds"
            )
        until = turn.now + (asked.timeout_s or fleet.config.deadlines.queue_s)
        fleet.joint_requests.append((asked, waiter, until))
        return
    states = _named(fleet.models, asked)
    _check_shared(fleet.models, {one.model for one in asked.swaps})
    requests = [
        local.StartSwap(one.model, one.version, asked.timeout_s, progress=asked.progress) for one in asked.swaps
    ]
    dues = [asked_for(state, one, waiter, fleet.past) for state, one in zip(states, requests, strict=True)]
    for state in states:
        if state.running is not None:
            state.running.gives_way = True
            text = "it gives way to a swap that was asked for"
            turn.post(state.running.swap.swap, swap_events.AbortAsked(text, SwapCause.OVERTAKEN))
            swaps.run(turn)
    party = Together(tuple(one.model for one in asked.swaps), waiter)
    for state, due in zip(states, dues, strict=True):
        _begin(turn, state, due, party)


def _named(models: Models, asked: local.StartSwaps) -> list[ModelState]:
    """Return the states of the models of a joint swap.

    Raises:
        RefusedError: a model is unknown, is named twice or is being swapped, or there are too few or too many.
    """
    names = [one.model for one in asked.swaps]
    if not 1 <= len(names) <= MAX_TOGETHER or len(set(names)) < len(names):
        raise RefusedError(f"models {names[:MAX_TOGETHER]}: name 1 to {MAX_TOGETHER} models, each once")
    states = [models.named(name) for name in names]
    for name, state in zip(names, states, strict=True):
        running = state.running
        if running is not None and not gives_way(running):
            s = running.swap
            raise RefusedError(
                f"model {name!r}: swap {s.swap} to version {s.version} is running (phase {s.phase.value}); wait for "
                "it, or abort it with `refitctl abort`"
            )
    return states


def _check_shared(models: Models, names: Collection[str]) -> None:
    """Refuse to swap models without those whose engines use a tensor that the swap would write.

    Raises:
        RefusedError: names the tensor, the other model and the next step.
    """
    for other, state in models.items():
        if other in names:
            continue
        for member in state.membership.targets.values():
            for shared in member.added.shares:
                if shared.model in names:
                    raise RefusedError(
                        f"model {shared.model!r}: its replica {shared.replica!r} holds {shared.name} for model "
                        f"{other!r} too (replica {member.added.replica!r}), whose weights would change too; swap both: "
                        f"client.swap_together({{{shared.model!r}: None, {other!r}: None}}), or `refitctl swap "
                        f"{shared.model} --with {other}`; to go back, publish the older weights as new versions of both"
                    )


# --- the next swap ----------------------------------------------------------------------------------------


def begin_due(turn: Turn, state: ModelState) -> None:
    """Begin a model's due swap: a requested one first, then a newer version, then a catch-up.

    No swap begins while daemons may report what is live.
    """
    fleet = turn.fleet
    if not fleet.lives.is_settled:
        return
    while state.queue and state.running is None:
        queued = state.queue.pop(0)
        waited_s = turn.now - queued.since
        try:
            _check_shared(fleet.models, {queued.asked.model})
            _begin(turn, state, asked_for(state, queued.asked, queued.waiter, fleet.past, waited_s))
        except RefusedError as exc:
            turn.send(queued.waiter, local.Failure(code=exc.code, message=str(exc)))
    if state.running is None and state.membership.auto_swap:
        _begin_if_due(turn, state, "auto-swap", newer)
    if state.running is None:
        find = lagging if state.config.catch_up else _lagging_observers
        _begin_if_due(turn, state, "catch-up", find)


def _lagging_observers(state: ModelState) -> DueSwap | None:
    return lagging(state, only_observers=True)


def _begin_if_due(turn: Turn, state: ModelState, what: str, find: Callable[[ModelState], DueSwap | None]) -> None:
    try:
        due = find(state)
        if due is not None and what == "auto-swap":  # a catch-up brings a version that was decided with its party
            _check_shared(turn.fleet.models, {state.membership.name})
    except RefusedError as exc:
        if state.unbegun.get(what) != str(exc):  # it is tried after every event
            turn.log(f"{what}-refused", model=state.membership.name, reason=str(exc))
        state.unbegun[what] = str(exc)
        return
    state.unbegun.pop(what, None)
    if due is not None and due.kind == "catch-up" and (until := gathers_until(due)) > turn.now:
        state.gathers_until = until
    elif due is not None:
        _begin(turn, state, due)


def _begin(turn: Turn, state: ModelState, due: DueSwap, party: Together | None = None) -> None:
    membership, fleet, name = due.membership, turn.fleet, state.membership.name
    if name in fleet.recovery.open:
        turn.note_ends(fleet.recovery.replaced(name))
    state.gathers_until = None
    d = fleet.config.deadlines
    limits = Limits(d.plan_s, d.stage_s, d.commit_s, due.timeout_s or None, d.pause_s)
    members = {m.id: m for m in membership.members()}
    in_control = membership.in_control() if membership.controllers else []
    names = {m.id: m.describe() for m in members.values()} | {c.id: c.describe() for c in in_control}
    swap = decision.begin(fleet.ids.swap(), name, due.version, limits, names, turn.now)
    running = Running(
        swap,
        due.version,
        list(due.waiters),
        due.run,
        due.kind,
        in_control,
        membership,
        members,
        source_reports(membership, due.version),
        answer_by=turn.now + due.timeout_s if due.timeout_s else None,
        flips_back=due.flips_back,
        together=party,
        is_watched=due.is_watched,
        is_early=bool(membership.writing(due.version)),
    )
    if due.kind != "catch-up":
        if membership is not state.membership:
            running.suspended = tuple(state.membership.suspended())
            running.drained = tuple(state.membership.drained())
        tried, run = state.tried
        state.tried = max(tried, due.version) if run == due.run else due.version, due.run
    state.running, fleet.swapping[swap.swap] = running, state
    turn.log("swap", swap=swap.swap, model=name, version=swap.version, phase=swap.phase.value, kind=due.kind)
    preparation.begin(turn, state, running)


def tick(turn: Turn, state: ModelState) -> None:
    """Begin a catch-up that is due, and answer requests that have waited too long."""
    gathered = state.gathers_until is not None and turn.now >= state.gathers_until
    if state.running is None and (try_again(state, turn.now) or gathered):
        state.gathers_until = None
        turn.due[state.membership.name] = None
    for queued in [q for q in state.queue if turn.now >= q.deadline]:
        state.queue.remove(queued)
        text = clipped(no_turn(state, turn.now - queued.since))
        turn.send(queued.waiter, local.Failure(code=DeadlineExceeded.code, message=text))


# --- after the start of a coordinator ---------------------------------------------------------------------


def live_learned(turn: Turn, model: str) -> None:
    """Apply a changed live version: fence ranks that serve another one, and catch them up."""
    state, lives = turn.fleet.models.get(model), turn.fleet.lives
    if (claim := lives.claim(model)) is not None:
        turn.tell_live(claim)
    if state is None:
        return
    state.live, state.highest = lives.of(model), lives.highest(model)
    running = state.running
    if running is not None and running.swap.phase is not Phase.COMMITTING:
        text = f"it was learned that version {state.live} is live"
        turn.post(running.swap.swap, swap_events.AbortAsked(text, SwapCause.OVERTAKEN))
        swaps.run(turn)
    for member in state.membership.targets.values():
        if member.staged is None:
            turn.fence_unless_live(member)


def settle_all(turn: Turn) -> None:
    """Once the live versions are certain, settle staged swaps and begin the waiting ones."""
    fleet = turn.fleet
    if fleet.may_swap or not fleet.lives.is_settled:
        return
    fleet.may_swap = True
    for member in list(fleet.undone.values()):
        if fleet.members.get(member.id) is member and member.staged is not None:
            settle(turn, member, member.staged)
    fleet.undone.clear()
    requests, fleet.joint_requests = fleet.joint_requests, []
    for asked, waiter, until in requests:
        try:
            if turn.now >= until:
                raise DeadlineExceeded("daemons were waited for, after the start of the coordinator; try again")
            start_together(turn, asked, waiter)
        except RefitdError as exc:
            turn.send(waiter, local.Failure(code=exc.code, message=str(exc)))
    for name in fleet.models:
        turn.due[name] = None


def settle_answered(turn: Turn, swaps: Collection[str]) -> None:
    """Settle the ranks that returned while the journal wrote the decision about one of these swaps."""
    fleet = turn.fleet
    for member in [m for m in fleet.undone.values() if m.staged in swaps]:
        del fleet.undone[member.id]
        if fleet.members.get(member.id) is member and member.staged is not None:
            settle(turn, member, member.staged)


def settle(turn: Turn, member: Member, swap: str) -> None:
    """Commit or abort the staged swap of a rank that returns, or leave it until it is known whether it is decided."""
    fleet, added = turn.fleet, member.added
    found = turn.fleet.identity_of(swap)
    state = fleet.models[added.model]
    live, running = state.live, state.running
    if found is None and fleet.lives.is_in_doubt and live is not None:
        # the journal with this swap is lost; if its version is live, it was decided
        found = (live.version, live.run) if live.is_at(added.staged_version, added.staged_run) else None
    is_deciding = running is not None and running.swap.swap == swap and running.swap.phase is Phase.DECIDING
    may_be_decided = is_deciding or (found is None and not fleet.lives.is_settled)
    match verdict(is_decided=found is not None, may_be_decided=may_be_decided):
        case Verdict.WAIT:
            fleet.undone[member.id] = member
        case Verdict.COMMIT:
            assert found is not None
            controllers.tell_again(turn, [member], swap, *found)
        case Verdict.ABORT:
            member.pending, reason = None, "the coordinator restarted before deciding"
            if added.in_place:
                poison(member, swap, reason)
            turn.to_node(member.node, cluster.Abort(swap=swap, reason=reason))
            turn.fence_unless_live(member)
            controllers.ranks_changed(turn, added.model, added.replica)
