"""Begin requested and due swaps, one per model at a time; further requested ones are queued."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from refitd.config import Config, ModelConfig
from refitd.coordinator import decision, together
from refitd.coordinator.decision import Limits
from refitd.coordinator.live_versions import LiveVersions
from refitd.coordinator.models import Models, ModelState, Queued, Running, Together, Waiter
from refitd.coordinator.report import source_reports
from refitd.coordinator.schedule import (
    DueSwap,
    asked_for,
    gathers_until,
    gave_way,
    gives_way,
    is_forming,
    lagging,
    must_wait,
    newer,
    no_turn,
    try_again,
)
from refitd.errors import DeadlineExceeded, RefitdError, RefusedError
from refitd.protocol import local
from refitd.protocol.base import Message, clipped
from refitd.states import SwapCause

# joint swaps that wait for a coordinator that has just started
MAX_WAITING = 64


class SwapQueue:
    """Begins swaps. `prepare(state, now)` goes on with one that has begun, `step` ends one that gives way.

    `replaced(model)` is called before a swap begins: it ends what earlier coordinators left of the model.
    """

    def __init__(
        self,
        config: Config,
        models: Models,
        new_swap_id: Callable[[], str],
        lives: LiveVersions,
        replaced: Callable[[str], None],
        prepare: Callable[[ModelState, float], None],
        step: Callable[[ModelState, decision.Event, float], None],
        send: Callable[[bytes, int, Message], None],
        log: Callable[..., None],
    ) -> None:
        self._config, self._models, self._lives = config, models, lives
        self._new_swap_id = new_swap_id
        self._replaced, self._prepare, self._step, self._send, self._log = replaced, prepare, step, send, log
        self._joining: frozenset[str] = frozenset()  # models whose joint swap is about to begin
        self._together: list[
            tuple[local.StartSwaps, Waiter, float]
        ] = []  # (request, waiter, deadline) of those received before the live versions are settled

    def start(self, asked: local.StartSwap, waiter: Waiter, now: float) -> None:
        """Begin a requested swap, or queue it behind the running one."""
        state = self._models.named(asked.model)
        together.check_shared(self._models, {asked.model})
        waits = must_wait(state, asked)
        if not waits and self._lives.is_settled(now):
            self._begin(state, asked_for(state, asked, waiter, self._lives.past), now)
            return
        ends = state.running is not None and gives_way(state.running)
        if ends:
            asked_for(state, asked, waiter, self._lives.past)  # a refused request must not end the catch-up
        state.queue.append(Queued(asked, waiter, now, now + (asked.timeout_s or self._config.deadlines.queue_s)))
        behind = "" if state.running is None else state.running.swap.swap
        self._log("queued", model=asked.model, version=asked.version, behind=behind, waiting=len(state.queue))
        if state.running is not None and ends:
            state.running.gives_way = True
            if not is_forming(state.running):
                self._step(state, gave_way(), now)

    def start_together(self, asked: local.StartSwaps, waiter: Waiter, now: float) -> None:
        """Begin swaps of several models that are decided together; they wait while daemons may report what is live.

        Raises:
            RefusedError: one of them cannot begin now; none has.
        """
        if not self._lives.is_settled(now):
            if len(self._together) >= MAX_WAITING:
                raise RefusedError(
                    f"the coordinator has just started, and {MAX_WAITING} requests for several models wait for it "
                    "already; try again in some seconds"
                )
            self._together.append((asked, waiter, now + (asked.timeout_s or self._config.deadlines.queue_s)))
            return
        states = together.named(self._models, asked)
        together.check_shared(self._models, {one.model for one in asked.swaps})
        dues = [
            asked_for(
                state,
                local.StartSwap(one.model, one.version, asked.timeout_s, progress=asked.progress),
                waiter,
                self._lives.past,
            )
            for state, one in zip(states, asked.swaps, strict=True)
        ]
        party = Together(tuple(one.model for one in asked.swaps), waiter)
        self._joining = frozenset(party.models)  # the catch-ups that end here must not begin again
        try:
            for state in states:
                if state.running is not None:
                    state.running.gives_way = True
                    text = "it gives way to a swap that was asked for"
                    self._step(state, decision.AbortAsked(text, SwapCause.OVERTAKEN), now)
        finally:
            self._joining = frozenset()
        for state, due in zip(states, dues, strict=True):
            self._begin(state, due, now, party)
            if party.aborted:
                self._step(state, decision.AbortAsked(party.aborted, SwapCause.TOGETHER), now)

    def settled(self, now: float) -> None:
        """Begin the joint swaps that were requested before the live versions were known."""
        waiting, self._together = self._together, []
        for asked, waiter, until in waiting:
            try:
                if now >= until:
                    raise DeadlineExceeded("daemons were waited for, after the start of the coordinator; try again")
                self.start_together(asked, waiter, now)
            except RefitdError as exc:
                self._send(*waiter, local.Failure(code=exc.code, message=str(exc)))

    def next(self, state: ModelState, now: float) -> None:
        """Start the due swap: a requested one first, then a newer version, then a catch-up.

        Nothing starts while daemons may still report what is live.
        """
        if not self._lives.is_settled(now) or state.membership.name in self._joining:
            return
        while state.queue and state.running is None:
            queued = state.queue.pop(0)
            waited_s = now - queued.since
            try:
                together.check_shared(self._models, {queued.asked.model})
                self._begin(state, asked_for(state, queued.asked, queued.waiter, self._lives.past, waited_s), now)
            except RefusedError as exc:
                self._send(*queued.waiter, local.Failure(code=exc.code, message=str(exc)))
        if state.running is None and state.membership.auto_swap:
            self._begin_if_due(state, "auto-swap", newer, now)
        if state.running is None:
            find = partial(
                lagging, only_observers=not self._config.models.get(state.membership.name, ModelConfig()).catch_up
            )
            self._begin_if_due(state, "catch-up", find, now)

    def _begin_if_due(
        self, state: ModelState, what: str, find: Callable[[ModelState], DueSwap | None], now: float
    ) -> None:
        try:
            due = find(state)
            if due is not None and what == "auto-swap":  # a catch-up brings a version that was decided with its party
                together.check_shared(self._models, {state.membership.name})
        except RefusedError as exc:
            if state.unbegun.get(what) != str(exc):  # it is asked again after every event
                self._log(f"{what}-refused", model=state.membership.name, reason=str(exc))
            state.unbegun[what] = str(exc)
        else:
            state.unbegun.pop(what, None)
            if due is not None and due.kind == "catch-up" and (until := gathers_until(due)) > now:
                state.gathers_until = until
            elif due is not None:
                self._begin(state, due, now)

    def _begin(self, state: ModelState, due: DueSwap, now: float, party: Together | None = None) -> None:
        self._replaced(state.membership.name)
        state.gathers_until = None
        membership, d = due.membership, self._config.deadlines
        limits = Limits(d.plan_s, d.stage_s, d.commit_s, due.timeout_s or None, d.pause_s)
        names = {m.id: m.describe() for m in membership.members()} | {
            c.id: c.describe() for c in membership.in_control()
        }
        swap = decision.begin(self._new_swap_id(), membership.name, due.version, limits, names, now)
        members, sources = {m.id: m for m in membership.members()}, source_reports(membership, due.version)
        answer_by = now + due.timeout_s if due.timeout_s else None
        state.running = Running(
            swap, due.version, list(due.waiters), due.run, due.kind, membership, members, sources, answer_by
        )
        state.running.together = party
        if due.kind != "catch-up":
            state.running.suspended = tuple(state.membership.suspended())
            state.running.drained = tuple(state.membership.drained())
            tried, run = state.tried
            state.tried = max(tried, due.version) if run == due.run else due.version, due.run
        phase = swap.phase.value
        self._log("swap", swap=swap.swap, model=swap.model, version=swap.version, phase=phase, kind=due.kind)
        state.running.flips_back, state.running.is_watched = due.flips_back, due.is_watched
        self._prepare(state, now)

    def tick(self, state: ModelState, now: float) -> None:
        """Begin a catch-up that is due, and answer requests that have waited too long."""
        gathered = state.gathers_until is not None and now >= state.gathers_until
        if state.running is None and (try_again(state, now) or gathered):
            state.gathers_until = None
            self.next(state, now)
        for queued in [q for q in state.queue if now >= q.deadline]:
            state.queue.remove(queued)
            late = local.Failure(code=DeadlineExceeded.code, message=clipped(no_turn(state, now - queued.since)))
            self._send(*queued.waiter, late)
