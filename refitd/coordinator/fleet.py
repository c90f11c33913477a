"""The coordinator's state as plain data, and a turn: one event's time, and the effects of handling it.

The functions of this package take a turn, change `turn.fleet` and append to `turn.effects`. They hold no callbacks,
read no clock and perform no IO. So a deep copy of a fleet is independent of the original: both give equal effects for
equal events. They share only the journal, which they only read.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from refitd.clusters import ClusterSpeeds
from refitd.commit import swap_events
from refitd.commit.decision import Phase, Swap, fence_reason
from refitd.commit.lockstep import FlipSteps
from refitd.config import Config, ModelConfig
from refitd.coordinator.actions import Answer, Instruction, Remember, Send, Waiter
from refitd.coordinator.descriptions import Descriptions, Registered
from refitd.coordinator.inquiries import Checks, Traces
from refitd.coordinator.journals import Drained, Journal, LiveVersion, SwapRecord
from refitd.coordinator.live_versions import AbsentRanks, LiveVersions, Recovery
from refitd.coordinator.members import Controller, Lost, Member, Membership, Node, by_node
from refitd.coordinator.plans import LoadedPlan, PlanCache
from refitd.errors import ProtocolError, RefusedError
from refitd.plan.shared import Regions, differences
from refitd.protocol import cluster, local
from refitd.protocol.base import Message
from refitd.protocol.reports import Crossing, SourceReport, SwapReport, TraceReport, VerifyReport
from refitd.states import Log
from refitd.text import called

# Limit on journal entries in one answer.
MAX_HISTORY = 1000


@dataclass(slots=True)
class Together:
    """Swaps of several models that are decided together, and their reports so far."""

    models: tuple[str, ...]
    waiter: Waiter
    reports: dict[str, SwapReport] = field(default_factory=dict)
    aborted: str = ""  # why one of them was aborted; then the others are aborted too


@dataclass(slots=True, eq=False)
class RegionComparison:
    """Collects the digests of a plan's regions. `held` are the source ranks that hold them, in order."""

    key: str
    regions: Regions
    held: Sequence[Member]
    deadline: float
    waiting: set[str] = field(default_factory=set)  # nodes that have not answered
    _digests: dict[int, npt.NDArray[np.uint64]] = field(default_factory=dict)  # by rank
    _there: dict[str, list[Member]] = field(init=False)  # node -> its ranks

    def __post_init__(self) -> None:
        self._there = by_node(self.held)

    @property
    def nodes(self) -> list[str]:
        """The nodes that are asked for digests."""
        return sorted(self._there)

    def requests(self, swap: str, version: int, run: str, timeout_s: float) -> Iterator[tuple[str, Message]]:
        """Yield (node, request) for each node."""
        table, holder_of = self.regions.table, self.regions.holder_of
        for node in self.nodes:
            self.waiting.add(node)
            here = self._there[node]
            ranks = tuple(member.added.rank for member in here)
            holders = tuple(holder_of[rank] for rank in ranks)
            wire = table.select(np.isin(table.holder, holders)).with_own_names().to_wire()
            members = tuple(member.id for member in here)
            yield node, cluster.DigestRegions(swap, version, run, members, ranks, holders, wire, timeout_s)

    def answered(self, node: str, digests: bytes) -> bool:
        """Store a node's digests; return whether all nodes have answered.

        Raises:
            ProtocolError: the number of digests is wrong.
        """
        if node not in self.waiting:
            return False
        here = self._there[node]
        counts = [len(self.regions.rows_of(member.added.rank)) for member in here]
        if len(digests) != 8 * sum(counts):
            raise ProtocolError(f"node {node} sent {len(digests)} bytes of digests for {sum(counts)} regions")
        parts = np.split(np.frombuffer(digests, "<u8"), np.cumsum(counts)[:-1])
        self._digests |= zip((member.added.rank for member in here), parts, strict=True)
        self.waiting.discard(node)
        return not self.waiting

    def problems(self) -> list[str]:
        """Name the tensors whose digests differ between ranks; call it once all nodes have answered."""
        return differences(
            [self.regions.digested(m.describe(), m.added.rank, self._digests[m.added.rank]) for m in self.held]
        )


