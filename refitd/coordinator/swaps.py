"""Swaps under way: planned, formed into epochs, stepped through their machine, and told to nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec

from refitd.commit import machine
from refitd.commit.journal import Record
from refitd.commit.machine import Limits, Phase
from refitd.config import Config, ModelConfig
from refitd.coordinator.actions import Decide, Instruction, Log, MakePlan, Planned, Remember, Send
from refitd.coordinator.fleet import Member, Model, Node
from refitd.coordinator.models import Models, ModelState, Queued, Recent, Running, Waiter
from refitd.coordinator.plans import LoadedPlan, PlanCache, plan_report
from refitd.coordinator.report import decided_report, swap_progress, swap_report, written_report
from refitd.coordinator.rosters import ShardReader
from refitd.coordinator.schedule import Due, asked_for, gives_way, lagging, left_behind, must_wait, newer, try_again
from refitd.coordinator.unfinished import Unfinished
from refitd.errors import DeadlineExceeded, IllegalTransition, PlanError, RefitdError, RefusedError
from refitd.protocol import cluster, local
from refitd.protocol.base import Message
from refitd.protocol.reports import SwapReport


class Swaps:
    """Begins the swaps that are due and carries them to their end. Instructions go to `out`."""

    def __init__(
        self,
        config: Config,
        boot: str,
        nodes: dict[str, Node],
        models: Models,
        members: dict[str, Member],
        new_swap_id: Callable[[], str],
        wall_clock: Callable[[], float],
        decided: Callable[[str], Record | None],
        recent: Recent,
        unfinished: Unfinished,
        out: Callable[[Instruction], None],
    ) -> None:
        self._config = config
        self._boot = boot
        self._nodes = nodes
        self._models = models
        self._members = members
        self._new_swap_id = new_swap_id
        self._wall_clock = wall_clock
        self._decided = decided
        self._recent = recent
        self._unfinished = unfinished
        self._out = out
        self._plans = PlanCache()
        self._tickets = 0
        # what asked for a plan: a swap of the model, or an operator who wants to see it
        self.plan_requests: dict[int, tuple[str, str | Waiter]] = {}
        self.reader = ShardReader()

    # --- what begins --------------------------------------------------------------------------------------

    def start(self, asked: local.StartSwap, waiter: Waiter, now: float) -> None:
        """Begin the swap that somebody asked for, or have it wait for the one that is running."""
        state = self._models.named(asked.model)
        if not must_wait(state, asked):
            self._begin(state, asked_for(state, asked, waiter, self._recent), now)
            return
        assert state.running is not None
        state.queue.append(Queued(asked, waiter, now + (asked.timeout_s or self._config.deadlines.queue_s)))
        behind = state.running.swap.swap
        self._log("queued", model=asked.model, version=asked.version, behind=behind, waiting=len(state.queue))
        if gives_way(state.running):
            state.running.gives_way = True
            self.step(state, machine.AbortAsked("it gives way to a swap of all replicas that was asked for"), now)

    def next(self, state: ModelState, now: float) -> None:
        """Start what is due now: what was asked for first, then a newer version, then replicas that lag behind."""
        while state.queue and state.running is None:
            queued = state.queue.pop(0)
            try:
                self._begin(state, asked_for(state, queued.asked, queued.waiter, self._recent), now)
            except RefusedError as exc:
                self._send(*queued.waiter, local.Failure(code=exc.code, message=str(exc)))
        if state.running is None and state.fleet.auto_swap:
            self._begin_if_due(state, "auto-swap", newer, now)
        if state.running is None:
            self._catch_up(state, now)

    def _catch_up(self, state: ModelState, now: float) -> None:
        if self._model_config(state).catch_up:
            self._begin_if_due(state, "catch-up", lagging, now)

    def _begin_if_due(self, state: ModelState, what: str, find: Callable[[ModelState], Due | None], now: float) -> None:
        try:
            due = find(state)
        except RefusedError as exc:
            self._log(f"{what}-refused", model=state.fleet.name, reason=str(exc))
        else:
            if due is not None:
                self._begin(state, due, now)

    def _begin(self, state: ModelState, due: Due, now: float) -> None:
        self.ended_late(self._unfinished.replaced(state.fleet.name))
        fleet, d = due.fleet, self._config.deadlines
        limits = Limits(d.plan_s, d.stage_s, d.commit_s, due.timeout_s or None, d.pause_s)
        swap = machine.begin(self._new_swap_id(), fleet.name, due.version, limits, now)
        members, sources = {m.id: m for m in fleet.members()}, fleet.source_reports(due.version)
        state.running = Running(swap, due.version, list(due.waiters), due.kind, fleet, members, sources)
        state.newest = max(state.newest, due.version)
        phase = swap.phase.value
        self._log("swap", swap=swap.swap, model=swap.model, version=swap.version, phase=phase, kind=due.kind)
        if state.plan is not None and fleet is state.fleet:
            self._plan_ready(state, state.plan, now)
        else:
            self._ask_plan(fleet, swap.swap, now)

    # --- plans --------------------------------------------------------------------------------------------

    def show_plan(self, state: ModelState, viewer: Waiter, now: float) -> None:
        """Answer an operator who wants to see the plan, once there is one."""
        if unoffered := state.fleet.unoffered():
            raise PlanError(unoffered)
        if state.plan is not None:
            self._send(*viewer, plan_report(state.fleet, state.plan))
        else:
            self._ask_plan(state.fleet, viewer, now)

    def _ask_plan(self, fleet: Model, who: str | Waiter, now: float) -> None:
        pools = fleet.pools()
        kept = self._plans.get(pools)
        self._tickets += 1
        self.plan_requests[self._tickets] = fleet.name, who
        if kept is not None:
            self.planned(Planned(self._tickets, kept), now)
            return
        try:
            rosters = self.reader.rosters(pools)
        except RefitdError as exc:  # a description that cannot be read: the swap must end now, not at its deadline
            self.planned(Planned(self._tickets, None, exc), now)
        else:
            self._out(MakePlan(self._tickets, rosters))

    def planned(self, event: Planned, now: float) -> None:
        """Take a plan that was asked for."""
        model, who = self.plan_requests.pop(event.ticket)
        state = self._models.get(model)
        running = state.running if state is not None else None
        mine = running if running is not None and running.swap.swap == who else None
        if event.plan is not None and state is not None:
            fleet = mine.fleet if mine is not None else state.fleet
            self._plans.put(fleet.pools(), event.plan)
            event.plan.members = fleet.ranks()
            event.plan.belongs_to(fleet.name)
            if fleet is state.fleet:
                state.plan = event.plan
        error = str(event.error) if event.error else ""
        if not isinstance(who, str):
            if event.plan is None or state is None:
                self._send(*who, local.Failure(code="plan", message=error or "the model has left"))
            else:
                self._send(*who, plan_report(state.fleet, event.plan))
        elif state is not None and mine is not None:
            if event.plan is None:
                self.step(state, machine.AbortAsked(f"the plan was refused: {error}"), now)
            else:
                self._plan_ready(state, event.plan, now)

    def _plan_ready(self, state: ModelState, plan: LoadedPlan, now: float) -> None:
        assert state.running is not None
        fleet = state.running.fleet
        links = plan.links(fleet)
        if links and plan.epoch is None:
            plan.epoch = self._new_epoch({node for link in links for node in link})
        state.running.plan = plan
        members = {m.id: m.node for m in fleet.targets.values()}
        names = {m.id: m.describe() for m in fleet.members()}
        nodes = frozenset(members.values()) | frozenset(plan.epoch.nodes if plan.epoch is not None else ())
        in_place = frozenset(m.id for m in fleet.targets.values() if m.added.in_place)
        asked = frozenset(m.id for m in fleet.targets.values() if m.added.pauses)
        nbytes = plan.table.total_bytes + fleet.converted_bytes()
        self.step(state, machine.PlanReady(members, nodes, nbytes, names, asked, in_place), now)

    def members_changed(self, state: ModelState) -> None:
        """The next swap needs a new plan. A running one keeps its own."""
        plan, state.plan = state.plan, None
        if plan is not None and (state.running is None or state.running.plan is not plan):
            self._drop(plan)

    def _drop(self, plan: LoadedPlan) -> None:
        """Have every node forget a plan; it is loaded anew, with a new epoch, if it is used again."""
        nodes = plan.loaded_on | set(plan.epoch.nodes if plan.epoch is not None else ())
        plan.loaded_on, plan.epoch = set(), None
        for name in sorted(nodes & self._nodes.keys()):
            self._to_node(name, cluster.DropPlan(plan=plan.id))

    # --- epochs -------------------------------------------------------------------------------------------

    def _new_epoch(self, names: set[str]) -> cluster.EpochPlan:
        """Return an epoch of these nodes, to be formed while the plan is loaded."""
        nodes = tuple(sorted(names & self._nodes.keys()))
        status = [self._nodes[name].status for name in nodes]
        transport = self._config.transport
        self._tickets += 1
        lanes = min((len(s.workers) for s in status), default=1)
        return cluster.EpochPlan(
            id=f"{self._boot}.{self._tickets}",
            service=transport.service,
            nodes=nodes,
            hosts=tuple(s.host for s in status),
            lanes=min(transport.lanes, lanes) if transport.lanes else lanes,
            staging_bytes=transport.staging_bytes,
            # the workers' own words, which name who is missing, come before the phase ends
            timeout_s=0.9 * self._config.deadlines.plan_s,
        )

    def _using(self, plan: str, epoch: str) -> list[tuple[ModelState, Running, LoadedPlan]]:
        """Return the models whose running swap uses this forming of a plan."""
        return [
            (state, running, used)
            for state in self._models.values()
            if (running := state.running) is not None
            and (used := running.plan) is not None
            and used.id == plan
            and (used.epoch.id if used.epoch is not None else "") == epoch
        ]

    def _plan_lost(self, plan: str, epoch: str, node: str, where: str, reason: str, now: float) -> None:
        """A node cannot use a plan, or its epoch: whoever uses it aborts, and it is loaded anew for the next swap."""
        self._log("plan-lost", plan=plan, epoch=epoch, node=node, where=where, reason=reason)
        for state, running, _ in self._using(plan, epoch):
            if not running.swap.is_staged:
                self.step(state, machine.NodeFailed(node, where, reason), now)
        for state in self._models.values():
            kept = state.plan
            if kept is not None and kept.id == plan and kept.epoch is not None and kept.epoch.id == epoch:
                self._drop(kept)

    def _relay(self, origin: str, message: cluster.EpochValue) -> None:
        """Pass a worker's value on to its peers."""
        states = self._models.values()
        plans = [s.plan for s in states] + [s.running.plan for s in states if s.running]
        epoch = next((p.epoch for p in plans if p is not None and p.epoch and p.epoch.id == message.epoch), None)
        if epoch is not None and origin in epoch.nodes and message.lane < epoch.lanes:
            for node in epoch.nodes:
                if node != origin:
                    self._to_node(node, message)

    # --- events of nodes ----------------------------------------------------------------------------------

    def node_said(self, name: str, message: cluster.NodeMessage, now: float) -> None:
        """Take a node's word about its part in a swap."""
        match message:
            case cluster.PlanLoaded(plan, epoch):
                for state, _, used in self._using(plan, epoch):
                    used.loaded_on.add(name)
                    self.step(state, machine.NodeLoaded(name), now)
            case cluster.PlanRefused(plan, epoch, where, reason) | cluster.EpochLost(plan, epoch, where, reason):
                self._plan_lost(plan, epoch, name, where, reason, now)
            case cluster.EpochPut(epoch, lane, key, value):
                self._relay(name, cluster.EpochValue(epoch=epoch, lane=lane, key=key, value=value))
            case cluster.StageProgress(swap, bytes_done):
                self.step_swap(swap, machine.NodeProgress(name, bytes_done), now)
            case cluster.StageDone(swap, copies, nbytes, _, crossing_s, _, converted):
                found = self._models.swapping(swap)
                if found is not None and found.running is not None and found.running.plan is not None:
                    found.running.plan.crossing_s[name] = crossing_s
                self.step_swap(swap, machine.NodeStaged(name, copies, nbytes + converted), now)
            case cluster.StageFailed(swap, where, reason):
                self.step_swap(swap, machine.NodeFailed(name, where, reason), now)
            case cluster.MemberQuiet(swap, member):
                self.step_swap(swap, machine.MemberQuiet(member), now)
            case cluster.MemberCommitted(swap, member, paused_s):
                self._member_committed(swap, member, paused_s, now)
            case cluster.MemberCommitFailed(swap, member, reason):
                self._member_failed(swap, member, reason, now)
            case _:
                pass

    def _member_committed(self, swap: str, member_id: str, paused_s: float, now: float) -> None:
        member = self._members.get(member_id)
        if member is not None and member.staged == swap:
            member.staged = None
            member.poisoned, member.left_behind = "", False
            member.tries, member.again_at = 0, None
            running = self._models[member.added.model].running
            if running is not None and running.swap.swap == swap:
                member.version = running.version
            elif (record := self._decided(swap)) is not None:
                member.version = record.version  # it was late, or this coordinator has restarted since
                self.ended_late(self._unfinished.committed(swap, member, paused_s))
        self.step_swap(swap, machine.MemberCommitted(member_id, paused_s), now)

    def _member_failed(self, swap: str, member_id: str, reason: str, now: float) -> None:
        member = self._members.get(member_id)
        if member is not None and member.staged == swap:
            member.staged, member.version = None, None  # it could be holding parts of two
            self.ended_late(self._unfinished.failed(swap, member, reason))
        self.step_swap(swap, machine.MemberFailed(member_id, reason), now)

    # --- steps --------------------------------------------------------------------------------------------

    def step_swap(self, swap: str, event: machine.Event, now: float) -> None:
        """Feed the machine of a swap, if it is under way."""
        state = self._models.swapping(swap)
        if state is not None:
            self.step(state, event, now)

    def step(self, state: ModelState, event: machine.Event, now: float) -> None:
        """Feed the machine of a model's running swap and carry out what it says."""
        running = state.running
        if running is None:
            return
        before = running.swap.phase
        try:
            running.swap, instructions = machine.step(running.swap, event, now)
        except IllegalTransition as exc:
            self._log("illegal", reason=str(exc))
            return
        if running.swap.phase is not before:
            s = running.swap
            self._log("swap", swap=s.swap, model=s.model, version=s.version, phase=s.phase.value, reason=s.reason)
        progress = swap_progress(running.swap)
        if progress is not None:
            for waiter in running.waiters:
                self._send(*waiter, progress)
        for instruction in instructions:
            self._perform(state, running, instruction, now)

    def _perform(self, state: ModelState, running: Running, instruction: machine.Instruction, now: float) -> None:
        s, plan = running.swap, running.plan
        match instruction:
            case machine.LoadPlan(node):
                assert plan is not None
                if node in plan.loaded_on:
                    self.step(state, machine.NodeLoaded(node), now)
                else:
                    self._to_node(node, plan.message(s.model, running.fleet, node))
            case machine.PauseOn(node, members):
                self._to_node(node, cluster.Pause(swap=s.swap, version=s.version, members=members))
            case machine.StageOn(node):
                assert plan is not None
                # the workers' own words, which name who is late, come before the phase ends
                timeout_s = max(0.05, 0.9 * (s.deadline - now))
                verify = self._model_config(state).verify
                stage = cluster.Stage(swap=s.swap, plan=plan.id, version=s.version, timeout_s=timeout_s, verify=verify)
                self._to_node(node, stage)
            case machine.ReleaseSources():
                for node in sorted({m.node for m in state.fleet.sources.values()}):
                    self._to_node(node, cluster.EndSwap(swap=s.swap))
            case machine.JournalDecision():
                self._decide(state, running, now)
            case machine.CommitOn(node):
                for member in running.fleet.targets.values():
                    if member.node == node and member.id in s.members:
                        member.staged = s.swap
                self._to_node(node, cluster.Commit(swap=s.swap, version=s.version))
            case machine.AbortOn(node, reason):
                self._to_node(node, cluster.Abort(swap=s.swap, reason=reason))
            case machine.Finished():
                self._finish(state, running, now)

    def _decide(self, state: ModelState, running: Running, now: float) -> None:
        """Have the decision written, with who is to take the version over: another coordinator may have to know."""
        s = running.swap
        report = decided_report(self._report(state, running, now))
        plan = running.plan.id if running.plan else ""
        at, written = self._wall_clock(), msgspec.json.encode(report)
        self._out(Decide(Record(s.swap, s.model, s.version, "decided", plan, "", at, written)))

    def journalled(self, swap: str, error: RefitdError | None, now: float) -> None:
        """The decision is on disk, or cannot be written."""
        if error is not None:
            self.step_swap(swap, machine.AbortAsked(f"the decision could not be journalled: {error}"), now)
            return
        state = self._models.swapping(swap)
        if state is not None and state.running is not None:
            state.live = state.running.version
            self.step(state, machine.Journalled(), now)

    def _finish(self, state: ModelState, running: Running, now: float) -> None:
        left_behind(state, running, now)
        s, plan = running.swap, running.plan
        report = self._report(state, running, now)
        state.running, state.last = None, report
        broken = s.phase is Phase.ABORTED and plan is not None and plan.epoch is not None
        if plan is not None and (plan is not state.plan or broken):
            self._drop(plan)  # an epoch does not outlive a swap that failed
        outcome, written = report.outcome, msgspec.json.encode(report)
        for waiter in running.waiters:
            self._send(*waiter, report)
        # whoever waits need not wait for the disk: the decision is on it
        self._remember(Record(s.swap, s.model, s.version, outcome, "", report.reason, 0.0, written))
        self.next(state, now)

    def _report(self, state: ModelState, running: Running, now: float) -> SwapReport:
        verified = self._model_config(state).verify
        return swap_report(running.swap, running.members, running.sources, running.kind, now, verified)

    def _remember(self, record: Record) -> None:
        """Have it written how a swap ended, now."""
        self._out(Remember(replace(record, at=self._wall_clock())))

    def ended_late(self, records: Iterable[Record]) -> None:
        """Have it written how swaps of an earlier coordinator ended."""
        for record in records:
            state = self._models.get(record.model)
            if state is not None and state.last is not None and state.last.swap == record.swap:
                state.last = written_report(record)
            r = record
            self._log("swap", swap=r.swap, model=r.model, version=r.version, phase=r.state, reason=r.reason)
            self._remember(record)

    def abort(self, state: ModelState, reason: str, now: float) -> None:
        """End the running swap because somebody asked for it.

        Raises:
            RefusedError: none runs, or it is decided.
        """
        model, running = state.fleet.name, state.running
        if running is None:
            raise RefusedError(f"model {model!r}: no swap is running")
        if running.swap.phase is Phase.COMMITTING:
            raise RefusedError(
                f"model {model!r}: swap {running.swap.swap} is decided and being committed; it cannot be aborted"
            )
        self.step(state, machine.AbortAsked(f"aborted on request: {reason or 'no reason given'}"), now)

    def tick(self, now: float) -> None:
        """Let time pass for what runs and what waits."""
        self.ended_late(self._unfinished.tick(now))
        for state in list(self._models.values()):
            if state.running is not None:
                self.step(state, machine.TimePassed(), now)
            elif try_again(state, now):
                self._catch_up(state, now)
            for queued in [q for q in state.queue if now >= q.deadline]:
                state.queue.remove(queued)
                late = f"model {state.fleet.name!r}: a swap before it runs for too long; see `refitctl status`"
                self._send(*queued.waiter, local.Failure(code=DeadlineExceeded.code, message=late))

    # --- output -------------------------------------------------------------------------------------------

    def _model_config(self, state: ModelState) -> ModelConfig:
        return self._config.models.get(state.fleet.name, ModelConfig())

    def _send(self, identity: bytes, request: int, message: Message) -> None:
        self._out(Send(identity, request, message))

    def _to_node(self, name: str, message: Message) -> None:
        node = self._nodes.get(name)
        if node is not None:
            self._send(node.identity, 0, message)

    def _log(self, event: str, **fields: object) -> None:
        self._out(Log(event, fields))
