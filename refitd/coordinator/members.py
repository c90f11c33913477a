"""The registered nodes, source and target ranks, and controllers."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from refitd.coordinator.plan_parts import HeldParts
from refitd.coordinator.records import LiveVersion
from refitd.protocol.base import PROTOCOL_VERSION
from refitd.protocol.cluster import AddShard
from refitd.protocol.control import AddController
from refitd.protocol.reports import NodeStatus
from refitd.protocol.roles import ANYONE, Allowed
from refitd.protocol.shards import Shard
from refitd.states import ServingState, TransferMode


@dataclass(slots=True)
class Node:
    """One daemon, and when it was last heard."""

    identity: bytes
    status: NodeStatus
    last_heard: float
    key: str = ""  # of its connection
    allowed: Allowed = ANYONE
    protocol: int = PROTOCOL_VERSION
    held: HeldParts | None = None  # of plans; None for one that keeps none


@dataclass(slots=True)
class Member:
    """One registered rank, source or target."""

    added: AddShard
    shard: Shard
    node: str
    host: str
    bytes: int
    attached: bool = True
    versions: set[int] = field(default_factory=set)  # source: published and held
    modes: dict[int, TransferMode] = field(default_factory=dict)  # source: how each of these is transferred
    mode: TransferMode = TransferMode.NONE  # source: how the latest version was transferred, held or not
    mode_reason: str = ""  # source: the measurement that chose it
    run: str = ""  # source: its run; target: the run of the version it serves
    newest: int = -1  # source: the highest version that this rank of its run has published, held or not
    version: int | None = None  # target: served
    staged: str | None = None  # target: a decided swap that it has not committed yet
    staged_version: int | None = None  # target: that swap's version, while `staged` is set
    wants: frozenset[tuple[str, str]] = frozenset()  # target: parts that arrive in MXFP8: (tensor, rounding)
    suspended: bool = False  # target: its engine sleeps, and swaps leave its replica out
    spare: tuple[int, str] | None = None  # target: the version, and its run, that its other arena holds
    seeds: bool = False  # target: an arena holds the version that it serves, so that others can be given it
    unfit: bool = False  # target: it failed to seed the version that it serves, and is not chosen again
    unseeded: frozenset[str] = frozenset()  # target: the ranks that could not seed it, as no plan fitted
    seeded_alone: bool = False  # target: no plan fitted it and others together; until it has been seeded
    poisoned: str = ""  # target: why it holds parts of two versions, until a swap succeeds
    left_behind: bool = False  # target: catching it up failed; the next swap tries again
    tries: int = 0  # target: catch-ups aborted since it registered
    joined_at: float = 0.0  # when it registered
    contents: int = 0  # source: increases when it provides other tensors than before
    again_at: float | None = None  # target: when its catch-up is retried
    step: str = ""  # target: its state, as text from its daemon
    events: tuple[str, ...] = ()  # target: the events that led there

    @property
    def id(self) -> str:
        """The id that the daemon gave it."""
        return self.added.member

    def describe(self) -> str:
        """Return its name for people."""
        kind = self.added.replica if self.added.role == "target" else "source"
        return f"{kind} rank {self.added.rank} (node {self.node}, host {self.host}, pid {self.added.pid})"


class ControlStep(enum.Enum):
    """How far a controller is with a swap."""

    FREE = "free"
    PAUSING = "pausing"
    PAUSED = "paused"  # the decision is not known yet
    GATHERING = "gathering"  # decided; its ranks have yet to hear of it
    COMMITTING = "committing"  # its commit hook runs
    FAILED = "failed"  # its hook failed, and ranks still have the version pending
    FINISHING = "finishing"  # its hook has returned; ranks have yet to report


@dataclass(slots=True)
class Controller:
    """The controller of one replica."""

    added: AddController
    node: str
    host: str
    step: ControlStep = ControlStep.FREE
    swap: str = ""
    version: int = 0
    is_decided: bool = False
    acked: set[str] = field(default_factory=set)  # ranks that know of the decision
    paused_s: float = 0.0
    tries: int = 0  # calls of its commit hook that failed, in this swap
    due_at: float | None = None

    @property
    def id(self) -> str:
        """The id that its daemon gave it."""
        return self.added.member

    def describe(self) -> str:
        """Return its name for people."""
        return f"controller of {self.added.replica} (node {self.node}, host {self.host}, pid {self.added.pid})"


def by_node(members: Iterable[Member]) -> dict[str, list[Member]]:
    """Return members by their node, in the order given."""
    found: dict[str, list[Member]] = {}
    for member in members:
        found.setdefault(member.node, []).append(member)
    return found


def poison(member: Member, swap: str, reason: str) -> None:
    """Note that a swap ended while it wrote the member's live tensors: they hold parts of two versions."""
    member.version, member.poisoned = None, f"swap {swap} ended while it was written in place: {reason}"


def serving_state(member: Member, live: LiveVersion | None) -> ServingState:
    """Return what a target rank serves, `live` being the version decided last."""
    if member.poisoned:
        return ServingState.POISONED
    if member.suspended:
        return ServingState.SUSPENDED
    if member.staged is not None:
        return ServingState.WAITING
    if member.version is None:
        return ServingState.EMPTY if live is None else ServingState.FENCED
    is_live = live is None or live.is_at(member.version, member.run)
    return ServingState.SERVING if is_live else ServingState.BEHIND
