"""The coordinator's state without sockets: takes events, returns instructions."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from math import prod

from refitd.config import Config, ModelConfig
from refitd.coordinator import decision
from refitd.coordinator.absent import AbsentRanks
from refitd.coordinator.actions import (
    Answer,
    DrainWritten,
    Event,
    FromNode,
    Instruction,
    JournalWritten,
    KeysRead,
    Planned,
    ReadKeys,
    Remember,
    Send,
)
from refitd.coordinator.admission import (
    check_hello,
    check_message,
    check_replica,
)
from refitd.coordinator.descriptions import Descriptions, unpack_shard
from refitd.coordinator.drains import Drains
from refitd.coordinator.live_versions import LiveVersions, NoPast, Past
from refitd.coordinator.membership import Member, Model, Node, poison
from refitd.coordinator.models import MAX_HISTORY, Models, ModelState, Recent, Waiter
from refitd.coordinator.records import Drained, Record
from refitd.coordinator.recovery import Unfinished
from refitd.coordinator.removals import Removals
from refitd.coordinator.report import written_report
from refitd.coordinator.requirements import wanted_parts
from refitd.coordinator.source_versions import SourceVersions
from refitd.coordinator.status import history_report, status_report
from refitd.coordinator.swaps import Swaps
from refitd.coordinator.traces import Traces
from refitd.coordinator.verification import Checks
from refitd.dtypes import ELEMENT_SIZES
from refitd.errors import ProtocolError, RefitdError, RefusedError
from refitd.events import Busy, Log, Tick
from refitd.protocol import cluster, control, local, versions
from refitd.protocol.base import PROTOCOL_VERSION, Message
from refitd.protocol.reports import VerifyReport
from refitd.protocol.traces import GetTrace, NodeTrace, TraceReport
from refitd.states import SwapCause

# Daemons send a heartbeat every second. After this long without one a node's members count as lost.
NODE_SILENCE_S = 10.0


def _same(report: TraceReport) -> Message:
    return report


def _nothing(model: str, limit: int) -> Sequence[Record]:
    return ()


class Coordinator:
    """All of the coordinator's state. `handle` takes an event and returns instructions."""

    def __init__(
        self,
        config: Config,
        boot: str,
        pid: int,
        started: float,
        new_swap_id: Callable[[], str],
        wall_clock: Callable[[], float],
        decided: Callable[[str], Record | None],
        recent: Recent = _nothing,
        past: Past | None = None,
        is_beside: bool = False,
        new_run: Callable[[], str] = lambda: secrets.token_hex(4),
        host: str = "",
        drained: Drained | None = None,
    ) -> None:
        """Start empty. `decided`, `recent` and `past` read the journal, also entries of earlier coordinators.

        `drained` are the nodes that the journal knows as drained; the coordinator keeps them up to date there.

        `is_beside` says that a standalone daemon started this process. `new_run` returns a new run id.
        """
        self._config = config
        self._boot, self._pid, self._started = boot, pid, started
        self._decided, self._recent, self._wall_clock = decided, recent, wall_clock
        self.nodes: dict[str, Node] = {}
        self.models = Models()
        self._members: dict[str, Member] = {}
        self._checks = Checks()
        self.traces = Traces(host, self.models)
        self._new_run = new_run
        self._lives = LiveVersions(
            past or NoPast(), started, is_beside, lambda found: self._out.append(Remember(found)), wall_clock, self._log
        )
        self._began = False  # whether swaps may begin, and waiting callers were told so
        self._undone: dict[str, Member] = {}  # ranks with a staged version, while it is unknown whether it was decided
        self._numbers = 0
        self._out: list[Instruction] = []
        # by this time every living rank has registered again and reached a commit point
        late = started + NODE_SILENCE_S + config.deadlines.commit_s
        ended = recent("", MAX_HISTORY)
        self._unfinished = Unfinished(ended, late)
        self._absent = AbsentRanks()
        self._absent.journalled(ended, started + config.deadlines.lease_s)
        self.swaps = Swaps(
            config,
            boot,
            self.nodes,
            self.models,
            self._members,
            new_swap_id,
            wall_clock,
            decided,
            self._lives,
            self._unfinished,
            self._absent,
            self.traces,
            self._out.append,
        )
        self._drains = Drains(
            {} if drained is None else drained,
            self.nodes,
            self.models,
            self.swaps.next,
            self._out.append,
            self._send,
            self._log,
        )
        self._removals = Removals(self.nodes, self.models, self._remove, self._forget_node, self._to_node, self._log)
        self._descriptions = Descriptions(self.swaps.planning.reader)
        self._sources = SourceVersions(self._members, self._new_run, self._to_node, self._log)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Handle an event; return instructions. A refused request changes nothing."""
        match event:
            case FromNode():
                self._from_node(event, now)
                if not self._began and self.nodes and not self._absent.awaits_any:
                    # a swap that begins before a rank is back leaves it out, and waits for its permit to end
                    self._lives.heard(now)
                    self._begin_if_settled(now)
            case Planned():
                self.swaps.planned(event, now)
            case KeysRead(allowed, waiter):

                def tell(report: Message) -> None:
                    if waiter is not None:
                        self._send(*waiter, report)

                self._removals.keys_read(allowed, tell, now)
            case DrainWritten():
                self._drains.written(event, now)
            case JournalWritten(swaps, error):
                for swap in swaps:
                    self.swaps.journalled(swap, error, now)
            case Busy(seconds):
                for node in self.nodes.values():
                    node.last_heard = min(now, node.last_heard + seconds)  # nodes heard meanwhile gain nothing
            case Tick():
                self._tick(now)
        done = self._out[:]
        self._out.clear()
        return done

    # --- daemons ------------------------------------------------------------------------------------------

    @property
    def may_swap(self) -> bool:
        """Whether swaps may begin: it is certain which versions are live."""
        return self._began

    @property
    def drained(self) -> Collection[str]:
        """The drained nodes, connected or not."""
        return self._drains.nodes

    def knows(self, identity: bytes, key: str) -> bool:
        """Whether this connection belongs to a node; others may only send NodeHello."""
        return any(node.identity == identity and node.key == key for node in self.nodes.values())

    def _from_node(self, event: FromNode, now: float) -> None:
        identity, request, message = event.identity, event.request, event.message
        if isinstance(message, cluster.NodeHello):
            self._hello(event, message, now)
            return
        node = next((n for n in self.nodes.values() if n.identity == identity and n.key == event.key), None)
        if node is None:
            # the daemon's connection is older than this coordinator: ask for NodeHello again
            failure = local.Failure(code="unknown-node", message="say NodeHello first")
            self._send(identity, request, failure)
            return
        node.last_heard = now
        try:
            check_message(node, message, self._members)
            self._from_known(node, event, now)
        except RefitdError as exc:
            self._log("refused", node=node.status.node, message=type(message).__name__, reason=str(exc))
            self._send(identity, request, local.Failure(code=exc.code, message=str(exc)))

    def _hello(self, event: FromNode, message: cluster.NodeHello, now: float) -> None:
        identity, request, name = event.identity, event.request, message.status.node
        old = self.nodes.get(name)
        alive = old is not None and now - old.last_heard < NODE_SILENCE_S / 2
        try:
            versions.check(message.protocol, f"node {name}", "this coordinator")
            check_hello(identity, event.key, event.allowed, message, self.nodes, alive)
        except (ProtocolError, RefusedError) as exc:
            self._log("refused", node=name, message="NodeHello", reason=str(exc))
            self._send(identity, request, local.Failure(code=exc.code, message=str(exc)))
            return
        if old is not None and old.status.pid != message.status.pid and alive:
            error = (
                f"node name {name!r} is in use by the daemon with pid {old.status.pid} on {old.status.host}; "
                "set node.name"
            )
            self._send(identity, request, local.Failure(code=RefusedError.code, message=error))
            return
        same = old is not None and old.status.pid == message.status.pid
        # a daemon without an answer repeats its NodeHello
        repeats = old is not None and same and old.identity == identity
        if old is not None and not (repeats and all(member.node != name for member in self._members.values())):
            said = f"its daemon has {'introduced itself' if same else 'started'} again"
            self._forget_node(name, said, now, is_back=same)
        self.nodes[name] = Node(identity, message.status, now, event.key, event.allowed, message.protocol)
        protocol = versions.shown(message.protocol)
        self._log("node", node=name, pid=message.status.pid, host=message.status.host, protocol=protocol)
        self._lives.greeted(now)
        changed = self._lives.said(name, message.live)
        for model in {claim.model for claim in message.live} | set(self._lives.models()):
            if (claim := self._lives.claim(model)) is not None and model not in changed:
                self._send(identity, 0, cluster.LiveIs(live=claim))
        lease_s = self._config.deadlines.lease_s
        welcome = cluster.NodeWelcome(protocol=PROTOCOL_VERSION, boot=self._boot, lease_s=lease_s, clock_s=now)
        self._send(identity, request, welcome)
        for model in changed:
            self._live_learned(model, now)
        for state in [self.models[model] for model in changed if model in self.models]:
            self.swaps.next(state, now)

    def _live_learned(self, model: str, now: float) -> None:
        """Apply a changed live version: fence ranks that hold another one, and catch them up."""
        self.swaps.fences.tell_live(model)
        state = self.models.get(model)
        if state is None:
            return
        state.live, state.highest = self._lives.of(model), self._lives.highest(model)
        running = state.running
        if running is not None and running.swap.phase is not decision.Phase.COMMITTING:
            text = f"it was learned that version {state.live} is live"
            self.swaps.step(state, decision.AbortAsked(text, SwapCause.OVERTAKEN), now)
        for member in state.fleet.targets.values():
            if member.staged is None:
                self.swaps.fences.fence_unless_live(member)

    def _begin_if_settled(self, now: float) -> None:
        """Once the live version is certain, settle staged swaps and begin the waiting ones."""
        if self._began or not self._lives.is_settled(now):
            return
        self._began = True
        for member in list(self._undone.values()):
            node = self.nodes.get(member.node)
            if node is not None and self._members.get(member.id) is member and member.staged is not None:
                self._settle(node, member, member.staged, now)
        self._undone.clear()
        for state in list(self.models.values()):
            self.swaps.next(state, now)

    def _from_known(self, node: Node, event: FromNode, now: float) -> None:
        request, message = event.request, event.message
        reply: Message | None = None
        match message:
            case cluster.NodeUpdate(status, moved):
                node.status = status
                for one in moved:
                    if one.member in self._members:
                        self._members[one.member].step, self._members[one.member].events = one.step, one.events
                reply = cluster.HeartbeatAnswer(now)
            case cluster.DescribeShard(digest, packed):
                used = {member.added.digest for member in self._members.values()}
                self._descriptions.take(digest, event.read or unpack_shard(packed, digest), used)
            case cluster.AddShard():
                reply = self._add(node, message, now)
            case cluster.RemoveShard(member, reason):
                self._remove(member, reason, now)
            case cluster.MemberSuspended(member, suspended, is_lost):
                self._suspended(self._member(member), suspended, is_lost, now)
                reply = local.Done()
            case control.AddController():
                state = self.models.get(message.model) or self._new_state(message.model)
                self.swaps.controllers.add(node, message, state.fleet, now)
                self.models[message.model] = state
                self._drains.registered(message.model, message.replica, node.status.node)
                reply = local.Done()
            case control.RemoveController(member, reason):
                self._remove_controller(member, node.status.node, reason, now)
            case cluster.DetachShard(member, reason):
                self._detach(member, reason)
            case cluster.ShardPublished():
                source = self._member(message.member)
                self._sources.published(self.models[source.added.model], source, message)
                reply = local.Done()
            case cluster.ShardWithdrawn(member, version):
                self._withdrawn(member, version, now)
            case cluster.WantsRoom(member, _, slots):
                found = self._member(member)
                self._sources.wants_room(self.models[found.added.model], found, slots)
            case local.StartSwap():
                self.swaps.start(message, (node.identity, request), now)
            case local.StartSwaps():
                self.swaps.start_together(message, (node.identity, request), now)
            case local.GetHistory(model, limit):
                reply = history_report(self._past_swaps(model, limit))
            case local.AbortSwap(model, reason):
                self.swaps.abort(self.models.named(model), reason, now)
                reply = local.Done()
            case local.Evict():
                reply = self._removals.evict(message, now)
            case local.Forget(model):
                self._check_known(model)
                reply = self._removals.forget(model, now)
            case local.Reload():
                self._out.append(ReadKeys((node.identity, request)))
            case local.DrainNode(name):
                self._drains.drain(name, (node.identity, request))
            case local.ResumeNode(name):
                self._drains.resume(name, (node.identity, request))
            case local.Verify(model, timeout_s):
                fleet = self.models.named(model).fleet
                self._numbers += 1
                asked = f"{self._boot}.{self._numbers}"
                within_s = timeout_s or self._config.deadlines.request_s
                for name, check in self._checks.begin(asked, fleet, (node.identity, request), within_s, now):
                    self._to_node(name, check)
            case cluster.MembersChecked():
                self._answer_checks(self._checks.answered(message, now))
            case GetTrace():
                self._check_known(message.model)
                self._numbers += 1
                number, wall = f"{self._boot}.{self._numbers}", self._wall_clock()
                collect = self.traces.begin(number, message, (node.identity, request), self.nodes.keys(), now, wall)
                for name in self.nodes:
                    self._to_node(name, collect)
            case NodeTrace():
                self._answer_traces(self.traces.answered(node.status.node, message))
            case local.GetStatus():
                uptime_s = max(0.0, now - self._started)
                reply = status_report(self._pid, uptime_s, self.nodes, self.models, self._config, self.drained)
            case local.GetDescription(model):
                reply = self.models.named(model).fleet.description()
            case local.GetPlan(model):
                self.swaps.planning.show(self.models.named(model), (node.identity, request))
            case _:
                self.swaps.node_said(node.status.node, message, now)
        if reply is not None:
            self._send(node.identity, request, reply)
        # only after the reply: a rank must know that it is registered before a swap sends it anything
        if isinstance(message, control.AddController) or (
            isinstance(message, cluster.AddShard) and not message.is_question
        ):
            self.swaps.controllers.ranks_changed(message.model, message.replica, now)
            self.swaps.next(self.models[message.model], now)
        elif isinstance(message, cluster.ShardPublished | cluster.MemberSuspended):
            self.swaps.next(self.models[self._member(message.member).added.model], now)

    def _past_swaps(self, model: str, limit: int) -> Sequence[Record]:
        """Return the last swaps of a model, "" for all."""
        if model:
            self._check_known(model)
        return self._recent(model, min(limit, MAX_HISTORY))

    def _check_known(self, model: str) -> None:
        """Raise RefusedError, which lists the known models, if a model is neither registered nor in the journal."""
        if model in self.models or self._recent(model, 1):
            return
        known = {*self.models, *self._lives.models(), *(record.model for record in self._recent("", MAX_HISTORY))}
        if model not in known:
            raise RefusedError(f"no model {model!r} is known; known models: {', '.join(sorted(known)) or 'none'}")

    def _answer_checks(self, reports: Iterable[tuple[Waiter, VerifyReport]]) -> None:
        for waiter, report in reports:
            self._log("verified", model=report.model, outcome=report.outcome, mixed=len(report.mixed))
            self._send(*waiter, report)

    def _answer_traces(self, reports: Iterable[tuple[Waiter, TraceReport]]) -> None:
        for (identity, request), report in reports:
            self._out.append(Answer(identity, request, partial(_same, report)))

    def _forget_node(self, name: str, reason: str, now: float, *, is_back: bool = False) -> None:
        node = self.nodes.pop(name)
        self._answer_checks(self._checks.lost(name, reason, now))
        self._answer_traces(self.traces.lost(name))
        self._log("node-again" if is_back else "node-lost", node=name, pid=node.status.pid, reason=reason)
        for member in [m for m in self._members.values() if m.node == name]:
            self._absent.lost(member, node.last_heard + self._config.deadlines.lease_s)
            self._remove(member.id, f"node {name}: {reason}", now)
        for controller in self.swaps.controllers.on_node(name):
            self._remove_controller(controller, name, f"node {name}: {reason}", now)

    # --- members ------------------------------------------------------------------------------------------

    def _new_state(self, model: str) -> ModelState:
        """Return the initial state of a model, with its history from the journal and the daemons."""
        configured = self._model_config(model)
        fleet = Model(model, configured.auto_swap, check_replicas=configured.check_replicas, drains=self._drains.nodes)
        state = ModelState(fleet, self._lives.of(model), self._lives.highest(model), self._lives.past.tried(model))
        past = self._recent(model, MAX_HISTORY)
        state.last = next((report for r in past if (report := written_report(r)) is not None), None)
        return state

    def _add(self, node: Node, added: cluster.AddShard, now: float) -> Message:
        if added.rank >= added.world_size:
            raise RefusedError(f"{added.member}: rank {added.rank} is not below world_size {added.world_size}")
        check_replica(added, self._model_config(added.model))
        if added.observes and node.status.node in self.drained:
            raise RefusedError(
                f"model {added.model!r}: node {node.status.node!r} is drained, so replica {added.replica!r}, which "
                f"observes, gets no version there; use another node, or refitctl resume {node.status.node}"
            )
        state = self.models.get(added.model) or self._new_state(added.model)
        shard = self._descriptions.of(added)
        state.fleet.check_part(added, shard)
        if added.is_question:
            state.fleet.replaced_by(added)
            return local.Done()
        nbytes = sum(prod(t.shape) * ELEMENT_SIZES.get(t.dtype, 0) for t in shard.tensors)
        is_source = added.role == "source"
        run, newest, base = self._sources.run_of(state, added) if is_source else (added.run, -1, None)
        member = Member(
            added,
            shard,
            node.status.node,
            node.status.host,
            nbytes,
            attached=added.attached,
            versions=set(added.versions),
            modes=dict(zip(added.versions, added.modes, strict=False)),
            mode=added.mode,
            mode_reason=added.mode_reason,
            run=run,
            newest=newest,
            version=added.version,
            staged=added.staged,
            staged_version=added.staged_version,
            poisoned=added.poisoned,
            suspended=added.suspended,
            spare=None if added.spare is None else (added.spare, added.spare_run),
            seeds=added.seeds,
            wants=wanted_parts(shard) if added.role == "target" else frozenset(),
        )
        replaced = state.fleet.replaced_by(added)
        for one in replaced:
            state.fleet.remove(one)
        state.fleet.add(member)
        self.models[added.model] = state
        for one in replaced:
            self._replace(one, member, now)
        self._lives.keep(added.model)
        self._members[member.id] = member
        self._absent.registered(member)
        self._drains.registered(added.model, added.replica, member.node)
        self.swaps.members_changed(state)
        self._log("registered", model=added.model, member=member.id, who=member.describe(), bytes=nbytes)
        if is_source:
            self._sources.registered(state, member, base)
            return cluster.SourceAdmitted(run=run, next_version=newest + 1)
        if added.staged is not None:
            if added.committing and added.staged_version is not None:
                self._lives.told(added.staged, added.staged_version, added.staged_run)
            self._settle(node, member, added.staged, now)
        elif added.version is not None:
            if self._lives.serves(added.model, member.describe(), added.version, added.run):
                self._live_learned(added.model, now)  # a due swap begins after this answer
            self.swaps.fences.fence_unless_live(member)
        self.swaps.ended_late(self._unfinished.registered(member))
        return local.Done()

    def _replace(self, old: Member, by: Member, now: float) -> None:
        """Forget a detached rank, and have its daemon free its memory.

        If the new rank has the same number and daemon, that daemon frees the memory by itself.
        """
        is_same = old.added.rank == by.added.rank and old.added.world_size == by.added.world_size
        if is_same and old.node == by.node:
            self._members.pop(old.id, None)
            return
        reason = f"its trainer is gone, and {by.describe()} has registered anew"
        self._remove(old.id, reason, now)  # first: a swap that reads it is aborted
        self._to_node(old.node, cluster.EvictMember(member=old.id, reason=reason))

    def _settle(self, node: Node, member: Member, swap: str, now: float) -> None:
        """Commit or abort a staged swap that an earlier coordinator left."""
        found = self.swaps.fences.identity_of(swap)
        live = self.models[member.added.model].live
        staged = member.added.staged_version, member.added.staged_run
        if found is None and self._lives.is_in_doubt and live is not None and live.is_at(*staged):
            found = live.version, live.run  # the journal with this swap is lost, but its version was decided
        if found is not None:
            self._send(node.identity, 0, cluster.CommitStaged(swap=swap, version=found[0], run=found[1]))
            return
        if not self._lives.is_settled(now):
            self._undone[member.id] = member  # another daemon may know it as decided
            return
        member.staged, reason = None, "the coordinator restarted before deciding"
        if member.added.in_place:
            poison(member, swap, reason)
        self._send(node.identity, 0, cluster.Abort(swap=swap, reason=reason))
        self.swaps.fences.fence_unless_live(member)
        self.swaps.controllers.ranks_changed(member.added.model, member.added.replica, now)

    def _remove(self, member_id: str, reason: str, now: float) -> None:
        member = self._members.pop(member_id, None)
        if member is None:
            return
        state = self.models[member.added.model]
        self._log("left", model=state.fleet.name, member=member_id, who=member.describe(), reason=reason)
        takes_part = state.takes_part(member)
        state.fleet.remove(member)
        self.swaps.members_changed(state)
        if takes_part:
            self.swaps.step(state, decision.MemberLost(member_id, reason), now)
        self.swaps.controllers.ranks_changed(state.fleet.name, member.added.replica, now)
        self._sources.room_changed(state)
        self._forget_if_empty(state)

    def _remove_controller(self, member: str, node: str, reason: str, now: float) -> None:
        model = self.swaps.controllers.remove(member, node, reason, now)
        if model is not None:
            self._forget_if_empty(self.models[model])

    def _forget_if_empty(self, state: ModelState) -> None:
        if not state.fleet.members() and not state.fleet.controllers and state.running is None:
            for queued in state.queue:
                gone = f"model {state.fleet.name!r}: everybody has left before the swap could begin"
                self._send(*queued.waiter, local.Failure(code=RefusedError.code, message=gone))
            self.models.pop(state.fleet.name, None)

    def _suspended(self, member: Member, suspended: bool, is_lost: bool, now: float) -> None:
        """Leave a replica out of swaps, or let it take part again; an undecided swap of it aborts.

        Raises:
            RefusedError: the rank has a decided version to commit first, or a decision about one is being written.
        """
        state = self.models[member.added.model]
        running = state.running
        takes_part = running is not None and state.takes_part(member)
        is_written = running is not None and member.id in running.swap.members
        being_decided = is_written and running is not None and running.swap.phase is decision.Phase.STAGED
        if suspended and (member.staged is not None or being_decided):
            raise RefusedError(
                f"{member.describe()} has a version that is decided, or is being decided; take it over first (poll or "
                "wait), then suspend"
            )
        if is_lost and not suspended and not member.suspended and (takes_part or member.staged is not None):
            raise RefusedError(f"{member.describe()} is not suspended, and a swap writes or reads it; suspend it first")
        if suspended and takes_part:
            self.swaps.step(state, decision.MemberLost(member.id, "its engine was suspended"), now)
        self._log("suspended" if suspended else "woken", model=state.fleet.name, member=member.id)
        member.suspended = suspended
        if is_lost and not suspended:
            member.version = None
        self.swaps.fences.fence_unless_live(member)

    def _detach(self, member_id: str, reason: str) -> None:
        member = self._members.get(member_id)
        if member is not None:
            member.attached = False
            self._sources.room_changed(self.models[member.added.model])
            self._log("detached", model=member.added.model, member=member_id, reason=reason)

    def _withdrawn(self, member_id: str, version: int, now: float) -> None:
        member = self._members.get(member_id)
        if member is None:
            return
        member.versions.discard(version)
        member.modes.pop(version, None)
        state = self.models[member.added.model]
        self._sources.room_changed(state)
        running = state.running
        if running is not None and running.version == version and state.reads(member):
            lost = decision.MemberLost(
                member_id, f"it withdrew version {version}, or published over it, before it was read"
            )
            self.swaps.step(state, lost, now)

    def _member(self, member_id: str) -> Member:
        member = self._members.get(member_id)
        if member is None:
            raise RefusedError(f"no member {member_id!r} is registered here; register again")
        return member

    # --- time and reports ---------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        self._answer_checks(self._checks.tick(now))
        self._answer_traces(self.traces.tick(now))
        self._begin_if_settled(now)
        for name, node in list(self.nodes.items()):
            if now - node.last_heard > NODE_SILENCE_S:
                self._forget_node(name, f"no word from it for {NODE_SILENCE_S:.0f} s", now)
        self.swaps.tick(now)

    def next_deadline(self) -> float | None:
        """Return when a swap or a check next needs a Tick, None if none does."""
        found = [self.swaps.next_deadline(), self._checks.next_deadline(), self.traces.next_deadline()]
        if not self._began:
            found.append(self._lives.deadline())
        return min((at for at in found if at is not None), default=None)

    def _model_config(self, model: str) -> ModelConfig:
        return self._config.models.get(model, ModelConfig())

    # --- output -------------------------------------------------------------------------------------------

    def _send(self, identity: bytes, request: int, message: Message) -> None:
        self._out.append(Send(identity, request, message))

    def _to_node(self, name: str, message: Message) -> None:
        node = self.nodes.get(name)
        if node is not None:
            self._send(node.identity, 0, message)

    def _log(self, event: str, **fields: object) -> None:
        self._out.append(Log(event, fields))
