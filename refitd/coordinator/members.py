"""Nodes, ranks and controllers that have registered, and one model's members with their ranks in a plan."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter

import msgspec
import numpy as np
import numpy.typing as npt

from refitd.caches import BoundedCache
from refitd.coordinator.descriptions import Described, Registered
from refitd.coordinator.journals import Drained, LiveVersion
from refitd.coordinator.plans import HeldParts
from refitd.protocol import local
from refitd.protocol.base import PROTOCOL_VERSION
from refitd.protocol.cluster import AddShard
from refitd.protocol.keys import ANYONE, Allowed
from refitd.protocol.reports import LostNode, NodeStatus, ReplicaName
from refitd.states import CommitMode, ServingState, TransferMode
from refitd.text import brief, target_rank

# Retries of a failed commit hook while ranks still have the version pending, and the pause that each adds.
COMMIT_AGAIN = 3
COMMIT_PAUSE_S = 3.0

# Limit on cached comparisons of a model: one for each choice of source replicas, until ranks register again.
MAX_COMPARED = 16

# Limit on cached forms of a model: one for each description.
MAX_FORMS = 1024

# A hash of (canonical tensor, dtype, dtype before a cast) for each tensor of a rank.
Forms = npt.NDArray[np.uint64]


@dataclass(slots=True)
class Node:
    """One daemon, and when it was last heard."""

    identity: bytes
    status: NodeStatus
    last_heard: float
    key: str = ""  # of its connection
    allowed: Allowed = ANYONE
    protocol: int = PROTOCOL_VERSION
    held: HeldParts = field(default_factory=HeldParts)  # parts of plans that it caches


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs."""

    node: str
    host: str


@dataclass(slots=True)
class Published:
    """The versions of a source rank."""

    attached: bool = True  # its trainer runs
    versions: set[int] = field(default_factory=set)  # published and still there
    modes: dict[int, TransferMode] = field(default_factory=dict)  # how each of these is transferred
    mode: TransferMode = TransferMode.NONE  # how the latest version was transferred, still there or not
    newest: int = -1  # the highest version that this rank of its run has published, still there or not
    contents: int = 0  # increases when the rank provides other tensors than before
    begun: int | None = None  # the version that it writes into a slot


@dataclass(slots=True)
class Arenas:
    """The arenas of a target: whether it can exchange them, seed ranks that join, or be seeded."""

    spare: tuple[int, str] | None = None  # (version, run) in its other arena
    lacks_base: bool = False  # its daemon suspects its base, or found it wrong: the next version comes full
    gives: bool = False  # one of its arenas has the version that it serves
    unfit: bool = False  # it failed to seed this version, and is not chosen again
    refused: frozenset[str] = frozenset()  # the ranks that could not seed it, because no plan fitted
    alone: bool = False  # no plan fitted it together with others; False again once it has been seeded


@dataclass(slots=True)
class CatchUp:
    """How a target reaches the live version after it has registered or failed."""

    joined_at: float = 0.0  # when it registered
    failed: bool = False  # its last catch-up failed; the next swap tries again
    tries: int = 0  # catch-ups that were aborted since it registered
    again_at: float | None = None  # when the catch-up is retried


