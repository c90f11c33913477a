"""Registered nodes, models, source ranks, target ranks and controllers, and which version may be swapped."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from refitd.caches import BoundedCache
from refitd.coordinator.partial import as_offered, kept_names, part_problems
from refitd.coordinator.records import Drained, LiveVersion
from refitd.coordinator.requirements import offer_problems, shortened
from refitd.coordinator.rosters import Registered
from refitd.errors import RefusedError
from refitd.protocol.base import PROTOCOL_VERSION
from refitd.protocol.cluster import AddShard
from refitd.protocol.control import AddController
from refitd.protocol.reports import (
    DescribedMember,
    ModelDescription,
    NodeStatus,
    SourceReport,
    SourceStatus,
    TargetStatus,
)
from refitd.protocol.roles import ANYONE, Allowed
from refitd.protocol.shards import Shard
from refitd.states import CommitMode, ServingState, TransferMode

# Limit on cached comparisons of a model: one for each choice of source replicas, until ranks register anew.
MAX_COMPARED = 16

# Limit on cached forms of a model: one for each description.
MAX_FORMS = 1024

# A hash of (canonical tensor, dtype, dtype from which it was cast) for each that is held.
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
    unfit: bool = False  # target: it could not seed the version that it serves, and is not asked for it again
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
        return f"{kind} rank {self.added.rank} (host {self.host}, pid {self.added.pid})"


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
        return f"controller of {self.added.replica} (host {self.host}, pid {self.added.pid})"


@dataclass(slots=True)
class Model:
    """One model with its sources and targets."""

    name: str
    auto_swap: bool
    sources: dict[int, Member] = field(default_factory=dict)
    targets: dict[tuple[str, int], Member] = field(default_factory=dict)
    seeds: dict[tuple[str, int], Member] = field(default_factory=dict)  # read in place of sources; see `seeded_by`
    check_replicas: bool = True
    drains: Drained = field(default_factory=dict)  # of all models; `refitd.coordinator.drains` changes it
    controllers: dict[str, Controller] = field(default_factory=dict)  # by replica
    # keys of comparisons in which all source ranks were equal
    compared: BoundedCache[str, bool] = field(default_factory=lambda: BoundedCache(MAX_COMPARED))
    forms: BoundedCache[str, Forms] = field(default_factory=lambda: BoundedCache(MAX_FORMS))  # by digest of a shard

    def members(self) -> list[Member]:
        """Return sources, seeds and targets, each in rank order."""
        return [*self.givers(), *(m for _, m in sorted(self.targets.items()))]

    def givers(self) -> list[Member]:
        """Return the ranks that a swap of these members may read: its seeds, or else the sources, in rank order."""
        return [m for _, m in sorted(self.seeds.items())] or [m for _, m in sorted(self.sources.items())]

    def source_world(self) -> int:
        """Return the world size of the sources; 0 while none is registered."""
        return next((m.added.world_size for m in self.sources.values()), 0)

    def missing_sources(self) -> list[int]:
        """Return the source ranks that have not registered."""
        return [rank for rank in range(self.source_world()) if rank not in self.sources]

    def run(self) -> str | None:
        """Return the run of all source ranks; None while they belong to several."""
        runs = {member.run for member in self.sources.values()}
        return runs.pop() if len(runs) == 1 else None

    def complete_versions(self) -> list[int]:
        """Return the versions of one run that every source rank holds, ascending."""
        if not self.sources or self.missing_sources() or self.run() is None:
            return []
        held = [member.versions for member in self.sources.values()]
        return sorted(set.intersection(*held))

    def droppable(self) -> tuple[set[int], int]:
        """Return the versions that no rank needs to hold, and the newest complete one (-1: none).

        The newest complete version is needed until a newer one is complete. So is every newer version that all ranks
        hold or can still publish (version numbers only go up).
        """
        ranks = list(self.sources.values())
        complete = max(self.complete_versions(), default=-1)
        held = {version for member in ranks for version in member.versions}
        given_up = {v for v in held if any(v <= m.newest and v not in m.versions for m in ranks)}
        return {version for version in held if version < complete} | given_up, complete

    def lagging_sources(self, member: Member) -> str:
        """Name the ranks that have published least: the versions that `member` holds wait for them."""
        newest = max(member.versions, default=-1)
        late = [(m.newest, rank) for rank, m in sorted(self.sources.items()) if m.newest < newest]
        said = [
            f"source rank {rank} of {self.source_world()} has not registered" for rank in self.missing_sources()[:5]
        ]
        for behind, rank in sorted(late)[:5]:
            gone = "" if self.sources[rank].attached else ", and its trainer is gone"
            what = "nothing yet" if behind < 0 or not self.sources[rank].versions else f"{behind} last"
            said.append(f"{self.sources[rank].describe()} has published {what}{gone}")
        return "; ".join(said)

    def check_part(self, a: AddShard, shard: Shard) -> None:
        """Check that a source rank says of the model's parts what the attached ones say.

        Raises:
            RefusedError: it says that all is offered and others that a part is, or the reverse.
        """
        others = self.sources.values() if a.role == "source" else ()
        for other in others:
            if other.attached and other.shard.is_partial != shard.is_partial and other.added.rank != a.rank:
                raise RefusedError(
                    f"model {self.name!r} source rank {a.rank} has partial={shard.is_partial}, {other.describe()} has "
                    f"partial={other.shard.is_partial}; give all ranks of the trainer the same"
                )

    def replaced_by(self, a: AddShard) -> list[Member]:
        """Return the detached ranks that a new rank replaces: its own, or a whole pool of another size.

        Raises:
            RefusedError: the rank is taken, or attached ranks have another size.
        """
        pool: dict[int, Member]
        if a.role == "source":
            pool, what = self.sources, f"model {self.name!r} source"
        else:
            pool = {rank: m for (replica, rank), m in self.targets.items() if replica == a.replica}
            what = f"model {self.name!r} replica {a.replica!r}"
        other_size = [other for other in pool.values() if other.added.world_size != a.world_size]
        for other in other_size:
            if other.attached:
                raise RefusedError(
                    f"{what} rank {a.rank} says there are {a.world_size} ranks, rank {other.added.rank} "
                    f"(host {other.host}, pid {other.added.pid}) said {other.added.world_size}; start all with one size"
                )
        if other_size:
            return other_size  # the trainer is gone and restarts with another number of ranks
        old = pool.get(a.rank)
        if old is not None and old.attached:
            raise RefusedError(
                f"{what} rank {a.rank} is already registered by pid {old.added.pid} on {old.host}; "
                "close that registration first, or use another rank"
            )
        return [] if old is None else [old]

    def add(self, member: Member) -> None:
        """Add a rank, replacing a detached one."""
        a = member.added
        if a.role == "source":
            self.sources[a.rank] = member
        else:
            self.targets[(a.replica, a.rank)] = member

    def remove(self, member: Member) -> None:
        """Remove a rank."""
        a = member.added
        if a.role == "source" and self.sources.get(a.rank) is member:
            del self.sources[a.rank]
        elif a.role == "target" and self.targets.get((a.replica, a.rank)) is member:
            del self.targets[(a.replica, a.rank)]

    def only(self, replicas: Collection[str]) -> Model:
        """Return this model with only these replicas; it shares the members."""
        targets = {key: member for key, member in self.targets.items() if key[0] in replicas}
        return replace(self, sources=dict(self.sources), targets=targets)

    def seeded_by(self, seeds: Collection[str], replicas: Collection[str]) -> Model:
        """Return this model with only `replicas`, which are given what the replicas `seeds` serve; without sources."""
        given = {key: member for key, member in self.targets.items() if key[0] in seeds}
        return replace(self.only(replicas), sources={}, seeds=given)

    def in_control(self) -> list[Controller]:
        """Return the controllers of the replicas that have ranks here."""
        replicas = {replica for replica, _ in self.targets}
        return [found for replica, found in sorted(self.controllers.items()) if replica in replicas]

    def suspended(self) -> list[str]:
        """Return the replicas of which a rank is suspended."""
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
                or (replica in noted and (ranks[replica] < m.added.world_size or self._lacks_controller(replica, [m])))
            }
        )

    def drained_sources(self) -> list[Member]:
        """Return the source ranks on drained nodes, in rank order."""
        return [m for _, m in sorted(self.sources.items()) if m.node in self.drains]

    def sources_give(self, live: LiveVersion) -> bool:
        """Whether every source rank holds this version, and may be read."""
        return live.version in self.complete_versions() and self.run() == live.run and not self.drained_sources()

    def left_out(self) -> str:
        """Return which replicas swaps leave out, with the reason and the next step; "" for none."""
        said = []
        if suspended := self.suspended():
            said.append(f"suspended: {', '.join(suspended)}; an engine wakes by target.resume()")
        if drained := self.drained():
            nodes = sorted({m.node for m in self.targets.values()} & self.drains.keys() or self.drains.keys())
            said.append(f"on a drained node: {', '.join(drained)}; refitctl resume {' or '.join(nodes)}")
        return f"every replica is left out ({'; '.join(said)})" if said else ""

    def engines(self) -> Model:
        """Return this model without replicas that observe, are suspended or drained; itself if there are none."""
        observers = {replica for (replica, _), m in self.targets.items() if m.added.observes}
        left_out = observers | set(self.suspended()) | set(self.drained())
        return self.only({replica for replica, _ in self.targets} - left_out) if left_out else self

    def behind(self, live: LiveVersion, *, only_observers: bool = False) -> list[str]:
        """Return the complete replicas that can be caught up to the live version."""
        found, drained = [], self.drained()
        for replica in sorted({r for (r, _), m in self.targets.items() if m.added.observes or not only_observers}):
            ranks = [m for (r, _), m in self.targets.items() if r == replica]
            late = [m for m in ranks if not live.is_at(m.version, m.run)]
            ready = len(ranks) == ranks[0].added.world_size and all(m.staged is None for m in ranks)
            ready = ready and not self._lacks_controller(replica, ranks)
            ready = ready and replica not in drained and not any(m.suspended for m in ranks)
            if late and ready and not any(m.left_behind for m in late):
                found.append(replica)
        return found

    def version_to_swap(self, wanted: int | None, *, may_be_older: bool = False) -> int:
        """Return the version that a swap would make live; older than the served one only with `may_be_older`.

        Raises:
            RefusedError: it cannot be swapped now; the text says what is missing and where.
        """
        if not self.sources:
            raise RefusedError(f"model {self.name!r} has no source; start the trainer and let it register_source")
        if missing := self.missing_sources():
            raise RefusedError(
                f"model {self.name!r}: source ranks {missing} of {self.source_world()} have not registered"
            )
        self._check_run()
        if drained := self.drained_sources():
            nodes = sorted({m.node for m in drained})
            raise RefusedError(
                f"model {self.name!r}: {drained[0].describe()} is on drained node {drained[0].node!r}, and no source "
                f"can be left out; refitctl resume {' and '.join(nodes)}, or start the trainer on another node"
            )
        complete = self.complete_versions()
        held = ", ".join(f"rank {r}: {sorted(m.versions) or 'none'}" for r, m in sorted(self.sources.items()))
        if wanted is None and not complete:
            raise RefusedError(
                f"model {self.name!r} has no version that every source rank has published ({held}); publish one"
            )
        version = complete[-1] if wanted is None else wanted
        if version not in complete:
            raise RefusedError(
                f"model {self.name!r}: version {version} is not held by every source rank ({held}); "
                f"complete versions: {complete or 'none'}"
            )
        self._check_targets(version, may_be_older)
        return version

    def check_seeded(self, version: int) -> None:
        """Check that the targets can be given this version by the seeds.

        Raises:
            RefusedError: as `version_to_swap`.
        """
        self._check_targets(version, may_be_older=True)

    def check_spare(self, version: int) -> str | None:
        """Return the run of a version that every target rank can exchange its live one for; None if some cannot.

        Raises:
            RefusedError: a rank is missing, or has another version to commit first.
        """
        held = {m.spare for m in self.targets.values()}
        found = held.pop() if len(held) == 1 else None
        if found is None or found[0] != version:
            return None
        self._check_targets(version, may_be_older=True)
        return found[1]

    def _check_run(self) -> None:
        if self.run() is not None:
            return
        ranks: dict[str, list[int]] = {}
        for rank, member in sorted(self.sources.items()):
            ranks.setdefault(member.run, []).append(rank)
        sides = "; ".join(f"run {run or '?'}: ranks {found[:8]}" for run, found in sorted(ranks.items()))
        raise RefusedError(
            f"model {self.name!r}: its source ranks are of several runs of the trainer ({sides}), whose versions are "
            "not the same though they have one number; start the ranks of the older run again"
        )

    def _check_targets(self, version: int, may_be_older: bool) -> None:
        if not self.targets:
            raise RefusedError(f"model {self.name!r} has no target; start an engine and let it register_target")
        for replica in sorted({replica for replica, _ in self.targets}):
            ranks = {rank: m for (r, rank), m in self.targets.items() if r == replica}
            world = next(iter(ranks.values())).added.world_size
            if missing := [rank for rank in range(world) if rank not in ranks]:
                raise RefusedError(
                    f"model {self.name!r}: replica {replica!r} lacks ranks {missing} of {world}; "
                    "wait until they have registered, or stop the others"
                )
            if self._lacks_controller(replica, ranks.values()):
                raise RefusedError(
                    f"model {self.name!r}: replica {replica!r} commits only when its controller says so, and has none; "
                    f"call client.control_replica({self.name!r}, {replica!r}, ...) in the process that drives it"
                )
            for member in ranks.values():
                if member.staged is not None:
                    raise RefusedError(
                        f"model {self.name!r}: {member.describe()} has not yet taken over the version of swap "
                        f"{member.staged}; it must reach a commit point (poll or wait), or be restarted"
                    )
                if member.version is not None and member.version > version and not may_be_older:
                    raise RefusedError(
                        f"model {self.name!r}: {member.describe()} serves version {member.version}, which is newer "
                        f"than {version}; publish a higher version, or `refitctl rollback` to it"
                    )
                self._check_held(member)
            if problems := self._unfollowable(replica):
                raise RefusedError(f"model {self.name!r}: replica {replica!r}: {shortened(problems)}")

    def _lacks_controller(self, replica: str, ranks: Iterable[Member]) -> bool:
        return replica not in self.controllers and any(member.added.controlled for member in ranks)

    def _check_held(self, member: Member) -> None:
        if member.added.stale:
            raise RefusedError(
                f"model {self.name!r}: {member.describe()} has {', '.join(member.added.stale)} derived from its "
                "weights, and no hook that makes it anew; register it with Derived(..., refresh=...)"
            )
        if problems := self._unoffered(member):
            raise RefusedError(f"model {self.name!r}: {member.describe()}: {shortened(problems)}")

    def unoffered(self) -> list[str]:
        """Return what targets want in MXFP8 and no source offers, and what replicas keep that they must not."""
        found = [f"{m.describe()}: {what}" for m in self.targets.values() for what in self._unoffered(m)]
        for replica in sorted({replica for replica, _ in self.targets}):
            found += [f"replica {replica!r}: {what}" for what in self._unfollowable(replica)]
        return found

    def _unfollowable(self, replica: str) -> list[str]:
        ranks = [m.shard for (r, _), m in self.targets.items() if r == replica]
        offered = {m.added.digest: m.shard for m in self.givers()}.values()
        return part_problems(as_offered(offered, ranks) if self.seeds else offered, ranks)

    def _unoffered(self, member: Member) -> list[str]:
        shards = {m.added.digest: m.shard for m in self.givers()} if member.wants else {}
        return offer_problems(shards.values(), member.wants)

    def converted_bytes(self) -> int:
        """Return the bytes that targets read again for conversions."""
        return sum(m.added.converted_bytes for m in self.targets.values())

    def ranks(self) -> dict[str, int]:
        """Return the plan-wide rank of every member: sources first, then replica after replica by name.

        sources 0, 1; engine-a 0, 1 -> 2, 3; engine-b 0 -> 4
        """
        offsets = self._offsets()
        found = {m.id: rank for rank, m in self.sources.items()}
        return found | {m.id: offsets[replica] + rank for (replica, rank), m in self._replicas().items()}

    def pools(self) -> list[list[Registered]]:
        """Return the planner's input: the sources, then each replica, with ranks numbered as in `ranks`."""
        pools = {"": [_registered(m, rank, f"source rank {rank}", True) for rank, m in sorted(self.sources.items())]}
        offsets, is_seeded = self._offsets(), bool(self.seeds)
        for (replica, rank), m in sorted(self._replicas().items()):
            gives, label = (replica, rank) in self.seeds, f"{replica} rank {rank}"
            pools.setdefault(replica, []).append(_registered(m, offsets[replica] + rank, label, gives, is_seeded))
        return list(pools.values())

    def description(self) -> ModelDescription:
        """Return what every member holds; equal descriptions appear once."""
        digests = {m.added.digest: m.shard for m in self.members()}
        index = {digest: i for i, digest in enumerate(digests)}
        return ModelDescription(
            model=self.name,
            shards=tuple(digests.values()),
            members=tuple(
                DescribedMember(
                    role=m.added.role,
                    replica=m.added.replica,
                    rank=m.added.rank,
                    world_size=m.added.world_size,
                    node=m.node,
                    host=m.host,
                    shard=index[m.added.digest],
                )
                for m in self.members()
            ),
        )

    def _offsets(self) -> dict[str, int]:
        offset, found = self.source_world(), {}
        worlds = {replica: m.added.world_size for (replica, _), m in self._replicas().items()}
        for replica in sorted(worlds):
            found[replica] = offset
            offset += worlds[replica]
        return found

    def _replicas(self) -> dict[tuple[str, int], Member]:
        return self.seeds | self.targets

    def source_status(self) -> tuple[SourceStatus, ...]:
        """Return the report rows of the sources."""
        return tuple(
            SourceStatus(
                rank=rank,
                node=m.node,
                host=m.host,
                pid=m.added.pid,
                attached=m.attached,
                tensors=len(m.shard.tensors),
                bytes=m.bytes,
                versions=tuple(sorted(m.versions)),
                way=m.mode,
                why=m.mode_reason,
                run=m.run,
                is_partial=m.shard.is_partial,
            )
            for rank, m in sorted(self.sources.items())
        )

    def source_reports(self, version: int) -> tuple[SourceReport, ...]:
        """Return how each source rank, or each seed, provides this version."""
        way = TransferMode.ARENA if self.seeds else TransferMode.NONE
        return tuple(
            SourceReport(m.added.rank, m.node, m.host, m.modes.get(version, way), m.mode_reason, m.added.replica)
            for m in self.givers()
        )

    def target_status(self, live: LiveVersion | None) -> tuple[TargetStatus, ...]:
        """Return the report rows of the targets; `live` is the version decided last."""
        drained = {*self.drained()}
        return tuple(
            TargetStatus(
                replica=replica,
                rank=rank,
                world_size=m.added.world_size,
                node=m.node,
                host=m.host,
                pid=m.added.pid,
                tensors=len(m.shard.tensors),
                bytes=m.bytes,
                state=serving_state(m, live),
                version=m.version,
                staged=m.staged_version if m.staged is not None else None,
                held_bytes=m.added.held_bytes,
                staging_bytes=m.added.staging_bytes,
                run=m.run if m.version is not None else "",
                step=m.step,
                events=m.events,
                mode=_mode(m),
                kept_tensors=len(m.shard.kept),
                kept_bytes=sum(tensor.nbytes for tensor in m.shard.kept),
                kept=kept_names(m.shard.kept),
                is_drained=replica in drained,
            )
            for (replica, rank), m in sorted(self.targets.items())
        )


def poison(member: Member, swap: str, reason: str) -> None:
    """Note that a swap ended while it wrote the member's live tensors: they hold parts of two versions."""
    member.version, member.poisoned = None, f"swap {swap} ended while it was written in place: {reason}"


def _mode(member: Member) -> CommitMode:
    if member.added.in_place:
        return CommitMode.IN_PLACE
    return CommitMode.FLIP if member.added.flips else CommitMode.COPY


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


def _registered(member: Member, rank: int, label: str, is_source: bool, as_held: bool = False) -> Registered:
    return Registered(rank, label, member.node, is_source, member.added.digest, member.shard, as_held)
