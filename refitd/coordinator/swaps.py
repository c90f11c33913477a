"""Running swaps: step their state machines and carry out the instructions, to the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property

import msgspec

from refitd.config import Config, ModelConfig
from refitd.coordinator import decision, together
from refitd.coordinator.absent import AbsentRanks
from refitd.coordinator.actions import Decide, Instruction, Remember, Send
from refitd.coordinator.controllers import Controllers
from refitd.coordinator.decision import Phase
from refitd.coordinator.fences import Fences
from refitd.coordinator.live_versions import LiveVersions
from refitd.coordinator.members import Member, Node, by_node
from refitd.coordinator.models import Models, ModelState, Running
from refitd.coordinator.preparation import Preparation
from refitd.coordinator.records import LiveVersion, SwapRecord
from refitd.coordinator.recovery import Recovery
from refitd.coordinator.report import (
    apart_report,
    decided_report,
    late_report,
    swap_progress,
    swap_report,
    written_report,
)
from refitd.coordinator.schedule import left_behind, used_up
from refitd.coordinator.status import refused_of
from refitd.coordinator.steps import CommitAtStep, Silent
from refitd.coordinator.swap_queue import SwapQueue
from refitd.coordinator.traces import Traces
from refitd.errors import IllegalTransition, RefitdError, RefusedError
from refitd.events import Log
from refitd.lockstep import Reached
from refitd.protocol import cluster, control
from refitd.protocol.base import Message
from refitd.protocol.reports import SwapReport
from refitd.states import SwapCause


class _Ends:
    """A swap's targets, found once for all instructions of one step: there is one for each of thousands of nodes."""

    def __init__(self, running: Running) -> None:
        self._running = running

    @cached_property
    def base(self) -> tuple[int, str] | None:
        """See Running.base."""
        return self._running.base()

    @cached_property
    def _by_node(self) -> dict[str, list[Member]]:
        return by_node(self._running.membership.targets.values())

    def targets(self, node: str) -> list[Member]:
        """Return the targets on a node."""
        return self._by_node.get(node, [])


