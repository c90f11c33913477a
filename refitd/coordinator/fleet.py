"""Who is registered: nodes, models, source ranks and target ranks, and what may be swapped."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from refitd.coordinator.held import offer_problems, shortened
from refitd.coordinator.rosters import Registered
from refitd.errors import RefusedError
from refitd.protocol.cluster import AddShard
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


@dataclass(slots=True)
class Node:
    """One daemon and when it was last heard."""

    identity: bytes
    status: NodeStatus
    last_heard: float
    key: str = ""  # that its connection was let in with
    allowed: Allowed = ANYONE


@dataclass(slots=True)
class Member:
    """One registered rank, on either side."""

    added: AddShard
    shard: Shard
    node: str
    host: str
    bytes: int
    attached: bool = True
    versions: set[int] = field(default_factory=set)  # source: published and held
    ways: dict[int, str] = field(default_factory=dict)  # source: how each of these is given
    way: str = ""  # source: how the latest version was given, held or not
    why: str = ""  # source: the measurement that chose it
    version: int | None = None  # target: served
    staged: str | None = None  # target: a decided swap that it has not taken over yet
    wants: frozenset[tuple[str, str]] = frozenset()  # target: what is to arrive in MXFP8: (tensor, rounding)
    poisoned: str = ""  # target: why it holds parts of two versions, until a swap has succeeded
    left_behind: bool = False  # target: it could not be brought to the live version; the next swap tries again
    tries: int = 0  # target: catch-ups that were aborted since it has registered
    again_at: float | None = None  # target: when it is left behind no more, and a catch-up tried again

    @property
    def id(self) -> str:
        """The daemon's name for it."""
        return self.added.member

    def describe(self) -> str:
        """Return how people are told about it."""
        kind = self.added.replica if self.added.role == "target" else "source"
        return f"{kind} rank {self.added.rank} (host {self.host}, pid {self.added.pid})"


