"""The coordinator's state: takes events, returns effects. It has no sockets, no clock and no callbacks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from refitd.clusters import ClusterSpeeds
from refitd.commit import swap_events
from refitd.config import Config
from refitd.coordinator import (
    controllers,
    nodes,
    preparation,
    publications,
    registrations,
    swap_queue,
    swaps,
)
from refitd.coordinator.actions import (
    DrainWritten,
    Event,
    FilesRead,
    FromNode,
    Instruction,
    JournalWritten,
    Planned,
    ReadFiles,
    Waiter,
)
from refitd.coordinator.descriptions import unpack_shard
from refitd.coordinator.eligibility import unrounded_by
from refitd.coordinator.fleet import MAX_HISTORY, Fleet, Ids, Models, ModelState, Turn
from refitd.coordinator.inquiries import Traces
from refitd.coordinator.journals import Drained, Journal, KnownNode, SwapRecord
from refitd.coordinator.live_versions import AbsentRanks, LiveVersions, Recovery
from refitd.coordinator.members import Node
from refitd.coordinator.nodes import NODE_SILENCE_S
from refitd.coordinator.reports import history_report, model_description, status_report
from refitd.errors import RefitdError, RefusedError
from refitd.protocol import cluster, local
from refitd.protocol.base import Message
from refitd.protocol.keys import ALL_ROLES, check_names, check_role
from refitd.protocol.reports import GetTrace, NodeTrace
from refitd.states import Busy, Tick


class CoordinatorState(Fleet):
    """The coordinator's state and its one method that changes it, `handle`.

    A deep copy is independent: `copy.handle(event, now)` returns what the original would, and the original does not
    change. They share the journal that `past` reads.
    """

    def __init__(
        self,
        config: Config,
        boot: str,
        pid: int,
        started: float,
        ids: Ids,
        past: Journal,
        *,
        is_standalone: bool = False,
        host: str = "",
        drained: Drained | None = None,
        known: Iterable[KnownNode] = (),
        wall: float = 0.0,
        speeds: ClusterSpeeds | None = None,
        max_files: int = 1 << 20,
    ) -> None:
        """Start without members.

        Args:
            config: of this process.
            boot: identifies this process.
            pid: of this process.
            started: the time now, of the clock that `handle` is given.
            ids: makes ids and keys.
            past: the journal, which this object only reads.
            is_standalone: a standalone daemon started this process.
            host: name of this host, for reports.
            drained: the nodes that the journal knows as drained.
            known: the nodes that the journal knows as connected or lost.
            wall: the time now, in seconds since the epoch.
            speeds: of the nodes' cables; None: all are equally fast.
            max_files: see Fleet.
        """
        models, swapping = Models(), dict[str, ModelState]()
        ended = past.recent("", MAX_HISTORY)
        # by this time every living rank has registered again and reached a commit point
        late = started + NODE_SILENCE_S + config.deadlines.commit_s
        absent = AbsentRanks(started + config.deadlines.lease_s)
        absent.journalled(ended, limit=MAX_HISTORY)
        super().__init__(
            config,
            boot,
            pid,
            started,
            host,
            past,
            ids,
            LiveVersions(past, started, is_standalone),
            Recovery(ended, late),
            absent,
            {} if drained is None else drained,
            models,
            swapping,
            Traces(host),
            speeds,
            max_files,
        )
        nodes.remember(self, known, ended, wall)

    def handle(self, event: Event, now: float, wall: float = 0.0) -> list[Instruction]:
        """Handle an event; return the effects that the caller must perform, in order.

        A refused request leaves the state unchanged.

        Args:
            event: the event.
            now: the time, in seconds of a monotonic clock.
            wall: the time, in seconds since the epoch; the journal and traces record it.
        """
        turn = Turn(now, wall, self)
        match event:
            case FromNode():
                _from_node(turn, event)
                if not self.may_swap and self.nodes and not self.absent.awaits_any:
                    # a swap that begins before a rank has returned leaves it out, and waits for its permit to end
                    self.lives.heard()
                    swap_queue.settle_all(turn)
            case Planned():
                preparation.planned(turn, event)
            case FilesRead():
                nodes.files_read(turn, event)
            case DrainWritten():
                nodes.drain_written(turn, event)
            case JournalWritten(written, None, sequences):
                for swap, sequence in zip(written, sequences, strict=True):
                    swaps.journalled(turn, swap, sequence)
            case JournalWritten(written, error):
                turn.events += ((swap, swap_events.NotJournalled(str(error))) for swap in written)
                if self.undone:
                    swap_queue.settle_answered(turn, written)
            case Busy(seconds):
                for node in self.nodes.values():
                    node.last_heard = min(now, node.last_heard + seconds)  # a node that was heard keeps its time
            case Tick():
                _tick(turn)
        swaps.run(turn)
        if self.undone and isinstance(event, JournalWritten):
            swap_queue.settle_answered(turn, event.swaps)
            swaps.run(turn)
        while turn.due:
            name = next(iter(turn.due))
            del turn.due[name]
            if (state := self.models.get(name)) is not None:
                swap_queue.begin_due(turn, state)
                swaps.run(turn)
        if self.unsent:
            preparation.send_plans(turn)
        return turn.effects

    def next_deadline(self) -> float | None:
        """Return when a Tick is next needed; None if no deadline is set."""
        if self.unsent:
            return self.started  # now
        found: list[float | None] = [check.deadline for check in self.checks.running.values()]
        found += [collection.deadline for collection in self.traces.running.values()]
        found += [controller.due_at for controller in self.controllers.values()]
        if not self.may_swap:
            found.append(self.lives.deadline())
        for state in self.models.values():
            found += [state.gathers_until, *(queued.deadline for queued in state.queue)]
            if state.steps.waiting:
                found.append(state.steps.next_deadline())
            if (running := state.running) is not None:
                found += [running.swap.deadline, running.answer_by]
                if running.comparison is not None and running.comparison.waiting:
                    found.append(running.comparison.deadline)
        return min((at for at in found if at is not None), default=None)


def _from_node(turn: Turn, event: FromNode) -> None:
    waiter, message = (event.identity, event.request), event.message
    if isinstance(message, cluster.NodeHello):
        nodes.hello(turn, event, message)
        return
    node = turn.fleet.node_at.get(event.identity)
    if node is None or node.key != event.key:
        # the daemon's connection is older than this coordinator: ask for NodeHello again
        turn.send(waiter, local.Failure(code="unknown-node", message="say NodeHello first"))
        return
    node.last_heard, name = turn.now, node.status.node
    try:
        check_names(message)
        if node.allowed.roles != ALL_ROLES:
            check_role(message, node.allowed.roles, f"the key of node {name!r}", "its line of security.allowed")
        reply = _handle(turn, node, event)
    except RefitdError as exc:
        turn.log("refused", node=name, message=type(message).__name__, reason=str(exc))
        turn.send(waiter, local.Failure(code=exc.code, message=str(exc)))
        return
    if reply is not None:
        turn.send(waiter, reply)
    match message:
        case cluster.AddShard(is_question=True):
            pass
        case cluster.AddShard() | local.RegisterController():
            # only after the reply: a rank must know that it is registered before a controller or swap addresses it
            controllers.ranks_changed(turn, message.model, message.replica)
            turn.due[message.model] = None


def _handle(turn: Turn, node: Node, event: FromNode) -> Message | None:
    """Handle a message of a known node; return the reply, None if it has none or gets it later."""
    fleet, name, waiter = turn.fleet, node.status.node, (event.identity, event.request)
    match event.message:
        # --- swaps
        case cluster.StageProgress() as message:
            swaps.progressed(turn, name, message)
        case cluster.StageDone(swap, where=where, reason=reason) if reason:
            turn.post(swap, swap_events.NodeFailed(name, where, reason))
        case cluster.StageDone() as done:
            swaps.staged(turn, name, done)
        case local.StepReached() as message:
            swaps.reached(turn, fleet.own(name, message.member), message)
        case local.CommitDone() as message:
            swaps.committed(turn, fleet.own(name, message.member), message)
        case local.CommitFailed() as message:
            swaps.commit_failed(turn, fleet.own(name, message.member), message)
        case local.Controlled() as message:
            controllers.said(turn, name, message)
        case cluster.PlanLoaded(plan, epoch, where, reason) if reason:
            preparation.lost(turn, name, plan, epoch, where, reason)
        case cluster.PlanLoaded(missing=missing) as message if missing:
            preparation.lacks_parts(turn, name, message)
        case cluster.PlanLoaded() as message:
            preparation.loaded(turn, name, message)
        case cluster.RegionsDigested() as message:
            preparation.digested(turn, name, message)
        # --- members
        case cluster.NodeUpdate() as message:
            nodes.updated(turn, node, message)
            return cluster.HeartbeatAnswer(turn.now)
        case local.Goodbye():
            registrations.forget_node(turn, name, "its daemon was stopped", event="node-left")
        case cluster.DescribeShard(digest, packed):
            read = event.read or unpack_shard(packed, digest, fleet.descriptions.lists)
            fleet.descriptions.take(digest, read, lambda: {m.added.digest for m in fleet.members.values()})
        case cluster.AddShard() as message:
            return registrations.add(turn, node, message)
        case local.Deregister(member_id, reason, is_detached):
            if (member := fleet.own(name, member_id)) is None:
                registrations.remove_controller(turn, member_id, name, reason)
            elif is_detached:
                registrations.detach(turn, member, reason)
            else:
                registrations.remove(turn, member, reason)
        case local.Suspend() as message:
            registrations.suspend(turn, fleet.member(name, message.member), message)
            return local.Done()
        case local.RegisterController() as message:
            registrations.add_controller(turn, node, message)
            return local.Done()
        case local.Publish() as message:
            publications.published(turn, fleet.member(name, message.member), message)
            return local.Done()
        case local.Withdraw(member_id, version):
            publications.withdrawn(turn, fleet.own(name, member_id), version)
        case local.BeginPublish(member_id, version, is_writing=True):
            publications.begun(turn, fleet.member(name, member_id), version)
        case local.BeginPublish(member_id, slots=slots):
            publications.wants_room(turn, fleet.member(name, member_id), slots)
        # --- requests of operators and clients
        case local.StartSwap() as message:
            swap_queue.start(turn, message, waiter)
        case local.StartSwaps() as message:
            swap_queue.start_together(turn, message, waiter)
        case local.AbortSwap(model, reason):
            swaps.abort(turn, fleet.models.named(model), reason)
            return local.Done()
        case local.GetHistory(model, limit):
            return history_report(_past_swaps(fleet, model, limit))
        case local.Evict() as message:
            return registrations.evict(turn, message)
        case local.Forget("", lost):
            return nodes.forget_lost(turn, lost)
        case local.Forget(model):
            _check_known(fleet, model)
            return registrations.forget(turn, model)
        case local.Reload():
            turn.effects.append(ReadFiles(waiter))
        case local.DrainNode(drained, True):
            nodes.drain(turn, drained, waiter)
        case local.DrainNode(resumed):
            nodes.resume(turn, resumed, waiter)
        case local.Verify(model, timeout_s):
            _verify(turn, model, timeout_s, waiter)
        case cluster.MembersChecked() as message:
            for one in message.members:
                fleet.own(name, one.member)
            turn.answer_checks(fleet.checks.answered(message, turn.now))
        case GetTrace() as message:
            _check_known(fleet, message.model)
            _collect_trace(turn, message, waiter)
        case NodeTrace() as message:
            turn.answer_traces(fleet.traces.answered(name, message))
        case local.GetStatus():
            return status_report(fleet, turn.now)
        case local.GetDescription(model):
            return model_description(fleet.models.named(model).membership)
        case local.GetUnrounded(member_id):
            found = fleet.member(name, member_id)
            state = fleet.models[found.added.model]
            return local.Unrounded(unrounded_by(state.membership, found), state.takes_part(found))
        case local.GetPlan(model):
            preparation.show(turn, fleet.models.named(model), waiter)
        case _:  # from a newer daemon
            pass
    return None


def _past_swaps(fleet: Fleet, model: str, limit: int) -> Sequence[SwapRecord]:
    """Return the last swaps of a model, "" for all."""
    if model:
        _check_known(fleet, model)
    return fleet.past.recent(model, min(limit, MAX_HISTORY))


def _check_known(fleet: Fleet, model: str) -> None:
    """Raise RefusedError, which lists the known models, if a model is neither registered nor in the journal."""
    if model in fleet.models or fleet.past.recent(model, 1):
        return
    written = (record.model for record in fleet.past.recent("", MAX_HISTORY))
    known = {*fleet.models, *fleet.lives.models(), *written}
    if model not in known:
        raise RefusedError(f"no model {model!r} is known; known models: {', '.join(sorted(known)) or 'none'}")


def _verify(turn: Turn, model: str, timeout_s: float, waiter: Waiter) -> None:
    """Ask all nodes with targets of a model to verify their live weights; raises RefusedError as `Checks.begin`."""
    fleet = turn.fleet
    membership = fleet.models.named(model).membership
    check = f"{fleet.boot}.{fleet.number('inquiry')}"
    within_s = timeout_s or fleet.config.deadlines.request_s
    for node, message in fleet.checks.begin(check, membership, waiter, within_s, turn.now):
        turn.to_node(node, message)


def _collect_trace(turn: Turn, asked: GetTrace, waiter: Waiter) -> None:
    """Ask all nodes for their timelines of a swap; raises RefusedError as `Traces.begin`."""
    fleet = turn.fleet
    state, number = fleet.models.get(asked.model), f"{fleet.boot}.{fleet.number('inquiry')}"
    running = None if state is None or state.running is None else (state.running.swap, state.running.kind)
    message = fleet.traces.begin(number, asked, waiter, fleet.nodes.keys(), running, turn.now, turn.wall)
    for node in fleet.nodes:
        turn.to_node(node, message)


def _tick(turn: Turn) -> None:
    fleet, now = turn.fleet, turn.now
    turn.answer_checks(fleet.checks.tick(now))
    turn.answer_traces(fleet.traces.tick(now))
    fleet.lives.settle(now)
    swap_queue.settle_all(turn)
    for name, node in list(fleet.nodes.items()):
        if now - node.last_heard > NODE_SILENCE_S:
            registrations.forget_node(turn, name, f"no word from it for {NODE_SILENCE_S:.0f} s")
    nodes.tick(turn)
    turn.note_ends(fleet.recovery.tick(now))
    controllers.tick(turn)
    swaps.run(turn)
    for state in list(fleet.models.values()):
        swaps.tick(turn, state)
        swap_queue.tick(turn, state)
