"""The coordinator without sockets: nodes and their members in, instructions out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod

from refitd.commit import machine
from refitd.commit.journal import Record
from refitd.config import Config, ModelConfig
from refitd.coordinator.actions import Event, FromNode, Instruction, JournalWritten, Log, Planned, Send, Tick
from refitd.coordinator.admission import MAX_UNUSED_PARTS, check_hello, check_message, check_shard, parts_of
from refitd.coordinator.fleet import Member, Model, Node
from refitd.coordinator.held import wanted_parts
from refitd.coordinator.models import MAX_HISTORY, Models, ModelState, Recent, Waiter
from refitd.coordinator.proofs import Checks
from refitd.coordinator.report import swap_progress, written_report
from refitd.coordinator.swaps import Swaps
from refitd.coordinator.unfinished import Unfinished
from refitd.dtypes import ELEMENT_SIZES
from refitd.errors import ProtocolError, RefitdError, RefusedError
from refitd.protocol import cluster, local
from refitd.protocol.base import PROTOCOL_VERSION, Message
from refitd.protocol.codec import unpack
from refitd.protocol.reports import (
    HistoryEntry,
    HistoryReport,
    LinkStatus,
    ModelStatus,
    StatusReport,
    VerifyReport,
)
from refitd.protocol.shards import Shard

# A daemon says something every second; this long without a word and its members count as lost.
NODE_SILENCE_S = 10.0

# Descriptions kept beyond those that members use: engines that restart find theirs known.
MAX_UNUSED_SHARDS = 256


class UnknownShard(RefusedError):
    """A member's description has not been sent, or has been forgotten."""

    code = "unknown-shard"


def _nothing(model: str, limit: int) -> Sequence[Record]:
    return ()


