"""The coordinator without sockets: events in, instructions out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

import msgspec

from refitd.commit import machine
from refitd.commit.journal import Record
from refitd.commit.machine import Limits, Phase, Swap
from refitd.config import Config, ModelConfig
from refitd.coordinator.actions import (
    Decide,
    Event,
    FromNode,
    Instruction,
    JournalWritten,
    Log,
    MakePlan,
    Planned,
    Remember,
    Send,
    Tick,
)
from refitd.coordinator.admission import MAX_UNUSED_PARTS, check_hello, check_message, check_shard, parts_of
from refitd.coordinator.fleet import Member, Model, Node
from refitd.coordinator.held import wanted_parts
from refitd.coordinator.plans import LoadedPlan, PlanCache, plan_report
from refitd.coordinator.proofs import Checks
from refitd.coordinator.report import swap_progress, swap_report
from refitd.coordinator.rosters import ShardReader
from refitd.dtypes import ELEMENT_SIZES
from refitd.errors import DeadlineExceeded, IllegalTransition, PlanError, ProtocolError, RefitdError, RefusedError
from refitd.protocol import cluster, local
from refitd.protocol.base import PROTOCOL_VERSION, Message
from refitd.protocol.codec import unpack
from refitd.protocol.reports import (
    HistoryEntry,
    HistoryReport,
    LinkStatus,
    ModelStatus,
    SourceReport,
    StatusReport,
    SwapReport,
    VerifyReport,
)
from refitd.protocol.shards import Shard

# A daemon says something every second; this long without a word and its members count as lost.
NODE_SILENCE_S = 10.0

# Descriptions kept beyond those that members use: engines that restart find theirs known.
MAX_UNUSED_SHARDS = 256

# Swaps of one model that may wait for the running one.
MAX_QUEUED = 64

# An aborted catch-up is tried again so many times for a registration, each time after so much longer a pause.
CATCH_UP_AGAIN = 3
CATCH_UP_PAUSE_S = 3.0

# How far back the journal is searched for the version before the live one, and what one answer shows at most.
MAX_HISTORY = 1000


class UnknownShard(RefusedError):
    """A member's description has not been sent, or has been forgotten."""

    code = "unknown-shard"


@dataclass(slots=True)
class _Running:
    """A swap under way and who waits for it."""

    swap: Swap
    version: int
    waiters: list[tuple[bytes, int]]
    kind: str
    fleet: Model  # the whole model, or what a catch-up brings to its live version
    members: dict[str, Member]  # as they were when it began: those that leave are reported too
    sources: tuple[SourceReport, ...] = ()  # likewise: a lent version ends when it has been read
    plan: LoadedPlan | None = None
    gives_way: bool = False  # a catch-up that was ended for the sake of a swap that somebody asked for


@dataclass(frozen=True, slots=True)
class _Queued:
    """A swap that waits for the running one."""

    asked: local.StartSwap
    waiter: tuple[bytes, int]
    deadline: float


@dataclass(slots=True)
class _ModelState:
    fleet: Model
    live: int | None = None  # the version that was decided last
    newest: int = -1  # the highest version that a swap was begun to
    plan: LoadedPlan | None = None  # of the present members; None after any change
    running: _Running | None = None
    queue: list[_Queued] = field(default_factory=list)
    last: SwapReport | None = None


def _nothing(model: str, limit: int) -> Sequence[Record]:
    return ()


@dataclass(slots=True)
class _PlanRequest:
    """Why a plan was asked for: a swap of the model, or an operator who wants to see it."""

    model: str
    swap: str | None = None
    viewer: tuple[bytes, int] | None = None