@dataclass(slots=True)
class Running:
    """A running swap and its waiters."""

    swap: Swap
    version: int
    waiters: list[Waiter]
    run: str
    kind: str
    controllers: list[Controller]  # of its replicas, at the swap's begin
    membership: Membership  # the whole model, or the replicas of a catch-up
    members: dict[str, Member]  # at the swap's begin; the report names members that have left since
    sources: tuple[SourceReport, ...] = ()  # at the swap's begin; a lent version ends once it has been read
    answer_by: float | None = None  # when callers get an interim answer; None: only at the end
    plan: LoadedPlan | None = None
    comparison: RegionComparison | None = None  # of its sources, if needed
    is_early: bool = False  # it began before its version was published in full
    compared_before: bool = False  # its sources still write it, and were found equal for an earlier version
    held_until: float | None = None  # when unreachable engines have stopped serving; the decision waits until then
    flips_back: bool = False  # it has no plan: targets exchange their arenas
    together: Together | None = None  # swaps that are decided with it
    suspended: tuple[str, ...] = ()  # replicas that it does not write
    drained: tuple[str, ...] = ()  # replicas on drained nodes, which it does not write
    apart: dict[tuple[str, int], str] = field(default_factory=dict)  # ranks that may have flipped apart
    gives_way: bool = False  # an undecided catch-up that was ended in favour of a requested swap
    crossing: Crossing = field(default_factory=Crossing)  # bytes received from other nodes
    gpu_paths: set[str] = field(default_factory=set)  # within nodes, as workers report them
    is_watched: bool = False  # `waiters` are sent its progress

    def look_again(self, now: float) -> None:
        """Have a held decision considered again: a rank that it waits for is reachable."""
        if self.held_until is not None:
            self.held_until = min(self.held_until, now)

    def is_due(self, now: float) -> bool:
        """Whether the held decision can be written now, before the deadline."""
        held = self.held_until is not None and self.swap.phase is Phase.STAGED
        return held and self.held_until is not None and self.held_until <= now < self.swap.deadline


@dataclass(frozen=True, slots=True)
class Queued:
    """A swap that waits for the running one."""

    asked: local.StartSwap
    waiter: Waiter
    since: float
    deadline: float


@dataclass(slots=True)
class ModelState:
    """One model."""

    membership: Membership
    config: ModelConfig = field(default_factory=ModelConfig)
    live: LiveVersion | None = None  # the version that was decided last
    highest: int = -1  # the highest version that was ever decided
    tried: tuple[int, str] = (-1, "")  # (version, run) of the highest swap begun in the last run
    bases: dict[str, int] = field(default_factory=dict)  # run -> the highest number used up before it
    published: dict[str, dict[int, int]] = field(default_factory=dict)  # run -> rank -> highest number
    wants_room: dict[str, int] = field(default_factory=dict)  # source rank waiting for a slot -> its slot count
    plan: LoadedPlan | None = None  # of the present members; None after any change
    running: Running | None = None
    gathers_until: float | None = None  # a catch-up that is due waits so long for others that join
    unbegun: dict[str, str] = field(default_factory=dict)  # automatic swap that could not begin -> reason, as logged
    queue: list[Queued] = field(default_factory=list)
    last: SwapReport | None = None
    steps: FlipSteps = field(default_factory=FlipSteps)  # how far ranks with a decided version have polled

    def takes_part(self, member: Member) -> bool:
        """Return whether this rank takes part in the running swap."""
        return self.running is not None and member.id in self.running.members

    def reads(self, member: Member) -> bool:
        """Return whether the running swap reads this source rank; False while its plan is not made."""
        running = self.running
        return (
            running is not None
            and running.plan is not None
            and running.plan.members.get(member.id) in running.plan.senders
        )


