"""Running swaps: step their state machines and carry out the instructions, to the report.

`run` is the loop of all running swaps. Everything else posts events to the turn, and `run` handles them in order.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from refitd.commit import decision, swap_events
from refitd.commit.decision import FINAL, Phase
from refitd.commit.lockstep import CommitAtStep, Reached, Silent
from refitd.coordinator import controllers, preparation
from refitd.coordinator.actions import Decide, Remember
from refitd.coordinator.descriptions import MAX_BYTES
from refitd.coordinator.fleet import ModelState, Running, Together, Turn
from refitd.coordinator.journals import LiveVersion, SwapRecord
from refitd.coordinator.members import Member, by_node
from refitd.coordinator.paths import paths_of
from refitd.coordinator.reports import late_report, swap_progress, swap_report
from refitd.coordinator.schedule import left_behind, used_up
from refitd.errors import IllegalTransition, RefusedError
from refitd.protocol import cluster, local
from refitd.protocol.reports import SwapReport, SwapReports
from refitd.states import SwapCause

# --- the machine ------------------------------------------------------------------------------------------


def run(turn: Turn) -> None:
    """Handle the posted events of running swaps until none is left; ignore events of ended swaps."""
    while turn.events:
        swap, event = turn.events.popleft()
        state = turn.fleet.swapping.get(swap)
        if state is None or state.running is None:
            continue
        running = state.running
        if (instructions := _move(turn, running, event)) is None:
            continue
        moved = running.swap
        _perform(turn, state, running, instructions)
        # after the instructions, which it would delay; a later step that they led to has been reported
        if running.is_watched and running.swap is moved and (progress := swap_progress(moved)) is not None:
            for waiter in running.waiters:
                turn.send(waiter, progress)


def _move(turn: Turn, running: Running, event: swap_events.Event) -> list[swap_events.Instruction] | None:
    """Step a swap's state machine; return its instructions, None if it refuses the event."""
    before = running.swap.phase
    try:
        running.swap, instructions = decision.step(running.swap, event, turn.now)
    except IllegalTransition as exc:
        turn.log("illegal", reason=str(exc))
        return None
    s = running.swap
    if s.phase is not before and s.phase not in FINAL:
        turn.log("swap", swap=s.swap, model=s.model, version=s.version, phase=s.phase.value, reason=s.reason)
    return instructions


def _perform(turn: Turn, state: ModelState, running: Running, instructions: list[swap_events.Instruction]) -> None:
    kinds, s, plan = {type(instruction) for instruction in instructions}, running.swap, running.plan
    # found once for all instructions of a step: there is one for each of thousands of nodes
    needs_targets = not kinds.isdisjoint((swap_events.StageOn, swap_events.CommitOn))
    targets = by_node(running.membership.targets.values()) if needs_targets else {}
    stage: cluster.Stage | None = None
    for instruction in instructions:
        match instruction:
            case swap_events.SendPlan(node):
                turn.fleet.unsent.append((s.swap, node))
            case swap_events.PauseOn(_, members):
                controllers.pause(turn, s, members)
            case swap_events.StageOn(node) if plan is None:
                ids = tuple(m.id for m in targets.get(node, ()))
                turn.to_node(node, cluster.Stage(s.swap, "", s.version, run=running.run, members=ids))
            case swap_events.StageOn(node):
                assert plan is not None
                for member in targets.get(node, ()):
                    member.arenas.spare = None  # it is staged into
                    member.arenas.gives &= member.added.flips
                stage = stage or _stage(turn, state, running, plan.id)
                turn.to_node(node, stage)
            case swap_events.ReleaseSources() if running.flips_back:
                pass
            case swap_events.ReleaseSources():
                # the leases of sources that were not read end too; seeds have none
                givers = running.membership.seeds.values() or state.membership.sources.values()
                for node, there in sorted(by_node(givers).items()):
                    of_run = tuple(sorted(m.id for m in there if m.run == running.run))
                    turn.to_node(node, cluster.EndSwap(swap=s.swap, version=s.version, members=of_run))
            case swap_events.JournalDecision():
                decide(turn, state, running)
            case swap_events.CommitOn(node):
                ranks = [m for m in targets.get(node, ()) if m.id in s.members]
                for member in ranks:
                    member.pending = s.swap, s.version
                controllers.tell_staged(turn, node, ranks, s.swap, s.version, running.run)
            case swap_events.AbortOn(node, reason):
                turn.to_node(node, cluster.Abort(swap=s.swap, reason=reason))
            case swap_events.Finished():
                _finish(turn, state, running)