class Coordinator:
    """All of the coordinator's knowledge. `handle` takes an event and returns what is to be done."""

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
    ) -> None:
        """`decided` and `recent` answer from the journal, earlier lives included."""
        self._config = config
        self._boot, self._pid, self._started = boot, pid, started
        self._decided, self._recent = decided, recent
        self.nodes: dict[str, Node] = {}
        self.models = Models()
        self._members: dict[str, Member] = {}
        self._shards: dict[str, Shard] = {}  # by digest
        self._checks = Checks()
        self._numbers = 0
        self._out: list[Instruction] = []
        # whoever is alive has introduced itself anew and reached a commit point by then
        late = started + NODE_SILENCE_S + config.deadlines.commit_s
        self._unfinished = Unfinished(recent("", MAX_HISTORY), late)
        self.swaps = Swaps(
            config,
            boot,
            self.nodes,
            self.models,
            self._members,
            new_swap_id,
            wall_clock,
            decided,
            recent,
            self._unfinished,
            self._out.append,
        )

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take an event, return what is to be done. A refused request changes nothing but its reply."""
        match event:
            case FromNode():
                self._from_node(event, now)
            case Planned():
                self.swaps.planned(event, now)
            case JournalWritten(swap, error):
                self.swaps.journalled(swap, error, now)
            case Tick():
                self._tick(now)
        done = self._out[:]
        self._out.clear()
        return done

    # --- daemons ------------------------------------------------------------------------------------------

    def _from_node(self, event: FromNode, now: float) -> None:
        identity, request, message = event.identity, event.request, event.message
        if isinstance(message, cluster.NodeHello):
            self._hello(event, message, now)
            return
        node = next((n for n in self.nodes.values() if n.identity == identity and n.key == event.key), None)
        if node is None:
            # this coordinator is younger than the daemon's connection: have it introduce itself again
            failure = local.Failure(code="unknown-node", message="say NodeHello first")
            self._send(identity, request, failure)
            return
        node.last_heard = now
        try:
            check_message(node, message, self._members)
            self._from_known(node, request, message, now)
        except RefitdError as exc:
            self._log("refused", node=node.status.node, message=type(message).__name__, reason=str(exc))
            self._send(identity, request, local.Failure(code=exc.code, message=str(exc)))

    def _hello(self, event: FromNode, message: cluster.NodeHello, now: float) -> None:
        identity, request, name = event.identity, event.request, message.status.node
        if message.protocol != PROTOCOL_VERSION:
            error = f"node {name} speaks protocol {message.protocol}, this coordinator {PROTOCOL_VERSION}; upgrade one"
            self._send(identity, request, local.Failure(code=ProtocolError.code, message=error))
            return
        old = self.nodes.get(name)
        alive = old is not None and now - old.last_heard < NODE_SILENCE_S / 2
        try:
            check_hello(identity, event.key, event.allowed, message, self.nodes, alive)
        except RefusedError as exc:
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
        if old is not None:
            same = old.status.pid == message.status.pid
            self._forget_node(name, f"its daemon has {'introduced itself' if same else 'started'} again", now)
        self.nodes[name] = Node(identity, message.status, now, event.key, event.allowed)
        self._log("node", node=name, pid=message.status.pid, host=message.status.host)
        self._send(identity, request, cluster.NodeWelcome(protocol=PROTOCOL_VERSION, boot=self._boot))

    def _from_known(self, node: Node, request: int, message: cluster.NodeMessage, now: float) -> None:
        reply: Message | None = None
        match message:
            case cluster.NodeUpdate(status):
                node.status = status
                reply = local.Done()
            case cluster.DescribeShard(digest, packed):
                self._describe(digest, unpack(packed, Shard, digest))
            case cluster.AddShard():
                self._add(node, message, now)
                reply = local.Done()
            case cluster.RemoveShard(member, reason):
                self._remove(member, reason, now)
            case cluster.DetachShard(member, reason):
                self._detach(member, reason)
            case cluster.ShardPublished():
                self._published(message)
                reply = local.Done()
            case cluster.ShardWithdrawn(member, version):
                self._withdrawn(member, version, now)
            case local.StartSwap():
                self.swaps.start(message, (node.identity, request), now)
            case local.GetHistory(model, limit):
                reply = self._history(model, limit)
            case local.AbortSwap(model, reason):
                self.swaps.abort(self.models.named(model), reason, now)
                reply = local.Done()
            case local.Verify(model, timeout_s):
                fleet = self.models.named(model).fleet
                self._numbers += 1
                asked = f"{self._boot}.{self._numbers}"
                within_s = timeout_s or self._config.deadlines.request_s
                for name, check in self._checks.begin(asked, fleet, (node.identity, request), within_s, now):
                    self._to_node(name, check)
            case cluster.MembersChecked():
                self._answer_checks(self._checks.answered(message, now))
            case local.GetStatus():
                reply = self._status(now)
            case local.GetDescription(model):
                reply = self.models.named(model).fleet.description()
            case local.GetPlan(model):
                self.swaps.show_plan(self.models.named(model), (node.identity, request), now)
            case _:
                self.swaps.node_said(node.status.node, message, now)
        if reply is not None:
            self._send(node.identity, request, reply)
        # only now: whoever has registered must know it before a swap asks something of it
        if isinstance(message, cluster.AddShard):
            self.swaps.next(self.models[message.model], now)
        elif isinstance(message, cluster.ShardPublished):
            self.swaps.next(self.models[self._member(message.member).added.model], now)

    def _answer_checks(self, reports: Iterable[tuple[Waiter, VerifyReport]]) -> None:
        for waiter, report in reports:
            self._log("verified", model=report.model, outcome=report.outcome, mixed=len(report.mixed))
            self._send(*waiter, report)

    def _forget_node(self, name: str, reason: str, now: float) -> None:
        node = self.nodes.pop(name)
        self._answer_checks(self._checks.lost(name, reason, now))
        self._log("node-lost", node=name, pid=node.status.pid, reason=reason)
        for member in [m for m in self._members.values() if m.node == name]:
            self._remove(member.id, f"node {name}: {reason}", now)

    # --- members ------------------------------------------------------------------------------------------

    def _describe(self, digest: str, shard: Shard) -> None:
        check_shard(shard)
        used = {member.added.digest for member in self._members.values()}
        # what no member uses any more makes room; a daemon that still counts on it is asked to describe it again
        unused = [d for d in self._shards if d not in used]
        parts = sum(parts_of(self._shards[d]) for d in unused)
        for count, old in zip(range(len(unused), 0, -1), unused, strict=True):
            if count <= MAX_UNUSED_SHARDS and parts <= MAX_UNUSED_PARTS:
                break
            parts -= parts_of(self._shards.pop(old))
        self.swaps.reader.keep(self._shards.keys())
        self._shards[digest] = shard

    def _add(self, node: Node, added: cluster.AddShard, now: float) -> None:
        if added.rank >= added.world_size:
            raise RefusedError(f"{added.member}: rank {added.rank} is not below world_size {added.world_size}")
        state = self.models.get(added.model)
        if state is None:
            # a coordinator that has started anew learns from its journal what is live
            auto = self._model_config(added.model).auto_swap
            past = self._recent(added.model, MAX_HISTORY)
            versions = [r.version for r in past if r.is_decided]
            live = versions[0] if versions else None
            state = ModelState(Model(added.model, auto), live, max(versions, default=-1))
            state.last = next((report for r in past if (report := written_report(r)) is not None), None)
        shard = self._shards.get(added.digest)
        if shard is None:
            raise UnknownShard(f"{added.member}: no shard {added.digest} has been described to this coordinator")
        nbytes = sum(prod(t.shape) * ELEMENT_SIZES.get(t.dtype, 0) for t in shard.tensors)
        member = Member(
            added,
            shard,
            node.status.node,
            node.status.host,
            nbytes,
            attached=added.attached,
            versions=set(added.versions),
            ways=dict(zip(added.versions, added.ways, strict=False)),
            way=added.way,
            why=added.why,
            version=added.version,
            staged=added.staged,
            poisoned=added.poisoned,
            wants=wanted_parts(shard) if added.role == "target" else frozenset(),
        )
        replaced = state.fleet.add(member)
        if replaced is not None:
            self._members.pop(replaced.id, None)
        self.models[added.model] = state
        self._members[member.id] = member
        self.swaps.members_changed(state)
        self._log("registered", model=added.model, member=member.id, who=member.describe(), bytes=nbytes)
        if added.staged is not None:
            self._settle(node, member, added.staged)
        elif added.version is not None and state.live is not None and added.version != state.live:
            reason = f"it holds version {added.version}, and {state.live} is live"
            self._send(node.identity, 0, cluster.FenceMember(member=member.id, reason=reason))
        self.swaps.ended_late(self._unfinished.registered(member))

    def _settle(self, node: Node, member: Member, swap: str) -> None:
        """Finish or undo a swap that an earlier life of this coordinator left behind."""
        record = self._decided(swap)
        if record is not None:
            self._send(node.identity, 0, cluster.Commit(swap=swap, version=record.version))
            return
        member.staged, reason = None, "the coordinator restarted before deciding"
        if member.added.in_place:
            member.version, member.poisoned = None, f"swap {swap} ended while it was written in place: {reason}"
        self._send(node.identity, 0, cluster.Abort(swap=swap, reason=reason))

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
            self.swaps.step(state, machine.MemberLost(member_id, reason), now)
        if not state.fleet.members() and state.running is None:
            for queued in state.queue:
                gone = f"model {state.fleet.name!r}: everybody has left before the swap could begin"
                self._send(*queued.waiter, local.Failure(code=RefusedError.code, message=gone))
            del self.models[member.added.model]

    def _detach(self, member_id: str, reason: str) -> None:
        member = self._members.get(member_id)
        if member is not None:
            member.attached = False
            self._log("detached", model=member.added.model, member=member_id, reason=reason)

    def _published(self, published: cluster.ShardPublished) -> None:
        member, version = self._member(published.member), published.version
        member.versions.add(version)
        member.ways[version] = member.way = published.way
        member.why = published.why
        state = self.models[member.added.model]
        self._log("published", model=state.fleet.name, member=member.id, version=version, way=published.way)

    def _withdrawn(self, member_id: str, version: int, now: float) -> None:
        member = self._members.get(member_id)
        if member is None:
            return
        member.versions.discard(version)
        member.ways.pop(version, None)
        state = self.models[member.added.model]
        running = state.running
        if running is not None and running.version == version and state.takes_part(member):
            lost = machine.MemberLost(member_id, f"it withdrew version {version} while it was being read")
            self.swaps.step(state, lost, now)

    def _member(self, member_id: str) -> Member:
        member = self._members.get(member_id)
        if member is None:
            raise RefusedError(f"no member {member_id!r} is registered here; register again")
        return member

    # --- time and reports ---------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        self._answer_checks(self._checks.tick(now))
        for name, node in list(self.nodes.items()):
            if now - node.last_heard > NODE_SILENCE_S:
                self._forget_node(name, f"no word from it for {NODE_SILENCE_S:.0f} s", now)
        self.swaps.tick(now)

    def next_deadline(self) -> float | None:
        """Return when the next Tick is needed for a running swap, None when none runs."""
        return min((s.running.swap.deadline for s in self.models.values() if s.running), default=None)

    def _status(self, now: float) -> StatusReport:
        return StatusReport(
            coordinator_pid=self._pid,
            uptime_s=max(0.0, now - self._started),
            nodes=tuple(node.status for _, node in sorted(self.nodes.items())),
            models=tuple(self._model_status(state) for _, state in sorted(self.models.items())),
            links=tuple(link for _, state in sorted(self.models.items()) for link in self._links(state)),
        )

    def _links(self, state: ModelState) -> list[LinkStatus]:
        plan = state.plan
        if plan is None:
            return []
        epoch = plan.epoch
        is_up = epoch is not None and plan.loaded_on.issuperset(epoch.nodes)
        return [
            LinkStatus(
                model=state.fleet.name,
                source=source,
                target=target,
                service=epoch.service if epoch is not None else self._config.transport.service,
                lanes=epoch.lanes if epoch is not None else 0,
                bytes=nbytes,
                state="up" if is_up else "down",
                seconds=plan.crossing_s.get(target, 0.0),
            )
            for (source, target), nbytes in sorted(plan.links(state.fleet).items())
        ]

    def _model_status(self, state: ModelState) -> ModelStatus:
        fleet = state.fleet
        return ModelStatus(
            model=fleet.name,
            source_world_size=fleet.source_world(),
            complete_versions=tuple(fleet.complete_versions()),
            auto_swap=fleet.auto_swap,
            sources=fleet.source_status(),
            live=state.live,
            queued=len(state.queue),
            targets=fleet.target_status(state.live),
            swap=swap_progress(state.running.swap) if state.running else None,
            last_swap=state.last,
            verify=self._model_config(fleet.name).verify,
        )

    def _history(self, model: str, limit: int) -> HistoryReport:
        return HistoryReport(
            swaps=tuple(
                HistoryEntry(
                    swap=r.swap,
                    model=r.model,
                    version=r.version,
                    state=r.state,
                    at=r.at,
                    reason=r.reason,
                    report=written_report(r),
                )
                for r in self._recent(model, min(limit, MAX_HISTORY))
            )
        )

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