class Swaps:
    """Begins due swaps and runs them to their end. Instructions go to `out`."""

    def __init__(
        self,
        config: Config,
        boot: str,
        nodes: dict[str, Node],
        models: Models,
        members: dict[str, Member],
        new_swap_id: Callable[[], str],
        wall_clock: Callable[[], float],
        decided: Callable[[str], SwapRecord | None],
        lives: LiveVersions,
        recovery: Recovery,
        absent: AbsentRanks,
        traces: Traces,
        out: Callable[[Instruction], None],
    ) -> None:
        self._config = config
        self._nodes = nodes
        self._models = models
        self._members = members
        self._wall_clock = wall_clock
        self._lives = lives
        self._recovery = recovery
        self._absent = absent
        self._traces = traces
        self._out = out
        self.fences = Fences(nodes, models, lives, decided, self._to_node)
        self.preparation = Preparation(config, boot, nodes, models, self.step, out, self._to_node, self._log)
        self.queue = SwapQueue(
            config,
            models,
            new_swap_id,
            lives,
            lambda model: self.ended_late(recovery.replaced(model)),
            self.preparation.begin,
            self.step,
            self._send,
            self._log,
        )
        self.controllers = Controllers(
            models, self._to_node, self.step_swap, self.fences.identity_of, self._tell_staged, self._log
        )

    # --- events of nodes ----------------------------------------------------------------------------------

    def node_said(self, name: str, message: cluster.NodeMessage, now: float) -> None:
        """Handle a node's message about its part in a swap."""
        match message:
            case (
                cluster.PlanLoaded()
                | cluster.PlanRefused()
                | cluster.PartsMissing()
                | cluster.EpochLost()
                | cluster.EpochPut()
                | cluster.RegionsDigested()
            ):
                self.preparation.node_said(name, message, now)
            case cluster.StageProgress(swap, bytes_done):
                self.step_swap(swap, decision.NodeProgress(name, bytes_done), now)
            case cluster.StageDone(swap, copies, nbytes, _, crossing_s, _, converted, crossing):
                found = self._models.swapping(swap)
                running = found.running if found is not None else None
                if running is not None and running.plan is not None and name in running.swap.nodes:
                    running.plan.crossing_s[name] = crossing_s
                    running.crossing += crossing
                self.step_swap(swap, decision.NodeStaged(name, copies, nbytes + converted), now)
            case cluster.StageFailed(swap, where, reason):
                self.step_swap(swap, decision.NodeFailed(name, where, reason), now)
            case cluster.MemberQuiet(swap, member):
                self.step_swap(swap, decision.QuietReported(member), now)
            case cluster.MemberStep(swap, member, step, origin, stands, thread):
                found_member = self._members.get(member)
                if found_member is not None and self.controllers.controls(swap, found_member):
                    self.controllers.acked(swap, found_member, now)
                elif found_member is not None and found_member.staged == swap:
                    polled_by = (name, found_member.added.pid, thread) if thread else None
                    state = self._models[found_member.added.model]
                    state.steps.reached(swap, found_member, Reached(step, origin, stands, polled_by), now)
                    self._flip(state, now)
            case cluster.MemberCommitted(swap, member, paused_s, spare, spare_run, seeds):
                if (committed := self._members.get(member)) is not None:
                    committed.spare = None if spare is None else (spare, spare_run)
                    committed.seeds, committed.unfit, committed.seeded_alone = seeds, False, False
                self._member_committed(swap, member, paused_s, now)
            case cluster.MemberCommitFailed(swap, member, reason):
                self._member_failed(swap, member, reason, now)
            case control.Controlled():
                self.controllers.said(name, message, now)
            case _:
                pass

    def _flip(self, state: ModelState, now: float) -> None:
        """Tell lockstep ranks in which poll they flip; log ranks that may flip apart from their replica."""
        absent = self._absent.by_replica(state.membership.name, now)
        for told in state.steps.due(state.membership.targets.values(), now, absent):
            swap, member = told.swap, told.member
            if isinstance(told, Silent):
                reason = "it has not said in which poll it is, and the other ranks stand in theirs until it does"
                self._log("silent", swap=swap, member=member.id, node=member.node, reason=reason)
                continue
            if not isinstance(told, CommitAtStep):
                self._log("pass", swap=swap, member=member.id)
                self._to_node(member.node, cluster.PassMember(swap=swap, member=member.id))
                continue
            self._to_node(member.node, cluster.FlipMember(swap, member.id, told.step, told.origin))
            if told.apart:
                self._log("apart", swap=swap, member=member.id, step=told.step, reason=told.apart)
                if state.running is not None and state.running.swap.swap == swap:
                    state.running.apart[(member.added.replica, member.added.rank)] = told.apart

    def _member_committed(self, swap: str, member_id: str, paused_s: float, now: float) -> None:
        member = self._members.get(member_id)
        if member is not None and member.staged == swap:
            member.staged = None
            member.poisoned, member.left_behind = "", False
            member.tries, member.again_at = 0, None
            running = self._models[member.added.model].running
            if running is not None and running.swap.swap == swap:
                member.version, member.run = running.version, running.run
            elif (found := self.fences.identity_of(swap)) is not None:
                member.version, member.run = found  # a late commit, or one decided before this coordinator started
                self.ended_late(self._recovery.committed(swap, member, paused_s))
                self.fences.fence_unless_live(member)
                self.controllers.ranks_changed(member.added.model, member.added.replica, now)
                self.queue.next(self._models[member.added.model], now)
        self.step_swap(swap, decision.CommitReported(member_id, paused_s), now)
        if member is not None:
            self.controllers.ranks_changed(member.added.model, member.added.replica, now)

    def _member_failed(self, swap: str, member_id: str, reason: str, now: float) -> None:
        member = self._members.get(member_id)
        if member is not None and member.staged == swap:
            member.staged, member.version = None, None  # it may hold parts of two versions
            self.ended_late(self._recovery.failed(swap, member, reason))
        self.step_swap(swap, decision.MemberFailed(member_id, reason), now)
        if member is not None:
            self.controllers.ranks_changed(member.added.model, member.added.replica, now)

    # --- steps --------------------------------------------------------------------------------------------

    def step_swap(self, swap: str, event: decision.Event, now: float) -> None:
        """Step a swap's state machine, if the swap is running."""
        state = self._models.swapping(swap)
        if state is not None:
            self.step(state, event, now)

    def step(self, state: ModelState, event: decision.Event, now: float) -> None:
        """Step the state machine of a model's running swap and carry out its instructions."""
        running = state.running
        if running is None:
            return
        before = running.swap.phase
        try:
            running.swap, instructions = decision.step(running.swap, event, now)
        except IllegalTransition as exc:
            self._log("illegal", reason=str(exc))
            return
        if running.swap.phase is not before:
            s = running.swap
            self._log("swap", swap=s.swap, model=s.model, version=s.version, phase=s.phase.value, reason=s.reason)
        stepped = running.swap
        ends = _Ends(running)
        for instruction in instructions:
            self._perform(state, running, instruction, ends, now)
        # after the instructions, which it would delay; an instruction may have led to a later step, already reported
        if running.is_watched and running.swap is stepped and (progress := swap_progress(stepped)) is not None:
            for waiter in running.waiters:
                self._send(*waiter, progress)

    def _tell_staged(self, ranks: Iterable[Member], swap: str, version: int, run: str) -> None:
        """Tell ranks that the version they have staged is decided; a controller calls those that it controls."""
        for node, there in sorted(by_node(ranks).items()):
            called = tuple(m.id for m in there if self.controllers.controls(swap, m))
            self._to_node(node, cluster.CommitStaged(swap=swap, version=version, run=run, controlled=called))

    def _perform(
        self, state: ModelState, running: Running, instruction: decision.Instruction, ends: _Ends, now: float
    ) -> None:
        s, plan = running.swap, running.plan
        match instruction:
            case decision.SendPlan() if running.flips_back:
                pass
            case decision.SendPlan(node):
                self.preparation.load(state, running, node, now)
            case decision.PauseOn(node, members):
                self.controllers.pause(s.swap, s.version, members)
                if asked := tuple(member for member in members if member not in self.controllers):
                    self._to_node(node, cluster.Pause(swap=s.swap, version=s.version, members=asked))
            case decision.StageOn(node) if running.flips_back:
                ids = tuple(m.id for m in ends.targets(node))
                self._to_node(node, cluster.StageSpare(s.swap, s.version, running.run, ids))
            case decision.StageOn(node):
                assert plan is not None
                for member in ends.targets(node):
                    member.spare = None  # it is staged into
                    member.seeds &= member.added.flips
                # shorter than the phase, so that the workers' own errors, which name who is late, arrive first
                timeout_s = max(0.05, 0.9 * (s.deadline - now))
                verify = self._model_config(state).verify
                deltas = self._config.transport.deltas and verify  # only digests prove that bases are the same
                base, base_run = (ends.base if deltas else None) or (None, "")
                stage = cluster.Stage(s.swap, plan.id, s.version, timeout_s, verify, running.run, base, base_run)
                self._to_node(node, stage)
            case decision.ReleaseSources() if running.flips_back:
                pass
            case decision.ReleaseSources():
                # sources that were not read end their leases, too; seeds have none
                givers = running.membership.seeds.values() or state.membership.sources.values()
                for node, there in sorted(by_node(givers).items()):
                    members = tuple(sorted(m.id for m in there if m.run == running.run))
                    self._to_node(node, cluster.EndSwap(swap=s.swap, version=s.version, members=members))
            case decision.JournalDecision():
                self._decide(state, running, now)
            case decision.CommitOn(node):
                ranks = [m for m in ends.targets(node) if m.id in s.members]
                for member in ranks:
                    member.staged, member.staged_version = s.swap, s.version
                self._tell_staged(ranks, s.swap, s.version, running.run)
            case decision.AbortOn(node, reason):
                self._to_node(node, cluster.Abort(swap=s.swap, reason=reason))
            case decision.Finished():
                self._finish(state, running, now)

    def _decide(self, state: ModelState, running: Running, now: float) -> None:
        """Journal the decision with the ranks that must commit, so that a later coordinator can finish it.

        The decision for a new version waits while unreachable engines may still serve the previous one; a joint one
        waits until all of its swaps have come so far.
        """
        party = together.party_of(self._models, state, running)
        if late := together.until_all_staged(running, party, now):
            self.step(state, decision.DecisionHeld(late), now)
            return
        for one, its in party:
            if text := used_up(one, its.version, its.run):  # learned since the swap began
                self.step(one, decision.AbortAsked(text, SwapCause.OVERTAKEN), now)
                return
        until = max(self._held_until(one, its, now) for one, its in party)
        if until > now:
            for one, its in party:
                its.held_until = until
                self.step(one, decision.DecisionHeld(until), now)
            return
        records = []
        for one, its in party:
            self.step(one, decision.DecisionSubmitted(), now)
            its.held_until, s = None, its.swap
            written = msgspec.json.encode(decided_report(self._report(one, its, now)))
            plan, at = its.plan.id if its.plan else "", self._wall_clock()
            records.append(SwapRecord(s.swap, s.model, s.version, "decided", plan, "", at, written, its.run))
        self._out(Decide(tuple(records)))

    def _held_until(self, state: ModelState, running: Running, now: float) -> float:
        """Return until when unreachable engines may serve the previous version; 0 if none does."""
        if running.is_live(state.live):
            return 0.0
        s = running.swap
        names_all = self._absent.names_all(s.model)
        unsure_until = self._lives.unsure_until(s.model, self._config.deadlines.lease_s, names_all=names_all)
        until = max(self._absent.until(s.model, now), unsure_until)
        if until > now:
            absent = self._absent.describe(s.model) or "ranks that the journal does not name"
            self._log("held", swap=s.swap, seconds=round(until - now, 1), absent=absent)
        return until

    def journalled(self, swap: str, error: RefitdError | None, now: float) -> None:
        """Handle the journal's result: the decision is on disk, or could not be written."""
        if error is not None:
            self.step_swap(swap, decision.NotJournalled(str(error)), now)
            return
        state = self._models.swapping(swap)
        if state is not None and state.running is not None:
            running, model = state.running, state.membership.name
            written = self._lives.past.live(model)
            sequence = written.sequence if written is not None and written.swap == swap else 0
            self._lives.decided(model, LiveVersion(running.version, running.run, sequence, swap))
            state.live, state.highest = self._lives.of(model), self._lives.highest(model)
            # before any node commits: every daemon with a committed rank must know what is live, and a rank that
            # registered after the swap began must not serve its old version
            self.fences.tell_live(model)
            for member in state.membership.targets.values():
                if member.id not in running.swap.members:
                    self.fences.fence_unless_live(member)
            self.controllers.decided(running.swap)
            self.step(state, decision.Journalled(), now)
            for controller in state.membership.in_control():
                self.controllers.ranks_changed(model, controller.added.replica, now)

    def _finish(self, state: ModelState, running: Running, now: float) -> None:
        left_behind(state, running, now)
        s = running.swap
        report = self._report(state, running, now)
        state.running, state.last = None, report
        self._traces.ended(s, report, self._wall_clock())
        self.preparation.ended(state, running)
        if s.phase is Phase.ABORTED:
            self.controllers.aborted(s.swap, now)
        outcome, written = report.outcome, msgspec.json.encode(report)
        self._answer(running, report)
        # callers need not wait for this write: the decision is on disk
        self._remember(SwapRecord(s.swap, s.model, s.version, outcome, "", report.reason, 0.0, written, running.run))
        if s.phase is Phase.ABORTED:
            for one, reason in together.also_aborted(self._models, running):
                self.step(one, decision.AbortAsked(reason, SwapCause.TOGETHER), now)
        self.queue.next(state, now)

    def _answer(self, running: Running, report: SwapReport) -> None:
        """Answer the callers of a swap; of a joint swap, once all of its swaps have a report."""
        for waiter in running.waiters:
            if running.together is None:
                self._send(*waiter, report)
            elif (reports := together.reported(running.together, report)) is not None:
                self._send(*waiter, reports)

    def _report(self, state: ModelState, running: Running, now: float) -> SwapReport:
        verified = self._model_config(state).verify
        seeds = {member.id for member in running.membership.seeds.values()}
        members = {name: member for name, member in running.members.items() if name not in seeds}
        report = swap_report(running.swap, members, running.sources, running.kind, now, verified)
        report = msgspec.structs.replace(
            report,
            run=running.run,
            suspended=running.suspended,
            drained=running.drained,
            crossing=running.crossing,
            refused=refused_of(self._nodes, state.membership.name),
        )
        return apart_report(report, running.apart)

    def _remember(self, record: SwapRecord) -> None:
        """Journal how a swap ended, with the current time."""
        self._out(Remember(replace(record, at=self._wall_clock())))

    def ended_late(self, records: Iterable[SwapRecord]) -> None:
        """Journal how swaps of earlier coordinators ended."""
        for record in records:
            state = self._models.get(record.model)
            if state is not None and state.last is not None and state.last.swap == record.swap:
                state.last = written_report(record)
            r = record
            self._log("swap", swap=r.swap, model=r.model, version=r.version, phase=r.state, reason=r.reason)
            self._remember(record)

    def abort(self, state: ModelState, reason: str, now: float) -> None:
        """Abort the running swap on request.

        Raises:
            RefusedError: no swap runs, or it is decided.
        """
        model, running = state.membership.name, state.running
        if running is None:
            raise RefusedError(f"model {model!r}: no swap is running")
        if running.swap.phase in (Phase.DECIDING, Phase.COMMITTING):
            raise RefusedError(
                f"model {model!r}: swap {running.swap.swap} is decided and being committed; it cannot be aborted"
            )
        self.step(state, decision.AbortAsked(f"aborted on request: {reason or 'no reason given'}"), now)

    def _answer_in_time(self, state: ModelState, now: float) -> None:
        """Answer callers whose timeout has passed: the swap is decided and goes on, some ranks are late."""
        running = state.running
        if running is None or running.answer_by is None or now < running.answer_by:
            return
        if running.swap.phase is not Phase.COMMITTING:
            return  # it ends now, by the same deadline
        report = late_report(self._report(state, running, now), running.swap, now)
        self._log("answered-in-time", swap=running.swap.swap, model=running.swap.model, reason=report.reason)
        self._answer(running, report)
        running.waiters.clear()
        running.answer_by = None

    def next_deadline(self) -> float | None:
        """Return the next deadline of running and queued swaps and waiting ranks; None if there is none."""
        found = [at for at in (self.controllers.next_deadline(),) if at is not None]
        for state in self._models.values():
            found += [queued.deadline for queued in state.queue]
            found += [at for at in (state.steps.next_deadline(), state.gathers_until) if at is not None]
            if state.running is not None:
                found.append(state.running.swap.deadline)
                if state.running.comparison is not None and state.running.comparison.waiting:
                    found.append(state.running.comparison.deadline)
                if state.running.answer_by is not None:
                    found.append(state.running.answer_by)
        return min(found, default=None)

    def tick(self, now: float) -> None:
        """Apply the deadlines of running and queued swaps."""
        self.ended_late(self._recovery.tick(now))
        self.controllers.tick(now)
        for state in list(self._models.values()):
            self._flip(state, now)
            running = state.running
            if running is not None and running.is_due(now):
                self._decide(state, running, now)
            elif running is not None:
                self.preparation.tick(state, running, now)
                self.step(state, decision.TimePassed(), now)
                self._answer_in_time(state, now)
            self.queue.tick(state, now)

    # --- output -------------------------------------------------------------------------------------------

    def _model_config(self, state: ModelState) -> ModelConfig:
        return self._config.models.get(state.membership.name, ModelConfig())

    def _send(self, identity: bytes, request: int, message: Message) -> None:
        self._out(Send(identity, request, message))

    def _to_node(self, name: str, message: Message) -> None:
        node = self._nodes.get(name)
        if node is not None:
            self._send(node.identity, 0, message)

    def _log(self, event: str, **fields: object) -> None:
        self._out(Log(event, fields))