def _stage(turn: Turn, state: ModelState, running: Running, plan: str) -> cluster.Stage:
    """Return the order to stage; its base is the version that most targets serve, unless it is the swap's own."""
    s, this = running.swap, (running.version, running.run)
    served = Counter((m.version, m.run) for m in running.membership.targets.values() if m.version is not None)
    (base, base_run), _ = served.most_common(1)[0] if served else ((None, ""), 0)
    # shorter than the phase: the workers' errors, which name the late one, must arrive first
    timeout_s = max(0.05, 0.9 * (s.deadline - turn.now))
    verify = state.config.verify
    # only digests prove that bases are equal
    if (base, base_run) == this or not (turn.fleet.config.transport.deltas and verify):
        base, base_run = None, ""
    return cluster.Stage(s.swap, plan, s.version, timeout_s, verify, running.run, base, base_run)


# --- the decision -----------------------------------------------------------------------------------------


def decide(turn: Turn, state: ModelState, running: Running) -> None:
    """Journal the decision with the ranks that must commit: a later coordinator can finish it.

    The decision for a new version waits while unreachable engines may serve the previous one. A joint one waits until
    all of its swaps are staged.
    """
    party = [(state, running)] if running.together is None else _party(turn, running.together)
    if running.together is not None and not _all_staged(running.together, party):
        limits = running.swap.limits
        late = turn.now + limits.plan_s + limits.stage_s + 2 * limits.pause_s
        turn.post(running.swap.swap, swap_events.DecisionHeld(late))
        return
    for one, its in party:
        if text := used_up(one, its.version, its.run):  # learned since the swap began
            turn.post(its.swap.swap, swap_events.AbortAsked(text, SwapCause.OVERTAKEN))
            return
    until = max(_held_until(turn, one, its) for one, its in party)
    if until > turn.now:
        for _, its in party:
            its.held_until = until
            turn.post(its.swap.swap, swap_events.DecisionHeld(until))
        return
    records = []
    for _, its in party:
        _move(turn, its, swap_events.DecisionSubmitted())
        its.held_until, s = None, its.swap
        report = msgspec.json.encode(swap_report(turn.fleet, its, turn.now))
        plan = its.plan.id if its.plan else ""
        records.append(SwapRecord(s.swap, s.model, s.version, "decided", plan, "", turn.wall, report, its.run))
    turn.effects.append(Decide(tuple(records)))


def _party(turn: Turn, together: Together) -> list[tuple[ModelState, Running]]:
    """Return the running swaps that are decided together."""
    states = [turn.fleet.models[name] for name in together.models if name in turn.fleet.models]
    return [(one, its) for one in states if (its := one.running) is not None and its.together is together]


def _all_staged(together: Together, party: list[tuple[ModelState, Running]]) -> bool:
    return len(party) == len(together.models) and all(its.swap.phase is Phase.STAGED for _, its in party)


def _held_until(turn: Turn, state: ModelState, running: Running) -> float:
    """Return until when unreachable engines may serve the previous version; 0 if none does."""
    s, fleet, live = running.swap, turn.fleet, state.live
    if live is not None and live.is_at(running.version, running.run):
        return 0.0
    may_be_unknown = fleet.lives.is_in_doubt or (live is not None and s.model not in fleet.absent.complete)
    until = fleet.absent.until(s.model, turn.now, may_be_unknown=may_be_unknown)
    if until > turn.now:
        absent = fleet.absent.describe(s.model) or "ranks that the journal does not name"
        turn.log("held", swap=s.swap, seconds=round(until - turn.now, 1), absent=absent)
    return until


def journalled(turn: Turn, swap: str, sequence: int) -> None:
    """Note that the decision is on disk, under this number."""
    state, lives = turn.fleet.swapping.get(swap), turn.fleet.lives
    if state is None or state.running is None:
        return
    running, model = state.running, state.membership.name
    state.live = LiveVersion(running.version, running.run, sequence, swap)
    claim = lives.decided(model, state.live)
    state.highest = claim.highest
    turn.fleet.absent.complete.add(model)  # its decisions wait for all ranks that were lost since
    # before any node commits: every daemon with a committed rank must know what is live, and a rank that registered
    # after the swap began must not serve its old version
    turn.tell_live(claim)
    for member in state.membership.targets.values():
        if member.id not in running.swap.members:
            turn.fence_unless_live(member)
    if running.controllers:
        controllers.note_decided(turn, running.swap)
    turn.post(swap, swap_events.Journalled())
    run(turn)
    for replica in sorted(state.membership.controllers):
        controllers.ranks_changed(turn, model, replica)