@dataclass(slots=True)
class Coordinator:
    """All of the coordinator's knowledge. `decided` and `recent` answer from the journal, earlier lives included."""

    config: Config
    boot: str
    pid: int
    started: float
    new_swap_id: Callable[[], str]
    wall_clock: Callable[[], float]
    decided: Callable[[str], Record | None]
    recent: Callable[[str, int], Sequence[Record]] = _nothing
    nodes: dict[str, Node] = field(default_factory=dict)
    models: dict[str, _ModelState] = field(default_factory=dict)
    _members: dict[str, Member] = field(default_factory=dict)
    _shards: dict[str, Shard] = field(default_factory=dict)  # by digest
    _reader: ShardReader = field(default_factory=ShardReader)
    _plans: PlanCache = field(default_factory=PlanCache)
    _plan_requests: dict[int, _PlanRequest] = field(default_factory=dict)
    _checks: Checks = field(default_factory=Checks)
    _tickets: int = 0
    _out: list[Instruction] = field(default_factory=list)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take an event, return what is to be done. A refused request changes nothing but its reply."""
        match event:
            case FromNode():
                self._from_node(event, now)
            case Planned():
                self._planned(event, now)
            case JournalWritten(swap, error):
                self._journalled(swap, error, now)
            case Tick():
                self._tick(now)
        done, self._out = self._out, []
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
        self._send(identity, request, cluster.NodeWelcome(protocol=PROTOCOL_VERSION, boot=self.boot))

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
                self._start(message, (node.identity, request), now)
            case local.GetHistory(model, limit):
                reply = self._history(model, limit)
            case local.AbortSwap(model, reason):
                self._abort(model, reason, now)
                reply = local.Done()
            case local.Verify(model, timeout_s):
                fleet = self._model(model).fleet
                self._tickets += 1
                asked = f"{self.boot}.{self._tickets}"
                within_s = timeout_s or self.config.deadlines.request_s
                for name, check in self._checks.begin(asked, fleet, (node.identity, request), within_s, now):
                    self._to_node(name, check)
            case cluster.MembersChecked():
                self._answer_checks(self._checks.answered(message, now))
            case local.GetStatus():
                reply = self._status(now)
            case local.GetDescription(model):
                reply = self._model(model).fleet.description()
            case local.GetPlan(model):
                self._show_plan(model, (node.identity, request), now)
            case _:
                self._swap_event(node, message, now)
        if reply is not None:
            self._send(node.identity, request, reply)
        # only now: whoever has registered must know it before a swap asks something of it
        if isinstance(message, cluster.AddShard):
            self._next(self.models[message.model], now)
        elif isinstance(message, cluster.ShardPublished):
            self._next(self.models[self._member(message.member).added.model], now)

    def _swap_event(self, node: Node, message: cluster.NodeMessage, now: float) -> None:
        name = node.status.node
        match message:
            case cluster.PlanLoaded(plan, epoch):
                for state in self._running_plan(plan, epoch):
                    if state.running is not None and state.running.plan is not None:
                        state.running.plan.loaded_on.add(name)
                        self._step(state, machine.NodeLoaded(name), now)
            case cluster.PlanRefused(plan, epoch, where, reason) | cluster.EpochLost(plan, epoch, where, reason):
                self._plan_lost(plan, epoch, name, where, reason, now)
            case cluster.EpochPut(epoch, lane, key, value):
                self._relay(name, cluster.EpochValue(epoch=epoch, lane=lane, key=key, value=value))
            case cluster.StageProgress(swap, bytes_done):
                self._step_swap(swap, machine.NodeProgress(name, bytes_done), now)
            case cluster.StageDone(swap, copies, nbytes, _, crossing_s, _, converted):
                for state in self.models.values():
                    if state.running and state.running.swap.swap == swap and state.running.plan:
                        state.running.plan.crossing_s[name] = crossing_s
                self._step_swap(swap, machine.NodeStaged(name, copies, nbytes + converted), now)
            case cluster.StageFailed(swap, where, reason):
                self._step_swap(swap, machine.NodeFailed(name, where, reason), now)
            case cluster.MemberQuiet(swap, member):
                self._step_swap(swap, machine.MemberQuiet(member), now)
            case cluster.MemberCommitted(swap, member, paused_s):
                self._member_committed(swap, member, paused_s, now)
            case cluster.MemberCommitFailed(swap, member, reason):
                self._member_failed(swap, member, reason, now)

    def _answer_checks(self, reports: Iterable[tuple[tuple[bytes, int], VerifyReport]]) -> None:
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
        self._reader.keep(self._shards.keys())
        self._shards[digest] = shard

    def _add(self, node: Node, added: cluster.AddShard, now: float) -> None:
        if added.rank >= added.world_size:
            raise RefusedError(f"{added.member}: rank {added.rank} is not below world_size {added.world_size}")
        state = self.models.get(added.model)
        if state is None:
            # a coordinator that has started anew learns from its journal what is live
            auto = self.config.models.get(added.model, ModelConfig()).auto_swap
            past = [r for r in self.recent(added.model, MAX_HISTORY) if r.is_decided]
            live = past[0].version if past else None
            state = _ModelState(Model(added.model, auto), live, max((r.version for r in past), default=-1))
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
        self._changed(state)
        self._log("registered", model=added.model, member=member.id, who=member.describe(), bytes=nbytes)
        if added.staged is not None:
            self._settle(node, member, added.staged)
        elif added.version is not None and state.live is not None and added.version != state.live:
            reason = f"it holds version {added.version}, and {state.live} is live"
            self._send(node.identity, 0, cluster.FenceMember(member=member.id, reason=reason))

    def _settle(self, node: Node, member: Member, swap: str) -> None:
        """Finish or undo a swap that an earlier life of this coordinator left behind."""
        record = self.decided(swap)
        if record is not None:
            self._send(node.identity, 0, cluster.Commit(swap=swap, version=record.version))
            return
        member.staged = None
        self._send(node.identity, 0, cluster.Abort(swap=swap, reason="the coordinator restarted before deciding"))

    def _remove(self, member_id: str, reason: str, now: float) -> None:
        member = self._members.pop(member_id, None)
        if member is None:
            return
        state = self.models[member.added.model]
        self._log("left", model=state.fleet.name, member=member_id, who=member.describe(), reason=reason)
        takes_part = self._takes_part(state, member)
        state.fleet.remove(member)
        self._changed(state)
        if takes_part:
            self._step(state, machine.MemberLost(member_id, reason), now)
        if not state.fleet.members() and state.running is None:
            for queued in state.queue:
                gone = f"model {state.fleet.name!r}: everybody has left before the swap could begin"
                self._send(*queued.waiter, local.Failure(code=RefusedError.code, message=gone))
            del self.models[member.added.model]

    def _takes_part(self, state: _ModelState, member: Member) -> bool:
        if state.running is None:
            return False
        if member.added.role == "target":
            return member.id in state.running.swap.members or state.running.swap.phase is Phase.IDLE
        # once everything is staged nobody needs the source any more
        return not state.running.swap.is_staged

    def _detach(self, member_id: str, reason: str) -> None:
        member = self._members.get(member_id)
        if member is not None:
            member.attached = False
            self._log("detached", model=member.added.model, member=member_id, reason=reason)

    def _changed(self, state: _ModelState) -> None:
        """Membership has changed: the next swap needs a new plan. A running one keeps its own."""
        plan, state.plan = state.plan, None
        if plan is not None and (state.running is None or state.running.plan is not plan):
            self._drop(plan)

    def _drop(self, plan: LoadedPlan) -> None:
        """Have every node forget a plan; it is loaded anew, with a new epoch, if it is used again."""
        nodes = plan.loaded_on | set(plan.epoch.nodes if plan.epoch is not None else ())
        plan.loaded_on, plan.epoch = set(), None
        for name in sorted(nodes & self.nodes.keys()):
            self._to_node(name, cluster.DropPlan(plan=plan.id))

    def _published(self, published: cluster.ShardPublished) -> None:
        member, version = self._member(published.member), published.version
        member.versions.add(version)
        member.ways[version] = member.way = published.way
        member.why = published.why
        state = self.models[member.added.model]
        self._log("published", model=state.fleet.name, member=member.id, version=version, way=published.way)

    def _next(self, state: _ModelState, now: float) -> None:
        """Start what is due now: what was asked for first, then a newer version, then replicas that lag behind."""
        while state.queue and state.running is None:
            queued = state.queue.pop(0)
            try:
                self._begin_asked(state, queued.asked, queued.waiter, now)
            except RefusedError as exc:
                self._send(*queued.waiter, local.Failure(code=exc.code, message=str(exc)))
        if state.running is None and state.fleet.auto_swap:
            self._auto(state, now)
        if state.running is None:
            self._catch_up(state, now)

    def _auto(self, state: _ModelState, now: float) -> None:
        """Start a swap to a complete version that is newer than all that were swapped to."""
        complete = state.fleet.complete_versions()
        if not complete or complete[-1] <= state.newest or not state.fleet.targets:
            return
        try:
            self._begin(state, "auto", state.fleet.version_to_swap(None), 0.0, [], now)
        except RefusedError as exc:
            self._log("auto-swap-refused", model=state.fleet.name, reason=str(exc))

    def _catch_up(self, state: _ModelState, now: float) -> None:
        """Bring replicas that have joined, come back or failed to the live version, where sources still hold it."""
        config = self.config.models.get(state.fleet.name, ModelConfig())
        live = state.live
        if live is None or not config.catch_up or live not in state.fleet.complete_versions():
            return
        replicas = state.fleet.behind(live)
        if not replicas:
            return
        fleet = state.fleet.only(replicas)
        whole = len(fleet.targets) == len(state.fleet.targets)
        try:
            version = fleet.version_to_swap(live, may_be_older=True)
            self._begin(state, "catch-up", version, 0.0, [], now, state.fleet if whole else fleet)
        except RefusedError as exc:
            self._log("catch-up-refused", model=state.fleet.name, replicas=replicas, reason=str(exc))

    def _catch_up_again(self, state: _ModelState, now: float) -> None:
        """Try once more what was aborted a while ago: nothing may have been wrong with the replica itself."""
        due = [m for m in state.fleet.targets.values() if m.again_at is not None and now >= m.again_at]
        for member in due:
            member.again_at, member.left_behind = None, False
        if due:
            self._catch_up(state, now)

    def _withdrawn(self, member_id: str, version: int, now: float) -> None:
        member = self._members.get(member_id)
        if member is None:
            return
        member.versions.discard(version)
        member.ways.pop(version, None)
        state = self.models[member.added.model]
        running = state.running
        if running is not None and running.version == version and self._takes_part(state, member):
            lost = machine.MemberLost(member_id, f"it withdrew version {version} while it was being read")
            self._step(state, lost, now)

    def _model_config(self, model: str) -> ModelConfig:
        return self.config.models.get(model, ModelConfig())

    def _member(self, member_id: str) -> Member:
        member = self._members.get(member_id)
        if member is None:
            raise RefusedError(f"no member {member_id!r} is registered here; register again")
        return member

    # --- swaps --------------------------------------------------------------------------------------------

    def _model(self, name: str) -> _ModelState:
        state = self.models.get(name)
        if state is None:
            known = ", ".join(sorted(self.models)) or "none"
            raise RefusedError(f"no model {name!r} is registered; registered models: {known}")
        return state

    def _start(self, asked: local.StartSwap, waiter: tuple[bytes, int], now: float) -> None:
        """Begin the swap that somebody asked for, or have it wait for the one that is running."""
        state = self._model(asked.model)
        running = state.running
        if running is None:
            self._begin_asked(state, asked, waiter, now)
            return
        r = running.swap
        # nobody asked for a catch-up: it never has others refused, and gives way to them while nothing is decided
        gives_way = running.kind == "catch-up"
        if not asked.queue and not gives_way:
            raise RefusedError(
                f"model {r.model!r}: swap {r.swap} to version {r.version} is running (phase {r.phase.value}); "
                "wait for it, queue behind it (--queue), or abort it with `refitctl abort`"
            )
        if len(state.queue) >= MAX_QUEUED:
            raise RefusedError(f"model {r.model!r}: {MAX_QUEUED} swaps are waiting already; wait for some of them")
        deadline = now + (asked.timeout_s or self.config.deadlines.queue_s)
        state.queue.append(_Queued(asked, waiter, deadline))
        self._log("queued", model=r.model, version=asked.version, behind=r.swap, waiting=len(state.queue))
        if gives_way and r.phase is not Phase.STAGED and r.phase is not Phase.COMMITTING:
            running.gives_way = True
            self._step(state, machine.AbortAsked("it gives way to a swap of all replicas that was asked for"), now)

    def _begin_asked(self, state: _ModelState, asked: local.StartSwap, waiter: tuple[bytes, int], now: float) -> None:
        version, kind = asked.version, "asked"
        if asked.rollback:
            version, kind = self._version_before(state) if version is None else version, "rollback"
        version = state.fleet.version_to_swap(version, may_be_older=asked.rollback)
        self._begin(state, kind, version, asked.timeout_s, [waiter], now)

    def _version_before(self, state: _ModelState) -> int:
        name, live = state.fleet.name, state.live
        if live is None:
            raise RefusedError(f"model {name!r}: no version has been live yet, so that there is none to go back to")
        older = [r.version for r in self.recent(name, MAX_HISTORY) if r.is_decided and r.version < live]
        if not older:
            raise RefusedError(
                f"model {name!r}: the journal has no version before {live}, which is live; name one with --version "
                f"(held by every source rank: {state.fleet.complete_versions() or 'none'})"
            )
        return older[0]

    def _begin(
        self,
        state: _ModelState,
        kind: str,
        version: int,
        timeout_s: float,
        waiters: list[tuple[bytes, int]],
        now: float,
        fleet: Model | None = None,
    ) -> None:
        fleet = state.fleet if fleet is None else fleet
        d = self.config.deadlines
        limits = Limits(d.plan_s, d.stage_s, d.commit_s, timeout_s or None, d.pause_s)
        swap = machine.begin(self.new_swap_id(), fleet.name, version, limits, now)
        members, sources = {m.id: m for m in fleet.members()}, fleet.source_reports(version)
        state.running = _Running(swap, version, waiters, kind, fleet, members, sources)
        state.newest = max(state.newest, version)
        self._log("swap", swap=swap.swap, model=swap.model, version=version, phase=swap.phase.value, kind=kind)
        if state.plan is not None and fleet is state.fleet:
            self._plan_ready(state, state.plan, now)
        else:
            self._ask_plan(fleet, _PlanRequest(swap.model, swap=swap.swap), now)

    def _ask_plan(self, fleet: Model, request: _PlanRequest, now: float) -> None:
        pools = fleet.pools()
        kept = self._plans.get(pools)
        self._tickets += 1
        self._plan_requests[self._tickets] = request
        if kept is not None:
            self._planned(Planned(self._tickets, kept), now)
            return
        try:
            rosters = self._reader.rosters(pools)
        except RefitdError as exc:  # a description that cannot be read: the swap must end now, not at its deadline
            self._planned(Planned(self._tickets, None, exc), now)
        else:
            self._out.append(MakePlan(self._tickets, rosters))

    def _planned(self, event: Planned, now: float) -> None:
        request = self._plan_requests.pop(event.ticket)
        state = self.models.get(request.model)
        if event.plan is not None and state is not None:
            running = state.running
            mine = running is not None and request.swap == running.swap.swap
            fleet = running.fleet if mine and running is not None else state.fleet
            self._plans.put(fleet.pools(), event.plan)
            event.plan.members = fleet.ranks()
            event.plan.belongs_to(fleet.name)
            if fleet is state.fleet:
                state.plan = event.plan
        error = str(event.error) if event.error else ""
        if request.viewer is not None:
            identity, number = request.viewer
            if event.plan is None or state is None:
                self._send(identity, number, local.Failure(code="plan", message=error or "the model has left"))
            else:
                self._send(identity, number, plan_report(state.fleet, event.plan))
        elif state is not None and state.running is not None and state.running.swap.swap == request.swap:
            if event.plan is None:
                self._step(state, machine.AbortAsked(f"the plan was refused: {error}"), now)
            else:
                self._plan_ready(state, event.plan, now)

    def _plan_ready(self, state: _ModelState, plan: LoadedPlan, now: float) -> None:
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
        self._step(state, machine.PlanReady(members, nodes, nbytes, names, asked, in_place), now)

    # --- epochs -------------------------------------------------------------------------------------------

    def _new_epoch(self, names: set[str]) -> cluster.EpochPlan:
        """Return an epoch of these nodes, to be formed while the plan is loaded."""
        nodes = tuple(sorted(names & self.nodes.keys()))
        status = [self.nodes[name].status for name in nodes]
        transport = self.config.transport
        self._tickets += 1
        lanes = min((len(s.workers) for s in status), default=1)
        return cluster.EpochPlan(
            id=f"{self.boot}.{self._tickets}",
            service=transport.service,
            nodes=nodes,
            hosts=tuple(s.host for s in status),
            lanes=min(transport.lanes, lanes) if transport.lanes else lanes,
            staging_bytes=transport.staging_bytes,
            # the workers' own words, which name who is missing, come before the phase ends
            timeout_s=0.9 * self.config.deadlines.plan_s,
        )

    def _running_plan(self, plan: str, epoch: str) -> list[_ModelState]:
        """Return the models whose running swap uses this forming of a plan."""
        return [
            state
            for state in self.models.values()
            if state.running is not None
            and state.running.plan is not None
            and state.running.plan.id == plan
            and (state.running.plan.epoch.id if state.running.plan.epoch is not None else "") == epoch
        ]

    def _plan_lost(self, plan: str, epoch: str, node: str, where: str, reason: str, now: float) -> None:
        """A node cannot use a plan, or its epoch: whoever uses it aborts, and it is loaded anew for the next swap."""
        self._log("plan-lost", plan=plan, epoch=epoch, node=node, where=where, reason=reason)
        for state in self._running_plan(plan, epoch):
            if state.running is not None and not state.running.swap.is_staged:
                self._step(state, machine.NodeFailed(node, where, reason), now)
        for state in self.models.values():
            kept = state.plan
            if kept is not None and kept.id == plan and kept.epoch is not None and kept.epoch.id == epoch:
                self._drop(kept)

    def _relay(self, origin: str, message: cluster.EpochValue) -> None:
        """Pass a worker's value on to its peers."""
        plans = [s.plan for s in self.models.values()] + [s.running.plan for s in self.models.values() if s.running]
        epoch = next((p.epoch for p in plans if p is not None and p.epoch and p.epoch.id == message.epoch), None)
        if epoch is not None and origin in epoch.nodes and message.lane < epoch.lanes:
            for node in epoch.nodes:
                if node != origin:
                    self._to_node(node, message)

    # --- steps --------------------------------------------------------------------------------------------

    def _step_swap(self, swap: str, event: machine.Event, now: float) -> None:
        for state in self.models.values():
            if state.running is not None and state.running.swap.swap == swap:
                self._step(state, event, now)
                return

    def _step(self, state: _ModelState, event: machine.Event, now: float) -> None:
        """Feed the swap's machine and carry out what it says."""
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
            for identity, request in running.waiters:
                self._send(identity, request, progress)
        for instruction in instructions:
            self._perform(state, running, instruction, now)

    def _perform(self, state: _ModelState, running: _Running, instruction: machine.Instruction, now: float) -> None:
        s = running.swap
        match instruction:
            case machine.LoadPlan(node):
                assert running.plan is not None
                if node in running.plan.loaded_on:
                    self._step(state, machine.NodeLoaded(node), now)
                else:
                    self._to_node(node, running.plan.message(s.model, running.fleet, node))
            case machine.PauseOn(node, members):
                self._to_node(node, cluster.Pause(swap=s.swap, version=s.version, members=members))
            case machine.StageOn(node):
                assert running.plan is not None
                # the workers' own words, which name who is late, come before the phase ends
                timeout_s = max(0.05, 0.9 * (running.swap.deadline - now))
                verify = self._model_config(s.model).verify
                stage = cluster.Stage(
                    swap=s.swap, plan=running.plan.id, version=s.version, timeout_s=timeout_s, verify=verify
                )
                self._to_node(node, stage)
            case machine.ReleaseSources():
                for node in sorted({m.node for m in state.fleet.sources.values()}):
                    self._to_node(node, cluster.EndSwap(swap=s.swap))
            case machine.JournalDecision():
                plan = running.plan.id if running.plan else ""
                self._out.append(Decide(Record(s.swap, s.model, s.version, "decided", plan, "", self.wall_clock())))
            case machine.CommitOn(node):
                for member in running.fleet.targets.values():
                    if member.node == node and member.id in s.members:
                        member.staged = s.swap
                self._to_node(node, cluster.Commit(swap=s.swap, version=s.version))
            case machine.AbortOn(node, reason):
                self._to_node(node, cluster.Abort(swap=s.swap, reason=reason))
            case machine.Finished():
                self._finish(state, running, now)

    def _journalled(self, swap: str, error: RefitdError | None, now: float) -> None:
        if error is None:
            for state in self.models.values():
                if state.running is not None and state.running.swap.swap == swap:
                    state.live = state.running.version
            self._step_swap(swap, machine.Journalled(), now)
        else:
            self._step_swap(swap, machine.AbortAsked(f"the decision could not be journalled: {error}"), now)

    def _member_committed(self, swap: str, member_id: str, paused_s: float, now: float) -> None:
        member = self._members.get(member_id)
        if member is not None and member.staged == swap:
            member.staged = None
            member.poisoned, member.left_behind = "", False
            member.tries, member.again_at = 0, None
            running = self.models[member.added.model].running
            if running is not None and running.swap.swap == swap:
                member.version = running.version
            elif (record := self.decided(swap)) is not None:
                member.version = record.version  # it was late, or this coordinator has restarted since
        self._step_swap(swap, machine.MemberCommitted(member_id, paused_s), now)

    def _member_failed(self, swap: str, member_id: str, reason: str, now: float) -> None:
        member = self._members.get(member_id)
        if member is not None and member.staged == swap:
            member.staged, member.version = None, None  # it could be holding parts of two
        self._step_swap(swap, machine.MemberFailed(member_id, reason), now)

    def _finish(self, state: _ModelState, running: _Running, now: float) -> None:
        s = running.swap
        self._account(running, now)
        verified = self._model_config(s.model).verify
        report = swap_report(s, running.members, running.sources, running.kind, now, verified)
        state.running, state.last = None, report
        broken = s.phase is Phase.ABORTED and running.plan is not None and running.plan.epoch is not None
        if running.plan is not None and (running.plan is not state.plan or broken):
            self._drop(running.plan)  # an epoch does not outlive a swap that failed
        outcome = "committed" if s.phase is Phase.COMMITTED else s.phase.value
        ended = self.wall_clock()
        record = Record(s.swap, s.model, s.version, outcome, "", report.reason, ended, msgspec.json.encode(report))
        self._out.append(Remember(record))
        for identity, request in running.waiters:
            self._send(identity, request, report)
        self._next(state, now)

    def _account(self, running: _Running, now: float) -> None:
        """Note what a swap that did not succeed has left behind."""
        s = running.swap
        if s.phase is Phase.COMMITTED:
            return
        for member_id in s.members:
            member = self._members.get(member_id)
            if member is None:
                continue
            if s.phase is Phase.ABORTED and member_id in s.poisoned:
                member.version, member.poisoned = None, f"swap {s.swap} ended while it was written in place: {s.reason}"
            member.left_behind |= member_id in s.failed  # it would most likely fail again at once
        if running.kind == "catch-up" and not running.gives_way:
            for member in running.fleet.targets.values():
                member.left_behind |= member.version != s.version
                if s.phase is Phase.ABORTED and member.left_behind and member.tries < CATCH_UP_AGAIN:
                    member.tries += 1
                    member.again_at = now + CATCH_UP_PAUSE_S * member.tries

    def _abort(self, model: str, reason: str, now: float) -> None:
        state = self._model(model)
        if state.running is None:
            raise RefusedError(f"model {model!r}: no swap is running")
        if state.running.swap.phase is Phase.COMMITTING:
            raise RefusedError(
                f"model {model!r}: swap {state.running.swap.swap} is decided and being committed; it cannot be aborted"
            )
        self._step(state, machine.AbortAsked(f"aborted on request: {reason or 'no reason given'}"), now)

    # --- time and reports ---------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        self._answer_checks(self._checks.tick(now))
        for name, node in list(self.nodes.items()):
            if now - node.last_heard > NODE_SILENCE_S:
                self._forget_node(name, f"no word from it for {NODE_SILENCE_S:.0f} s", now)
        for state in list(self.models.values()):
            if state.running is not None:
                self._step(state, machine.TimePassed(), now)
            else:
                self._catch_up_again(state, now)
            for queued in [q for q in state.queue if now >= q.deadline]:
                state.queue.remove(queued)
                late = f"model {state.fleet.name!r}: a swap before it runs for too long; see `refitctl status`"
                self._send(*queued.waiter, local.Failure(code=DeadlineExceeded.code, message=late))

    def next_deadline(self) -> float | None:
        """Return when the next Tick is needed for a running swap, None when none runs."""
        return min((s.running.swap.deadline for s in self.models.values() if s.running), default=None)

    def _status(self, now: float) -> StatusReport:
        return StatusReport(
            coordinator_pid=self.pid,
            uptime_s=max(0.0, now - self.started),
            nodes=tuple(node.status for _, node in sorted(self.nodes.items())),
            models=tuple(self._model_status(state) for _, state in sorted(self.models.items())),
            links=tuple(link for _, state in sorted(self.models.items()) for link in self._links(state)),
        )

    def _links(self, state: _ModelState) -> list[LinkStatus]:
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
                service=epoch.service if epoch is not None else self.config.transport.service,
                lanes=epoch.lanes if epoch is not None else 0,
                bytes=nbytes,
                state="up" if is_up else "down",
                seconds=plan.crossing_s.get(target, 0.0),
            )
            for (source, target), nbytes in sorted(plan.links(state.fleet).items())
        ]

    def _model_status(self, state: _ModelState) -> ModelStatus:
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

    def _show_plan(self, model: str, viewer: tuple[bytes, int], now: float) -> None:
        state = self._model(model)
        if unoffered := state.fleet.unoffered():
            raise PlanError(unoffered)
        if state.plan is not None:
            self._send(*viewer, plan_report(state.fleet, state.plan))
        else:
            self._ask_plan(state.fleet, _PlanRequest(model, viewer=viewer), now)

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
                    report=msgspec.json.decode(r.report, type=SwapReport) if r.report else None,
                )
                for r in self.recent(model, min(limit, MAX_HISTORY))
            )
        )

    # --- output -------------------------------------------------------------------------------------------

    def _send(self, identity: bytes, request: int, message: Message) -> None:
        self._out.append(Send(identity, request, message))

    def _to_node(self, name: str, message: Message) -> None:
        node = self.nodes.get(name)
        if node is not None:
            self._send(node.identity, 0, message)

    def _log(self, event: str, **fields: object) -> None:
        self._out.append(Log(event, fields))