@dataclass(slots=True)
class Model:
    """One model name with its sources and targets."""

    name: str
    auto_swap: bool
    sources: dict[int, Member] = field(default_factory=dict)
    targets: dict[tuple[str, int], Member] = field(default_factory=dict)

    def members(self) -> list[Member]:
        """Return sources and targets, each in rank order."""
        return [m for _, m in sorted(self.sources.items())] + [m for _, m in sorted(self.targets.items())]

    def source_world(self) -> int:
        """Return how many source ranks there are to be; 0 while none is registered."""
        return next((m.added.world_size for m in self.sources.values()), 0)

    def missing_sources(self) -> list[int]:
        """Return the source ranks that have not registered."""
        return [rank for rank in range(self.source_world()) if rank not in self.sources]

    def complete_versions(self) -> list[int]:
        """Return the versions that every source rank holds, ascending."""
        if not self.sources or self.missing_sources():
            return []
        held = [member.versions for member in self.sources.values()]
        return sorted(set.intersection(*held))

    def add(self, member: Member) -> Member | None:
        """Take a rank in; return the detached one that it replaces.

        Raises:
            RefusedError: the rank is taken, or its pool has another size.
        """
        a = member.added
        pool: dict[int, Member]
        if a.role == "source":
            pool, what = self.sources, f"model {self.name!r} source"
        else:
            pool = {rank: m for (replica, rank), m in self.targets.items() if replica == a.replica}
            what = f"model {self.name!r} replica {a.replica!r}"
        for other in pool.values():
            if other.added.world_size != a.world_size:
                raise RefusedError(
                    f"{what} rank {a.rank} says there are {a.world_size} ranks, rank {other.added.rank} "
                    f"(host {other.host}, pid {other.added.pid}) said {other.added.world_size}; start all with one size"
                )
        old = pool.get(a.rank)
        if old is not None and old.attached:
            raise RefusedError(
                f"{what} rank {a.rank} is already registered by pid {old.added.pid} on {old.host}; "
                "close that registration first, or use another rank"
            )
        if a.role == "source":
            self.sources[a.rank] = member
        else:
            self.targets[(a.replica, a.rank)] = member
        return old

    def remove(self, member: Member) -> None:
        """Forget a rank."""
        a = member.added
        if a.role == "source" and self.sources.get(a.rank) is member:
            del self.sources[a.rank]
        elif a.role == "target" and self.targets.get((a.replica, a.rank)) is member:
            del self.targets[(a.replica, a.rank)]

    def only(self, replicas: Collection[str]) -> Model:
        """Return this model with these replicas alone; the members are the same ones."""
        targets = {key: member for key, member in self.targets.items() if key[0] in replicas}
        return Model(self.name, self.auto_swap, self.sources, targets)

    def behind(self, live: int) -> list[str]:
        """Return the replicas, all of whose ranks are there, that can be brought to the live version."""
        found = []
        for replica in sorted({replica for replica, _ in self.targets}):
            ranks = [m for (r, _), m in self.targets.items() if r == replica]
            late = [m for m in ranks if m.version != live]
            ready = len(ranks) == ranks[0].added.world_size and all(m.staged is None for m in ranks)
            if late and ready and not any(m.left_behind for m in late):
                found.append(replica)
        return found

    def version_to_swap(self, wanted: int | None, *, may_be_older: bool = False) -> int:
        """Return the version a swap would make live; older than what is served only with `may_be_older`.

        Raises:
            RefusedError: it cannot be swapped now; the text says what is missing and where.
        """
        if not self.sources:
            raise RefusedError(f"model {self.name!r} has no source; start the trainer and let it register_source")
        if missing := self.missing_sources():
            raise RefusedError(
                f"model {self.name!r}: source ranks {missing} of {self.source_world()} have not registered"
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

    def _check_held(self, member: Member) -> None:
        if member.added.stale:
            raise RefusedError(
                f"model {self.name!r}: {member.describe()} has {', '.join(member.added.stale)} derived from its "
                "weights, and no hook that makes it anew; register it with Derived(..., refresh=...)"
            )
        if problems := self._unoffered(member):
            raise RefusedError(f"model {self.name!r}: {member.describe()}: {shortened(problems)}")

    def unoffered(self) -> list[str]:
        """Return what targets want in MXFP8 and no source offers so, each with who wants it."""
        return [f"{m.describe()}: {what}" for m in self.targets.values() for what in self._unoffered(m)]

    def _unoffered(self, member: Member) -> list[str]:
        shards = {m.added.digest: m.shard for m in self.sources.values()} if member.wants else {}
        return offer_problems(shards.values(), member.wants)

    def converted_bytes(self) -> int:
        """Return the bytes that targets read once more, to convert what has arrived."""
        return sum(m.added.converted_bytes for m in self.targets.values())

    def ranks(self) -> dict[str, int]:
        """Return the plan-wide rank of every member: sources first, then replica after replica by name.

        sources 0, 1; engine-a 0, 1 -> 2, 3; engine-b 0 -> 4
        """
        found = {m.id: rank for rank, m in self.sources.items()}
        for replica, offset in self._offsets().items():
            found |= {m.id: offset + rank for (r, rank), m in self.targets.items() if r == replica}
        return found

    def pools(self) -> list[list[Registered]]:
        """Return what the planner needs: the sources, then each replica, ranks numbered as `ranks` says."""
        offsets = self._offsets()
        pools = [[_registered(m, rank, f"source rank {rank}") for rank, m in sorted(self.sources.items())]]
        for replica, offset in offsets.items():
            members = [(rank, m) for (r, rank), m in sorted(self.targets.items()) if r == replica]
            pools.append([_registered(m, offset + rank, f"{replica} rank {rank}") for rank, m in members])
        return pools

    def description(self) -> ModelDescription:
        """Return what every member holds, equal descriptions once."""
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
        worlds = {replica: m.added.world_size for (replica, _), m in self.targets.items()}
        for replica in sorted(worlds):
            found[replica] = offset
            offset += worlds[replica]
        return found

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
                way=m.way,
                why=m.why,
            )
            for rank, m in sorted(self.sources.items())
        )

    def source_reports(self, version: int) -> tuple[SourceReport, ...]:
        """Return how each source rank gives this version."""
        return tuple(
            SourceReport(rank, m.node, m.host, way=m.ways.get(version, ""), why=m.why)
            for rank, m in sorted(self.sources.items())
        )

    def target_status(self, live: int | None) -> tuple[TargetStatus, ...]:
        """Return the report rows of the targets; `live` is the version decided last."""
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
                state=_state(m, live),
                version=m.version,
                held_bytes=m.added.held_bytes,
                staging_bytes=m.added.staging_bytes,
            )
            for (replica, rank), m in sorted(self.targets.items())
        )


def _state(member: Member, live: int | None) -> str:
    if member.poisoned:
        return "poisoned"
    if member.staged is not None:
        return "behind"
    if member.version is None:
        return "empty" if live is None else "fenced"
    return "serving" if live is None or member.version == live else "behind"


def _registered(member: Member, rank: int, label: str) -> Registered:
    is_source = member.added.role == "source"
    return Registered(rank, label, member.node, is_source, member.added.digest, member.shard)