# --- what nodes and ranks report --------------------------------------------------------------------------


def progressed(turn: Turn, node: str, message: cluster.StageProgress) -> None:
    """Note how many bytes a node has staged; raises RefusedError for a number that cannot be right."""
    if message.bytes_done > MAX_BYTES:
        raise RefusedError(
            f"node {node!r} says it has staged {message.bytes_done} bytes, at most {MAX_BYTES} are believed"
        )
    turn.post(message.swap, swap_events.NodeProgress(node, message.bytes_done))


def staged(turn: Turn, node: str, done: cluster.StageDone) -> None:
    """Note that a node has staged and verified all that it receives; raises RefusedError as `progressed`."""
    if (nbytes := max(done.bytes, *msgspec.structs.astuple(done.crossing))) > MAX_BYTES:
        raise RefusedError(f"node {node!r} says it has staged {nbytes} bytes, at most {MAX_BYTES} are believed")
    state = turn.fleet.swapping.get(done.swap)
    running = None if state is None else state.running
    if running is not None and running.plan is not None and node in running.swap.nodes:
        running.plan.crossing_s[node] = done.crossing_s
        if running.plan.moves_between:
            running.crossing += done.crossing
        running.gpu_paths.update(done.paths)
    turn.post(done.swap, swap_events.NodeStaged(node, done.copies, done.bytes + done.converted_bytes))


def reached(turn: Turn, member: Member | None, message: local.StepReached) -> None:
    """Note how far a rank (None: it has left) with a decided version has polled."""
    if member is None:
        return
    if (controller := controllers.caller(turn, message.swap, member)) is not None:
        controllers.acked(turn, controller, member)
    elif member.staged == message.swap:
        polled_by = (member.place.node, member.added.pid, message.thread) if message.thread else None
        where = Reached(message.step, message.origin, message.stands, polled_by)
        state = turn.fleet.models[member.added.model]
        state.steps.reached(message.swap, member, where, turn.now)
        _flip(turn, state)


def _flip(turn: Turn, state: ModelState) -> None:
    """Tell lockstep ranks the poll of their flip; log ranks that may flip apart from their replica."""
    absent = turn.fleet.absent.by_replica(state.membership.name, turn.now)
    for order in state.steps.due(state.membership.targets.values(), turn.now, absent):
        swap, member = order.swap, order.member
        if isinstance(order, Silent):
            reason = "it has not said in which poll it is, and the other ranks stand in theirs until it does"
            turn.log("silent", swap=swap, member=member.id, node=member.node, reason=reason)
        elif not isinstance(order, CommitAtStep):
            turn.log("pass", swap=swap, member=member.id)
            turn.to_node(member.node, local.FlipAt(swap=swap, member=member.id))
        else:
            turn.to_node(member.node, local.FlipAt(swap, member.id, order.step, order.origin))
            if order.apart:
                turn.log("apart", swap=swap, member=member.id, step=order.step, reason=order.apart)
                if state.running is not None and state.running.swap.swap == swap:
                    state.running.apart[(member.added.replica, member.added.rank)] = order.apart


def committed(turn: Turn, member: Member | None, message: local.CommitDone) -> None:
    """Note that a rank (None: it has left) serves a decided version."""
    swap = message.swap
    turn.post(swap, swap_events.CommitReported(message.member, message.paused_s))
    if member is None:
        return
    arenas, catch_up = member.arenas, member.catch_up
    arenas.spare = None if message.spare is None else (message.spare, message.spare_run)
    arenas.gives, arenas.unfit, arenas.alone = message.seeds, False, False
    model = member.added.model
    if member.staged == swap:
        member.pending, member.poisoned = None, ""
        catch_up.failed, catch_up.tries, catch_up.again_at = False, 0, None
        running = turn.fleet.models[model].running
        if running is not None and running.swap.swap == swap:
            member.version, member.run = running.version, running.run
        elif (found := turn.fleet.identity_of(swap)) is not None:
            member.version, member.run = found  # a late commit, or one decided before this coordinator started
            turn.note_ends(turn.fleet.recovery.committed(swap, member, message.paused_s))
            turn.fence_unless_live(member)
            turn.due[model] = None
    if turn.fleet.controllers:
        controllers.ranks_changed(turn, model, member.added.replica)