class Models(dict[str, ModelState]):
    """The models by name."""

    def named(self, name: str) -> ModelState:
        """Return a model's state.

        Raises:
            RefusedError: no model has this name.
        """
        state = self.get(name)
        if state is None:
            known = ", ".join(sorted(self)) or "none"
            raise RefusedError(f"no model {name!r} is registered; registered models: {known}")
        return state


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The requester of a plan and its members. Ranks may join and leave while it is made."""

    model: str
    who: str | Waiter  # a swap, or an operator
    membership: Membership
    pools: list[list[Registered]]
    speeds: ClusterSpeeds | None = None


class Ids:
    """Makes ids and keys from a secret seed and a counter: a copy makes the same ones as the original."""

    def __init__(self, seed: bytes) -> None:
        """`seed` is random and secret, 16 to 64 bytes."""
        self._seed, self._count = seed, 0

    def key(self, nbytes: int = 32) -> bytes:
        """Return a new secret, which cannot be told from random bytes without the seed."""
        self._count += 1
        return hashlib.blake2b(self._count.to_bytes(8, "big"), key=self._seed, digest_size=nbytes).digest()

    def swap(self) -> str:
        """Return the id of a new swap."""
        return self.key(4).hex()

    def run(self) -> str:
        """Return the id of a new run of a trainer."""
        return self.key(4).hex()


@dataclass
class Fleet:
    """Everything that the coordinator knows.

    Attributes:
        config, boot, pid, started, host: of this process; `boot` identifies it.
        past: reads the journal, also entries of earlier coordinators.
        ids: makes ids and keys.
        nodes, node_at: the connected daemons, by name and by connection.
        awaited: nodes that were connected to an earlier coordinator, and have not returned yet.
        lost: nodes whose heartbeats have ended, the longest lost first.
        models: each model with its members, running swap and queue.
        swapping: the models with a running swap, by the swap's id.
        members: all ranks, by id.
        controllers: all controllers, by id.
        lives: the live versions.
        absent: ranks that cannot be reached and may serve.
        recovery: swaps that an earlier coordinator decided and did not see end.
        drained: the drained nodes; every `Membership` reads it.
        descriptions: of the ranks' tensors.
        plans: recent plans.
        plan_requests: the unanswered requests for plans, by ticket.
        speeds: of the nodes' cables; None: all are equally fast.
        max_files: how many files this process may open; each node takes one.
        checks, traces: questions of operators to all nodes.
        joint_requests: (request, waiter, deadline) of joint swaps received before `may_swap`.
        undone: ranks with a staged version, while it is unknown whether it was decided.
        may_swap: whether swaps may begin: it is certain which versions are live.
        unsent: (swap, node) of plans to be sent: a few in each turn, because packing them takes time.
        numbers: counters of checks, epochs and plan requests.
    """

    config: Config
    boot: str
    pid: int
    started: float
    host: str
    past: Journal
    ids: Ids = field(repr=False)
    lives: LiveVersions
    recovery: Recovery
    absent: AbsentRanks
    drained: Drained
    models: Models
    swapping: dict[str, ModelState]
    traces: Traces
    speeds: ClusterSpeeds | None = None
    max_files: int = 1 << 20
    nodes: dict[str, Node] = field(default_factory=dict)
    node_at: dict[bytes, Node] = field(default_factory=dict)
    awaited: dict[str, Lost] = field(default_factory=dict)
    lost: dict[str, Lost] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)
    controllers: dict[str, Controller] = field(default_factory=dict)
    descriptions: Descriptions = field(default_factory=Descriptions)
    plans: PlanCache = field(default_factory=PlanCache)
    plan_requests: dict[int, PlanRequest] = field(default_factory=dict)
    checks: Checks = field(default_factory=Checks)
    joint_requests: list[tuple[local.StartSwaps, Waiter, float]] = field(default_factory=list)
    undone: dict[str, Member] = field(default_factory=dict)
    may_swap: bool = False
    unsent: deque[tuple[str, str]] = field(default_factory=deque)
    numbers: Counter[str] = field(default_factory=Counter)

    def number(self, what: str) -> int:
        """Return the next number of this kind, from 1."""
        self.numbers[what] += 1
        return self.numbers[what]

    def identity_of(self, swap: str) -> tuple[int, str] | None:
        """Return (version, run) of a decided swap; None if neither the journal nor a daemon knows it as decided."""
        record = self.past.decided(swap)
        return (record.version, record.run) if record is not None else self.lives.was_decided(swap)

    def own(self, node: str, member_id: str) -> Member | None:
        """Return a rank of this node, None if it is not registered (a message about it may be late).

        Raises:
            RefusedError: the rank is another node's.
        """
        found = self.members.get(member_id)
        if found is not None and found.place.node != node:
            raise RefusedError(f"{called(member_id)} is one of node {found.node!r}; node {node!r} cannot speak for it")
        return found

    def member(self, node: str, member_id: str) -> Member:
        """Return a registered rank of this node.

        Raises:
            RefusedError: it is not registered, or is another node's.
        """
        found = self.own(node, member_id)
        if found is None:
            raise RefusedError(f"{called(member_id)} is not registered; register again")
        return found


@dataclass(slots=True)
class Turn:
    """The handling of one event.

    Attributes:
        now: the time of the event, in seconds of a monotonic clock.
        wall: the time, in seconds since the epoch.
        fleet: the state that it reads and changes.
        effects: for the caller to perform, in this order.
        events: events of running swaps that have yet to be handled, in this order: (swap, event).
        due: models to look at before the turn ends: the next swap may begin, or no member is left.
    """

    now: float
    wall: float
    fleet: Fleet
    effects: list[Instruction] = field(default_factory=list)
    events: deque[tuple[str, swap_events.Event]] = field(default_factory=deque)
    due: dict[str, None] = field(default_factory=dict)

    def log(self, event: str, **fields: object) -> None:
        """Write a log line."""
        self.effects.append(Log(event, fields))

    def send(self, waiter: Waiter, message: Message) -> None:
        """Send an answer, or with number 0 a message, over a daemon's connection."""
        self.effects.append(Send(*waiter, message))

    def to_node(self, name: str, message: Message) -> None:
        """Send a message to a node, if it is connected."""
        node = self.fleet.nodes.get(name)
        if node is not None:
            self.effects.append(Send(node.identity, 0, message))

    def answer_checks(self, reports: Iterable[tuple[Waiter, VerifyReport]]) -> None:
        """Send the reports of finished checks."""
        for waiter, report in reports:
            self.log("verified", model=report.model, outcome=report.outcome, mixed=len(report.mixed))
            self.send(waiter, report)

    def answer_traces(self, reports: Iterable[tuple[Waiter, TraceReport]]) -> None:
        """Send collected traces."""
        self.effects += (Answer(*waiter, report) for waiter, report in reports)

    def tell_live(self, claim: cluster.LiveClaim) -> None:
        """Tell all daemons the live version, for them to remember."""
        for name in sorted(self.fleet.nodes):
            self.to_node(name, cluster.LiveIs(live=claim))

    def fence_unless_live(self, member: Member) -> None:
        """Fence a rank that serves another version than the live one, until it has caught up.

        A rank that is about to commit the live version is not fenced: the fence could cross its report, and would stay.
        """
        fleet = self.fleet
        live, staged = fleet.models[member.added.model].live, member.staged
        if live is None or (staged is not None and fleet.identity_of(staged) == (live.version, live.run)):
            return
        if reason := fence_reason(member.version, member.run, live.version, live.run):
            self.to_node(member.node, local.Fence(member=member.id, reason=reason))

    def note_ends(self, records: Iterable[SwapRecord]) -> None:
        """Journal how swaps of earlier coordinators ended."""
        for r in records:
            state = self.fleet.models.get(r.model)
            if state is not None and state.last is not None and state.last.swap == r.swap:
                state.last = r.written_report()
            self.log("swap", swap=r.swap, model=r.model, version=r.version, phase=r.state, reason=r.reason)
            self.effects.append(Remember(replace(r, at=self.wall)))

    def post(self, swap: str, event: swap_events.Event) -> None:
        """Have a running swap handle an event, after those posted before."""
        self.events.append((swap, event))