@dataclass(slots=True)
class Member:
    """One registered rank, source or target.

    A coordinator that restarts learns it again from AddShard; the other fields have their defaults then.
    """

    added: AddShard
    described: Described
    place: Place
    run: str = ""  # of a source; or the run of the version that a target serves
    source: Published = field(default_factory=Published)  # of a source
    # of a target:
    version: int | None = None  # served
    pending: tuple[str, int | None] | None = None  # (swap, its version): decided, and the rank has not committed it
    suspended: bool = False  # its engine sleeps; swaps leave its replica out
    poisoned: str = ""  # why it has parts of two versions, until a swap succeeds
    arenas: Arenas = field(default_factory=Arenas)
    catch_up: CatchUp = field(default_factory=CatchUp)
    told: tuple[str, tuple[str, ...]] = ("", ())  # (its state, the events that led there), as its daemon's text

    @property
    def id(self) -> str:
        """The id that the daemon gave it."""
        return self.added.member

    @property
    def node(self) -> str:
        """The node where it runs."""
        return self.place.node

    @property
    def staged(self) -> str | None:
        """The decided swap that it has not committed."""
        return None if self.pending is None else self.pending[0]

    @property
    def staged_version(self) -> int | None:
        """The version of the swap that it has not committed."""
        return None if self.pending is None else self.pending[1]

    @property
    def in_lockstep(self) -> bool:
        """Whether it commits in the same poll as the other ranks of its replica."""
        return self.added.role == "target" and self.added.world_size > 1 and not self.added.controlled

    def describe(self) -> str:
        """Return its name for people."""
        added = self.added
        who = target_rank(added.replica, added.rank) if added.role == "target" else f"source rank {added.rank}"
        return f"{who} (node {self.place.node}, host {self.place.host}, pid {self.added.pid})"


def commit_mode(added: AddShard) -> CommitMode:
    """Return how a target goes live."""
    if added.in_place:
        return CommitMode.IN_PLACE
    return CommitMode.FLIP if added.flips else CommitMode.COPY


@dataclass(frozen=True, slots=True)
class Lost:
    """A node that was removed, and when it was last heard."""

    described: LostNode
    last_heard: float

    @classmethod
    def of(cls, node: Node, members: Iterable[Member], reason: str) -> Lost:
        """Describe a node and the ranks that were on it."""
        there = [member.added for member in members]
        replicas = dict.fromkeys(ReplicaName(one.model, one.replica) for one in there if one.role == "target")
        sources = dict.fromkeys(one.model for one in there if one.role == "source")
        s = node.status
        described = LostNode(s.node, s.host, s.pid, 0.0, brief(reason), tuple(replicas), tuple(sources))
        return cls(described, node.last_heard)

    def report(self, now: float) -> LostNode:
        """Return it as a report."""
        return msgspec.structs.replace(self.described, silent_s=max(0.0, now - self.last_heard))


class ControlStep(enum.Enum):
    """How far a controller is with a swap."""

    FREE = "free"
    PAUSING = "pausing"
    PAUSED = "paused"  # the decision is not known yet
    GATHERING = "gathering"  # decided; its ranks must be told first
    COMMITTING = "committing"  # its commit hook runs
    FAILED = "failed"  # its hook failed, and ranks still have the version pending
    FINISHING = "finishing"  # its hook has returned; ranks have yet to report


@dataclass(slots=True)
class Controller:
    """The controller of one replica."""

    added: local.RegisterController
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
    refuses: bool = False  # its engine was last resumed without a version

    @property
    def id(self) -> str:
        """The id that its daemon gave it."""
        return self.added.member

    def describe(self) -> str:
        """Return its name for people."""
        return f"controller of {self.added.replica} (node {self.node}, host {self.host}, pid {self.added.pid})"

    def enter(self, swap: str, version: int, *, is_decided: bool) -> None:
        """Begin with a swap."""
        self.swap, self.version, self.is_decided = swap, version, is_decided
        self.paused_s, self.tries, self.due_at = 0.0, 0, None
        self.acked.clear()

    def note_failure(self, now: float) -> None:
        """Note that a hook failed, and when it is called again."""
        self.step, self.tries = ControlStep.FAILED, self.tries + 1
        self.due_at = now + COMMIT_PAUSE_S * self.tries if self.tries <= COMMIT_AGAIN else None


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


@dataclass(frozen=True, slots=True)
class Offered:
    """What the sources of a model offer at one moment."""

    world: int  # their world size; 0 while none is registered
    missing: list[int]  # ranks that have not registered
    run: str | None  # of all source ranks; None while they belong to several
    complete: list[int]  # versions of one run that every rank holds, ascending
    drained: list[Member]  # ranks on drained nodes, in rank order


