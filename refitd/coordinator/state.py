"""The coordinator's state without sockets: takes events, returns instructions."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from refitd.config import Config
from refitd.coordinator.absent import AbsentRanks
from refitd.coordinator.actions import (
    Answer,
    DrainWritten,
    Event,
    FilesRead,
    FromNode,
    Instruction,
    JournalWritten,
    Planned,
    ReadFiles,
    Remember,
    Send,
)
from refitd.coordinator.admission import check_hello, check_message
from refitd.coordinator.cables import with_speeds
from refitd.coordinator.descriptions import Descriptions, unpack_shard
from refitd.coordinator.drains import Drains
from refitd.coordinator.live_versions import LiveVersions, NoPast, Past
from refitd.coordinator.members import Member, Node
from refitd.coordinator.models import MAX_HISTORY, Models, Recent, Waiter
from refitd.coordinator.plan_parts import SHARES_SINCE, HeldParts
from refitd.coordinator.records import Drained, SwapRecord
from refitd.coordinator.recovery import Recovery
from refitd.coordinator.registrations import Registrations
from refitd.coordinator.removals import Removals
from refitd.coordinator.settling import Settling
from refitd.coordinator.source_versions import SourceVersions
from refitd.coordinator.status import history_report, model_description, status_report
from refitd.coordinator.swaps import Swaps
from refitd.coordinator.traces import Traces
from refitd.coordinator.unrounded import unrounded_by
from refitd.coordinator.verification import Checks
from refitd.errors import ProtocolError, RefitdError, RefusedError
from refitd.events import Busy, Log, Tick
from refitd.offline.clusters import ClusterSpeeds
from refitd.protocol import cluster, control, local, versions
from refitd.protocol.base import PROTOCOL_VERSION, Message
from refitd.protocol.reports import ReloadReport, VerifyReport
from refitd.protocol.traces import GetTrace, NodeTrace, TraceReport

# Daemons send a heartbeat every second. After this long without one a node's members count as lost.
NODE_SILENCE_S = 10.0


def _same(report: TraceReport) -> Message:
    return report


def _nothing(model: str, limit: int) -> Sequence[SwapRecord]:
    return ()


class CoordinatorState:
    """All of the coordinator's state. `handle` takes an event and returns instructions."""

    def __init__(
        self,
        config: Config,
        boot: str,
        pid: int,
        started: float,
        new_swap_id: Callable[[], str],
        wall_clock: Callable[[], float],
        decided: Callable[[str], SwapRecord | None],
        recent: Recent = _nothing,
        past: Past | None = None,
        is_standalone: bool = False,
        new_run: Callable[[], str] = lambda: secrets.token_hex(4),
        host: str = "",
        drained: Drained | None = None,
        speeds: ClusterSpeeds | None = None,
    ) -> None:
        """Start empty. `decided`, `recent` and `past` read the journal, also entries of earlier coordinators.

        `drained` are the nodes that the journal knows as drained; the coordinator keeps them up to date there.

        `speeds` are those of the nodes' cables; None: all are equally fast.

        `is_standalone` says that a standalone daemon started this process. `new_run` returns a new run id.
        """
        self._config = config
        self._boot, self._pid, self._started = boot, pid, started
        self._recent, self._wall_clock = recent, wall_clock
        self.nodes: dict[str, Node] = {}
        self._node_at: dict[bytes, Node] = {}  # by identity
        self.models = Models()
        self._members: dict[str, Member] = {}
        self._checks = Checks()
        self.traces = Traces(host, self.models)
        self._lives = LiveVersions(
            past or NoPast(),
            started,
            is_standalone,
            lambda found: self._out.append(Remember(found)),
            wall_clock,
            self._log,
        )
        self._numbers = 0
        self._out: list[Instruction] = []
        # by this time every living rank has registered again and reached a commit point
        late = started + NODE_SILENCE_S + config.deadlines.commit_s
        ended = recent("", MAX_HISTORY)
        recovery = Recovery(ended, late)
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
            recovery,
            self._absent,
            self.traces,
            self._out.append,
        )
        self.swaps.preparation.planning.speeds = speeds
        self.swaps.preparation.cable_tests.answer = lambda waiter, message: self._send(*waiter, message)
        self._drains = Drains(
            {} if drained is None else drained,
            self.nodes,
            self.models,
            self.swaps.queue.next,
            self._out.append,
            self._send,
            self._log,
        )
        self._descriptions = Descriptions(self.swaps.preparation.planning.reader)
        self._sources = SourceVersions(self._members, new_run, self._to_node, self._log)
        self._settling = Settling(self.models, self._members, self._lives, self.swaps, self._to_node)
        self._registrations = Registrations(
            config,
            self.models,
            self._members,
            recent,
            self._descriptions,
            self._sources,
            self._drains,
            self._lives,
            recovery,
            self._absent,
            self.swaps,
            self._settling,
            self._to_node,
            self._send,
            self._log,
        )
        self._removals = Removals(
            self.nodes, self.models, self._registrations.remove, self._forget_node, self._to_node, self._log
        )

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Handle an event; return instructions. A refused request changes nothing."""
        match event:
            case FromNode():
                self._from_node(event, now)
                if not self._settling.has_begun and self.nodes and not self._absent.awaits_any:
                    # a swap that begins before a rank is back leaves it out, and waits for its permit to end
                    self._lives.heard(now)
                    self._settling.begin(now)
            case Planned():
                self.swaps.preparation.planned(event, now)
            case FilesRead(allowed, waiter, speeds):
                self.swaps.preparation.use_speeds(speeds)

                def tell(report: ReloadReport) -> None:
                    if waiter is not None:
                        self._send(*waiter, with_speeds(report, speeds, self.nodes))

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
        return self._settling.has_begun

    @property
    def drained(self) -> Collection[str]:
        """The drained nodes, connected or not."""
        return self._drains.nodes

    def knows(self, identity: bytes, key: str) -> bool:
        """Whether this connection belongs to a node; others may only send NodeHello."""
        node = self._node_at.get(identity)
        return node is not None and node.key == key

    def _from_node(self, event: FromNode, now: float) -> None:
        identity, request, message = event.identity, event.request, event.message
        if isinstance(message, cluster.NodeHello):
            self._hello(event, message, now)
            return
        node = self._node_at.get(identity)
        if node is None or node.key != event.key:
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
            self._forget_node(name, said, now, event="node-again" if same else "node-lost")
        held = HeldParts(takes_shares=message.protocol >= SHARES_SINCE) if message.keeps_parts else None
        node = Node(identity, message.status, now, event.key, event.allowed, message.protocol, held)
        self._node_at[identity] = self.nodes[name] = node
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
            self._settling.live_learned(model, now)
        for state in [self.models[model] for model in changed if model in self.models]:
            self.swaps.queue.next(state, now)

    def _from_known(self, node: Node, event: FromNode, now: float) -> None:
        request, message = event.request, event.message
        reply: Message | None = None
        match message:
            case cluster.NodeUpdate(status, moved):
                node.status = status
                for one in moved:
                    if (member := self._members.get(one.member)) is not None:
                        member.step, member.events = one.step, one.events
                        member.spare = None if one.spare_lost else member.spare
                reply = cluster.HeartbeatAnswer(now)
            case cluster.NodeLeaves():
                self._forget_node(node.status.node, "its daemon was stopped", now, event="node-left")
                return
            case cluster.DescribeShard(digest, packed):
                used = {member.added.digest for member in self._members.values()}
                self._descriptions.take(digest, event.read or unpack_shard(packed, digest), used)
            case cluster.AddShard():
                reply = self._registrations.add(node, message, now)
            case cluster.RemoveShard(member, reason):
                self._registrations.remove(member, reason, now)
            case cluster.MemberSuspended(member, suspended, is_lost):
                self._registrations.suspend(self._registrations.member(member), suspended, is_lost, now)
                reply = local.Done()
            case control.AddController():
                self._registrations.add_controller(node, message, now)
                reply = local.Done()
            case control.RemoveController(member, reason):
                self._registrations.remove_controller(member, node.status.node, reason, now)
            case cluster.DetachShard(member, reason):
                self._registrations.detach(member, reason)
            case cluster.ShardPublished():
                source = self._registrations.member(message.member)
                self._sources.published(self.models[source.added.model], source, message)
                reply = local.Done()
            case cluster.ShardWithdrawn(member, version):
                self._registrations.withdrawn(member, version, now)
            case cluster.WantsRoom(member, _, slots):
                found = self._registrations.member(member)
                self._sources.wants_room(self.models[found.added.model], found, slots)
            case local.StartSwap():
                self.swaps.queue.start(message, (node.identity, request), now)
            case local.StartSwaps():
                self.swaps.queue.start_together(message, (node.identity, request), now)
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
                self._out.append(ReadFiles((node.identity, request)))
            case local.MeasureCables():
                self.swaps.preparation.cable_tests.begin(message, (node.identity, request), now)
            case cluster.CableMeasured():
                self.swaps.preparation.cable_tests.measured(node.status.node, message)
            case local.DrainNode(name):
                self._drains.drain(name, (node.identity, request))
            case local.ResumeNode(name):
                self._drains.resume(name, (node.identity, request))
            case local.Verify(model, timeout_s):
                membership = self.models.named(model).membership
                self._numbers += 1
                asked = f"{self._boot}.{self._numbers}"
                within_s = timeout_s or self._config.deadlines.request_s
                for name, check in self._checks.begin(asked, membership, (node.identity, request), within_s, now):
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
                reply = model_description(self.models.named(model).membership)
            case local.GetUnrounded(member):
                found = self._registrations.member(member)
                state = self.models[found.added.model]
                reply = local.Unrounded(unrounded_by(state.membership, found), state.takes_part(found))
            case local.GetPlan(model):
                self.swaps.preparation.planning.show(self.models.named(model), (node.identity, request))
            case _:
                self.swaps.node_said(node.status.node, message, now)
        if reply is not None:
            self._send(node.identity, request, reply)
        # only after the reply: a rank must know that it is registered before a swap sends it anything
        if isinstance(message, control.AddController) or (
            isinstance(message, cluster.AddShard) and not message.is_question
        ):
            self.swaps.controllers.ranks_changed(message.model, message.replica, now)
            self.swaps.queue.next(self.models[message.model], now)
        elif isinstance(message, cluster.ShardPublished | cluster.MemberSuspended):
            state = self.models[self._registrations.member(message.member).added.model]
            # nothing can begin before the last of thousands of ranks has published
            if isinstance(message, cluster.MemberSuspended) or state.membership.completes(message.version):
                self.swaps.queue.next(state, now)

    def _past_swaps(self, model: str, limit: int) -> Sequence[SwapRecord]:
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

    def _forget_node(self, name: str, reason: str, now: float, *, event: str = "node-lost") -> None:
        node = self.nodes.pop(name)
        del self._node_at[node.identity]
        self._answer_checks(self._checks.lost(name, reason, now))
        self._answer_traces(self.traces.lost(name))
        self.swaps.preparation.cable_tests.node_lost(name, reason)
        self._log(event, node=name, pid=node.status.pid, reason=reason)
        for member in [m for m in self._members.values() if m.node == name]:
            self._absent.lost(member, node.last_heard + self._config.deadlines.lease_s)
            self._registrations.remove(member.id, f"node {name}: {reason}", now)
        for controller in self.swaps.controllers.on_node(name):
            self._registrations.remove_controller(controller, name, f"node {name}: {reason}", now)

    # --- time and reports ---------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        self._answer_checks(self._checks.tick(now))
        self._answer_traces(self.traces.tick(now))
        self.swaps.preparation.cable_tests.tick(now)
        self._settling.begin(now)
        for name, node in list(self.nodes.items()):
            if now - node.last_heard > NODE_SILENCE_S:
                self._forget_node(name, f"no word from it for {NODE_SILENCE_S:.0f} s", now)
        self.swaps.tick(now)

    def next_deadline(self) -> float | None:
        """Return when a swap or a check next needs a Tick, None if none does."""
        found = [self.swaps.next_deadline(), self._checks.next_deadline(), self.traces.next_deadline()]
        if not self._settling.has_begun:
            found.append(self._lives.deadline())
        return min((at for at in found if at is not None), default=None)

    # --- output -------------------------------------------------------------------------------------------

    def _send(self, identity: bytes, request: int, message: Message) -> None:
        self._out.append(Send(identity, request, message))

    def _to_node(self, name: str, message: Message) -> None:
        node = self.nodes.get(name)
        if node is not None:
            self._send(node.identity, 0, message)

    def _log(self, event: str, **fields: object) -> None:
        self._out.append(Log(event, fields))