def commit_failed(turn: Turn, member: Member | None, message: local.CommitFailed) -> None:
    """Note that a rank (None: it has left) could not commit: it may have parts of two versions."""
    swap = message.swap
    turn.post(swap, swap_events.MemberFailed(message.member, message.reason))
    if member is None:
        return
    if member.staged == swap:
        member.pending = member.version = None
        turn.note_ends(turn.fleet.recovery.failed(swap, member, message.reason))
    controllers.ranks_changed(turn, member.added.model, member.added.replica)


# --- the end ----------------------------------------------------------------------------------------------


def _finish(turn: Turn, state: ModelState, running: Running) -> None:
    s = running.swap
    if s.phase is not Phase.COMMITTED:
        left_behind(state, running, turn.now)
    report = swap_report(turn.fleet, running, turn.now)
    if (plan := running.plan) is not None and s.phase is not Phase.ABORTED:
        wiring = preparation.wiring_of(turn, running.members.values(), plan)
        if plan.paths[0] != wiring:  # summed once for a plan, because it may have millions of rows
            plan.paths = wiring, paths_of(plan.routed, wiring)
        report = msgspec.structs.replace(report, paths=plan.paths[1])
    turn.log(
        "swap",
        swap=s.swap,
        model=s.model,
        version=s.version,
        phase=s.phase.value,
        reason=s.reason,
        kind=report.kind,
        ranks=len(report.members),
        bytes=report.bytes,
        plan_s=report.plan_s,
        pause_s=report.pause_s,
        stage_s=report.stage_s,
        commit_s=report.commit_s,
        total_s=report.total_s,
    )
    state.running, state.last = None, report
    del turn.fleet.swapping[s.swap]
    turn.fleet.traces.ended(s, report, turn.wall)
    if s.phase is Phase.ABORTED or running.plan is not state.plan:
        preparation.ended(turn, state, running)
    if s.phase is Phase.ABORTED:
        controllers.aborted(turn, s.swap)
    outcome, written = report.outcome, msgspec.json.encode(report)
    _answer(turn, running, report)
    # callers need not wait for this write: the decision is on disk
    record = SwapRecord(s.swap, s.model, s.version, outcome, "", report.reason, turn.wall, written, running.run)
    turn.effects.append(Remember(record))
    if s.phase is Phase.ABORTED and running.together is not None and not running.together.aborted:
        _abort_party(turn, running.together, s)
    turn.due[s.model] = None


def _abort_party(turn: Turn, together: Together, aborted: decision.Swap) -> None:
    """Abort the other swaps of a joint one."""
    reason = f"it was to be decided together with model {aborted.model!r}, whose swap was aborted: {aborted.reason}"
    together.aborted = reason
    for name in together.models:
        state = turn.fleet.models.get(name)
        if state is not None and state.running is not None and state.running.together is together:
            turn.post(state.running.swap.swap, swap_events.AbortAsked(reason, SwapCause.TOGETHER))


def _answer(turn: Turn, running: Running, report: SwapReport) -> None:
    """Answer the callers of a swap; of a joint swap, once all of its swaps have a report."""
    answer: SwapReport | SwapReports = report
    if (party := running.together) is not None:
        is_new = report.model not in party.reports
        party.reports[report.model] = report
        if not is_new or len(party.reports) < len(party.models):
            return
        answer = SwapReports(tuple(party.reports[name] for name in party.models))
    for waiter in running.waiters:
        turn.send(waiter, answer)


def abort(turn: Turn, state: ModelState, reason: str) -> None:
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
    text = f"aborted on request: {reason or 'no reason given'}"
    turn.post(running.swap.swap, swap_events.AbortAsked(text))
    run(turn)


def tick(turn: Turn, state: ModelState) -> None:
    """Apply the deadlines of a model's running swap."""
    if state.steps.waiting:
        _flip(turn, state)
    running = state.running
    if running is not None and running.is_due(turn.now):
        decide(turn, state, running)
        run(turn)
    elif running is not None:
        preparation.tick(turn, running)
        turn.post(running.swap.swap, swap_events.TimePassed())
        run(turn)
        _answer_in_time(turn, state)


def _answer_in_time(turn: Turn, state: ModelState) -> None:
    """Answer callers whose timeout has passed: the swap is decided and continues, some ranks are late."""
    running = state.running
    if running is None or running.answer_by is None or turn.now < running.answer_by:
        return
    if running.swap.phase is not Phase.COMMITTING:
        return  # it ends now, by the same deadline
    report = late_report(swap_report(turn.fleet, running, turn.now), running.swap, turn.now)
    turn.log("answered-in-time", swap=running.swap.swap, model=running.swap.model, reason=report.reason)
    _answer(turn, running, report)
    running.waiters.clear()
    running.answer_by = None