@dataclass(slots=True)
class Membership:
    """One model with its sources and targets."""

    name: str
    auto_swap: bool
    sources: dict[int, Member] = field(default_factory=dict)
    targets: dict[tuple[str, int], Member] = field(default_factory=dict)
    seeds: dict[tuple[str, int], Member] = field(default_factory=dict)  # read in place of sources; see `seeded_by`
    check_replicas: bool = True
    drains: Drained = field(default_factory=dict)  # of all models; `refitd.coordinator.nodes` changes it
    controllers: dict[str, Controller] = field(default_factory=dict)  # by replica
    # keys of comparisons that found all source ranks equal
    compared: BoundedCache[str, bool] = field(default_factory=lambda: BoundedCache(MAX_COMPARED))
    forms: BoundedCache[str, Forms] = field(default_factory=lambda: BoundedCache(MAX_FORMS))  # by digest of a shard
    # canonical tensors that targets need unrounded, by digest of a source's and of a target's shard
    unrounded: BoundedCache[tuple[str, str], frozenset[str]] = field(default_factory=lambda: BoundedCache(MAX_FORMS))
    # the targets by replica and rank: most messages concern one replica of thousands
    _replicas: dict[str, dict[int, Member]] = field(init=False)

    def __post_init__(self) -> None:
        self._replicas = {}
        for (replica, rank), member in self.targets.items():
            self._replicas.setdefault(replica, {})[rank] = member

    def members(self) -> list[Member]:
        """Return sources, seeds and targets, each in rank order."""
        return [*self.givers(), *(m for _, m in sorted(self.targets.items()))]

    def replicas(self) -> dict[str, list[Member]]:
        """Return the target ranks of each replica, by name and in rank order."""
        return {name: [m for _, m in sorted(ranks.items())] for name, ranks in sorted(self._replicas.items())}

    def pool(self, replica: str) -> Mapping[int, Member]:
        """Return the target ranks of a replica, by rank."""
        return self._replicas.get(replica, {})

    def replica(self, name: str) -> list[Member]:
        """Return the target ranks of a replica, in rank order."""
        return [m for _, m in sorted(self.pool(name).items())]

    def givers(self) -> list[Member]:
        """Return the ranks that a swap of these members may read: its seeds, or else the sources, in rank order."""
        return [m for _, m in sorted(self.seeds.items())] or [m for _, m in sorted(self.sources.items())]

    def offered(self) -> Offered:
        """Return what the sources offer now."""
        ranks = list(self.sources.values())
        world = ranks[0].added.world_size if ranks else 0
        missing = [r for r in range(world) if r not in self.sources] if len(ranks) < world else []
        runs = {member.run for member in ranks}
        is_whole = len(runs) == 1 and not missing
        complete = sorted(set.intersection(*(m.source.versions for m in ranks))) if is_whole else []
        drained = [m for _, m in sorted(self.sources.items()) if m.node in self.drains] if self.drains else []
        return Offered(world, missing, runs.pop() if len(runs) == 1 else None, complete, drained)

    def writing(self, version: int) -> frozenset[str]:
        """Return the source ranks that have begun a version and not published it in full."""
        ranks = () if self.seeds else self.sources.values()
        return frozenset(m.id for m in ranks if m.source.begun == version and version not in m.source.versions)

    def forming(self) -> int | None:
        """Return the newest version that may be staged while it is published: every source rank has begun it.

        Replicas that are written in place would pause all the while, and be lost if the publication failed.
        """
        version = max((v for m in self.sources.values() if (v := m.source.begun) is not None), default=None)
        if version is None or any(m.added.in_place for m in self.targets.values()) or not self.is_begun(version):
            return None
        return version

    def is_begun(self, version: int) -> bool:
        """Return whether every source rank has published a version or writes it."""
        # no swap can begin before the last of thousands of ranks has begun; ranks that registered last are asked first,
        # because mostly they publish last, too
        sources = (m.source for m in reversed(self.sources.values()))
        return all(version in source.versions or version == source.begun for source in sources)

    def droppable(self) -> tuple[set[int], int]:
        """Return the versions that no rank needs to hold, and the newest complete one (-1: none).

        The newest complete version is needed until a newer one is complete. So is every newer version that all ranks
        hold or can still publish (version numbers only go up).
        """
        ranks = list(self.sources.values())
        complete = max(self.offered().complete, default=-1)
        held = {version for member in ranks for version in member.source.versions}
        given_up = {v for v in held if any(v <= m.source.newest and v not in m.source.versions for m in ranks)}
        return {version for version in held if version < complete} | given_up, complete

    def lagging_sources(self, member: Member) -> str:
        """Name the ranks that have published least: the versions that `member` holds wait for them."""
        newest, offered = max(member.source.versions, default=-1), self.offered()
        late = [(m.source.newest, rank) for rank, m in sorted(self.sources.items()) if m.source.newest < newest]
        said = [f"source rank {rank} of {offered.world} has not registered" for rank in offered.missing[:5]]
        for behind, rank in sorted(late)[:5]:
            gone = "" if self.sources[rank].source.attached else ", and its trainer is gone"
            what = "nothing yet" if behind < 0 or not self.sources[rank].source.versions else f"{behind} last"
            said.append(f"{self.sources[rank].describe()} has published {what}{gone}")
        return "; ".join(said)

    def add(self, member: Member) -> None:
        """Add a rank, replacing a detached one."""
        a = member.added
        if a.role == "source":
            self.sources[a.rank] = member
        else:
            self.targets[(a.replica, a.rank)] = self._replicas.setdefault(a.replica, {})[a.rank] = member

    def remove(self, member: Member) -> None:
        """Remove a rank."""
        a = member.added
        if a.role == "source" and self.sources.get(a.rank) is member:
            del self.sources[a.rank]
        elif a.role == "target" and self.targets.get((a.replica, a.rank)) is member:
            del self.targets[(a.replica, a.rank)], self._replicas[a.replica][a.rank]
            if not self._replicas[a.replica]:
                del self._replicas[a.replica]

    def only(self, replicas: Collection[str]) -> Membership:
        """Return this model with only these replicas; it shares the members."""
        targets = {key: member for key, member in self.targets.items() if key[0] in replicas}
        return replace(self, sources=dict(self.sources), targets=targets)

    def seeded_by(self, seeds: Collection[str], replicas: Collection[str]) -> Membership:
        """Return this model without sources and with only `replicas`, which receive what the replicas `seeds` serve."""
        given = {key: member for key, member in self.targets.items() if key[0] in seeds}
        return replace(self.only(replicas), sources={}, seeds=given)

    def in_control(self) -> list[Controller]:
        """Return the controllers of the replicas that have ranks here."""
        replicas = {replica for replica, _ in self.targets}
        return [found for replica, found in sorted(self.controllers.items()) if replica in replicas]

    def suspended(self) -> list[str]:
        """Return the replicas with a suspended rank."""
        return sorted({replica for (replica, _), m in self.targets.items() if m.suspended})

    def drained(self) -> list[str]:
        """Return the replicas that swaps leave out because of drained nodes.

        They have a rank or their controller there; or they had, and it has not registered elsewhere.
        """
        if not self.drains:
            return []
        ranks = Counter(replica for replica, _ in self.targets)
        controlled = {replica for replica, c in self.controllers.items() if c.node in self.drains}
        noted = {replica for found in self.drains.values() for model, replica in found if model == self.name}
        return sorted(
            {
                replica
                for (replica, _), m in self.targets.items()
                if m.node in self.drains
                or replica in controlled
                or (replica in noted and (ranks[replica] < m.added.world_size or self.lacks_controller(replica, [m])))
            }
        )

    def sources_give(self, live: LiveVersion) -> bool:
        """Whether every source rank holds this version, and may be read."""
        offered = self.offered()
        return live.version in offered.complete and offered.run == live.run and not offered.drained

    def left_out(self) -> str:
        """Return which replicas swaps leave out, with the reason and the next step; "" for none."""
        said = []
        if suspended := self.suspended():
            said.append(f"suspended: {', '.join(suspended)}; an engine wakes by target.resume()")
        if drained := self.drained():
            nodes = sorted({m.node for m in self.targets.values()} & self.drains.keys() or self.drains.keys())
            said.append(f"on a drained node: {', '.join(drained)}; refitctl resume {' or '.join(nodes)}")
        return f"every replica is left out ({'; '.join(said)})" if said else ""

    def engines(self) -> Membership:
        """Return this model without replicas that observe, are suspended or drained; itself if there are none."""
        left_out = {replica for (replica, _), m in self.targets.items() if m.added.observes or m.suspended}
        left_out |= {*self.drained()} if self.drains else set()
        return self.only({replica for replica, _ in self.targets} - left_out) if left_out else self

    def behind(self, live: LiveVersion, *, only_observers: bool = False) -> list[str]:
        """Return the complete replicas that can be caught up to the live version."""
        found, drained = [], self.drained() if self.drains else []
        for replica, ranks in self.replicas().items():
            if only_observers and not any(m.added.observes for m in ranks):
                continue
            late = [m for m in ranks if not live.is_at(m.version, m.run)]
            ready = len(ranks) == ranks[0].added.world_size and all(m.pending is None for m in ranks)
            ready = ready and replica not in drained and not any(m.suspended for m in ranks)
            ready = ready and not any(m.catch_up.failed for m in late)
            if late and ready and not self.lacks_controller(replica, ranks):
                found.append(replica)
        return found

    def lacks_controller(self, replica: str, ranks: Iterable[Member]) -> str:
        """Return the lack of a controlled replica, a controller or its pause hook; "" if it is complete."""
        controlled = [member for member in ranks if member.added.controlled]
        if controlled and replica not in self.controllers:
            return "commits only when its controller says so, and has none"
        if any(m.added.in_place for m in controlled) and not self.controllers[replica].added.pauses:
            return "is written in place, and its controller has no pause hook to stop it first"
        return ""

    def ranks(self) -> dict[str, int]:
        """Return the plan-wide rank of every member: sources first, then replica after replica by name.

        sources 0, 1; engine-a 0, 1 -> 2, 3; engine-b 0 -> 4
        """
        offsets = self._offsets()
        found = {m.id: rank for rank, m in self.sources.items()}
        return found | {m.id: offsets[replica] + rank for (replica, rank), m in self._receivers().items()}

    def pools(self) -> list[list[Registered]]:
        """Return the planner's input: the sources, then each replica, with ranks numbered as in `ranks`."""
        pools = {"": [_registered(m, rank, f"source rank {rank}", True) for rank, m in sorted(self.sources.items())]}
        offsets, is_seeded = self._offsets(), bool(self.seeds)
        for (replica, rank), m in sorted(self._receivers().items(), key=itemgetter(0)):
            gives, label = (replica, rank) in self.seeds, target_rank(replica, rank)
            pools.setdefault(replica, []).append(_registered(m, offsets[replica] + rank, label, gives, is_seeded))
        return list(pools.values())

    def _offsets(self) -> dict[str, int]:
        offset, found = self.offered().world, {}
        worlds = {replica: m.added.world_size for (replica, _), m in self._receivers().items()}
        for replica in sorted(worlds):
            found[replica] = offset
            offset += worlds[replica]
        return found

    def _receivers(self) -> dict[tuple[str, int], Member]:
        return self.seeds | self.targets


def _registered(member: Member, rank: int, label: str, is_source: bool, as_held: bool = False) -> Registered:
    return Registered(rank, label, member.node, is_source, member.added.digest, member.described.shard, as_held)
